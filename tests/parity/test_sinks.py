"""Sinks, biases of experts and the clamped gate of gpt-oss: loss, gradient norm and every gradient are those of one
process in every layout.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

from megalite.core.base.errors import UserError
from megalite.core.parts.families import FAMILIES
from megalite.runtime.options.run import Config
from tests.parity import jobs
from tests.parity.harness import (
    Grid,
    Result,
    check,
    check_mistake,
    config,
    mistaken,
    one_process,
    ranks_of,
    scaled,
    trained,
)
from tests.rows import layout_tests
from tests.workers import WorkerPool

# Large initial weights, so that the gate's limit, biases and sinks are felt.
OSS = jobs.llama(
    **dict(FAMILIES["gpt_oss"].options)
    | {"num_experts": 8, "moe_topk": 3, "moe_ffn_size": 24, "init_std": 0.3, "window": 5, "norm_eps": 1e-5}
)

STRONG: Grid = {
    ranks_of(4, ep=2, tp=2): [(OSS, 3, {}, {"recompute": "selective"}), (OSS, 1, {"sequence_parallel": False}, {})],
    ranks_of(4, cp=2, pp=2): [(OSS, 1, {"schedule": "zb-h1", "cp_comm": "ring"}, {"recompute": "full"})],
}
GRID: Grid = {
    ranks_of(2, tp=2): [(OSS, 1, {}, {"recompute": "full"}), (OSS, 1, {"overlap_tp_reduce": False}, {})],
    ranks_of(2, tp=2, etp="1"): [(OSS, 1, {}, {})],
    ranks_of(2, ep=2): [
        (OSS, 2, {}, {"recompute": "full"}),
        (OSS, 1, {"moe_dispatch": "allgather"}, {}),
        (OSS, 1, {}, {"offload": "optimizer"}),
    ],
    ranks_of(4, ep=4, tp=2, etp="1"): [(OSS, 3, {}, {})],
    ranks_of(2, cp=2): [
        (OSS, 1, {"cp_comm": comm}, {"recompute": recompute})
        for comm, recompute in (("gather", "none"), ("ring", "selective"), ("a2a", "full"))
    ],
    ranks_of(4, cp=4): [(OSS, 3, {"cp_comm": "a2a+ring"}, {}), (OSS, 1, {"cp_comm": "gather"}, {})],
    ranks_of(4, cp=2, tp=2): [(OSS, 2, {}, {}), (OSS, 1, {"cp_comm": "a2a"}, {"recompute": "selective"})],
    ranks_of(4, ep=2, pp=2): [
        (OSS, 1, {"schedule": "zb-v", "vp": 2}, {}),
        (OSS, 3, {"schedule": "interleaved", "vp": 2}, {"recompute": "full"}),
    ],
    ranks_of(8, ep=2, tp=2, pp=2): [(OSS, 1, {"schedule": "1f1b"}, {"micro_batch_size": 2})],
}


test_same_gradients_in_any_layout, test_grid = layout_tests(check, STRONG, GRID)


def mistakes(rank: int, cfg: Config) -> dict[str, tuple[Any, str, Any]]:
    from megalite.core.parts.context.blocks import Total
    from megalite.core.parts.context.heads import HeadExchange
    from megalite.core.parts.ffn.experts.grouped_linear import GroupedLinear

    add, make, call = Total.add_sinks, GroupedLinear.__init__, HeadExchange.__call__

    def twice(self: Any, *args: Any) -> None:
        make(self, *args)
        self.adds_bias = True

    def of_rank_0(self: Any, *args: Any, sinks: Any, **options: Any) -> Any:
        return call(self, *args, sinks=sinks.roll(len(sinks) // self.axis.size), **options)

    return {
        "no sinks": (Total, "add_sinks", lambda *_: None),
        "sinks on one rank": (Total, "add_sinks", add if rank else lambda *_: None),
        "biases of every rank of tp": (GroupedLinear, "__init__", twice),
        "sinks of other heads": (HeadExchange, "__call__", of_rank_0),
    }


MISTAKES: dict[str, dict[str, Any]] = {
    "no sinks": {"tp": 2},
    "sinks on one rank": {"cp": 2, "cp_comm": "ring"},
    "biases of every rank of tp": {"tp": 2},
    "sinks of other heads": {"cp": 2, "cp_comm": "a2a"},
}


@pytest.mark.full
@pytest.mark.parametrize("mistake", MISTAKES)
def test_mistakes_of_others_show(pool: WorkerPool, mistake: str) -> None:
    check_mistake(pool, mistakes, mistake, 2, config(OSS, 1, MISTAKES[mistake], micro_batch_size=1))


# Without routers, whose choices turn by rounding.
DENSE = replace(OSS, num_experts=None, moe_topk=2, moe_ffn_size=None, ffn_hidden_size=48, init_std=0.1)
# Seen: 2.1e-4 and 1.2e-3; with the sinks of other heads, 7e-4 and 3.4e-3.
FAR_IN_BF16 = (4e-4, 2.4e-3)


def distances(ranks: Sequence[Sequence[Result]]) -> np.ndarray:
    """How far loss and norm of two steps in bf16 are from those of one process, at most."""
    want = np.array(one_process(scaled(jobs.make_config(DENSE, precision="bf16"))).steps)
    return np.max([np.abs(np.array(result.steps) / want - 1) for (result,) in ranks], (0, 1))


@pytest.mark.full
@pytest.mark.parametrize(
    "layout",
    [{"tp": 2}, {"cp": 2, "cp_comm": "gather"}, {"cp": 4, "cp_comm": "ring"}, {"cp": 2, "tp": 2, "cp_comm": "a2a"}],
    ids=str,
)
def test_half_precision(pool: WorkerPool, layout: dict[str, Any]) -> None:
    """Blocks of keys, and sums over tp, round apart from one process."""
    ranks = pool.run(4, trained, [config(DENSE, 1, layout, precision="bf16")], 4)
    assert (distances(ranks) < FAR_IN_BF16).all()


@pytest.mark.full
@pytest.mark.parametrize("mistake", ["no sinks", "sinks on one rank", "sinks of other heads"])
def test_mistakes_of_others_show_in_half_precision(pool: WorkerPool, mistake: str) -> None:
    ranks = pool.run(2, mistaken, mistakes, mistake, config(DENSE, 1, MISTAKES[mistake], precision="bf16"), 2)
    assert (distances(ranks) > FAR_IN_BF16).all()


@pytest.mark.full
def test_compiled_blocks() -> None:
    plain, compiled = (jobs.train(0, jobs.make_config(OSS, compile=on), 1, 2) for on in (False, True))
    torch.testing.assert_close(torch.tensor(compiled), torch.tensor(plain), rtol=1e-5, atol=0)


BAD: list[tuple[dict[str, Any], dict[str, Any], str]] = [
    ({}, {"attention": "math"}, "math with --attention-sinks: .* torch's choice"),
    (
        {"attention_sinks": False, "attention_dropout": 0.1},
        {"attention": "flash"},
        "with --attention-dropout 0.1",
    ),
    ({"kv_lora_rank": 8, "num_kv_heads": 8}, {}, "its heads have no sinks here"),
    (
        {"moe_router_score_function": "sigmoid", "moe_router_enable_expert_bias": True},
        {},
        "a router has one bias",
    ),
]


@pytest.mark.parametrize(("model", "train", "words"), BAD, ids=[words for *_, words in BAD])
def test_what_does_not_fit_is_refused(model: dict[str, Any], train: dict[str, Any], words: str) -> None:
    options = {**FAMILIES["gpt_oss"].options, "num_experts": 8, "moe_topk": 2, "moe_ffn_size": 24, **model}
    with pytest.raises(UserError, match=words):
        jobs.make_config(jobs.llama(**options), **train)
