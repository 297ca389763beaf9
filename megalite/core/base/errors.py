"""The exception for user mistakes, in one printable line, and the checks that raise it."""

from __future__ import annotations

import math
import re
from typing import Any

from megalite.core.base.redact import mask, mask_fields

# Control characters (C0 without tab, DEL, C1), line separators, text direction marks, and halves of surrogate pairs.
_UNPRINTABLE = re.compile("[\x00-\x08\x0a-\x1f\x7f-\x9f\u2028-\u202e\u2066-\u2069\ud800-\udfff]")

# An error quotes values and names, and a file may hold one of any length.
_MAX_FIELD = 1000


def _shorten(field: str) -> str:
    half = _MAX_FIELD // 2
    return field if len(field) <= _MAX_FIELD else f"{field[:half]} ... {field[-half:]}"


def printable(text: str, keep: str = "") -> str:
    r"""Return text of any origin (names, file contents, library errors) as one harmless line.

    Characters that a terminal or a log would act on are escaped as in Python, an ESC as \x1b. Those in `keep` stay.
    """
    return _UNPRINTABLE.sub(lambda m: m[0] if m[0] in keep else m[0].encode("unicode_escape").decode(), text)


def describe(e: BaseException) -> str:
    """Describe an error of a library in a short line without credentials."""
    return printable(" ".join(mask_fields(f"{type(e).__name__}: {e}").split()))[:300]


class UserError(Exception):
    """A user mistake in configuration, data, checkpoint or layout (exit code 2).

    Args:
        given: the option or file, with its value ("--tp 3").
        rule: the rule it breaks ("num_heads 8 must be divisible by tp").
        remedy: what to change ("use --tp 2 or --tp 4").
    """

    def __init__(self, given: str, rule: str, remedy: str) -> None:
        # Always one line: messages quote file contents and library errors, which may contain newlines.
        given, rule, remedy = (_shorten(mask(field)) for field in (given, rule, remedy))
        super().__init__(printable(" ".join(f"{given}: {rule}; {remedy}".split())))

    @classmethod
    def from_message(cls, message: str) -> UserError:
        """Make the error from a complete message: another rank's, or several mistakes, one per line."""
        error = cls.__new__(cls)
        Exception.__init__(error, printable(mask(message), keep="\n"))
        return error


class LocalUserError(UserError):
    """A user mistake that other ranks may not see: this rank has to report it itself."""


def require(ok: bool, given: str, rule: str, remedy: str) -> None:
    """Raise `UserError(given, rule, remedy)` unless `ok`."""
    if not ok:
        raise UserError(given, rule, remedy)


def in_range(options: Any, names: str, low: float, high: float, *, above: bool = False) -> None:
    """Check low <= value < high (`above`: low < value) for the options in `names`; None is skipped.

    Where there is no natural limit, `high` is far beyond any use: a typo must not take all memory.
    """
    for name in names.split():
        value, flag = getattr(options, name), "--" + name.replace("_", "-")
        top = "finite" if high == math.inf else f"below {high}"
        rule = f"must be {'more than' if above else 'at least'} {low} and {top}"
        ok = value is None or (low < value if above else low <= value) and value < high
        require(ok, f"{flag} {value}", rule, "use a value in that range")
