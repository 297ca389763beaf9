"""States without a model: a function of (name, kind, step), cut over tensor-parallel ranks; and jobs that save them."""

from __future__ import annotations

import contextlib
import hashlib
import os
import resource
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch

from megalite.core.base.errors import UserError
from megalite.core.mesh.context import ParallelContext
from megalite.core.mesh.grid import Grid
from megalite.core.sharding import ParamSpec, StateTensor
from megalite.runtime.checkpoint.load import find_good, load_checkpoint
from megalite.runtime.checkpoint.pruning import Keep
from megalite.runtime.checkpoint.save import Checkpointer, SaveError
from tests.shards import tp_shard

INJECT = str(Path(__file__).with_name("inject"))
SPECS = [
    ParamSpec("embed_tokens.weight", (50, 16), sharded_dims=(("tp", 0),), padded=True),
    ParamSpec("layers.0.qkv_proj.weight", (48, 16), sharded_dims=(("tp", 0),), parts=(24, 12, 12)),
    ParamSpec("layers.0.o_proj.weight", (16, 24), sharded_dims=(("tp", 1),)),
    ParamSpec("norm.weight", (16,)),
]
RUN: dict[str, Any] = {
    "preset": "tiny",
    "mock_data": True,
    "seq_len": 8,
    "micro_batch_size": 1,
    "global_batch_size": 2,
    "num_layers": 2,
    "eval_steps": 0,
}
"""Options of a tiny run."""


def value(spec: ParamSpec, kind: str, step: int, scale: int = 1) -> torch.Tensor:
    """The whole tensor at a step."""
    base = torch.arange(spec.numel, dtype=torch.float32).view(spec.shape)
    return base * 0.5 + step * 1000 + len(spec.name) + 7 * len(kind)


def states_at(step: int, tp_rank: int = 0, tp: int = 1, specs: list[ParamSpec] | None = None) -> list[StateTensor]:
    """What a rank holds at a step; NaN where `step` is negative (to be loaded)."""
    out = []
    for spec in specs or SPECS:
        shard = tp_shard(spec, tp_rank, tp)
        for kind in ("master", "exp_avg", "exp_avg_sq"):
            full = value(spec, kind, step)
            flat = (shard.take(full) if step >= 0 else torch.full(shard.shape, float("nan"))).view(-1)
            slices = shard.flat_slices(0, flat.numel())
            out.append(StateTensor(spec.name, kind, spec.shape, flat, slices, shard.is_owner()))
    return out


def assert_states(states: list[StateTensor], step: int, tp_rank: int = 0, tp: int = 1) -> None:
    """Bitwise those of the step."""
    for state, expected in zip(states, states_at(step, tp_rank, tp)):
        assert torch.equal(state.flat, expected.flat), (state.role, state.name)


def context(world: int) -> ParallelContext:
    """Tensor parallel over all ranks."""
    return ParallelContext.create(Grid.of(world, tp=world), torch.device("cpu"))


def digest(folder: Path) -> dict[str, str]:
    """SHA-256 of every file of a folder."""
    return {p.name: hashlib.sha256(p.read_bytes()).hexdigest() for p in sorted(folder.iterdir())}


@contextlib.contextmanager
def killed_at(point: str | None) -> Iterator[None]:
    """Processes started inside die at the point."""
    before = os.environ.get("PYTHONPATH")
    if point is not None:
        os.environ.update(PYTHONPATH=INJECT, KILL_AT=point)
    try:
        yield
    finally:
        os.environ.pop("KILL_AT", None)
        os.environ.pop("PYTHONPATH", None)
        if before is not None:
            os.environ["PYTHONPATH"] = before


def save_all(rank: int, world: int, root: str, steps: list[int], code: Any = "none") -> None:
    """Checkpoints of the steps, in the foreground."""
    ctx = context(world)
    checkpointer = Checkpointer(root, ctx, run_id="first", keep=Keep(last=9), code=code)
    for step in steps:
        checkpointer.save(step, states_at(step, rank, world), {"step": step})
    checkpointer.close()


