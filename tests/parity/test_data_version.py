"""Runs that continue a checkpoint of an older version keep its order of samples; new ones resume exactly."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from megalite.extras.prepare.token_writer import IndexedDatasetWriter
from megalite.runtime.checkpoint.manifest import commit_text
from megalite.runtime.data.blend import BlendOrder
from megalite.runtime.start import resume, start
from tests.parity.runs import MODEL, losses, train
from tests.workers import WorkerPool


@pytest.fixture
def arguments(tmp_path: Path) -> list[str]:
    """Two sources of some 40 samples each: a batch of 8 in six steps ends the first epoch of the smaller one."""
    for name, count in (("a", 700), ("b", 400)):
        with IndexedDatasetWriter(tmp_path / name, np.dtype("<u2")) as writer:
            writer.add_documents(np.random.default_rng(count).integers(0, 90, count), [count])
            writer.finalize({"vocab_size": 90, "tokenizer_sha256": "0"})
    model = [word for word in MODEL if word != "--mock-data"]
    model += ["--micro-batch-size", "2", "--split", "1"]
    return [*model, "--data", "0.61", str(tmp_path / "a"), "0.39", str(tmp_path / "b")]


def meta_of(run_dir: Path, step: int) -> dict[str, Any]:
    return json.loads((run_dir / "checkpoints" / f"step_{step:08}" / "manifest.json").read_text())["meta"]


@pytest.mark.full
@pytest.mark.parametrize("version", [1, 2])
def test_an_older_checkpoint_keeps_its_order(
    arguments: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, version: int
) -> None:
    with monkeypatch.context() as old:
        old.setattr(start, "VERSION_OF_DATA", version)
        train(0, [*arguments, "--train-steps", "6", "--run-dir", str(tmp_path / "whole")], 1)
        train(0, [*arguments, "--train-steps", "3", "--run-dir", str(tmp_path / "half")], 1)
    folder = tmp_path / "half" / "checkpoints" / "step_00000003"
    content = json.loads((folder / "manifest.json").read_text())
    assert content["meta"]["data_version"] == version
    if version == 1:  # as it was before there were versions
        del content["meta"]["data_version"], content["meta"]["blend"]
    data = json.dumps(content, separators=(",", ":")).encode()
    (folder / "manifest.json").write_bytes(data)
    (folder / "COMMIT").write_bytes(commit_text(data))
    train(0, [*arguments, "--train-steps", "6", "--run-dir", str(tmp_path / "half")], 1)
    assert losses(tmp_path / "half") == losses(tmp_path / "whole")
    assert meta_of(tmp_path / "half", 6)["data_version"] == version
    train(0, [*arguments, "--train-steps", "6", "--run-dir", str(tmp_path / "new")], 1)
    assert losses(tmp_path / "new") != losses(tmp_path / "whole")
    # With other data it is a new order.
    train(
        0,
        [
            *(*arguments, "--train-steps", "9", "--run-dir", str(tmp_path / "next")),
            *("--resume", str(tmp_path / "half"), "--reset-data"),
        ],
        1,
    )
    assert meta_of(tmp_path / "next", 9)["data_version"] == resume.VERSION_OF_DATA


@pytest.mark.full
def test_a_blend_resumes_in_another_layout(
    pool: WorkerPool, arguments: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    train(0, [*arguments, "--train-steps", "6", "--run-dir", str(tmp_path / "whole")], 1)
    pool.run(2, train, [*arguments, "--train-steps", "3", "--run-dir", str(tmp_path / "half")], 2)
    assert meta_of(tmp_path / "half", 3)["blend"] == {"position": 0, "taken": [0, 0]}
    pool.run(2, train, [*arguments, "--pp", "2", "--train-steps", "6", "--run-dir", str(tmp_path / "half")], 2)
    np.testing.assert_allclose(losses(tmp_path / "half"), losses(tmp_path / "whole"), rtol=1e-5)
    begun: list[int] = []
    monkeypatch.setattr(BlendOrder, "start_from", lambda self, position, taken: begun.append(position))
    train(0, [*arguments, "--train-steps", "7", "--run-dir", str(tmp_path / "half")], 1)
    assert begun == [0]


def train_counted(rank: int, arguments: list[str], world: int) -> int:
    """Train, and count the samples that this rank reads from files."""
    from megalite.runtime.data.samples import GPTDataset

    read, sample = [0], GPTDataset.sample

    def counted(self: GPTDataset, position: int) -> Any:
        read[0] += 1
        return sample(self, position)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(GPTDataset, "sample", counted)
        train(rank, arguments, world)
    return read[0]


@pytest.mark.parametrize("flags", [[], pytest.param(["--document-mask"], marks=pytest.mark.full)])
def test_middle_stages_read_nothing(pool: WorkerPool, arguments: list[str], tmp_path: Path, flags: list[str]) -> None:
    """But with document masks, which attention on every stage needs."""
    arguments = [*arguments, *flags, "--hidden-dropout", "0", "--train-steps", "2"]
    train(0, [*arguments, "--run-dir", str(tmp_path / "one")], 1)
    read = pool.run(4, train_counted, [*arguments, "--pp", "4", "--run-dir", str(tmp_path / "four")], 4)
    assert min(read[0], read[3]) >= 16
    assert [bool(count) for count in read[1:3]] == [bool(flags)] * 2
    np.testing.assert_allclose(losses(tmp_path / "four"), losses(tmp_path / "one"), rtol=1e-5)
