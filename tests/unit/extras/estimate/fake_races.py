"""Checks streams and memory of several layouts in one process, without pytest, which may have imported torch too early.

To be imported after `guard.install_guard`. Standard input: a line of JSON for each check, [name of a case or a mutant,
whether on the last rank]. Output: a line for each, [faults by description, number of operations, streams].
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Mapping
from contextlib import nullcontext
from functools import partial
from typing import Any
from unittest import mock

from megalite.core.engine import Engine
from megalite.core.mesh import collectives
from megalite.core.mesh.grid import Grid
from megalite.core.optim.bucket import Bucket
from megalite.core.optim.gather_chain import GatherChain
from megalite.core.optim.weight_store import WeightStore
from megalite.core.pipeline.observe import Observer
from megalite.core.pipeline.schedule import Op
from megalite.core.step import train_step
from megalite.extras.estimate import races
from tests.parity import jobs
from tests.unit.extras.estimate.layouts import ALL, CUT, EXPERTS, WHOLE_3

ZERO_3 = {**CUT, **WHOLE_3}
BF16 = {"precision": "bf16"}
ACTIVATIONS = {"recompute": "full", "offload": "activations", **BF16}
# (layout, training options), of Llama with four layers on eight ranks.
MORE: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "zero2-zb-v": ({**CUT, "zero": 2, "vp": 2, "schedule": "zb-v"}, {}),
    "zero3-groups-recompute": ({"tp": 2, **WHOLE_3, "zero_group": "2"}, {"recompute": "full", "loss_chunk": 5}),
    "bf16-reduce": ({**CUT, "zero": 2}, {**BF16, "grad_reduce_dtype": "bf16"}),
    "offload-optimizer": (CUT, {"offload": "optimizer", **BF16}),
    "offload-params": (ZERO_3, {"offload": "optimizer+params", **BF16}),
    "offload-activations": (CUT, ACTIVATIONS),
    "offload-activations-zero3": (ZERO_3, ACTIVATIONS),
    "experts": ({"tp": 2, "ep": 4, "etp": "1", "zero": 2}, {**BF16, "recompute": "full"}),
    "experts-zero3-zb-v": ({**ZERO_3, "ep": 2, "vp": 2, "schedule": "zb-v"}, BF16),
    "interrupted": ({"tp": 2, "zero": 2}, {}),
}
CASES = ALL | {
    name: (partial(jobs.llama, **(EXPERTS if name.startswith("experts") else {})), 8, 4, *case)
    for name, case in MORE.items()
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
    "weights are not waited for": ("zero3-gpt2", (WeightStore, "wait", _nothing)),
    "a reduction is not waited for": ("zero2-llama", (Bucket, "_wait_reduction", _settle_without_wait)),
    "the chain does not wait": ("tp2-pp2-dp2-zero1-llama", (GatherChain, "wait", _chain_without_wait)),
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


def check(name: str, last: bool) -> tuple[Mapping[str, int], int, list[str]]:
    """Faults of a case on its last or first rank, the number of operations, and the streams."""
    make, world, layers, parallel, train = CASES[name]
    # Where one stage has all samples, fewer micro-batches show the same.
    size = 4 if parallel.get("tp", 1) * parallel.get("cp", 1) == world else 1
    cfg = jobs.make_config(make(layers), parallel, **{"micro_batch_size": size, **train})
    before_step = {"before_step": _interrupt} if name == "interrupted" else {}
    # The first rank and the last: the first and the last stage.
    rank = world - 1 if last else 0
    order = races.check_rank(cfg, Grid.from_config(cfg.parallel, world), rank, **before_step)
    return order.faults, order.operations, order.streams


def main() -> None:
    for line in sys.stdin:
        name, last = json.loads(line)
        case, change = MUTANTS.get(name, (name, None))
        with nullcontext() if change is None else mock.patch.object(*change):
            print(json.dumps(check(case, last)), flush=True)
