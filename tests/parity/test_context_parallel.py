"""Samples shared by ranks (--cp): loss, gradient norm and every gradient are those of one process."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

from megalite.core.batch import MicroBatch, Positions
from megalite.runtime.data import Rows
from megalite.runtime.options.run import Config
from tests.parity import jobs, packed
from tests.parity.features import Feature
from tests.parity.harness import assert_same_gradients, boxes_of, config, put_together, ranks_of
from tests.parity.models import FEW_HEADS, ONE_KEY, dropped
from tests.workers import WorkerPool

LLAMA, GPT2, GEMMA2, GEMMA3 = jobs.llama(), jobs.gpt2(), jobs.gemma2(), jobs.gemma3()
PACKED = {name: make(4, **packed.SIZES) for name, make in packed.MAKE.items()}


class TestContextParallel(Feature):
    strong = {
        ranks_of(4, cp=2): [
            (LLAMA, 1, {"cp_comm": "gather"}, {}),
            (GEMMA2, 3, {"cp_comm": "ring", "zero_group": "2"}, {"recompute": "selective"}),
        ],
        ranks_of(4, cp=4): [(FEW_HEADS, 3, {"cp_comm": "a2a+gather"}, {"recompute": "full"})],
        ranks_of(8, cp=2, tp=2, pp=2): [
            (GPT2, 2, {"cp_comm": "a2a", "schedule": "zb-v", "vp": 2}, {"loss_chunk": 5}),
            (LLAMA, 1, {"cp_comm": "ring", "schedule": "zb-h1"}, {}),
        ],
    }
    grid = {
        ranks_of(2, cp=2): [
            (GEMMA3, 1, {"cp_comm": "ring"}, {}),
            (GEMMA2, 0, {"cp_comm": "a2a"}, {"offload": "optimizer"}),
            (GPT2, 2, {"cp_comm": "gather"}, {"loss_chunk": 3}),
            (LLAMA, 3, {"cp_comm": "gather"}, {"offload": "optimizer+params"}),
            (LLAMA, 1, {"cp_comm": "ring"}, {"offload": "activations", "recompute": "full"}),
        ],
        ranks_of(4, cp=2): [
            (GEMMA3, 2, {"cp_comm": "a2a", "zero_reduce": "step"}, {}),
            (GPT2, 3, {"cp_comm": "ring", "zero_keep": "step"}, {}),
        ],
        ranks_of(4, cp=4): [
            (LLAMA, 3, {"cp_comm": "a2a", "zero_group": "2"}, {}),
            (LLAMA, 1, {"cp_comm": "ring"}, {"recompute": "selective"}),
            (LLAMA, 1, {"cp_comm": "gather"}, {"z_loss": 1e-2, "loss_chunk": 3}),
            (FEW_HEADS, 2, {"cp_comm": "a2a+ring"}, {}),
            (ONE_KEY, 3, {"cp_comm": "a2a"}, {}),
            (GEMMA2, 3, {"cp_comm": "ring"}, {"loss_chunk": 2}),
        ],
        ranks_of(4, cp=2, tp=2): [
            (LLAMA, 3, {"cp_comm": "ring", "sequence_parallel": False}, {}),
            (GPT2, 2, {"cp_comm": "gather"}, {"recompute": "full"}),
            (GEMMA2, 1, {"cp_comm": "a2a", "overlap_tp_reduce": False}, {}),
        ],
        ranks_of(4, cp=2, pp=2): [
            (LLAMA, 3, {"cp_comm": "gather", "schedule": "1f1b"}, {}),
            (GPT2, 2, {"cp_comm": "gather", "schedule": "interleaved", "vp": 2}, {}),
            (GEMMA3, 1, {"cp_comm": "a2a", "schedule": "gpipe"}, {}),
        ],
        ranks_of(8, cp=4, tp=2): [(LLAMA, 1, {"cp_comm": "a2a", "sequence_parallel": False}, {})],
    }
    packed = {
        ranks_of(4, cp=4): [
            (PACKED["llama"], 1, {"cp_comm": "gather"}, {}),
            (PACKED["gemma2"], 1, {"cp_comm": "ring"}, {}),
            (PACKED["gpt2"], 1, {"cp_comm": "a2a"}, {"loss_chunk": 5}),
        ],
        ranks_of(8, cp=2, tp=2, pp=2): [
            (PACKED["gpt2"], 1, {"cp_comm": "ring", "schedule": "zb-v", "vp": 2}, {}),
            (PACKED["gemma3"], 2, {"cp_comm": "gather", "schedule": "zb-h1"}, {}),
            (PACKED["llama"], 3, {"cp_comm": "a2a"}, {"recompute": "full"}),
        ],
    }
    recomputed = {
        ranks_of(2, cp=2): [(dropped(GEMMA2), 1, {"cp_comm": comm}, {}) for comm in ("gather", "a2a", "ring")],
    }
    planted = {
        mistake: (ranks_of(4, cp=4), (LLAMA, 1, {"cp_comm": "gather"}, {}))
        for mistake in (
            "summed over dp only",
            "local positions",
            "targets shifted in the slice",
            "not summed over cp",
            "mean of rank means",
        )
    }
    rounded = [
        (FEW_HEADS, precision, [{"cp": 4, "cp_comm": comm} for comm in comms])
        for precision, comms in (("bf16", ("gather", "ring", "a2a+gather")), ("fp16", ("ring",)))
    ]
    # Attention runs outside of the compiled code.
    compiled = [
        (ranks_of(2, cp=2), (jobs.llama(1), 1, {"cp_comm": comm}, {"recompute": recompute}))
        for comm, recompute in (("gather", "selective"), ("ring", "full"), ("a2a", "none"))
    ]
    always = Feature.always | {"rounded": 1}

    @staticmethod
    def mistakes(rank: int, cfg: Config) -> dict[str, tuple[Any, str, Any]]:
        from megalite.core import step
        from megalite.core.mesh import grid
        from megalite.core.parts.context import gather

        shared, cut = MicroBatch.shared, step.to_microbatches

        def shifted(batch: MicroBatch, ranks: int, rank: int) -> MicroBatch:
            part = shared(batch, ranks, rank)
            return replace(part, targets_SB=torch.cat((part.tokens_SB[1:], part.tokens_SB[:1])))

        def not_summed(x: torch.Tensor, axis: Any) -> Any:
            return x.view(axis.size, -1, *x.shape[1:])[axis.rank].clone(), gather.collectives.FinishedWork()

        def local(positions: Positions, ranks: int, rank: int) -> Positions:
            return Positions(positions.length, (range(positions.length // ranks),))

        def of_rank(*args: Any) -> Any:
            """Divide by the rank's own count of targets, as a mean over its tokens does; the last token has none."""
            out = cut(*args)
            for at, part in enumerate(out):
                runs = part.positions.runs
                uncounted = 1 if runs[-1].stop == part.positions.length else 0
                held = len(part.tokens_SB)
                assert part.targets_SB is not None
                weights = torch.full_like(part.targets_SB, held / (held - uncounted), dtype=torch.float32)
                out[at] = replace(part, weights_SB=weights)
            return out

        return {
            "local positions": (Positions, "shared", local),
            "targets shifted in the slice": (MicroBatch, "shared", shifted),
            "not summed over cp": (gather.collectives, "start_reduce_scatter", not_summed),
            "mean of rank means": (step, "to_microbatches", of_rank),
            "summed over dp only": (grid, "AXES", [axis._replace(cuts_batch=axis.name == "dp") for axis in grid.AXES]),
        }


