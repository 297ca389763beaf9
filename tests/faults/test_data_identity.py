"""Data that changed between two runs, or while one reads them: every rank exits 2, and one line names the files."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from megalite.extras.prepare.token_writer import IndexedDatasetWriter
from tests.faults.zygote import Zygote

RUN = [
    *("--num-layers", "1", "--hidden-size", "16", "--num-heads", "2", "--seq-len", "16", "--vocab-size", "100"),
    *("--global-batch-size", "4", "--train-steps", "2", "--split", "90,10", "--device", "cpu", "--save-every", "2"),
]


def write(prefix: Path, shift: int = 0, sidecar: bool = True) -> Path:
    with IndexedDatasetWriter(prefix, np.dtype(np.uint16)) as writer:
        for i in range(100):
            writer.add_documents((np.arange(4000) + 50 * i + shift) % 100, [4000])
        writer.finalize({"tokenizer_sha256": "0" * 64, "vocab_size": 100} if sidecar else None)
    return prefix


def rewrite(manifest: Path, content: dict[str, Any]) -> None:
    """Whoever changes a manifest can also write its COMMIT."""
    manifest.write_text(json.dumps(content))
    (manifest.parent / "COMMIT").write_text(hashlib.sha256(manifest.read_bytes()).hexdigest() + "\n")


def errors(zygote: Zygote, folder: Path, *flags: str, world: int = 1) -> list[str]:
    """Lines of the ranks that begin with an error; all of them left with 2 if there are any, else with 0."""
    left = zygote.start([*RUN, "--run-dir", str(folder / "run"), *flags], world, folder).end()
    lines = [line for rank in left for line in rank.err.splitlines() if "error:" in line]
    assert {rank.code for rank in left} == {2 if lines else 0}, left
    assert "Traceback" not in "".join(rank.err for rank in left)
    return lines


def test_data_that_changed_since_the_save(zygote: Zygote, tmp_path: Path) -> None:
    train, valid, other = write(tmp_path / "train"), write(tmp_path / "valid"), write(tmp_path / "other", 1)
    flags = ["--data", str(train), "--valid-data", str(valid)]
    assert not errors(zygote, tmp_path, *flags)
    more = ["--train-steps", "4", "--lr-decay-steps", "2"]
    (line,) = errors(zygote, tmp_path, "--data", str(train), "--valid-data", str(other), *more)
    assert "error: the evaluation data: checkpoint" in line
    assert str(other) in line
    # One byte of 800,000, in none of the 64 places that were looked at before; the ranks share the checking.
    with Path(f"{train}.bin").open("r+b") as f:
        f.seek(500_001)
        f.write(b"\x01")
    (line,) = errors(zygote, tmp_path, *flags, *more, world=2)
    assert "train.bin, bytes 491520 to 524288: differ from what preprocessing wrote" in line
    write(train)
    manifest = tmp_path / "run" / "checkpoints" / "step_00000002" / "manifest.json"
    whole = json.loads(manifest.read_text())
    without = {name: options for name, options in whole["meta"]["config"].items() if name != "data"}
    rewrite(manifest, {**whole, "meta": {**whole["meta"], "config": without}})
    (line,) = errors(zygote, tmp_path, *flags, *more)
    assert "its manifest has no meta.config.data" in line
    rewrite(manifest, whole)
    assert not errors(zygote, tmp_path, *flags, *more)


@pytest.mark.full
def test_data_overwritten_in_mid_run(zygote: Zygote, tmp_path: Path) -> None:
    """By other ids that are valid as well; once with checksums and once without."""
    for name, sidecar, words in (("a", True, "differ from what preprocessing"), ("b", False, "was changed while")):
        prefix = write(tmp_path / name, sidecar=sidecar)
        flags = [*RUN, "--data", str(prefix), "--train-steps", "1000000", "--lr-decay", "constant"]
        job = zygote.start([*flags, "--run-dir", str(tmp_path / f"run_{name}")], 2, tmp_path)
        job.wait_for(0, "step 3/")
        with Path(f"{prefix}.bin").open("r+b") as f:
            f.write(np.full(400_000, 3, "<u2").tobytes())
        left = job.end()
        assert [rank.code for rank in left] == [2, 2], left
        (line,) = [line for rank in left for line in rank.err.splitlines() if "error:" in line]
        assert f"{prefix}.bin" in line
        assert words in line
