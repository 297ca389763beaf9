"""Pairs of a forward and a backward pass that take turns: every bit is that of the same passes one after the other."""

from __future__ import annotations

import pytest

from megalite.runtime.options.run import Config
from tests.parity.harness import Row, Shape, assert_same_bits, config, ranks_of, trained
from tests.parity.models import BIASED, MIXTRAL, QWEN, dropped
from tests.rows import always_run
from tests.workers import WorkerPool

EAGER = {"pp": 2, "schedule": "1f1b-eager"}
INTERLEAVED = {"pp": 2, "vp": 2, "schedule": "interleaved"}

ROWS: dict[str, tuple[Shape, list[Row]]] = {
    "pp 1": (
        ranks_of(2, ep=2),
        [
            (MIXTRAL, 1, {}, {}),
            (QWEN, 1, {}, {}),
            (dropped(QWEN), 2, {}, {"recompute": "full"}),
            (BIASED, 1, {}, {"recompute": "selective", "precision": "bf16"}),
            (MIXTRAL, 1, {"moe_dispatch": "allgather"}, {"offload": "optimizer"}),
        ],
    ),
    "pp 2": (
        ranks_of(4, ep=2, pp=2),
        [
            (MIXTRAL, 1, EAGER, {}),
            (dropped(QWEN), 2, EAGER, {"recompute": "full"}),
            (QWEN, 1, INTERLEAVED, {}),
            (MIXTRAL, 1, INTERLEAVED, {"recompute": "selective"}),
        ],
    ),
    "tp 2": (ranks_of(4, ep=2, tp=2), [(QWEN, 1, {}, {}), (QWEN, 0, {"sequence_parallel": False}, {})]),
    "whole experts": (ranks_of(4, ep=4, tp=2, etp="1"), [(MIXTRAL, 2, {}, {})]),
    "cp 2": (ranks_of(4, ep=4, cp=2), [(QWEN, 1, {"cp_comm": "a2a"}, {})]),
}


def plain_and_paired(shape: Shape, row: Row) -> list[Config]:
    """The config, and that with pairs in place of its schedule."""
    model, zero, more, train = row
    layout, train = dict(shape[1]) | more, {"micro_batch_size": 1} | train
    schedule = "interleaved-overlap" if layout.get("vp", 1) > 1 else "1f1b-overlap"
    return [
        config(model, zero, each, **train) for each in (layout, layout | {"moe_overlap": True, "schedule": schedule})
    ]


@pytest.mark.parametrize("name", always_run(ROWS, "pp 1", "pp 2"))
def test_pairs_change_no_bit(pool: WorkerPool, name: str) -> None:
    shape, rows = ROWS[name]
    cfgs = [cfg for row in rows for cfg in plain_and_paired(shape, row)]
    ranks = pool.run(shape[0], trained, cfgs, shape[0])
    for first in range(0, len(cfgs), 2):
        assert_same_bits([rank[first : first + 2] for rank in ranks])
