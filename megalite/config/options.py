"""Options by name: their types, groups and help texts, and the conversion of given values to them."""

from __future__ import annotations

import ast
import dataclasses
import inspect
import textwrap
from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple, get_args, get_origin, get_type_hints

import yaml

from megalite.config.names import names_in, suggest
from megalite.config.run import Config
from megalite.errors import UserError


@dataclass(frozen=True)
class Start:
    """Where to start from, and what to print instead of training."""

    preset: str | None = None
    """Named model; --config and flags override it."""
    config: tuple[str, ...] = ()
    """YAML file of options, as --print-config writes it (repeatable, later files win)."""
    deepspeed_config: str | None = None
    """DeepSpeed's JSON: keys are mapped to options, ignored, or refused with a reason (see docs/coming_from.md)."""
    accelerate_config: str | None = None
    """Accelerate's YAML, likewise."""
    print_config: bool = False
    """Print the resolved options as YAML and exit."""
    dry_run: bool = False
    """Print layout, parameters and memory per rank and exit."""
    layout: Literal["auto"] | None = None
    """Choose tp, pp, micro-batch size and so on for these ranks and their memory; those that flags give stay."""
    ignore_megatron_flags: bool = False
    """Drop flags of Megatron-LM that have no effect here, and log their names."""


class Given(NamedTuple):
    """The value of an option, and the words to quote in an error."""

    value: Any
    written: str

    @property
    def source(self) -> str:
        """The flag it was given with; `--x` and `--no-x` count as one."""
        return self.written.split(" ")[0].replace("--no-", "--")


Layer = dict[str, Given]
"""Options that one source gives, by name."""


GROUPS: dict[str, type] = get_type_hints(Config)
"""Group of options (key of the YAML file, heading of the help) -> dataclass."""

TYPES: dict[str, Any] = {
    name: hint for cls in GROUPS.values() for name, hint in get_type_hints(cls, include_extras=True).items()
}
"""Option -> its type. Names are unique over the groups, so that flags need no prefix."""

GROUP_OF: dict[str, str] = {f.name: group for group, cls in GROUPS.items() for f in dataclasses.fields(cls)}
"""Option -> its group."""

LAYOUT = (
    *("tp", "pp", "vp", "sequence_parallel", "schedule", "micro_batch_size"),
    *("recompute", "zero", "zero_group", "offload"),
)
"""Options that `--layout auto` chooses."""
LAYOUT_DETAILS = ("zero_keep", "zero_reduce", "offload_dir")
"""Options that belong to some of these choices only."""


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


def with_options(config: Config, options: Mapping[str, Any]) -> Config:
    """Return the config with other values of some options.

    Raises:
        UserError: they do not fit together.
    """
    groups: dict[str, dict[str, Any]] = defaultdict(dict)
    for name, value in options.items():
        groups[GROUP_OF[name]][name] = value
    changed = {group: dataclasses.replace(getattr(config, group), **values) for group, values in groups.items()}
    return dataclasses.replace(config, **changed)


def read_value(hint: Any, value: Any, written: str) -> Any:
    """Convert a word of the command line, or a value of YAML or a preset, to the type `hint`.

    Raises:
        UserError: it does not fit. The error quotes `written`.
    """
    kind = _not_none(hint)
    try:
        # For text, "null" may also be the name of a tokenizer or a project.
        nothing = value is None or value == "None" or (value == "null" and kind is not str)
        return None if nothing and kind is not hint else _convert(kind, value)
    except KeyError as e:
        raise UserError(written, f"has no field {e}", suggest(str(e.args[0]), get_type_hints(kind))) from None
    except (ValueError, TypeError, yaml.YAMLError):
        remedy = "write it as '{factor: 8.0}'" if dataclasses.is_dataclass(kind) else "correct the value"
        choices = choices_of(hint)
        raise UserError(written, _rule_of(hint), suggest(str(value), choices) if choices else remedy) from None


def help_texts(cls: type) -> dict[str, str]:
    """Return the string under each field of a dataclass, read from the source, as Python does not keep it."""
    (tree,) = ast.parse(textwrap.dedent(inspect.getsource(cls))).body
    assert isinstance(tree, ast.ClassDef)
    return {
        ast.unparse(field.target): str(under.value.value)
        for field, under in zip(tree.body, tree.body[1:])
        if isinstance(field, ast.AnnAssign) and isinstance(under, ast.Expr) and isinstance(under.value, ast.Constant)
    }


def choices_of(hint: Any) -> list[str]:
    """List the words that a type allows; empty if there are too many to list."""
    kind = _not_none(hint)
    if mark := names_in(kind):
        return mark.names
    return [str(choice) for choice in get_args(kind)] if get_origin(kind) is Literal else []


def _not_none(hint: Any) -> Any:
    return get_args(hint)[0] if type(None) in get_args(hint) else hint


def _convert(kind: Any, value: Any) -> Any:
    """`value` as `kind`; ValueError, TypeError or YAMLError where it does not fit, KeyError for an unknown key."""
    if get_origin(kind) is tuple:
        items = value if isinstance(value, list | tuple) else [value]
        return tuple(_convert(get_args(kind)[0], item) for item in items)
    if dataclasses.is_dataclass(kind):
        tree = yaml.load(value, StrictLoader) if isinstance(value, str) else value
        if not isinstance(tree, dict):
            raise ValueError
        hints = get_type_hints(kind)
        return kind(**{name: _convert(hints[str(name)], item) for name, item in tree.items()})  # type: ignore[operator]
    if isinstance(value, list | dict | None) or isinstance(value, bool) != (kind is bool):
        raise ValueError
    if words := choices_of(kind):
        choices = words if names_in(kind) else get_args(kind)
        return choices[words.index(str(value))]
    if kind is int and isinstance(value, float) or kind is str and "\0" in str(value):
        raise ValueError
    return kind(value)


def _rule_of(hint: Any) -> str:
    """What values a type allows, in words."""
    kind = _not_none(hint)
    if choices := choices_of(kind):
        rule = f"one of {', '.join(choices)}" if len(choices) > 1 else choices[0]
    elif dataclasses.is_dataclass(kind):
        rule = f"a mapping of {', '.join(get_type_hints(kind))}"
    elif get_origin(kind) is tuple:
        rule = {int: "a list of whole numbers", float: "a list of numbers"}.get(get_args(kind)[0], "a list")
    else:
        rule = {bool: "true or false", int: "a whole number", float: "a number", str: "text without zero bytes"}[kind]
    return f"must be {rule}" + ("" if kind is hint or len(choices) == 1 else " or null")
