"""Runs of real ranks whose weights are sharded: what happens between steps comes to the same as without."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch

from megalite.extras.convert.hf import export_hf
from megalite.extras.inference.generate import generate
from megalite.extras.inference.load import load_model
from tests.faults.harness import PAIRED, codes, committed, events, in_batch, once_committed, outcome
from tests.faults.zygote import Zygote

# Blocks, embedding and output layer are cut, and any read of a released weight is an error.
ZERO_3 = ["--zero", "3", "--zero-whole-below", "100", "--debug-zero"]


def test_a_whole_run(zygote: Zygote, tmp_path: Path) -> None:
    """A spike, a rewind, evaluations, full saves and weights alone; then export and generation."""
    flags = [*PAIRED, "--on-spike", "rewind", "--lr-decay-steps", "14", "--train-steps", "14"]
    flags += ["--save-every", "4", "--save-model-every", "3", "--eval-every", "4", "--eval-steps", "2"]
    runs, jobs = [tmp_path / "cut" / "run", tmp_path / "whole" / "run"], []
    for run, more in zip(runs, (ZERO_3, [])):
        run.parent.mkdir()
        jobs.append(zygote.start([*flags, *more, "--run-dir", str(run)], 2, run.parent, in_batch("spike", 88)))
    for job in jobs:
        left = job.end()
        assert codes(left) == [0, 0], left
    cut, whole = runs
    (event,), (expected,) = events(cut, "rewind"), events(whole, "rewind")
    assert (event["step"], event["next_sample"]) == (expected["step"], expected["next_sample"]) == (11, 88)
    assert event["checkpoint"].endswith("step_00000008")
    np.testing.assert_allclose(outcome(cut)[0], outcome(whole)[0], rtol=1e-5)
    got, want = ([(e["step"], e["loss"]) for e in events(run, "eval")] for run in runs)
    assert [step for step, _ in got] == [4, 8, 12, 14]
    np.testing.assert_allclose(got, want, rtol=1e-5)

    # The weights alone, of a step before the rewind and of one after it, and the last full checkpoint.
    saved = [run / "checkpoints" for run in runs]
    for name in ("model_00000006", "model_00000009", "step_00000014"):
        for mine, theirs in zip(
            *(load_model(folder / name, torch.device("cpu")).stage.parameters() for folder in saved)
        ):
            # Rounded to bf16, weights that differ in the last bits may differ by one step of it.
            torch.testing.assert_close(mine, theirs, rtol=1e-5 if name.startswith("step") else 2**-7, atol=1e-6)
    export_hf(cut, tmp_path / "hf", dtype="fp32")
    models = [load_model(path, torch.device("cpu")) for path in (cut, tmp_path / "hf", whole)]
    text = [generate(model, [1, 2, 3], max_new_tokens=12, temperature=0) for model in models]
    assert text[0] == text[1] == text[2]
    assert all(map(torch.equal, models[0].stage.parameters(), models[1].stage.parameters()))


def test_copies_are_compared_before_a_save(zygote: Zygote, tmp_path: Path) -> None:
    """Norms stay whole, on every rank; shares are held once, and nobody to compare them with is no error."""
    run = [*PAIRED, *ZERO_3, "--run-dir", str(tmp_path / "run")]
    flip = {"rank": 1, "kind": "", "place": "flip", "at": 4}
    left = zygote.start(run, 2, tmp_path, flip, once_committed(tmp_path / "run", 2, rank=1, at=4)).end()
    assert codes(left) == [1, 1]
    assert "the copies of norm.weight on ranks 0, 1 differ (dp)" in left[0].err
    assert committed(tmp_path / "run") == {"step_00000002"}


@pytest.mark.root
def test_scratch_files_that_do_not_fit(zygote: Zygote, tmp_path: Path, tiny_disk: Path) -> None:
    """Exit 2 before the first step with one line and both sizes; no rank dies of SIGBUS, and nothing is left."""
    flags = ["--hidden-size", "128", "--offload", "optimizer", "--offload-dir", str(tiny_disk)]
    left = zygote.start([*PAIRED, *flags, "--run-dir", str(tmp_path / "run")], 2, tmp_path).end()
    assert codes(left) == [2, 2]
    (line,) = [line for rank in left for line in rank.err.splitlines() if "error:" in line]
    assert f"--offload-dir {tiny_disk}: " in line
    assert "bytes are needed there and " in line
    assert "step 1/" not in left[0].err
    assert list(tiny_disk.iterdir()) == []
