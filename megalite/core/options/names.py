"""Options whose values are the keys of a table: whatever is in the table can be chosen, and nothing else."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import cache
from typing import Any, get_args, get_type_hints

from megalite.core.base.errors import UserError


@dataclass(frozen=True, eq=False)
class Described:
    """Annotation of an option that names an entry of a table, which reads it: `Annotated[str, Described(TABLE)]`. Where
    its help says {each}, stand the entries.

    Attributes:
        table: table whose keys are the names. An entry may have `about`, a few words on it, and where a name has an
            argument `form`, how that is written.
        others: further names.
    """

    table: Mapping[str, Any]
    others: tuple[str, ...] = ()

    @property
    def each(self) -> str:
        """The names of the table, each with what its entry says of itself."""
        about = {name: getattr(entry, "about", "") for name, entry in self.table.items()}
        return ", ".join(f"{name} ({text})" if text else name for name, text in about.items())

    @property
    def forms(self) -> list[str]:
        """How names with arguments are written, each form once."""
        return [*dict.fromkeys(form for entry in self.table.values() if (form := getattr(entry, "form", "")))]


@dataclass(frozen=True, eq=False)
class Choices(Described):
    """Annotation of an option whose values are the keys of a table, which may grow until the options are read."""

    @property
    def names(self) -> list[str]:
        """All names, in order."""
        return [*self.others, *self.table]

    @property
    def rule(self) -> str:
        """What a value must be, in words."""
        names = self.names
        return ", or ".join([f"one of {', '.join(names)}" if len(names) > 1 else names[0], *self.forms])

    def __contains__(self, name: object) -> bool:
        return name in self.table or name in self.others


def mark_of(hint: Any) -> Choices | None:
    """Return the `Choices` of an option's type, or None."""
    return mark if isinstance(mark := description_of(hint), Choices) else None


def description_of(hint: Any) -> Described | None:
    """Return the `Described` of an option's type, or None."""
    return next((mark for mark in get_args(hint) if isinstance(mark, Described)), None)


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
    import difflib  # here: most commands have no misspelled word

    close = difflib.get_close_matches(word, list(known), n=1)
    return f"did you mean {dashes}{close[0]}?" if close else otherwise
