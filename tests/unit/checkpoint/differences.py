"""Weights for the tests of differences, and what a snapshot of them loads."""

from __future__ import annotations

from pathlib import Path

from megalite.core.mesh.context import ParallelContext
from megalite.core.sharding import ParamSpec, StateTensor
from megalite.runtime.checkpoint.load import load_checkpoint
from megalite.runtime.checkpoint.save import Checkpointer
from tests.faults import checkpoint_states as cs

SPECS = [
    *cs.SPECS,
    ParamSpec("layers.1.rows", (1024, 700), sharded_dims=(("tp", 0),)),
    ParamSpec("layers.1.columns", (700, 1024), sharded_dims=(("tp", 1),)),
    ParamSpec("odd.weight", (101, 7)),
]


def weights(step: int, rank: int = 0, tp: int = 1) -> list[StateTensor]:
    """Weights that a step changes a little, the same in every layout."""
    states = cs.states_at(0, rank, tp, SPECS)
    for state in states:
        noise = (state.flat * 2).long().mul_(2654435761).remainder_(2**24)
        state.flat.copy_(noise * 2.0**-24 * (1 + step * 2**-13))
        state.flat[noise % 97 == 0] = -0.0
        state.flat[noise % 97 == 1] = 1e-42
    return states


def loaded(path: Path, rank: int = 0, tp: int = 1) -> bytes:
    states = [s for s in cs.states_at(-1, rank, tp, SPECS) if s.role == "master"]
    load_checkpoint(path, states, ParallelContext.single())
    return b"".join(state.flat.numpy().tobytes() for state in states)


def save(
    root: Path, steps: list[int], delta: int, ctx: ParallelContext | None = None, rank: int = 0, tp: int = 1
) -> None:
    """Save snapshots of some steps."""
    checkpointer = Checkpointer(root, ctx or ParallelContext.single(), "run", delta=delta)
    for step in steps:
        checkpointer.save_model(step, weights(step, rank, tp), {"step": step})
    checkpointer.close()
