"""Match the ranks' logs as if every operation blocked its rank until all its peers take part.

No library is as strict: programs that pass cannot deadlock, whatever is buffered or queued.
"""

from __future__ import annotations

from collections.abc import Sequence

from megalite.extras.estimate.record import Communication


def find_faults(logs: Sequence[Sequence[Communication]]) -> list[str]:
    """Match the logs of all ranks.

    Returns:
        A line for each rank that gets stuck, or one for the first operations that differ; empty if all match.
    """
    at = [0] * len(logs)
    ready = list(range(len(logs)))
    while ready:
        rank = ready.pop()
        if at[rank] == len(logs[rank]):
            continue
        mine = logs[rank][at[rank]]
        others = _partners(mine, rank)
        heads = {other: logs[other][at[other]] for other in others if at[other] < len(logs[other])}
        if len(heads) < len(others) or not all(_meets(mine, head, rank) for head in heads.values()):
            continue  # the last rank to arrive finds the others waiting
        for other, head in heads.items():
            if (head.numel, head.dtype) != (mine.numel, mine.dtype):
                return [f"rank {rank} posts {_text(mine)}; rank {other} posts {_text(head)}"]
        for member in (rank, *others):
            at[member] += 1
            ready.append(member)
    stuck = [(rank, log[i:]) for rank, (log, i) in enumerate(zip(logs, at)) if i < len(log)]
    return [f"rank {rank} is stuck in {_text(log[0])}, the first of {len(log)} remaining" for rank, log in stuck]


def _partners(posted: Communication, rank: int) -> tuple[int, ...]:
    if posted.kind in ("send", "recv"):
        assert posted.peer is not None
        return (posted.peer,)
    return tuple(member for member in posted.ranks if member != rank)


def _meets(mine: Communication, head: Communication, rank: int) -> bool:
    if (mine.axis, mine.ranks) != (head.axis, head.ranks):
        return False
    if mine.kind in ("send", "recv"):
        return {mine.kind, head.kind} == {"send", "recv"} and head.peer == rank
    return (mine.kind, mine.peer) == (head.kind, head.peer)


def _text(posted: Communication) -> str:
    peer = "" if posted.peer is None else f" with rank {posted.peer}"
    return f"{posted.kind} over {posted.axis}{peer} of {posted.numel} x {posted.dtype}"
