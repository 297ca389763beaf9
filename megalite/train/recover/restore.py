"""A process that takes over a rank: it meets the others, loads the last copies, and continues the run's history."""

from __future__ import annotations

import contextlib
import time
from pathlib import Path
from typing import Any

from megalite.base.errors import require
from megalite.base.log import logger
from megalite.checkpoint.folder import step_name
from megalite.checkpoint.manifest import read_manifest
from megalite.checkpoint.safetensors_io import BadCheckpoint
from megalite.config.run import Config
from megalite.dist.collectives import gather_texts
from megalite.dist.context import ParallelContext
from megalite.dist.rendezvous import store_host
from megalite.train.engine import Engine
from megalite.train.recover.copies import Copies
from megalite.train.recover.member import guard
from megalite.train.run import Run


def meet_guards(cfg: Config, ctx: ParallelContext) -> None:
    """Connect the guards of all ranks, in the first round; every rank calls it.

    Raises:
        UserError: the run is to recover, and this process has no guard.
    """
    if cfg.run.recover == "none":
        return
    rank_guard = guard()
    require(
        rank_guard is not None,
        f"--recover {cfg.run.recover}",
        "needs ranks that can be started again",
        "start them as pretrain_gpt.py, with torchrun or megalite train, or use --recover none",
    )
    assert rank_guard is not None
    if rank_guard.round == 0:
        offer = ""
        if ctx.rank == 0:
            port, token = rank_guard.host(ctx.world.size, cfg.run.max_recoveries)
            offer = f"{port} {token}"
        port_text, token = gather_texts(offer, ctx.world, ctx.device)[0].split()
        rank_guard.meet(ctx.rank, store_host(), int(port_text), token)
    rank_guard.met = time.monotonic()


def guard_round() -> int:
    """Number of recoveries before this process; 0 without a guard."""
    rank_guard = guard()
    return 0 if rank_guard is None else rank_guard.round


def open_copies(engine: Engine) -> Copies | None:
    """Return the copies of this rank, with the newest loaded into the engine if there is one; None without a guard."""
    if engine.cfg.run.recover == "none":
        return None
    rank_guard, optimizer = guard(), engine.optimizer
    assert rank_guard is not None
    copies = Copies(rank_guard, optimizer.states())
    for problem in copies.load(engine.ctx):
        older = "the copies before it" if copies.restored else "the newest checkpoint on disk"
        if engine.ctx.rank == 0:
            logger.warning(f"{problem}: using {older} on all ranks")
    if copies.restored is not None:
        optimizer.load_scalars(copies.restored["scalars"])
        engine.scaler.load_scalars(copies.restored["scalars"])
        optimizer.finish_load()
    return copies


def continue_recovered(run: Run, restored: dict[str, Any]) -> None:
    """Continue the history of the run's earlier processes: which checkpoints are its own, what a rewind counted."""
    run.recovered, run.rewinds = restored["trained"], dict(restored["rewinds"])
    for step, path in restored["continues"]:
        run.continues = step, Path(path)
        run.checkpointer.continues(path)
    base = run.continues[0] if run.continues else -1
    saved = [(step, Path(path)) for step, path in restored["saved"]]
    if (last := (run.step, run.checkpointer.root / step_name(run.step))) not in saved and run.step > base:
        # A copy is made before the save of its step.
        saved.append(last)
    # Rank 0 looks for all. A save may have been committed after the copy was made, or cut short.
    found = [path.name for step, path in saved if run.engine.ctx.rank == 0 and _is_whole(path, run, step > base)]
    names = set(gather_texts(" ".join(found), run.engine.ctx.world, run.engine.ctx.device)[0].split())
    run.saved = [(step, path) for step, path in saved if path.name in names]
    for step, path in run.saved:
        if step > base:
            run.checkpointer.adopt(path.name)


def _is_whole(path: Path, run: Run, own: bool) -> bool:
    """Whether a checkpoint is committed and, where it has to be, one of this run's `own`."""
    if not (path / "COMMIT").exists():
        return False
    with contextlib.suppress(BadCheckpoint):
        return not own or read_manifest(path).run_id == run.checkpointer.run_id
    return False


def record_recovery(run: Run) -> bool:
    """Log and record what a recovery cost; return False if this is none."""
    rank_guard = guard()
    if rank_guard is None or rank_guard.round == 0:
        return False
    turn, now = rank_guard.turn, time.monotonic()
    seconds = {
        "end": turn["gone"] - turn["died"],
        "meet": rank_guard.met - turn["gone"],
        "load": now - rank_guard.met,
    }
    logger.info(f"{turn['cause']}: back to step {run.step} in {now - turn['died']:.1f} s")
    run.only_saves = bool(turn["gave_up"])
    if run.only_saves:
        logger.info(f"{turn['gave_up']}: saving, then exiting")
    run.metrics.event(
        "recovery", step=run.step, round=rank_guard.round, ranks=[turn["rank"]], cause=turn["cause"], seconds=seconds
    )
    return True
