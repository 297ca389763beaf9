"""With dropout too, loss, gradient norm and every gradient are those of one process, in every layout: a mask is a
function of the sample's place in the global batch, not of the rank or the micro-batch that computes it.
"""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from megalite.runtime.checkpoint.manifest import commit_text
from tests.parity import jobs, models, runs
from tests.parity.features import Feature
from tests.parity.harness import assert_same, in_one_process, one_process, ranks_of, scaled, trained
from tests.parity.models import dropped
from tests.rows import always_run
from tests.workers import WorkerPool

GPT2, LLAMA = dropped(jobs.gpt2()), dropped(jobs.llama())
GEMMA2 = dropped(jobs.gemma2(attention_softcap=0.5, logit_softcap=5.0))
# Heads for two of four ranks; scores of heads that have no value; each layer's own limits.
FEW_HEADS = dropped(models.FEW_HEADS)
SINKS = dropped(jobs.llama(attention_sinks=True, window=9, window_pattern=2))
EXPERTS, SHARED = dropped(models.MIXTRAL), dropped(models.QWEN)
LATENT, LITE = dropped(models.LATENT), dropped(models.LITE)
HYBRID, NEXT = dropped(models.HYBRID), dropped(models.NEXT)
AHEAD = dropped(models.TWO_AHEAD)


class TestDropout(Feature):
    strong = {
        ranks_of(4): [(GPT2, 0, {}, {}), (GPT2, 3, {}, {"recompute": "full"}), (AHEAD, 2, {}, {})],
        ranks_of(4, cp=2, tp=2): [
            (GEMMA2, 1, {"cp_comm": "ring"}, {}),
            (LLAMA, 1, {"cp_comm": "a2a"}, {"recompute": "selective"}),
            (LATENT, 1, {}, {"micro_batch_size": 2}),
        ],
        ranks_of(4, pp=2): [(GPT2, 1, {"schedule": "zb-v", "vp": 2}, {})],
        ranks_of(4, ep=2, tp=2): [(SHARED, 1, {}, {})],
    }
    grid = {
        ranks_of(2): [(GEMMA2, 3, {}, {}), (SINKS, 1, {}, {"recompute": "full"}), (HYBRID, 1, {}, {})],
        ranks_of(2, tp=2): [
            (GPT2, 1, {"sequence_parallel": False}, {}),
            (SINKS, 1, {}, {}),
            (LATENT, 1, {"sequence_parallel": False}, {}),
            (AHEAD, 1, {}, {"recompute": "full"}),
            (NEXT, 1, {}, {}),
        ],
        ranks_of(2, pp=2): [
            (LLAMA, 1, {"schedule": "interleaved", "vp": 2}, {"recompute": "full"}),
            (GPT2, 1, {"schedule": "zb-h1"}, {"recompute": "selective"}),
            (AHEAD, 1, {"schedule": "zb-v", "vp": 2}, {}),
        ],
        ranks_of(2, cp=2): [
            *((LLAMA, 1, {"cp_comm": comm}, {}) for comm in ("gather", "ring")),
            (GEMMA2, 1, {"cp_comm": "a2a"}, {}),
            (SINKS, 1, {"cp_comm": "gather"}, {}),
            (HYBRID, 3, {"cp_comm": "ring"}, {"recompute": "full"}),
            (LITE, 1, {}, {}),
        ],
        ranks_of(4, cp=4): [
            (FEW_HEADS, 3, {"cp_comm": "a2a+gather"}, {"recompute": "full"}),
            (FEW_HEADS, 1, {"cp_comm": "a2a+ring"}, {}),
            (SINKS, 2, {"cp_comm": "a2a"}, {}),
        ],
        ranks_of(4, ep=4): [(EXPERTS, 1, {}, {}), (SHARED, 3, {}, {"recompute": "full"})],
        ranks_of(4, ep=2, cp=2): [(EXPERTS, 2, {"cp_comm": "ring"}, {})],
        ranks_of(8): [(LLAMA, 3, {"zero_group": "2"}, {})],
        ranks_of(8, tp=2, pp=2): [(GEMMA2, 3, {"schedule": "1f1b", "sequence_parallel": False}, {})],
        ranks_of(4, tp=2, pp=2): [(LATENT, 1, {"schedule": "zb-h1"}, {"recompute": "selective"})],
        ranks_of(8, tp=2, pp=2, ep=2): [(SHARED, 1, {"schedule": "zb-v", "vp": 2}, {})],
        ranks_of(8, tp=2, pp=2, cp=2): [(AHEAD, 2, {"schedule": "zb-v", "vp": 2, "cp_comm": "a2a"}, {})],
    }


