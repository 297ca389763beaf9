"""Values of options: read from words of the command line and from files, and checked against their types."""

from __future__ import annotations

import dataclasses
from typing import Any, Literal, get_args, get_origin, get_type_hints

import yaml

from megalite.core.base.errors import UserError
from megalite.core.options.names import mark_of, suggest

_KINDS = {
    bool: "true or false",
    int: "a whole number",
    float: "a number",
    str: "text without zero bytes",
    dict: "a mapping",
    list: "a list",
}


class StrictLoader(yaml.SafeLoader):
    """Safe YAML in which duplicate keys are an error, instead of the last one silently winning."""

    def compose_node(self, parent: yaml.Node | None, index: Any) -> yaml.Node | None:
        """Refuse aliases of lists and mappings: a few lines of nested ones stand for billions of values."""
        alias = self.peek_event() if self.check_event(yaml.AliasEvent) else None
        node = super().compose_node(parent, index)  # type: ignore[no-untyped-call]
        if alias is not None and not isinstance(node, yaml.ScalarNode):
            raise yaml.composer.ComposerError(None, None, "an alias must stand for a single value", alias.start_mark)
        return node  # type: ignore[no-any-return]

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        keys = [key.value for key, _ in node.value if isinstance(key, yaml.ScalarNode)]
        twice = [key for i, key in enumerate(keys) if key in keys[:i]]
        if twice:
            raise yaml.constructor.ConstructorError(None, None, f"{twice[0]} is given twice", node.start_mark)
        return super().construct_mapping(node, deep)


def fits(hint: Any, value: Any) -> bool:
    """Check whether a JSON value has the type `hint`; whether a choice is offered is not checked.

    Args:
        hint: type of an option: one value, `X | None`, `Literal`, `Annotated`, `tuple[X, ...]` or a dataclass.
        value: None, bool, int, float, str, list or dict.
    """
    if type(None) in get_args(hint):
        return value is None or fits(get_args(hint)[0], value)
    if hasattr(hint, "__metadata__"):
        return fits(get_args(hint)[0], value)
    if get_origin(hint) is Literal:
        return type(value) in {type(choice) for choice in get_args(hint)}
    if get_origin(hint) is tuple:
        return isinstance(value, list) and all(fits(get_args(hint)[0], item) for item in value)
    if dataclasses.is_dataclass(hint):
        hints = get_type_hints(hint)
        return isinstance(value, dict) and all(key in hints and fits(hints[key], v) for key, v in value.items())
    if hint is str:
        return type(value) is str and "\0" not in value
    return type(value) is hint or (hint is float and type(value) is int)


def read_value(hint: Any, value: Any, written: str) -> Any:
    """Convert a word of the command line, or a value of YAML or a preset, to the type `hint`.

    Raises:
        UserError: it does not fit. The error quotes `written`.
    """
    kind = _without_none(hint)
    try:
        # For text, "null" may also be the name of a tokenizer or a project.
        is_none = value is None or value == "None" or (value == "null" and kind is not str)
        return None if is_none and kind is not hint else _convert(kind, value)
    except KeyError as e:
        raise UserError(written, f"has no field {e}", suggest(str(e.args[0]), get_type_hints(kind))) from None
    except (ValueError, TypeError, OverflowError, yaml.YAMLError):
        remedy = "write it as '{factor: 8.0}'" if dataclasses.is_dataclass(kind) else "correct the value"
        choices = choices_of(hint)
        raise UserError(written, rule_of(hint), suggest(str(value), choices) if choices else remedy) from None


def choices_of(hint: Any) -> list[str]:
    """List the words that a type allows; empty if there are too many to list."""
    kind = _without_none(hint)
    if mark := mark_of(kind):
        return mark.names
    return [str(choice) for choice in get_args(kind)] if get_origin(kind) is Literal else []


def rule_of(hint: Any) -> str:
    """Return which values a type allows, in words."""
    kind = _without_none(hint)
    choices = choices_of(kind)
    if mark := mark_of(kind):
        rule = mark.rule
    elif choices:
        rule = f"one of {', '.join(choices)}" if len(choices) > 1 else choices[0]
    elif dataclasses.is_dataclass(kind):
        rule = f"a mapping of {', '.join(get_type_hints(kind))}"
    elif get_origin(kind) is tuple:
        rule = {int: "a list of whole numbers", float: "a list of numbers"}.get(get_args(kind)[0], "a list")
    else:
        rule = _KINDS[kind]
    return f"must be {rule}" + ("" if kind is hint or len(choices) == 1 else " or null")


def _without_none(hint: Any) -> Any:
    return get_args(hint)[0] if type(None) in get_args(hint) else hint


def _convert(kind: Any, value: Any) -> Any:
    """Read `value` as `kind`; KeyError for an unknown key, and one of the errors above where it does not fit."""
    if get_origin(kind) is tuple:
        items = value if isinstance(value, list | tuple) else [value]
        return tuple(_convert(get_args(kind)[0], item) for item in items)
    if dataclasses.is_dataclass(kind):
        tree = yaml.load(value, StrictLoader) if isinstance(value, str) else value
        if not isinstance(tree, dict):
            raise ValueError
        hints = get_type_hints(kind)
        return kind(**{name: _convert(hints[str(name)], item) for name, item in tree.items()})  # type: ignore[operator]
    if words := choices_of(kind):
        # YAML reads `off` without quotes as False.
        word = "off" if value is False and "off" in words else str(value)
        if (mark := mark_of(kind)) and word in mark:
            return word
        return get_args(kind)[words.index(word)]
    if kind in (int, float) and isinstance(value, str):
        value = kind(value)  # all words of a command line, and what YAML 1.1 takes for text: 1e-4
    elif kind is str and not isinstance(value, bool | list | dict | None):
        value = str(value)  # a project named 5
    if not fits(kind, value):
        raise ValueError
    return kind(value)
