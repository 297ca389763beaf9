"""Context parallelism (`--cp`): samples shared by ranks, and attention across them."""

from __future__ import annotations

from collections.abc import Callable

from torch import Tensor

from megalite.core.mesh.context import Axis, ParallelContext
from megalite.core.ops import Ops
from megalite.core.parts.context.blocks import BlockAttention, WholeSamples
from megalite.core.parts.context.gather import Gather
from megalite.core.parts.context.heads import HeadExchange
from megalite.core.parts.context.ring import Ring


def share_attention(
    comm: str,
    head_ranks: int,
    ctx: ParallelContext,
    ops: Ops,
    sinks: bool = False,
    *,
    dropout: bool = False,
    recomputed: bool,
    long: int | None,
) -> Callable[..., Tensor]:
    """Return `ops.attention` for tokens that the ranks of cp share as `batch.runs_of` says.

    No kernel of torch has sinks. They are merged by the log-sum-exp, as blocks of keys are: a ring of one rank.

    Args:
        comm: how attention reaches the tokens of other ranks, a value of `--cp-comm`.
        head_ranks: number of neighbors that can exchange tokens for heads.
        ctx: this rank's axes.
        ops: the kernels in use.
        sinks: whether calls have `sinks`, see `BlockAttention`.
        dropout: whether calls of training have `dropout`.
        recomputed: whether backward computes attention again.
        long: number of tokens of a sample from which a CPU needs blocks instead of a mask; None: no sample has as many.
    """
    cp, alone = ctx.axis("cp"), Axis("own")
    if cp.size == 1 or comm == "a2a":
        blocks = BlockAttention(Ring(alone), alone, ops)
        whole = WholeSamples(ops, blocks, long) if dropout or long is not None else ops.attention
        attention = blocks if sinks else whole
        return HeadExchange(cp, attention, not recomputed) if cp.size > 1 else attention
    neighbors, others = ctx.split("cp", size=head_ranks) if "a2a" in comm else (None, cp)
    shared = BlockAttention((Ring if "ring" in comm else Gather)(others), others, ops)
    return shared if neighbors is None else HeadExchange(neighbors, shared, not recomputed)
