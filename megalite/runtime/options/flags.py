"""The flags of a command line: split into words, read as values of options, merged where they repeat."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, get_origin, get_type_hints

from megalite.core.base.errors import UserError
from megalite.core.options.names import dashed, suggest
from megalite.core.options.values import read_value
from megalite.runtime.options.dialect import Dialect, Flag
from megalite.runtime.options.fields import GROUPS, TYPES, Layer, OptionValue, help_texts


def read_flags(tokens: Iterable[str], dialect: Dialect) -> tuple[Layer, dict[str, OptionValue]]:
    """Read a command line.

    Returns:
        The options it gives, those of `dialect.start` among them, and the flags of `dialect.computed` with their words.

    Raises:
        UserError: a flag is unknown, its value does not fit, or two flags conflict.
    """
    hints = {**get_type_hints(dialect.start), **TYPES}
    valued = {dashed(name): name for name, hint in hints.items() if hint is not bool} | {**dialect.renamed}
    switches = {
        **{dashed(name): {name: True} for name, hint in hints.items() if hint is bool},
        **{f"no-{dashed(name)}": {name: False} for name, hint in TYPES.items() if hint is bool},
        **dialect.switches,
    }
    known = {*valued, *switches, *dialect.computed}
    flags: Layer = {}
    computed: dict[str, OptionValue] = {}
    for flag, words in dialect.accept(_split(tokens), known, lambda flag: _hint(flag, known)):
        written = " ".join([f"--{flag}", *words])
        alone = flag in dialect.computed and dialect.computed[flag].hint is bool
        if words and (alone or flag in switches):
            raise UserError(written, "takes no value", f"write --{flag} alone, or drop it")
        if alone:
            computed[flag] = OptionValue(True, written)
            continue
        if flag in switches:
            for name, value in switches[flag].items():
                add_flag(flags, name, read_value(hints[name], value, written), written, dialect)
            continue
        hint = hints[valued[flag]] if flag in valued else dialect.computed[flag].hint
        is_list = get_origin(hint) is tuple
        if not words or len(words) > 1 and not is_list:
            rule = "takes one or more values" if is_list else "takes one value"
            raise UserError(written, rule, "give one, or see --help all")
        if flag not in valued:
            computed[flag] = OptionValue(words if is_list else words[0], written)
            continue
        spelled = [dialect.values.get(valued[flag], {}).get(word, word) for word in words]
        value = read_value(hint, spelled if is_list else spelled[0], written)
        add_flag(flags, valued[flag], value, written, dialect)
    return flags, computed


def add_flag(flags: Layer, name: str, value: Any, written: str, dialect: Dialect) -> None:
    """Add an option. A repeated flag overrides the earlier one (a list is extended); conflicting flags are an error."""
    option, before = OptionValue(value, written), flags.get(name)
    if before is not None and before.source == option.source:
        if isinstance(value, tuple):
            option = OptionValue(before.value + value, f"{before.written} {' '.join(map(str, value))}")
    elif before is not None and dialect.refines.get(before.source) == option.source:
        option = before
    elif before is not None and dialect.refines.get(option.source) != before.source and before.value != value:
        raise UserError(written, f"{before.written} conflicts with it", "keep one of the two")
    flags[name] = option


def _split(tokens: Iterable[str]) -> list[Flag]:
    """["--lr=1", "--data", "0.7", "A"] -> flags without dashes, with the words that follow each."""
    flags: list[Flag] = []
    for token in tokens:
        if token.startswith("--"):
            flag, equals, value = token[2:].partition("=")
            flags.append((dashed(flag), [value] if equals else []))
        elif token[:1] == "-" and token[1:2].isalpha():
            raise UserError(token, "is not a flag", f"flags have two dashes: -{token}")
        elif not flags:
            raise UserError(token, "is not a flag", "options are given as --name value; see --help all")
        else:
            flags[-1][1].append(token)
    return flags


def _hint(flag: str, known: Iterable[str]) -> str:
    """Return the remedy for an unknown flag: a similar flag, or an option whose help text contains the word."""
    by_letters = suggest(flag, known, "--")
    if by_letters.startswith("did you mean"):
        return by_letters
    texts = {name: text for cls in GROUPS.values() for name, text in help_texts(cls).items()}
    in_words, start = flag.replace("-", " "), f"{flag.replace('-', '_')}_"
    mentioned = [f"--{dashed(n)}" for n, text in texts.items() if in_words in text.lower() or n.startswith(start)]
    return f"did you mean {' or '.join(mentioned[:3])}?" if mentioned else "see --help all"