@pytest.mark.parametrize("size", always_run([2, 4, 8], 4))
def test_micro_batch_size_changes_nothing(size: int) -> None:
    """Masks are those of samples, whichever samples a pass has beside them."""
    for model in (GPT2, GEMMA2):
        cfg = scaled(jobs.make_config(model, micro_batch_size=size))
        assert_same(trained(0, [cfg], 1), one_process(in_one_process(cfg)), f"micro-batches of {size}")


def test_attention_feels_its_dropout() -> None:
    for model in (GPT2, GEMMA2, SINKS, LATENT):
        ((want, _),), ((without, _),) = (
            jobs.train(0, jobs.make_config(replace(model, attention_dropout=rate)), 1, 1) for rate in (0.2, 0.0)
        )
        assert abs(without / want - 1) > 1e-4


# (world, options) of the two halves of a run
HALVES: list[list[tuple[int, list[str]]]] = [
    [(2, ["--micro-batch-size", "4"]), (4, ["--tp", "2", "--cp", "2", "--zero", "2"])],
    [(4, ["--zero", "3", "--zero-whole-below", "500"]), (1, ["--micro-batch-size", "8"])],
]


@pytest.mark.full
@pytest.mark.parametrize("halves", HALVES, ids=str)
def test_a_resume_on_other_replicas_is_the_run_that_never_stopped(
    pool: WorkerPool, tmp_path: Path, halves: list[tuple[int, list[str]]]
) -> None:
    model = [*runs.MODEL, "--num-layers", "2", "--attention-dropout", "0.1"]
    runs.train(0, [*model, "--train-steps", "4", "--run-dir", str(tmp_path / "a")], 1)
    for (world, options), steps in zip(halves, ("2", "4")):
        arguments: list[Any] = [*model, *options, "--train-steps", steps, "--run-dir", str(tmp_path / "b")]
        pool.run(world, runs.train, arguments, world)
    (_, *want), (_, *got) = (zip(*runs.losses(tmp_path / run)) for run in "ab")
    np.testing.assert_allclose(got, want, rtol=1e-6)


@pytest.mark.full
def test_a_checkpoint_with_other_masks_says_so(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    """Once: what is saved after that has these masks."""
    flags = [*runs.MODEL, "--run-dir", str(tmp_path / "run")]
    runs.train(0, [*flags, "--train-steps", "1"], 1)
    folder = tmp_path / "run" / "checkpoints" / "step_00000001"
    content = json.loads((folder / "manifest.json").read_text())
    assert content["meta"].pop("mask_version") == 2
    data = json.dumps(content, separators=(",", ":")).encode()
    (folder / "manifest.json").write_bytes(data)
    (folder / "COMMIT").write_bytes(commit_text(data))
    said = []
    for run, *options in (
        ("without", "--resume", str(folder), "--train-steps", "2", "--hidden-dropout", "0"),
        ("run", "--train-steps", "2"),
        ("run", "--train-steps", "3"),
    ):
        capfd.readouterr()
        runs.train(0, [*flags, "--run-dir", str(tmp_path / run), *options], 1)
        said.append("dropout masks" in capfd.readouterr().err)
    assert said == [False, True, False]
