"""Runs that continue from the checkpoint of another run: an older release's, or of an earlier stage of the training."""

from __future__ import annotations

import dataclasses
import hashlib
import json
import shutil
from pathlib import Path

import pytest

from megalite.config.options import GROUPS
from tests.parity.test_resume import losses, train
from tests.ranks import ROOT
from tests.workers import WorkerPool

# Saved by release 0.1.0 on dp 2 after step 2 of 4. Every later version resumes it and reaches these losses and norms.
RELEASE = ROOT / "tests/data/checkpoint_0.1.0"
RELEASED = [
    *("--num-layers", "1", "--hidden-size", "4", "--num-heads", "1", "--vocab-size", "11", "--ffn-hidden-size", "8"),
    *("--seq-len", "8", "--global-batch-size", "4", "--mock-data", "--device", "cpu", "--lr", "1e-2"),
    *("--lr-decay-steps", "4", "--train-steps", "4"),
]
STEPS_3_AND_4 = [(3, 2.329104594886303, 0.6534492610090132), (4, 2.3380914852023125, 0.5627079527118354)]


@pytest.mark.parametrize("world", [1, 2])
def test_a_checkpoint_of_an_older_release_resumes(pool: WorkerPool, tmp_path: Path, world: int) -> None:
    there = tmp_path / "checkpoints" / "step_00000002"
    shutil.copytree(RELEASE, there)
    if world == 1:
        forget_defaults(there)
    pool.run(world, train, [*RELEASED, "--run-dir", str(tmp_path)], world)
    for found, expected in zip(losses(tmp_path), STEPS_3_AND_4, strict=True):
        assert found == pytest.approx(expected, rel=1e-6)


def forget_defaults(checkpoint: Path) -> None:
    """Make a checkpoint of a release that had none of the options which are at their defaults."""
    manifest = json.loads((checkpoint / "manifest.json").read_text())
    for section, options in manifest["meta"]["config"].items():
        defaults = dataclasses.asdict(GROUPS[section]())
        for name in [name for name, value in options.items() if value == defaults[name]]:
            del options[name]
    text = json.dumps(manifest).encode()
    (checkpoint / "manifest.json").write_bytes(text)
    (checkpoint / "COMMIT").write_text(hashlib.sha256(text).hexdigest() + "\n")
