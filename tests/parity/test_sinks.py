"""Sinks, biases of experts and the clamped gate of gpt-oss: loss, gradient norm and every gradient are those of one
process in every layout.
"""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import Any

import pytest

from megalite.core.parts.families import FAMILIES
from megalite.runtime.options.run import Config
from tests.parity import jobs
from tests.parity.features import Feature
from tests.parity.harness import ROUNDS_NO_WORSE, ranks_of, rounding
from tests.parity.models import dropped
from tests.parity.packed import weighted
from tests.workers import WorkerPool

# Large initial weights, so that the gate's limit, biases and sinks are felt.
OSS = jobs.llama(
    **dict(FAMILIES["gpt_oss"].options)
    | {"num_experts": 8, "moe_topk": 3, "moe_ffn_size": 24, "init_std": 0.3, "window": 5, "norm_eps": 1e-5}
)

# Without routers, whose choices turn by rounding.
DENSE = replace(OSS, num_experts=None, moe_topk=2, moe_ffn_size=None, ffn_hidden_size=48, init_std=0.1, num_layers=2)

PLACES: dict[str, dict[str, Any]] = {
    "sinks of other heads": {"cp": 2, "cp_comm": "a2a"},
    "sinks on one rank": {"cp": 2, "cp_comm": "ring"},
    "no sinks": {"tp": 2},
    "biases of every rank of tp": {"tp": 2},
}
OPTIONS: dict[str, Any] = {**FAMILIES["gpt_oss"].options, "num_experts": 8, "moe_topk": 2, "moe_ffn_size": 24}


class TestSinks(Feature):
    strong = {
        ranks_of(4, ep=2, tp=2): [
            (OSS, 3, {}, {"recompute": "selective"}),
            (OSS, 1, {"sequence_parallel": False}, {"data": weighted}),
        ],
        ranks_of(4, cp=2, pp=2): [(OSS, 1, {"schedule": "zb-h1", "cp_comm": "ring"}, {"recompute": "full"})],
    }
    grid = {
        ranks_of(2, tp=2): [(OSS, 1, {"overlap_tp_reduce": False}, {})],
        ranks_of(2, ep=2): [(OSS, 1, {"moe_dispatch": "allgather"}, {}), (OSS, 1, {}, {"offload": "optimizer"})],
        ranks_of(4, ep=4, tp=2, etp="1"): [(OSS, 3, {}, {})],
        ranks_of(4, cp=4): [(OSS, 3, {"cp_comm": "a2a+ring"}, {}), (OSS, 1, {"cp_comm": "gather"}, {"data": weighted})],
        ranks_of(4, cp=2, tp=2): [(OSS, 2, {}, {}), (OSS, 1, {"cp_comm": "a2a"}, {"recompute": "selective"})],
        ranks_of(4, ep=2, pp=2): [
            (OSS, 1, {"schedule": "zb-v", "vp": 2}, {}),
            (OSS, 3, {"schedule": "interleaved", "vp": 2}, {"recompute": "full"}),
        ],
    }
    recomputed = {ranks_of(2, cp=2): [(dropped(OSS), 1, {"cp_comm": "ring"}, {})]}
    planted = {mistake: (ranks_of(2, **layout), (OSS, 1, {}, {})) for mistake, layout in PLACES.items()}
    rounded = [
        (
            DENSE,
            "bf16",
            [{"cp": 2, "cp_comm": "gather"}, {"cp": 4, "cp_comm": "ring"}, {"cp": 2, "tp": 2, "cp_comm": "a2a"}],
        )
    ]
    compiled = [(ranks_of(2, tp=2), (replace(OSS, num_layers=2), 1, {}, {}))]
    refused = [
        (partial(jobs.llama, **OPTIONS), model, train, words)
        for model, train, words in (
            (
                {"attention_sinks": False, "attention_dropout": 0.1},
                {"attention": "flash"},
                "with --attention-dropout 0.1",
            ),
        )
    ]

    @staticmethod
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


@pytest.mark.full
@pytest.mark.parametrize("mistake", ["no sinks", "sinks on one rank", "sinks of other heads"])
def test_planted_faults_show_in_half_precision(pool: WorkerPool, mistake: str) -> None:
    assert rounding(pool, DENSE, "bf16", PLACES[mistake], (TestSinks.mistakes, mistake)) > ROUNDS_NO_WORSE
