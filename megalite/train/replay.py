"""A step that ends badly is repeated from the copy in memory: other bits mean hardware, not the data or the model.

A recomputed step also cures a passing fault (silent data corruption in training: arXiv 2604.00726).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

import torch

from megalite.base.log import logger
from megalite.dist.collectives import gather_texts
from megalite.train.engine import Engine
from megalite.train.recover.copies import sums_of_bits
from megalite.train.run import Run
from megalite.train.step import StepResult


class LocalGradients:
    """Sums the bits of a rank's own gradients in each step, before they are reduced with those of other ranks.

    Args:
        engine: what this rank trains with.
    """

    def __init__(self, engine: Engine) -> None:
        self._sums: list[torch.Tensor] = []
        for bucket in engine.optimizer.buckets:
            bucket.before_reduce = lambda grad: self._sums.append(sums_of_bits([grad]))

    def start(self) -> None:
        """Forget the step before."""
        self._sums.clear()

    def read(self) -> list[int]:
        """Return the sums of this step, in the order in which gradients were complete."""
        return torch.cat(self._sums).tolist() if self._sums else []


def is_bad(run: Run, result: StepResult) -> bool:
    """Whether a step had no update, and not because a dynamic loss scale overflowed, as it does now and then."""
    # Until it cannot be lowered further.
    expected = result.skipped and result.loss_scale > run.engine.scaler.minimum
    return (result.skipped or result.spiked) and not expected


def replay(
    run: Run,
    first: StepResult,
    gradients: LocalGradients,
    scalars: Mapping[str, int | float],
    again: Callable[[], StepResult],
) -> StepResult:
    """Repeat a step that did not update the weights, and say whether it came to the same bits; every rank calls it.

    Args:
        run: the run, whose copies are kept.
        first: what the step came to.
        gradients: what this rank's gradients were.
        scalars: state of optimizer and loss scale before the step.
        again: runs the step.

    Returns:
        What it came to this time.
    """
    engine, ctx, number = run.engine, run.engine.ctx, run.step + 1
    own = gradients.read()
    changed, damaged = _load_again(run, scalars)
    gradients.start()
    second = again()
    told = {"memory": bool(changed), "gradients": gradients.read() != own}
    found = {
        kind: [rank for rank, text in enumerate(gather_texts("x" * differs, ctx.world, ctx.device)) if text]
        for kind, differs in told.items()
    }
    same = not any(found.values()) and _bits(first) == _bits(second)
    run.metrics.event("replay", step=number, same=same, copy=changed is not None, damaged=list(damaged), **found)
    source, blamed = "the copy in memory", "the data or the model"
    if changed is None:
        source, blamed = "the state at hand", "the data, the model or what memory holds"
    head = f"step {number} again, from {source}: "
    if damaged and ctx.rank == 0:
        logger.warning("; ".join(damaged.values()))
    if same:
        logger.info(f"{head}the same bits, so {blamed} did it, or a fault that comes back")
    elif ctx.rank == 0:
        varies = ctx.device.type == "cuda" and not engine.cfg.train.deterministic
        cause = "hardware, or kernels that vary (--deterministic)" if varies else "hardware"
        logger.warning(f"{head}other bits: {cause}; {_culprits(**found)}")
    return second


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
