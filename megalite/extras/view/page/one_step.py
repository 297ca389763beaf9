"""The real step and the real buckets of a rank of each pipeline stage, without a GPU: `python -m` this, JSON on stdout.

A process of its own, because a run's config may be wrong in any way, and torch needs a guard before it is imported.
"""

from __future__ import annotations

import json
import sys
import time
from collections import defaultdict
from functools import partial
from typing import Any

from megalite.core.base.errors import UserError
from megalite.extras.estimate.guard import install_guard
from megalite.extras.view.page.part import limit_processor_time

# Of processor time; what is not begun by then is left out.
_SECONDS = 120.0
# What each rank of a group of n sends, in whole tensors (of gathers and scatters the full one), by ring or pairwise.
_SENT = {
    "all_reduce": lambda n: 2 * (n - 1) / n,
    "all_gather": lambda n: (n - 1) / n,
    "reduce_scatter": lambda n: (n - 1) / n,
    "all_to_all": lambda n: (n - 1) / n,
    "send": lambda n: 1.0,
}


def main(config: str, world: int) -> dict[str, Any]:
    """Return {"stages": one entry for each pipeline rank, "buckets": ZeRO stage -> one list for each}."""
    install_guard()
    from megalite.core.mesh.grid import Grid
    from megalite.extras.compat.dialect import DIALECT
    from megalite.runtime.options import cli
    from megalite.runtime.options.fields import with_options

    cfg = cli.parse(["--config", config], world=world, dialect=DIALECT).config
    changed = {"device": "cuda", "batch_size_schedule": None, "compile": False, "offload": "none", "offload_dir": None}
    cfg = with_options(cfg, changed)
    grid = Grid.from_config(cfg.parallel, world)
    ranks = [grid.rank(pp=stage) for stage in range(grid["pp"])]
    own = cfg.parallel.zero
    buckets: dict[int, Any] = {own: _guarded(partial(_all_buckets, cfg, own, grid, ranks))}
    stages = [_guarded(partial(_stage, cfg, grid, rank)) for rank in ranks]
    buckets |= {zero: _guarded(partial(_all_buckets, cfg, zero, grid, ranks)) for zero in range(4) if zero != own}
    return {"stages": stages, "buckets": buckets}


def _guarded(make: Any) -> Any:
    if time.process_time() > _SECONDS:
        return {"problem": f"left out: the parts before it took {_SECONDS:g} s of processor time"}
    try:
        return make()
    except UserError as e:
        return {"problem": str(e)}


def _stage(cfg: Any, grid: Any, rank: int) -> dict[str, Any]:
    """Return a step of a rank: memory over its operations by holder, and messages by axis, kind and phase."""
    from megalite.extras.estimate.rank import estimate
    from megalite.extras.estimate.record import Communication
    from megalite.extras.estimate.streams import Machine, simulate_streams

    e = estimate(cfg, grid, rank)
    exposed = simulate_streams(e.log, Machine(), e.one_queue).exposed
    phases = {i: kind for kind, begin, end in e.spans for i in range(begin, end)}
    first = min((begin for _, begin, _ in e.spans), default=0)
    rows: dict[tuple[str, str, int], dict[str, Any]] = {}
    for i, event in enumerate(e.log[e.first :], e.first):
        if isinstance(event, Communication):
            n = len(event.ranks)
            ends = (rank, event.peer) if event.kind in ("send", "recv") else event.ranks
            new = {"ranks": list(ends), "phases": defaultdict(int), "calls": 0, "bytes": 0}
            row = rows.setdefault((event.axis, event.kind, n), new)
            row["calls"] += 1
            row["bytes"] += event.nbytes
            row["phases"][phases.get(i) or ("before" if i < first else "after")] += event.nbytes
    messages = [
        {
            "axis": axis,
            "kind": kind,
            "size": n,
            **row,
            "sent": round(_SENT.get(kind, lambda n: 0.0)(n) * row["bytes"]),
            "exposed_s": exposed[axis, kind],
        }
        for (axis, kind, n), row in sorted(rows.items())
    ]
    timeline = [
        {"op": op, "before": before, "peak": peak, "held": held}
        for (op, before, peak), held in zip(e.timeline, e.held)
        if "@" not in op
    ]
    holders: dict[str, int] = defaultdict(int)
    for (holder, _), nbytes in e.peak.holders.items():
        holders[holder] += nbytes
    return {
        "rank": e.rank,
        "states": e.states,
        "peak": e.peak.nbytes,
        "during": e.peak.during,
        "holders": holders,
        "timeline": timeline,
        "messages": messages,
        "flops": e.flops,
        "kernels": e.kernels,
    }


def _all_buckets(cfg: Any, zero: int, grid: Any, ranks: list[int]) -> list[list[dict[str, Any]]]:
    from megalite.runtime.options.fields import with_options

    return [_buckets(with_options(cfg, {"zero": zero}), grid, rank) for rank in ranks]


def _buckets(cfg: Any, grid: Any, rank: int) -> list[dict[str, Any]]:
    """Return the buckets of a rank's optimizer at the config's ZeRO stage.

    Returns:
        Per bucket: over (axes of its groups) and shares (ranks of one group, in order); numel; params: [name, first
        element in the bucket, elements]; weights, grads, states: whether each is cut into shares; bytes of an element
        of each.
    """
    from megalite.core.build import build_engine
    from megalite.core.mesh.context import ParallelContext
    from megalite.extras.estimate.backends import target_backends
    from megalite.extras.estimate.fake_cuda import fake_cuda
    from megalite.extras.estimate.record import recorded_world

    with recorded_world(rank, grid), fake_cuda() as device, target_backends(cfg.train.ops):
        optimizer = build_engine(cfg, ParallelContext.create(grid, device)).optimizer
        element = defaultdict(set)
        for state in optimizer.states():
            element[state.name].add((state.role, state.flat.element_size()))
        out = []
        for bucket in optimizer.buckets:
            spec, layout = bucket.params[0].shard.spec, bucket.params[0].shard.layout
            states = dict(sorted(element[spec.tied_to or spec.name]))
            if bucket.weights.element_size() == 4:
                states.pop("master", None)  # the weights themselves
            out.append(
                {
                    "over": list(layout.batch),
                    "shares": bucket.share_axis.size,
                    "numel": bucket.numel,
                    "params": [[p.shard.spec.name, at, p.numel()] for p, at in zip(bucket.params, bucket.starts)],
                    "weights": bucket.sharded.weights,
                    "grads": bucket.sharded.grad,
                    "states": bucket.sharded.state,
                    "bytes": {
                        "weights": bucket.weights.element_size(),
                        "grads": bucket.grad.element_size(),
                        "states": sum(states.values()),
                    },
                }
            )
        return out


if __name__ == "__main__":
    limit_processor_time(int(sys.argv[1]))
    print(json.dumps(main(sys.argv[2], int(sys.argv[3]))))