def save_under_kill(
    rank: int, world: int, root: str, victim: int, point: str, background: bool, code: Any = "none"
) -> dict[str, Any]:
    """Save steps 5 and 10, then 15 with one rank's writer killed at a point; then be the next run.

    Returns:
        The error, the step that the next run finds, and what it found left.
    """
    ctx = context(world)
    save_all(rank, world, root, [5, 10], code)
    with killed_at(point if rank == victim else None):
        checkpointer = Checkpointer(root, ctx, run_id="second", keep=Keep(last=2), code=code)
    path = Path(root)
    checkpointer.continues(path / "step_00000010")
    kept = digest(path / "step_00000010")
    error = ""
    try:
        checkpointer.save(15, states_at(15, rank, world), {"step": 15}, background=background)
        checkpointer.finish()
    except SaveError as e:
        error = str(e)
    checkpointer.close()
    left = sorted(p.name for p in path.iterdir())
    assert digest(path / "step_00000010") == kept
    following = Checkpointer(root, ctx, run_id="third", keep=Keep(last=2))
    cleaned = sorted(p.name for p in path.iterdir())
    found = find_good(root, ctx)
    assert found is not None
    states = states_at(-1, rank, world)
    meta, _ = load_checkpoint(found, states, ctx)
    assert_states(states, meta["step"], rank, world)
    following.continues(found.path)
    following.save(20, states_at(20, rank, world), {"step": 20})
    following.close()
    return {"error": error, "found": meta["step"], "left": left, "cleaned": cleaned}


def save_with_limit(rank: int, world: int, root: str, limit: int) -> tuple[str, list[str]]:
    """Rank 1's writer may not write files of more than `limit` bytes."""
    ctx = context(world)
    checkpointer = Checkpointer(root, ctx)
    if rank == 1:
        resource.prlimit(checkpointer._writer.process.pid, resource.RLIMIT_FSIZE, (limit, limit))
    error = ""
    try:
        checkpointer.save(5, states_at(5, rank, world), {})
    except SaveError as e:
        error = str(e)
    checkpointer.close()
    return error, sorted(p.name for p in Path(root).iterdir())


def kill_writer(rank: int, world: int, root: str, on_error: Any) -> dict[str, Any]:
    """Rank 1's writer is killed with a save in the background under way."""
    ctx = context(world)
    checkpointer = Checkpointer(root, ctx, on_error=on_error)
    checkpointer.save(5, states_at(5, rank, world), {"step": 5})
    kept = digest(Path(root) / "step_00000005")
    writer = checkpointer._writer.process
    if rank == 1:
        os.kill(writer.pid, signal.SIGSTOP)
    checkpointer.save(10, states_at(10, rank, world), {"step": 10}, background=True)
    if rank == 1:
        os.kill(writer.pid, signal.SIGKILL)
        writer.wait()
    out: dict[str, Any] = {"poll": "", "finish": ""}
    try:
        checkpointer.poll()
    except SaveError as e:
        out["poll"] = str(e)
    try:
        out["saved"] = checkpointer.finish()
    except SaveError as e:
        out["finish"] = str(e)
    if on_error == "warn":
        checkpointer.save(15, states_at(15, rank, world), {"step": 15})
    checkpointer.close()
    assert digest(Path(root) / "step_00000005") == kept
    out["left"] = sorted(p.name for p in Path(root).iterdir())
    return out


def load_step(rank: int, world: int, root: str, fallback: bool) -> tuple[int, str]:
    """(step found by all ranks together, "") or (-1, error)."""
    ctx = context(world)
    try:
        found = find_good(root, ctx, fallback)
        assert found is not None
        states = states_at(-1, rank, world)
        meta, _ = load_checkpoint(found, states, ctx)
    except UserError as e:
        return -1, str(e)
    assert_states(states, meta["step"], rank, world)
    return meta["step"], ""