def owned(rank: int, cfg: Config, world: int) -> list[tuple[int, slice]]:
    """By bucket: its padded size, and the part whose optimizer states this rank has."""
    (engine,) = jobs.engines([cfg], world)
    return [(bucket.numel, bucket.owned) for bucket in engine.optimizer.buckets]


@pytest.mark.parametrize("cp", [2, pytest.param(4, marks=pytest.mark.full)])
def test_optimizer_states_are_cut_over_dp_and_cp(pool: WorkerPool, cp: int) -> None:
    for buckets in zip(*pool.run(4, owned, config(LLAMA, 1, {"cp": cp, "zero_group": "full"}), 4), strict=True):
        parts = sorted((part.start, part.stop) for _, part in buckets)
        assert [start for start, _ in parts] == [0, *(stop for _, stop in parts[:-1])]
        assert parts[-1][1] == buckets[0][0]
        assert len({stop - start for start, stop in parts}) == 1


def chats() -> Rows:
    """Packed conversations: of each only some turns are learned, with weights of their own."""
    rows, draws = packed.packed(), np.random.default_rng(4)
    targets = np.where(np.arange(packed.SEQ) // 3 % 2, rows.targets, -1)
    return replace(rows, targets=targets, weights=draws.uniform(0.1, 2, targets.shape).astype(np.float32))


def trained_on_chats(rank: int, cfgs: Sequence[Config], world: int) -> list[Any]:
    """By config: loss and norm of a step and of an evaluation, and the boxes of the gradients."""
    from megalite.core.step import eval_step, train_step

    out, rows = [], chats()
    for engine in jobs.engines(cfgs, world):
        share = len(rows) // engine.ctx.dp.size
        mine = rows[engine.ctx.dp.rank * share :][:share]
        evaluated, *_ = eval_step(engine, mine)
        result = train_step(engine, mine, 1)
        out.append(([result.loss, result.grad_norm, evaluated, result.targets], boxes_of(engine)))
        engine.optimizer.wait_weights()
    return out


# (model, layout of eight ranks, training options)
CHATS: list[tuple[str, dict[str, Any], dict[str, Any]]] = [
    ("llama", {"cp": 4, "cp_comm": "a2a", "zero": 3, "zero_whole_below": 500}, {"recompute": "full"}),
    ("gemma2", {"cp": 4, "cp_comm": "gather", "zero": 2}, {"loss_chunk": 5}),
    ("gpt2", {"cp": 4, "cp_comm": "ring"}, {"micro_batch_size": 4}),
]


@pytest.mark.parametrize("row", [CHATS[1], *(pytest.param(row, marks=pytest.mark.full) for row in CHATS[::2])], ids=str)
def test_chats(pool: WorkerPool, row: tuple[str, dict[str, Any], dict[str, Any]]) -> None:
    name, parallel, train = row
    model = packed.MAKE[name](2, **packed.SIZES)
    ((figures, boxes),) = trained_on_chats(0, [jobs.make_config(model)], 1)
    ranks = pool.run(8, trained_on_chats, [jobs.make_config(model, parallel, **train)], 8)
    for ((got, _),) in ranks:
        np.testing.assert_allclose(got[:2], figures[:2], rtol=1e-5)
        np.testing.assert_allclose(got[2:], figures[2:], rtol=1e-6)
    assert_same_gradients([held for ((_, held),) in ranks], put_together([boxes]), str(row))


def few_targets() -> Rows:
    """Only the first tokens of the first sample are learned, with weights: three of four ranks count nothing."""
    tokens = np.random.default_rng(8).integers(0, jobs.VOCAB, (jobs.BATCH, jobs.SEQ + 1))
    targets = np.full((jobs.BATCH, jobs.SEQ), -1)
    targets[0, :2] = tokens[0, 1:3]
    weights = np.ones(targets.shape, np.float32)
    weights[0, 1] = 0.25
    return Rows(tokens[:, :-1], targets, np.zeros_like(targets), weights)


@pytest.mark.parametrize("comm", ["gather", "ring", "a2a"])
def test_ranks_without_a_target_take_part(pool: WorkerPool, comm: str) -> None:
    (want,) = packed.learned(0, [jobs.make_config(LLAMA)], 1, [few_targets()])
    cfgs = [jobs.make_config(LLAMA, {"cp": 4, "cp_comm": comm, "zero": 1})]
    for (got,) in pool.run(4, packed.learned, cfgs, 4, [few_targets()]):
        np.testing.assert_allclose(got, want, rtol=1e-5)
    assert want[0][2] == 1.25
