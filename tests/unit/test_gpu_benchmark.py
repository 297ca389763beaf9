"""benchmarks/gpu.sh without a GPU: what a part measured survives its end, and every part runs with tiny sizes."""

from __future__ import annotations

import json
import os
import re
import weakref
from pathlib import Path
from typing import Any

import pytest
import torch

from benchmarks import gpu, gpu_parts, gpus, gpus_row
from megalite.core.engine import Engine
from megalite.core.mesh.context import ParallelContext
from megalite.core.mesh.grid import Grid
from megalite.runtime.options import cli
from megalite.runtime.options.run import Config

ROOT = Path(__file__).parents[2]


@pytest.mark.parametrize(
    ("end", "outcome"),
    [
        ("signal.signal(2, signal.SIG_IGN); time.sleep(600)", "cut off after 5 s"),
        ("raise SystemExit(3)", "failed with exit code 3"),
        ("os._exit(0)", "passed"),
    ],
)
def test_what_was_measured_is_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, end: str, outcome: str) -> None:
    monkeypatch.setattr(gpu, "_KILL_AFTER_S", 0.5)
    script = (
        "import os, signal, time\n"
        "with open(os.environ['MEGALITE_ROWS'], 'a') as out: out.write('{\"ms\": 1.5}\\n{\"ms\": 2')\n"
        f"print('measured', flush=True)\n{end}\n"
    )
    part = gpu.run_part("step", ("-c", script), 5.0, "cpu", tmp_path / "log", dict(os.environ))
    assert part["outcome"] == outcome
    assert part["rows"] == [{"ms": 1.5}]
    assert "| 1.5 |" in gpu.markdown({"step": part})
    assert "measured" in (tmp_path / "log").read_text()


def test_a_second_call_adds_to_the_first(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """And tests that were cut off have passed, while a part that failed is the exit code."""
    write = "import os; open(os.environ['MEGALITE_ROWS'], 'a').write('{\"ms\": 1.5}\\n')"
    parts = {
        # First: what a part leaves of its time is the next one's.
        "tests": (1, ("-c", "import time; time.sleep(600)")),
        "machine": (60, ("-c", write)),
        "step": (60, ("-c", "raise SystemExit(3)")),
    }
    monkeypatch.setattr(gpu, "PARTS", parts)

    def ended(*words: str) -> tuple[int, dict[str, Any]]:
        monkeypatch.setattr("sys.argv", ["gpu.py", "--device", "cpu", "--out", str(tmp_path), *words])
        return gpu.main(), json.loads((tmp_path / "rehearsal.json").read_text())["parts"]

    code, first = ended()
    assert (code, list(first)) == (1, ["tests", "machine", "step"])
    code, second = ended("--parts", "tests")
    assert code == 0
    assert second["tests"]["outcome"].startswith("cut off")
    assert {**second, "tests": None} == {**first, "tests": None}
    assert second["machine"]["rows"] == [{"ms": 1.5}]


def test_a_row_without_memory_is_refused_and_the_next_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The size to publish of every model comes before the others."""

    def figures(flags: str, size: int, device: torch.device, compiled: bool) -> dict[str, float]:
        if not rows.exists():
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2 GiB.\nMore")
        return {"tokens_per_s": 1.0}

    rows = tmp_path / "rows"
    monkeypatch.setenv("MEGALITE_ROWS", str(rows))
    monkeypatch.setattr(gpu_parts, "step_figures", figures)
    monkeypatch.setitem(gpu_parts._MODELS, "cpu", gpu_parts._MODELS["cuda"])
    gpu_parts.step(torch.device("cpu"))
    refused, *others = [json.loads(line) for line in rows.read_text().splitlines()]
    assert refused["refused"] == "CUDA out of memory. Tried to allocate 2 GiB."
    assert [row["tokens_per_s"] for row in others] == [1.0] * len(others)
    models = [row["model"] for row in (refused, *others)]
    assert models[: len(set(models))] == list(dict.fromkeys(models))
    assert models[1] == "8b width"


@pytest.mark.parametrize("part", [name for name in gpu_parts.PARTS if name != "compiled"])
def test_every_part_runs(part: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MEGALITE_ROWS", str(tmp_path / "rows"))
    gpu_parts.PARTS[part](torch.device("cpu"))
    rows = [json.loads(line) for line in (tmp_path / "rows").read_text().splitlines()]
    figures = {"machine": "torch", "attention": "forward_tflops", "step": "tokens_per_s", "profile": "busy_ms"}
    assert any(row.get(figures.get(part, "forward_tflops")) for row in rows)


def test_a_row_of_steps_holds_no_memory_of_the_one_before(monkeypatch: pytest.MonkeyPatch) -> None:
    gradients: list[weakref.ref[torch.Tensor]] = []
    build = gpu_parts.build_engine

    def recorded(cfg: Config, ctx: ParallelContext) -> Engine:
        assert [ref() for ref in gradients] == [None] * len(gradients)
        engine = build(cfg, ctx)
        gradients.extend(weakref.ref(bucket.grad) for bucket in engine.optimizer.buckets)
        return engine

    monkeypatch.setattr(gpu_parts, "build_engine", recorded)
    gpu_parts.step(torch.device("cpu"))
    assert len(gradients) >= 2


def test_parts_fit_and_their_files_exist() -> None:
    assert sum(seconds for seconds, _ in gpu.PARTS.values()) <= 570
    for name, (_, command) in gpu.PARTS.items():
        files = [word.split("=")[-1] for word in command if re.search(r"\.py$|^tests/", word)]
        assert files, name
        assert all((ROOT / file).exists() for file in files), name
        if gpu.MEASURE in command:
            assert command[1] in gpu_parts.PARTS


def test_layouts_for_all_gpus() -> None:
    parts = gpus.parts_of(8, tiny=False)
    assert list(parts) == ["check", "ranks", *gpus.LAYOUTS]
    assert sum(seconds for seconds, _ in parts.values()) <= 1100
    for _, command in list(parts.values())[2:]:
        cfg = cli.parse(command[command.index("--preset") :]).config
        assert cfg.num_microbatches(Grid.from_config(cfg.parallel, 8)["dp"]) >= 4
    assert list(gpus.parts_of(2, tiny=False))[2:] == ["ZeRO-2", "ZeRO-3", "tp 2"]


@pytest.mark.full
def test_a_row_of_all_gpus(tmp_path: Path) -> None:
    seconds, command = gpus.parts_of(2, tiny=True)["tp 2"]
    env = {**os.environ, "PYTHONPATH": str(ROOT)}
    part = gpu.run_part("tp 2", command, seconds, "cpu", tmp_path / "log", env)
    assert part["outcome"] == "passed", (tmp_path / "log").read_text()
    (row,) = part["rows"]
    assert row["exposed"].keys() >= {"tp all_gather", "tp reduce_scatter", "world all_reduce"}
    assert 0 < row["exposed_ms"] < row["step_ms"]
    assert row["tokens_per_s_per_gpu"] == pytest.approx(8 * 32 / 2 / row["step_ms"] * 1e3, rel=1e-4)
    assert "| tp 2 |" in gpus.page({"gpus": "2"}, {"tp 2": part})


def test_a_rank_that_fails_ends_the_others() -> None:
    script = "import os, time; int(os.environ['RANK']) and os._exit(3); time.sleep(600)"
    assert gpus_row.start(2, ["-c", script]) == 3
