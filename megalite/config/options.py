"""Options by name: their types, what somebody gave for them, and the way from given strings to typed values (tyro)."""

from __future__ import annotations

import contextlib
import dataclasses
import difflib
import io
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple, get_args, get_origin, get_type_hints

import tyro
import yaml

from megalite.config.model import RopeScaling
from megalite.config.run import Config
from megalite.errors import UserError

GROUPS: dict[str, type] = get_type_hints(Config)
"""Group of options (key of the YAML file, heading of the help) -> dataclass."""

TYPES: dict[str, Any] = {name: hint for cls in GROUPS.values() for name, hint in get_type_hints(cls).items()}
"""Option -> its type. Names are unique over the groups, so that flags need no prefix."""

GROUP_OF: dict[str, str] = {f.name: group for group, cls in GROUPS.items() for f in dataclasses.fields(cls)}
"""Option -> its group."""

Values = tuple[str, ...]


class Given(NamedTuple):
    """An option as somebody wrote it: its values as strings, and the words to quote in an error."""

    values: Values
    written: str

    @property
    def source(self) -> str:
        """What it was written with: a flag (`--x` and `--no-x` are one), or a place in a file."""
        return self.written.split(" ")[0].replace("--no-", "--")


Layer = dict[str, Given]


class StrictLoader(yaml.SafeLoader):
    """Safe YAML in which a key given twice is an error, instead of the last one winning unsaid."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        keys = [key.value for key, _ in node.value if isinstance(key, yaml.ScalarNode)]
        twice = [key for i, key in enumerate(keys) if key in keys[:i]]
        if twice:
            raise yaml.constructor.ConstructorError(None, None, f"{twice[0]} is given twice", node.start_mark)
        return super().construct_mapping(node, deep)


def kind_of(name: str) -> Any:
    """Type of an option, without `None`."""
    hint = TYPES[name]
    inner = [arg for arg in get_args(hint) if arg is not type(None)]
    return inner[0] if type(None) in get_args(hint) else hint


def _unchecked(cls: type) -> type:
    """`cls` for tyro: without its checks, which want all layers merged, and with sub-structures as strings."""
    space: dict[str, Any] = {"__post_init__": lambda self: None, "__annotations__": {}}
    for name in get_type_hints(cls):
        if dataclasses.is_dataclass(kind_of(name)):
            space["__annotations__"][name] = str | None
            space[name] = None
    return dataclass(frozen=True)(type(cls.__name__, (cls,), space))


_Options = dataclasses.make_dataclass("Options", [(group, _unchecked(cls)) for group, cls in GROUPS.items()])


def _tyro(layer: Layer) -> Any:
    """Strings -> typed values in groups; SystemExit where one does not fit its type."""
    tokens: list[str] = []
    for name, (values, _) in layer.items():
        flag = name.replace("_", "-")
        if kind_of(name) is bool:
            tokens.append(f"--{flag}" if values == ("True",) else f"--no-{flag}")
        elif get_origin(kind_of(name)) is tuple:
            tokens += [f"--{flag}", *values]
        else:
            tokens.append(f"--{flag}={values[0]}")
    with contextlib.redirect_stderr(io.StringIO()):
        return tyro.cli(_Options, args=tokens, config=(tyro.conf.OmitArgPrefixes,))


def typed_values(layer: Layer) -> dict[str, Any]:
    """All options as values; those that nobody gave at their defaults."""
    try:
        options = _tyro(layer)
    except SystemExit:
        for name, given in layer.items():
            _check_alone(name, given)
        raise AssertionError(f"tyro refuses {layer} together, but nothing of it alone") from None
    typed = {name: getattr(getattr(options, group), name) for name, group in GROUP_OF.items()}
    if typed["rope_scaling"] is not None:
        typed["rope_scaling"] = _rope_scaling(layer["rope_scaling"])
    return typed


def _check_alone(name: str, given: Given) -> None:
    """Raises the `UserError` of an option that tyro refuses by itself (tyro's own messages are boxes of many lines)."""
    try:
        _tyro({name: given})
    except SystemExit:
        choices = [str(choice) for choice in get_args(kind_of(name))] if get_origin(kind_of(name)) is Literal else []
        raise UserError(given.written, rule_of(name), suggest(given.values[0], choices)) from None


def rule_of(name: str) -> str:
    """What values the type of an option allows, in words."""
    kind = kind_of(name)
    if get_origin(kind) is Literal:
        rule = f"must be one of {', '.join(str(choice) for choice in get_args(kind))}"
    elif get_origin(kind) is tuple:
        rule = "must be a list"
    else:
        rule = {
            bool: "must be true or false",
            int: "must be a whole number",
            float: "must be a number",
            str: "must be text",
            RopeScaling: f"must be a mapping of {', '.join(_ROPE_SCALING)}",
        }[kind]
    return rule + (" or null" if type(None) in get_args(TYPES[name]) else "")


_ROPE_SCALING = get_type_hints(RopeScaling)


def _rope_scaling(given: Given) -> RopeScaling:
    """`{factor: 8.0, ...}` as YAML; numbers not given take the defaults of `RopeScaling`."""
    try:
        tree = yaml.load(given.values[0], Loader=StrictLoader)
        if not isinstance(tree, dict) or any(isinstance(value, bool) for value in tree.values()):
            raise ValueError
        numbers = {str(name): _ROPE_SCALING[name](value) for name, value in tree.items()}
    except KeyError as e:
        raise UserError(given.written, f"has no number {e}", suggest(str(e.args[0]), _ROPE_SCALING)) from None
    except (yaml.YAMLError, ValueError, TypeError):
        raise UserError(given.written, rule_of("rope_scaling"), "write it as '{factor: 8.0}'") from None
    return RopeScaling(**numbers)


def suggest(word: str, known: Iterable[str], dashes: str = "") -> str:
    """The remedy for a word that is not among those known."""
    close = difflib.get_close_matches(word, list(known), n=1)
    return f"did you mean {dashes}{close[0]}?" if close else "see --help"
