"""The table of a profile: time by phase of the step (`--profile`)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from torch.autograd import DeviceType

from megalite.core.pipeline.observe import OPTIMIZER_RANGE, RANGE
from megalite.runtime.record.profile import WAIT, ProfiledSteps, headline

FORWARD = "forward matrix products"
BACKWARD = "backward matrix products"
ATTENTION = "attention"
COLLECTIVES = "collectives"
OPTIMIZER = "optimizer"
DATA = "data"
OTHER_OPS = "other operations"
NO_OP = "outside operations"
PHASES = (FORWARD, BACKWARD, ATTENTION, COLLECTIVES, OPTIMIZER, DATA, OTHER_OPS, NO_OP)

_MATRIX = ("aten::mm", "aten::addmm", "aten::bmm", "aten::baddbmm", "aten::addmm_", "aten::baddbmm_")
_ATTENTION = ("scaled_dot_product", "flash_attn", "flash_attention", "efficient_attention", "attention_core")
_COLLECTIVE = (WAIT, "c10d::", "record_param_comms", "nccl:", "gloo:")


@dataclass
class PhaseTime:
    """One row of the table: seconds, and number of matrix products."""

    seconds: float = 0.0
    calls: int = 0


def phase_times(profiled: ProfiledSteps) -> dict[str, PhaseTime]:
    """Add up seconds by phase.

    On a CPU an operation's time is its own, without that of operations inside it, and all rows together are `wall`. On
    a GPU it is that of its kernels: where they run side by side (communication under computation) the rows together can
    exceed the wall time, and nothing is left outside operations.
    """
    events, on_gpu = profiled.events, profiled.device.type == "cuda"
    rows = {name: PhaseTime() for name in PHASES}
    rows[DATA].seconds = profiled.read
    steps = [e.time_range for e in events if e.name.removeprefix(RANGE).isdecimal() and e.name.startswith(RANGE)]
    for event in events:
        if event.device_type != DeviceType.CPU or event.is_async or event.name.startswith(RANGE):
            continue
        # An evaluation between two steps does not count.
        if not any(s.start <= event.time_range.start <= s.end for s in steps):
            continue
        row = rows[phase_of(event)]
        row.seconds += (sum(k.duration for k in event.kernels) if on_gpu else event.self_cpu_time_total) / 1e6
        row.calls += event.name in _MATRIX
    rows[NO_OP].seconds = max(0.0, profiled.wall - sum(row.seconds for row in rows.values()))
    return rows


def phase_of(event: Any) -> str:
    """Get the phase of one operation, by its name and those of its callers."""
    names, at = [], event
    while at is not None:
        names.append(at.name)
        at = at.cpu_parent
    if any(part in name.lower() for name in names for part in _ATTENTION):
        return ATTENTION
    if any(name.startswith(_COLLECTIVE) for name in names):
        return COLLECTIVES
    if OPTIMIZER_RANGE in names:
        return OPTIMIZER
    if any(name in _MATRIX for name in names):
        # In autograd's thread on a GPU; inside the operation on a CPU; a deferred weight gradient inside W.
        ranges = [name[len(RANGE)] for name in names if name.startswith(RANGE)]
        later = any(name.startswith("autograd::engine") for name in names) or any(kind in "BIW" for kind in ranges)
        return BACKWARD if later else FORWARD
    return OTHER_OPS


def phase_table(profiled: ProfiledSteps) -> str:
    """Format the seconds by phase as text, per step."""
    rows = phase_times(profiled)
    wall = profiled.wall
    steps = profiled.num_steps
    lines = [headline(profiled), f"{'phase':<26}{'ms per step':>11}{'share':>8}"]
    lines[-1] += f"{'calls per step':>16}"
    for name in sorted(rows, key=lambda n: -rows[n].seconds):
        row = rows[name]
        calls = f"{row.calls / steps:>16.0f}" if name in (FORWARD, BACKWARD) else ""
        lines.append(f"{name:<26}{row.seconds / steps * 1e3:>11.2f}{row.seconds / wall:>8.1%}{calls}")
    return "\n".join(lines)
