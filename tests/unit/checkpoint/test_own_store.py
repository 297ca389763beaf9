"""A store from outside: a file system that an installed package gives to fsspec, and a run saves and resumes there."""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path
from typing import Any

import pytest

import megalite
from megalite.runtime.checkpoint.mirror import SaveError

pytest.importorskip("fsspec", reason="fsspec is not installed")

from fsspec.registry import known_implementations

SHELF = """
import os
from fsspec.implementations.local import LocalFileSystem

class Shelf(LocalFileSystem):
    protocol = "shelf"

    def __init__(self, **options):
        super().__init__(auto_mkdir=True, **options)  # as objects need no folder

    @classmethod
    def _strip_protocol(cls, path):
        return os.environ["SHELF"] + "/" + path[8:].rstrip("/") if path.startswith("shelf://") else path
"""
SIZES: dict[str, Any] = {
    "num_layers": 2,
    "hidden_size": 32,
    "num_heads": 4,
    "vocab_size": 256,
    "seq_len": 16,
    "mock_data": True,
    "global_batch_size": 4,
    "save_every": 2,
    "lr_decay_steps": 4,
    "device": "cpu",
}


@pytest.fixture
def package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Folder of a module; this process knows its store shelf://, whose objects lie in the folder SHELF."""
    packages = tmp_path / "site"
    packages.mkdir()
    (packages / "shelf_store.py").write_text(SHELF)
    monkeypatch.syspath_prepend(packages)
    monkeypatch.setenv("SHELF", str(tmp_path / "shelf"))
    monkeypatch.setitem(known_implementations, "shelf", {"class": "shelf_store.Shelf"})
    return packages


def losses(steps: int, run_dir: str, cache: Path) -> list[float]:
    cfg = megalite.configure(**SIZES, train_steps=steps, run_dir=run_dir, cache_dir=str(cache))
    with megalite.start(cfg) as run:
        return [record["loss"] for record in megalite.steps(run)]


def test_a_run_goes_on_from_it_after_its_disk_is_lost(
    package: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    info = package / "shelf_store-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: shelf-store\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text("[fsspec.specs]\nshelf = shelf_store:Shelf\n")
    monkeypatch.setenv("PYTHONPATH", f"{package}{os.pathsep}{os.environ.get('PYTHONPATH', '')}")
    whole = losses(4, str(tmp_path / "whole"), tmp_path / "cache")
    assert losses(2, "shelf://runs/mine", tmp_path / "lost") == whole[:2]
    kept = tmp_path / "shelf/runs/mine/checkpoints"
    assert [path.name[:13] for path in kept.iterdir() if path.is_dir()] == ["step_00000002"]
    shutil.rmtree(tmp_path / "lost")
    assert losses(4, "shelf://runs/mine", tmp_path / "new disk") == whole[2:]
    (newest,) = (path for path in kept.iterdir() if path.name.startswith("step_00000004"))
    assert json.loads((newest / "manifest.json").read_text())["step"] == 4


def test_one_that_only_the_trainer_knows_is_an_error(
    package: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    """The process that uploads cannot open it; the run used to wait for it forever."""
    with pytest.raises(SaveError, match="the last checkpoint is not uploaded"):
        losses(2, "shelf://runs/mine", tmp_path / "cache")
    assert "cannot be opened (ValueError: Protocol not known: shelf)" in capfd.readouterr().err
