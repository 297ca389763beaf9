"""Ranks that fail together: an error on one rank is reported once and ends all of them."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import Future, wait
from typing import TypeVar

from megalite.core.base.errors import UserError
from megalite.core.mesh.collectives import gather_texts
from megalite.core.mesh.context import ParallelContext

T = TypeVar("T")

# How long a rank works between two meetings of `agree_in_rounds`.
_ROUND_S = 1.0


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


def agree_in_rounds(ctx: ParallelContext, action: Callable[[], T], each_round: Callable[[], None]) -> T:
    """As `agree`, for what one rank may do longer than a collective may take: `action` runs in a thread.

    Meanwhile all ranks meet every second, and call `each_round`.
    """
    answer: Future[T] = Future()

    def work() -> None:
        try:
            answer.set_result(action())
        except BaseException as e:
            answer.set_exception(e)

    # Not one of a pool's, for which the process would wait if another rank's failure ends it.
    threading.Thread(target=work, name="agree", daemon=True).start()
    while not all(gather_texts("done" if wait([answer], _ROUND_S).done else "", ctx.world, ctx.device)):
        each_round()
    return agree(ctx, answer.result)


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
