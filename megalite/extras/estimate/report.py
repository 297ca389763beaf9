"""An estimate as JSON, and as a page of text."""

from __future__ import annotations

from collections import Counter
from dataclasses import asdict
from typing import Any

from megalite.extras.estimate.order import Order
from megalite.extras.estimate.rank import Estimate
from megalite.extras.estimate.streams import Machine, simulate_streams
from megalite.extras.plan.memory.ranks import RankMemory


def to_json(e: Estimate, predicted: RankMemory) -> dict[str, Any]:
    """Return all figures; memory and messages are in bytes.

    Args:
        e: the estimate.
        predicted: memory of the rank as `--dry-run` predicts it.
    """
    times = simulate_streams(e.log, Machine(), e.one_queue)
    by_axis: dict[str, dict[str, dict[str, float]]] = {}
    for (axis, kind), (count, nbytes) in e.collectives.items():
        exposed = times.exposed[axis, kind]
        by_axis.setdefault(axis, {})[kind] = {"count": count, "bytes": nbytes, "exposed_s": exposed}
    return {
        "rank": e.rank,
        "world": e.grid.world,
        "coords": e.grid.coords(e.rank),
        "ops": e.ops,
        "states_bytes": e.states,
        "building_bytes": e.building.nbytes,
        "peak_bytes": e.peak.nbytes,
        "peak_during": e.peak.during,
        "peak_holders": dict(_holders(e)),
        "predicted_bytes": {"total": predicted.total, **asdict(predicted)},
        "kernels": e.kernels,
        "calls": e.calls,
        "calls_bytes": e.moved,
        "flops": e.flops,
        "host_syncs": sum(e.syncs.values()),
        "host_syncs_in": e.syncs,
        "collectives": by_axis,
        "times": {"step_s": times.step, "kernels_s": times.busy, "assumed": asdict(Machine())},
        "timeline": [{"op": op, "before_bytes": before, "peak_bytes": most} for op, before, most in e.timeline],
    }


def to_text(e: Estimate, predicted: RankMemory) -> str:
    """Format the figures as a page; arguments as for `to_json`."""
    coords = ", ".join(f"{name} {place} of {e.grid[name]}" for name, place in e.grid.coords(e.rank).items())
    difference = e.peak.nbytes / predicted.total - 1
    syncs = ", ".join(f"{count} x {name}" for name, count in e.syncs.items())
    lines = [
        f"rank {e.rank} of {e.grid.world}: {coords}",
        e.ops,
        "",
        f"memory    {_size(e.peak.nbytes)} at most, during {e.peak.during}; {_size(e.states)} between steps",
        f"          --dry-run predicts {_size(predicted.total)}: the step takes {difference:+.1%}",
    ]
    lines += [f"          {_size(nbytes):>12}  {holder}" for holder, nbytes in _holders(e)]
    lines += [
        "",
        f"compute   {e.kernels:,} kernels, {e.flops:.4g} FLOPs (matrix products and attention)",
        f"host      waits for the GPU {sum(e.syncs.values())} times: {syncs}",
        "",
        f"{'axis':<10}{'operation':<16}{'number':>8}{'bytes':>14}{'exposed':>12}",
    ]
    times = simulate_streams(e.log, Machine(), e.one_queue)
    for (axis, kind), (count, nbytes) in e.collectives.items():
        exposed = f"{times.exposed[axis, kind] * 1e3:.1f} ms"
        lines.append(f"{axis:<10}{kind:<16}{count:>8,}{_size(nbytes):>14}{exposed:>12}")
    lines += [
        "",
        f"exposed: the GPU computes for {times.busy * 1e3:.0f} ms and waits for the rest of {times.step * 1e3:.0f} ms,",
        "on H100 hosts at 75 to 80 % of their peaks, without the waits for other stages (megalite schedule times them)",
    ]
    return "\n".join(lines)


def order_text(order: Order) -> str:
    """Format what the check of streams and memory found."""
    faults = [f"{count} x {fault}" for fault, count in order.faults.items()]
    verdict = "out of order:" if faults else "every access to memory is in order"
    return "\n".join([f"{order.operations:,} operations on {len(order.streams)} streams: {verdict}", *faults])


def _holders(e: Estimate) -> list[tuple[str, int]]:
    by_holder: Counter[str] = Counter()
    for (holder, _), nbytes in e.peak.holders.items():
        by_holder[holder] += nbytes
    return by_holder.most_common()


def _size(nbytes: int) -> str:
    for unit, size in (("GiB", 2**30), ("MiB", 2**20), ("KiB", 2**10)):
        if nbytes >= size:
            return f"{nbytes / size:.2f} {unit}"
    return f"{nbytes} B"
