"""Tables of other tools' options that megalite does not have: why, what to do instead, and which values pass."""

from __future__ import annotations

import os
import re
from collections.abc import Iterable
from fnmatch import fnmatchcase
from typing import NamedTuple


class Refusal(NamedTuple):
    """Names of another tool (flags, or keys of a file) that are no options here.

    Attributes:
        why: what megalite does instead.
        instead: what to change; empty if dropping the names does not affect training.
        patterns: pattern of a name (`*` matches anything) -> values, as written, at which it is accepted; `$NAME` is
            the value of a variable of the environment.
    """

    why: str
    instead: str
    patterns: dict[str, tuple[str, ...]]

    def covers(self, name: str) -> bool:
        return any(fnmatchcase(name, pattern) for pattern in self.patterns)

    def accepts(self, name: str, value: str, otherwise: tuple[str, ...] = ()) -> bool:
        """Check for a value that requests nothing, or what is done anyway.

        Args:
            name: name that the row covers.
            value: its value, as written.
            otherwise: accepted values of names for which the table lists none.
        """
        rows = (values for pattern, values in self.patterns.items() if fnmatchcase(name, pattern))
        return any(value in map(os.path.expandvars, values or otherwise) for values in rows)


def read_table(text: str) -> list[Refusal]:
    """Read a table: lines `why -> what to do instead`, below each the indented names with their values (`a=1|1.0`).

    Names below a line without an arrow can simply be dropped.
    """
    rows = re.findall(r"^(\S.*?)(?: -> (.*))?\n((?: +.*\n)+)", text, re.M)
    return [Refusal(why, instead, patterns_of(names)) for why, instead, names in rows]


def patterns_of(names: str) -> dict[str, tuple[str, ...]]:
    """Read the names of a row."""
    words = (word.partition("=") for word in names.split())
    return {pattern: tuple(values.split("|")) if values else () for pattern, _, values in words}


def all_patterns(rows: Iterable[Refusal]) -> list[str]:
    """List the patterns of all rows."""
    return [pattern for row in rows for pattern in row.patterns]
