"""The Python on the user's pages runs as it stands, from top to bottom, in an empty folder."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

from megalite.checkpoint.hf.convert import export_hf
from megalite.train.metrics import read_metrics

DOCS = Path(__file__).resolve().parents[2] / "docs"


def blocks(page: str) -> list[str]:
    """Python blocks of a page."""
    return re.findall(r"^```python\n(.*?)^```$", (DOCS / page).read_text(), re.M | re.S)


def run_block(text: str, names: dict[str, Any], capsys: pytest.CaptureFixture[str]) -> list[str]:
    """Run a block among the names of those before it; the lines it prints."""
    capsys.readouterr()
    exec(compile(text, "block", "exec"), names)
    return capsys.readouterr().out.splitlines()


def losses(run_dir: str) -> list[float]:
    return [step["loss"] for step in read_metrics(Path(run_dir))[0]]


def test_the_python_api(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.chdir(tmp_path)
    names: dict[str, Any] = {}
    notebook, from_hf, stopped, own_data, by_hand, text = blocks("api.md")
    printed = run_block(notebook, names, capsys)
    # Two micro-batches... of one sample each: the hook sees all of the first step and none of the others.
    assert printed[:8] == ["layers.0 returns [128, 1, 128]"] * 8
    assert [float(line.split()[1]) for line in printed[8:]] == losses("runs/notebook")
    assert len(printed) == 8 + 20
    export_hf("runs/notebook", "my-model")
    assert run_block(from_hf, names, capsys) == ["llama 2"]
    # Trained before: not at ln 512.
    assert losses("runs/from-hf")[0] < losses("runs/notebook")[0] - 0.05
    (line,) = run_block(stopped, names, capsys)
    learned = [step for step, loss in enumerate(losses("runs/stopped"), start=1) if loss < 6.2][0]
    assert line == f"stopped after step {learned + 1}"
    (line,) = run_block(own_data, names, capsys)
    assert float(line.split()[1]) < losses("runs/own-data")[0] - 0.2
    assert len(run_block(by_hand, names, capsys)) == 2
    assert len(re.findall(r"\d+", run_block(text, names, capsys)[0])) == 5
