"""Windows of steps, as A:B (B excluded)."""

from __future__ import annotations

from itertools import pairwise

from megalite.core.base.errors import require


def step_range(flag: str, given: str | None) -> range:
    """Parse the half-open step range of an A:B option (B excluded); empty for None."""
    if given is None:
        return range(0)
    first, colon, end = given.partition(":")
    ok = bool(colon) and first.isdecimal() and end.isdecimal() and 1 <= int(first) < int(end)
    require(ok, f"{flag} {given}", "must be A:B with 1 <= A < B, for steps A to B - 1", f"write {flag} 10:13")
    return range(int(first), int(end))


def step_windows(flag: str, given: str | None) -> tuple[range, ...]:
    """Parse an option of one or more step ranges, A:B or A:B,C:D, in order and apart; () for None."""
    if given is None:
        return ()
    windows = tuple(step_range(flag, window) for window in given.split(","))
    apart = all(before.stop <= after.start for before, after in pairwise(windows))
    require(apart, f"{flag} {given}", "must be windows in order that share no step", f"write {flag} 10:13,100:103")
    return windows
