"""Checks streams and memory of several layouts in one process, without pytest, which may have imported torch too early.

To be imported after `guard.install_guard`. Arguments: names of cases and mutants.
Output: a line for each, [faults by description, number of operations, streams], as JSON.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Mapping
from contextlib import nullcontext
from typing import Any
from unittest import mock

from megalite.dist import collectives
from megalite.dist.grid import Grid
from megalite.extras.estimate import races
from megalite.optim.bucket import Bucket
from megalite.optim.gather_chain import GatherChain
from megalite.pipeline.observe import Observer
from megalite.pipeline.schedule import Op
from megalite.train.engine import Engine
from megalite.train.step import train_step
from tests.parity import jobs

CUT = {"tp": 2, "pp": 2}
ZERO_3 = {"zero": 3, "zero_whole_below": 0}
BF16 = {"precision": "bf16"}
ACTIVATIONS = {"recompute": "full", "offload": "activations", **BF16}
# name: (layout, training options), of Llama with four layers on eight ranks; with "-gpt2" of GPT-2.
CASES: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "zero0-gpt2": ({**CUT, "zero": 0}, {}),
    "zero1": (CUT, {}),
    "zero2": ({**CUT, "zero": 2}, {}),
    "zero2-zb-v": ({**CUT, "zero": 2, "vp": 2, "schedule": "zb-v"}, {}),
    "zero3-gpt2": ({**CUT, **ZERO_3}, {}),
    "zero3-zb-h1": ({**CUT, **ZERO_3, "schedule": "zb-h1"}, {}),
    "zero3-vp2": ({**CUT, **ZERO_3, "vp": 2}, {}),
    "zero3-groups-recompute": ({"tp": 2, **ZERO_3, "zero_group": "2"}, {"recompute": "full", "loss_chunk": 5}),
    "zero3-backward": ({**CUT, **ZERO_3, "zero_keep": "backward"}, {}),
    "bf16-reduce": ({**CUT, "zero": 2}, {**BF16, "grad_reduce_dtype": "bf16"}),
    "no-overlap": (
        {**CUT, "overlap_grad_reduce": False, "overlap_param_gather": False, "overlap_tp_reduce": False},
        {},
    ),
    "offload-optimizer": (CUT, {"offload": "optimizer", **BF16}),
    "offload-params": ({**CUT, **ZERO_3}, {"offload": "optimizer+params", **BF16}),
    "offload-activations": (CUT, ACTIVATIONS),
    "offload-activations-zero3": ({**CUT, **ZERO_3}, ACTIVATIONS),
    "zero2-groups": ({"tp": 2, "zero": 2, "zero_group": "2"}, {}),
    "zero2-step-gpt2": ({**CUT, "zero": 2, "zero_reduce": "step"}, {}),
    "zero3-zb-v": ({**CUT, **ZERO_3, "vp": 2, "schedule": "zb-v"}, {}),
    "zero3-keep-step": ({**CUT, **ZERO_3, "zero_keep": "step"}, {}),
    "no-sp-zb-h1": ({**CUT, "sequence_parallel": False, "schedule": "zb-h1"}, {}),
    "recompute-selective": ({**CUT, "schedule": "zb-h1"}, {"recompute": "selective"}),
    "gpipe-gpt2": ({**CUT, "schedule": "gpipe"}, {}),
    "eager": ({"pp": 4, "schedule": "1f1b-eager"}, {}),
    "experts": ({"tp": 2, "ep": 4, "etp": "1", "zero": 2}, {**BF16, "recompute": "full"}),
    "experts-zero3-zb-v": ({**CUT, **ZERO_3, "ep": 2, "vp": 2, "schedule": "zb-v"}, BF16),
    "int8": (CUT, {"compress": "int8"}),
    "topk": (CUT, {"compress": "topk:0.1"}),
    "interrupted": ({"tp": 2, "zero": 2}, {}),
}


def _nothing(*_: Any) -> None:
    pass


def _settle_without_wait(bucket: Bucket, settle: Callable[[Bucket], None] = Bucket._wait_reduction) -> None:
    bucket._reducing = collectives.FinishedWork()
    settle(bucket)


def _chain_without_wait(chain: GatherChain, bucket: Bucket) -> None:
    chain._post(chain._place[id(bucket)] + 2)


# Name of a mutant: (case, what is replaced by what).
MUTANTS: dict[str, tuple[str, tuple[Any, str, Callable[..., None]]]] = {
    "weights are not waited for": ("zero3-gpt2", (Bucket, "wait_weights", _nothing)),
    "a reduction is not waited for": ("zero2", (Bucket, "_wait_reduction", _settle_without_wait)),
    "the chain does not wait": ("zero1", (GatherChain, "wait", _chain_without_wait)),
    "the host does not wait for copies": ("offload-optimizer", (races.FakeEvent, "synchronize", _nothing)),
    "fetched activations are not waited for": ("offload-activations", (races.FakeStream, "wait_event", _nothing)),
    "an upload does not wait for compute": ("offload-params", (races.FakeStream, "wait_stream", _nothing)),
    "what is under way is forgotten": ("interrupted", (collectives.PendingWork, "drop", _nothing)),
}


class _Interrupt(Observer):
    """Stops a step after its first backward pass."""

    def end(self, op: Op) -> None:
        if op.kind == "B":
            raise KeyboardInterrupt


def _interrupt(engine: Engine, step: int) -> None:
    batch = races.zeros(engine)
    try:
        with engine.executor.observed_by(_Interrupt()):
            train_step(engine, batch, step)
    except KeyboardInterrupt:
        pass


def check(name: str, rank: int) -> tuple[Mapping[str, int], int, list[str]]:
    """Faults of a case on a rank, the number of operations, and the streams."""
    parallel, train = CASES[name]
    experts = {"num_experts": 8, "moe_ffn_size": 24} if name.startswith("experts") else {}
    model = jobs.gpt2(4) if name.endswith("gpt2") else jobs.llama(4, **experts)
    cfg = jobs.make_config(model, parallel, **train)
    before_step = {"before_step": _interrupt} if name == "interrupted" else {}
    order = races.check_rank(cfg, Grid.from_config(cfg.parallel, 8), rank, **before_step)
    return order.faults, order.operations, order.streams


def main() -> None:
    for i, name in enumerate(sys.argv[1:] or [*CASES, *MUTANTS]):
        case, change = MUTANTS.get(name, (name, None))
        with nullcontext() if change is None else mock.patch.object(*change):
            # The first rank and the last: the first and the last stage.
            print(json.dumps(check(case, 0 if i % 2 else 7)), flush=True)
