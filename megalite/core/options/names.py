"""Options whose values are the keys of a table: whatever is in the table can be chosen, and nothing else."""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import cache
from typing import Any, get_args, get_type_hints

from megalite.core.base.errors import UserError


@dataclass(frozen=True, eq=False)
class Choices:
    """Annotation of such an option: `Annotated[str, Choices(TABLE)]`. The table may grow until the options are read.

    Attributes:
        table: table whose keys are the names.
        others: further names.
        with_argument: how a name with an argument is written, where the table reads it.
    """

    table: Mapping[str, Any]
    others: tuple[str, ...] = ()
    with_argument: str = ""

    @property
    def names(self) -> list[str]:
        """All names, in order."""
        return [*self.others, *self.table]

    @property
    def rule(self) -> str:
        """What a value must be, in words."""
        names = self.names
        rule = f"one of {', '.join(names)}" if len(names) > 1 else names[0]
        return f"{rule}, or {self.with_argument}" if self.with_argument else rule

    def __contains__(self, name: object) -> bool:
        return name in self.table or name in self.others


def mark_of(hint: Any) -> Choices | None:
    """Return the `Choices` of an option's type, or None."""
    return next((mark for mark in get_args(hint) if isinstance(mark, Choices)), None)


def check_names(options: Any) -> None:
    """Check every option of a dataclass that is annotated with `Choices`.

    Raises:
        UserError: a name is not in its table.
    """
    for field, mark in _marked(type(options)):  # type: ignore[arg-type]
        name = getattr(options, field)
        if name not in mark:
            raise UserError(f"--{dashed(field)} {name}", f"must be {mark.rule}", suggest(str(name), mark.names))


@cache
def _marked(cls: type) -> list[tuple[str, Choices]]:
    hints = get_type_hints(cls, include_extras=True)
    return [(field, mark) for field, hint in hints.items() if (mark := mark_of(hint))]


def dashed(name: str) -> str:
    """Return the flag of an option, without its two dashes."""
    return name.replace("_", "-")


def suggest(word: str, known: Iterable[str], dashes: str = "", otherwise: str = "see --help") -> str:
    """Return the remedy for a word that is not among those known."""
    close = difflib.get_close_matches(word, list(known), n=1)
    return f"did you mean {dashes}{close[0]}?" if close else otherwise
