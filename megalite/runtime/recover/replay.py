"""A step that ends badly is repeated from the copy in memory: other bits mean hardware, not the data or the model.

A recomputed step also cures a passing fault (silent data corruption in training: arXiv 2604.00726).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import asdict
from functools import partial

from megalite.core.base.log import logger
from megalite.core.mesh.collectives import gather_texts
from megalite.core.rows import Rows
from megalite.core.step import StepResult
from megalite.runtime.loop.run import Run
from megalite.runtime.recover.exchange import Exchange, exchange
from megalite.runtime.recover.local_gradients import LocalGradients
from megalite.runtime.watch.heartbeat import READING
from megalite.runtime.watch.watchdog import OWN


def is_bad(run: Run, result: StepResult) -> bool:
    """Whether a step had no update, and not because a dynamic loss scale overflowed, as it does now and then."""
    # Until it cannot be lowered further.
    expected = result.skipped and result.loss_scale > run.engine.scaler.minimum
    return (result.skipped or result.spiked) and not expected


def replay(
    run: Run,
    first: StepResult,
    batch: Rows,
    gradients: LocalGradients,
    scalars: Mapping[str, int | float],
    again: Callable[[], StepResult],
) -> StepResult:
    """Repeat a step that did not update the weights, and say what came of it; every rank calls it.

    If it is the same bits, replicas also compute each other's samples.

    Args:
        run: the run, whose copies are kept.
        first: what the step came to.
        batch: this rank's samples.
        gradients: what this rank's gradients were.
        scalars: state of optimizer and loss scale before the step.
        again: runs the step.

    Returns:
        What it came to this time.
    """
    engine = run.engine
    ctx = run.engine.ctx
    number = run.step + 1
    own = gradients.read()
    changed, damaged = _load_again(run, scalars)
    gradients.start(closely=True)
    second = again()
    told = {"memory": bool(changed), "gradients": gradients.read() != own}
    found = {
        kind: [rank for rank, text in enumerate(gather_texts("x" * differs, ctx.world, ctx.device)) if text]
        for kind, differs in told.items()
    }
    same, copy = not any(found.values()) and _bits(first) == _bits(second), changed is not None
    elsewhere = _exchange(run, batch, second, gradients) if same else None
    more = {} if elsewhere is None else {"exchange": asdict(elsewhere)}
    run.metrics.event("replay", step=number, same=same, copy=copy, damaged=list(damaged), **found, **more)
    if damaged and ctx.rank == 0:
        logger.warning("; ".join(damaged.values()))
    if ctx.rank == 0:
        varies = ctx.device.type == "cuda" and not engine.cfg.train.deterministic
        kernels = ", or kernels that vary (--deterministic)" if varies else ""
        head = f"step {number} again, from the {'copy in memory' if copy else 'state at hand'}: "
        if elsewhere is None:
            logger.warning(f"{head}other bits: hardware{kernels}; {_culprits(**found)}")
        else:
            _report(elsewhere, f"{head}the same bits", copy, kernels)
    return second


def _exchange(run: Run, batch: Rows, second: StepResult, gradients: LocalGradients) -> Exchange:
    """Let replicas compute each other's samples of the step."""
    read = partial(_read_share, run)
    return exchange(run.engine, read, batch, run.step + 1, second.loss_scale, gradients)


def _read_share(run: Run, dp_rank: int) -> tuple[Rows, Exception | None]:
    """Read samples of another rank; a store that is away while they are read is no hang."""
    run.heartbeat.beat(READING, run.step + 1, OWN)
    found = run.loader.read_share(dp_rank)
    run.heartbeat.beat("training on samples of another rank", run.step + 1, OWN)
    return found


def _report(elsewhere: Exchange, head: str, copy: bool, kernels: str) -> None:
    """Log what the same bits mean, after an exchange."""
    blamed = "the data or the model" if copy else "the data, the model or what memory holds"
    if elsewhere.suspects:
        ranks = " or ".join(", ".join(map(str, replica)) for replica in elsewhere.suspects)
        where = "where another replica computes it"
        logger.warning(f"{head}, but others {where}: hardware or weights of rank {ranks}{kernels}")
    elif elsewhere.obstacle:
        logger.info(f"{head}, so {blamed} did it, or a fault that comes back (no exchange: {elsewhere.obstacle})")
    else:
        logger.info(f"{head}, on other hardware too, so {blamed} did it")


def _load_again(run: Run, scalars: Mapping[str, int | float]) -> tuple[bool | None, dict[int, str]]:
    """Go back to before the step; return what `Copies.reload` does."""
    engine, copies = run.engine, run.copies
    assert copies is not None
    engine.optimizer.wait_weights()
    changed, damaged = copies.reload(engine.ctx, int(scalars["num_steps"]), run.rewinds)
    engine.optimizer.load_scalars(dict(scalars))
    engine.scaler.load_scalars(dict(scalars))
    if changed is not None:
        # Not of the states at hand: what is wrong with those of one rank would reach the others.
        engine.optimizer.finish_load()
    return changed, damaged


def _culprits(memory: list[int], gradients: list[int]) -> str:
    """Name the ranks: what has changed in memory of one changes the gradients of others."""
    if memory:
        return f"the states of rank {', '.join(map(str, memory))} had changed in memory"
    if gradients:
        return f"own gradients of rank {', '.join(map(str, gradients))} differ"
    return "no rank's own gradients differ, only their sum"


def _bits(result: StepResult) -> tuple[str, str]:
    """Return loss and norm so that NaN equals NaN."""
    return result.loss.hex(), result.grad_norm.hex()
