"""Checks of option values, each an error with the value, the rule and what to change."""

from __future__ import annotations

import math
from typing import Any

from megalite.errors import UserError


def require(ok: bool, given: str, rule: str, remedy: str) -> None:
    """Raise `UserError(given, rule, remedy)` unless `ok`."""
    if not ok:
        raise UserError(given, rule, remedy)


def in_range(owner: Any, names: str, low: float, high: float = math.inf, *, above: bool = False) -> None:
    """Check low <= value < high (`above`: low < value) of the options in `names`; those at None are left to follow."""
    for name in names.split():
        value, flag = getattr(owner, name), "--" + name.replace("_", "-")
        top = "finite" if high == math.inf else f"below {high}"
        rule = f"must be {'more than' if above else 'at least'} {low} and {top}"
        ok = value is None or (low < value if above else low <= value) and value < high
        require(ok, f"{flag} {value}", rule, f"give a {flag} in that range")


def step_range(flag: str, given: str | None) -> range:
    """Steps of an A:B option: B is the first that does not count any more; none for None."""
    if given is None:
        return range(0)
    first, colon, end = given.partition(":")
    ok = bool(colon) and first.isdecimal() and end.isdecimal() and 1 <= int(first) < int(end)
    require(ok, f"{flag} {given}", "must be A:B with 1 <= A < B, for steps A to B - 1", f"write {flag} 10:13")
    return range(int(first), int(end))
