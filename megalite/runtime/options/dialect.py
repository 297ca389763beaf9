"""How other tools spell a run's options. `megalite.extras.compat` knows them; the trainer itself knows only its own."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from megalite.core.base.errors import UserError
from megalite.runtime.options.fields import Layer, StartOptions

Flag = tuple[str, list[str]]
"""A flag without its dashes, and the words after it."""
Accept = Callable[[Sequence[Flag], Collection[str], Callable[[str], str]], list[Flag]]
Recognize = Callable[[str], tuple[str, str] | None]
Defaults = Callable[[Layer, Collection[str], Layer, int], Layer]
ReadFiles = Callable[[StartOptions, Mapping[str, Any], Layer, int | None], tuple[list[Layer], int | None]]
"""Functions of a `Dialect`."""


class ComputedOption(NamedTuple):
    """An option whose value is computed from another tool's flag and from other options.

    Attributes:
        option: our option.
        hint: type of the flag's value.
        compute: function of (our flag, the flag as written, its value, all options and "world", the number of ranks)
            that returns the option's value.
    """

    option: str
    hint: Any
    compute: Callable[[str, str, Any, Mapping[str, Any]], Any]


def refuse_unknown(flags: Sequence[Flag], known: Collection[str], hint: Callable[[str], str]) -> list[Flag]:
    """Return the flags of a command line; raise UserError at the first that is not an option.

    Args:
        flags: all flags of a command line.
        known: the flags that are options.
        hint: makes the remedy for an unknown flag.
    """
    for flag, words in flags:
        if flag not in known:
            raise UserError(" ".join([f"--{flag}", *words]), "is an unknown flag", hint(flag))
    return list(flags)


def no_defaults(flags: Layer, computed: Collection[str], given: Layer, world: int) -> Layer:
    """Return no layer."""
    return {}


def recognize_nothing(text: str) -> tuple[str, str] | None:
    """Return None."""
    return None


def read_no_files(
    start: StartOptions, lower: Mapping[str, Any], flags: Layer, world: int | None
) -> tuple[list[Layer], int | None]:
    """Return no layer, and the number of ranks unchanged."""
    return [], world


@dataclass(frozen=True)
class Dialect:
    """Spellings that a command line accepts besides megalite's own.

    Attributes:
        renamed: flag -> our option; values are unchanged except for `values`.
        switches: flag without a value -> values of our options.
        values: our option -> {other spelling of a value: ours}.
        computed: flag -> the option that is computed from it, in this order.
        implied: flag of `computed` -> values of further options that it sets.
        refines: specific flag -> the general one that it overrides, in either order; both with dashes.
        accept: function of (flags, flags that are options, remedy for an unknown flag) that returns those that are
            options, drops what has no meaning here, and raises UserError for all others.
        defaults: function of (flags, flags of `computed` that are given, options that any source gives, number of
            ranks, or 0 where `--layout auto` divides them) that returns the lowest layer of a command in another tool's
            words: that tool's defaults.
        recognize: function of the text of a `--config` that returns the tool that the file is of, and what to do
            instead; None if it knows none.
        start: dataclass of the options of the group `start`.
        read_files: function of (`start`, all options without files of other tools and flags, flags, number of ranks as
            far as known) that returns the layers of other tools' files, lowest first, and the number of ranks.
        about: sentences about all this for `--help`.
    """

    renamed: Mapping[str, str] = field(default_factory=dict)
    switches: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    values: Mapping[str, Mapping[str, str]] = field(default_factory=dict)
    computed: Mapping[str, ComputedOption] = field(default_factory=dict)
    implied: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    refines: Mapping[str, str] = field(default_factory=dict)
    accept: Accept = refuse_unknown
    defaults: Defaults = no_defaults
    recognize: Recognize = recognize_nothing
    start: type[StartOptions] = StartOptions
    read_files: ReadFiles = read_no_files
    about: str = ""


PLAIN = Dialect()
"""megalite's own options, and nothing else."""
