"""Options whose values are the keys of a table: whatever is in the table can be chosen, and nothing else."""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import cache
from typing import Any, get_args, get_type_hints

from megalite.errors import UserError


@dataclass(frozen=True, eq=False)
class NamedIn:
    """Mark of such an option: `Annotated[str, NamedIn(TABLE)]`. The table may grow until the options are read.

    Args:
        table: the table; its keys are the names.
        others: names beside them.
    """

    table: Mapping[str, Any]
    others: tuple[str, ...] = ()

    @property
    def names(self) -> list[str]:
        """All names, in order."""
        return [*self.others, *self.table]


def names_in(hint: Any) -> NamedIn | None:
    """Return the mark of an option's type, if it has one."""
    return next((mark for mark in get_args(hint) if isinstance(mark, NamedIn)), None)


def check_names(options: Any) -> None:
    """Check every option of a dataclass whose values are names.

    Raises:
        UserError: a name is not in its table.
    """
    for field, mark in _marked(type(options)):  # type: ignore[arg-type]
        name = getattr(options, field)
        if name not in mark.table and name not in mark.others:
            flag = f"--{field.replace('_', '-')} {name}"
            raise UserError(flag, f"must be one of {', '.join(mark.names)}", suggest(str(name), mark.names))


@cache
def _marked(cls: type) -> list[tuple[str, NamedIn]]:
    hints = get_type_hints(cls, include_extras=True)
    return [(field, mark) for field, hint in hints.items() if (mark := names_in(hint))]


def suggest(word: str, known: Iterable[str], dashes: str = "") -> str:
    """Return the remedy for a word that is not among those known."""
    close = difflib.get_close_matches(word, list(known), n=1)
    return f"did you mean {dashes}{close[0]}?" if close else "see --help"
