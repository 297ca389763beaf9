from __future__ import annotations

import hashlib
import json
import pydoc_data.topics
import subprocess
import sys
import sysconfig
from pathlib import Path

import pytest

from examples.corpus import python_corpus
from megalite.core.base.errors import UserError
from tests.ranks import ROOT


def test_the_corpus_is_this_pythons_library_and_topics_each_text_once(tmp_path: Path) -> None:
    manifest = python_corpus(tmp_path / "c.jsonl")
    entries = [json.loads(line) for line in (tmp_path / "c.jsonl").read_bytes().split(b"\n") if line]
    texts = {entry["source"]: entry["text"] for entry in entries}
    assert len(texts) == len(entries) == len(set(texts.values())) == manifest["texts"] > 400
    assert sum(len(t.encode()) for t in texts.values()) == manifest["bytes"] > 5_000_000
    library = Path(sysconfig.get_paths()["stdlib"])
    assert texts["argparse.py"].encode() == (library / "argparse.py").read_bytes()
    assert texts["pydoc topic lambda"] == pydoc_data.topics.topics["lambda"]
    assert not any("site-packages" in name or "/test" in name or name.startswith("test") for name in texts)
    listed = sorted(f"{name} {hashlib.sha256(text.encode()).hexdigest()}" for name, text in texts.items())
    assert manifest["list_sha256"] == hashlib.sha256("\n".join(listed).encode()).hexdigest()
    assert json.loads((tmp_path / "c.jsonl.manifest.json").read_text()) == manifest


@pytest.mark.parametrize("max_mb", [0.5, 1.5])
def test_a_limited_corpus_fills_its_limit_with_whole_texts(tmp_path: Path, max_mb: float) -> None:
    manifest = python_corpus(tmp_path / "c.jsonl", max_mb)
    assert 0.9 * max_mb * 1e6 < manifest["bytes"] <= max_mb * 1e6
    texts = [json.loads(line)["text"] for line in (tmp_path / "c.jsonl").read_bytes().split(b"\n") if line]
    assert sum(len(t.encode()) for t in texts) == manifest["bytes"]


def test_the_command_says_what_it_wrote(tmp_path: Path) -> None:
    command = [sys.executable, str(ROOT / "examples/corpus.py"), "--out", "c.jsonl", "--max-mb", "0.5"]
    result = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=120)
    assert (result.returncode, result.stderr) == (0, "")
    manifest = json.loads((tmp_path / "c.jsonl.manifest.json").read_text())
    assert f"c.jsonl: {manifest['texts']} texts, " in result.stdout
    assert manifest["list_sha256"] in result.stdout


@pytest.mark.full
def test_packages_and_whole_directories_held_out(tmp_path: Path) -> None:
    manifest = python_corpus(tmp_path / "c.jsonl", 3, packages=True, held_out=tmp_path / "h.jsonl")
    sources = [
        [json.loads(line)["source"] for line in (tmp_path / name).read_text().split("\n") if line]
        for name in ("c.jsonl", "h.jsonl")
    ]
    trained, held_out = ({str(Path(source).parent) for source in part} for part in sources)
    assert not trained & held_out
    assert len(sources[0]) + len(sources[1]) == manifest["texts"]
    assert 0 < manifest["held_out_bytes"] < manifest["bytes"] <= 3e6
    assert any(source.startswith("torch/") for source in sources[0])
    assert manifest["packages"]["torch"].startswith("2.")


@pytest.mark.parametrize(
    ("out", "max_mb", "message"), [("c.txt", 1, "must be a .jsonl"), ("c.jsonl", 1e-6, "at least")]
)
def test_mistakes_are_told_and_leave_nothing(tmp_path: Path, out: str, max_mb: float, message: str) -> None:
    with pytest.raises(UserError, match=message):
        python_corpus(tmp_path / out, max_mb)
    assert list(tmp_path.iterdir()) == []


def test_the_file_that_cannot_be_written_is_named(tmp_path: Path) -> None:
    (tmp_path / "held.jsonl").mkdir()
    (tmp_path / "file").write_text("")
    for out, held_out in (("c.jsonl", "held.jsonl"), ("c.jsonl", "file/h.jsonl"), ("file/c.jsonl", "h.jsonl")):
        blamed = f"--out {tmp_path / out}" if "/" in out else f"--held-out {tmp_path / held_out}"
        with pytest.raises(UserError, match=f"^{blamed}: cannot be written"):
            python_corpus(tmp_path / out, 0.5, held_out=tmp_path / held_out)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["file", "held.jsonl"]
