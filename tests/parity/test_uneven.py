"""Any number of replicas shares a batch: micro-batches go to them in order, and where one has fewer than others, its
last passes have no target. Losses, norms, figures of routers and every gradient are those of one process.
"""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from megalite.runtime.options.run import Config
from tests.parity import jobs, models, runs
from tests.parity.features import Feature
from tests.parity.harness import ranks_of
from tests.parity.models import BIASED, MIXTRAL, QWEN, dropped
from tests.parity.packed import weighted
from tests.workers import WorkerPool

# Eight samples: on three replicas 2, 3 and 3, of which the first runs one pass without a sample.
ALONE: dict[str, Any] = {"micro_batch_size": 1}
GPT2, LLAMA = dropped(jobs.gpt2()), dropped(jobs.llama())
# Experts that three ranks can share; dropout would hide nothing of what routers count.
SIX, GATED = replace(MIXTRAL, num_experts=6), replace(QWEN, num_experts=6)
MOVED = replace(BIASED, num_experts=6, moe_router_num_groups=3)
AHEAD = dropped(models.TWO_AHEAD)


class TestUneven(Feature):
    strong = {
        ranks_of(3): [
            (GPT2, 3, {}, ALONE),
            (GPT2, 1, {}, {"micro_batch_size": 2, "data": weighted, "recompute": "full"}),
        ],
        ranks_of(3, ep=3): [(GATED, 2, {}, ALONE)],
    }
    grid = {
        ranks_of(3): [
            (LLAMA, 0, {}, ALONE),
            (AHEAD, 1, {}, {**ALONE, "data": weighted, "z_loss": 0.01}),
            (GPT2, 1, {}, {**ALONE, "loss_chunk": 5}),
            (LLAMA, 2, {"zero_reduce": "step"}, ALONE),
            (LLAMA, 3, {"zero_keep": "step"}, {**ALONE, "offload": "optimizer"}),
        ],
        ranks_of(5): [(LLAMA, 3, {}, {**ALONE, "recompute": "full"}), (AHEAD, 2, {}, ALONE)],
        ranks_of(7): [(GPT2, 1, {}, ALONE)],
        ranks_of(3, ep=3): [
            (SIX, 1, {}, {**ALONE, "data": weighted}),
            (SIX, 3, {}, {**ALONE, "recompute": "full"}),
            (MOVED, 0, {}, ALONE),
        ],
        ranks_of(6, ep=2, cp=2): [(MIXTRAL, 3, {}, ALONE)],
        ranks_of(6, pp=2): [
            (GPT2, 1, {"schedule": "1f1b"}, ALONE),
            (GPT2, 3, {"schedule": "zb-h1"}, ALONE),
            (LLAMA, 1, {"schedule": "interleaved", "vp": 2}, {**ALONE, "data": weighted}),
            (AHEAD, 1, {"schedule": "zb-v", "vp": 2}, ALONE),
            (AHEAD, 2, {"schedule": "gpipe"}, ALONE),
        ],
        ranks_of(6, pp=2, ep=3): [(GATED, 1, {"schedule": "zb-h1"}, ALONE)],
        ranks_of(6, cp=2): [
            (LLAMA, 1, {"cp_comm": "ring"}, {**ALONE, "data": weighted}),
            (GPT2, 3, {"cp_comm": "a2a"}, ALONE),
        ],
        ranks_of(6, tp=2): [(GPT2, 1, {}, ALONE), (SIX, 1, {"sequence_parallel": False}, ALONE)],
    }
    planted = {
        "passes without samples counted": (ranks_of(3), (GPT2, 1, {}, ALONE)),
        "divided by all passes": (ranks_of(3), (GPT2, 1, {}, ALONE)),
        "masks by rank": (ranks_of(3), (GPT2, 1, {}, ALONE)),
        "routers count them": (ranks_of(3), (SIX, 1, {}, ALONE)),
        "routers divide by them": (ranks_of(3), (SIX, 1, {}, ALONE)),
    }

    @staticmethod
    def mistakes(rank: int, cfg: Config) -> dict[str, tuple[Any, str, Any]]:
        from megalite.core import microbatches, step
        from megalite.core.rows import Rows

        filled, status_of, share_of = Rows.filled, step.status_of, microbatches.share_of

        def with_targets(self: Rows, samples: int) -> Rows:
            return self[np.arange(samples) % len(self)]

        def with_tokens(self: Rows, samples: int) -> Rows:
            return replace(filled(self, samples), padding=self.padding)

        def of_passes(engine: Any, loss_sum: Any, rows: Rows, failed: bool) -> Any:
            return status_of(engine, loss_sum, with_targets(rows, 3), failed)

        def by_rank(samples: int, replicas: int, replica: int, size: int = 1) -> range:
            most = -(-samples // replicas)
            return range(replica * most, replica * most + len(share_of(samples, replicas, replica, size)))

        return {
            "passes without samples counted": (Rows, "filled", with_targets),
            "divided by all passes": (step, "status_of", of_passes),
            "masks by rank": (microbatches, "share_of", by_rank),
            "routers count them": (Rows, "filled", with_tokens),
            "routers divide by them": (Rows, "num_tokens", lambda self: self.inputs.size),
        }


RUN = [*runs.MODEL, "--attention-dropout", "0.1", "--eval-every", "3", "--eval-steps", "2"]


@pytest.mark.parametrize(
    "more",
    [
        pytest.param(["--zero", "3", "--zero-whole-below", "500"], marks=pytest.mark.full),
        pytest.param(["--batch-size-schedule", "0:4 2:7 4:8"], marks=pytest.mark.full),
    ],
    ids=["zero3", "ramp"],
)
def test_four_replicas_then_three_then_four_are_the_run_left_alone(
    pool: WorkerPool, tmp_path: Path, more: list[str]
) -> None:
    runs.train(0, [*RUN, *more, "--train-steps", "6", "--run-dir", str(tmp_path / "a")], 1)
    for world, steps in ((4, "2"), (3, "4"), (4, "6")):
        arguments = [*RUN, *more, "--train-steps", steps, "--run-dir", str(tmp_path / "b")]
        ends = pool.run(world, runs.train, arguments, world)
        assert len({tuple(end) for end, _ in ends}) == 1
    np.testing.assert_allclose(runs.losses(tmp_path / "b"), runs.losses(tmp_path / "a"), rtol=1e-6)
    got, want = evaluations(tmp_path / "b"), evaluations(tmp_path / "a")
    assert [*want] == [3, 6]  # the other has more, at the ends of its parts
    assert {step: got[step] for step in want} == pytest.approx(want, rel=1e-6)


def evaluations(run_dir: Path) -> dict[int, float]:
    """By step, the loss of its evaluation."""
    lines = [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]
    return {line["step"]: line["loss"] for line in lines if line.get("event") == "eval"}
