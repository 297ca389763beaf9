"""Ranks that fail together: an error on one rank is reported once and ends all of them."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

from megalite.dist.collectives import gather_texts
from megalite.dist.context import ParallelContext
from megalite.base.errors import UserError

T = TypeVar("T")


def agree(ctx: ParallelContext, action: Callable[[], T]) -> T:
    """Run `action` on every rank; if it raises UserError anywhere, every rank raises the first rank's error."""
    result, message = None, ""
    try:
        result = action()
    except UserError as e:
        message = str(e)
    messages = gather_texts(message, ctx.world, ctx.device)
    for rank, text in enumerate(messages):
        if text:
            where = "" if rank == 0 or all(messages) else f"rank {rank}: "
            raise UserError.from_message(where + text)
    return result  # type: ignore[return-value]


def check_equal(ctx: ParallelContext, what: str, text: str, remedy: str) -> None:
    """Raise UserError on every rank unless `text` is the same on all of them.

    Args:
        what: name of what is compared, for the message.
        text: this rank's value (a short one, or a hash).
        remedy: what to do when they differ.
    """
    texts = gather_texts(text, ctx.world, ctx.device)
    for rank, other in enumerate(texts):
        if other != texts[0]:
            raise UserError(f"{what} of rank {rank} ({other})", f"must equal rank 0's ({texts[0]})", remedy)
