"""Command line of a run: flat flags from the fields of `Config`, presets, YAML files, and Megatron-LM's spellings.

Order, later wins: defaults < options of the family (`--arch`) < `--preset` < `--config FILE` (repeatable) < flags.
Every layer is brought to one form, {option: `Given`}; the layers are merged; tyro turns the strings into typed values;
`Config` checks them. A mistake is a `UserError`: what was given, the rule, what to change.
"""

from __future__ import annotations

import ast
import dataclasses
import inspect
import json
import sys
import textwrap
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, get_args, get_origin, get_type_hints

import yaml

from megalite.config import megatron as aliases
from megalite.config.model import ModelConfig, RopeScaling
from megalite.config.options import (
    GROUP_OF,
    GROUPS,
    TYPES,
    Given,
    Layer,
    StrictLoader,
    Values,
    kind_of,
    rule_of,
    suggest,
    typed_values,
)
from megalite.config.run import Config
from megalite.errors import UserError
from megalite.families import FAMILIES, PRESETS


@dataclass(frozen=True)
class Start:
    """What to begin with, and what to show instead of training."""

    preset: str | None = None
    """Named model; --config and flags override it."""
    config: tuple[str, ...] = ()
    """YAML file of options, as --print-config writes it (repeatable, later files win)."""
    print_config: bool = False
    """Print the resolved options as YAML and exit."""
    dry_run: bool = False
    """Print layout, parameters and memory of each rank and exit."""


@dataclass(frozen=True)
class Parsed:
    """A checked configuration, and whether to show it (`print_config`) or what it would do (`dry_run`) instead."""

    config: Config
    print_config: bool = False
    dry_run: bool = False


def parse(
    argv: list[str] | None = None,
    prog: str = "pretrain_gpt.py",
    read_model: Callable[[str], ModelConfig] | None = None,
) -> Parsed:
    """Read a command line (default: this process's).

    `--help` prints the options and raises SystemExit(0).

    Args:
        argv: the words after the program's name.
        prog: that name, for `--help`.
        read_model: the model of an `--init-from-hf` folder; its options come before preset, files and flags.

    Raises:
        UserError: the command line, a file it names, or the configuration they make is wrong.
    """
    tokens = sys.argv[1:] if argv is None else argv
    if "-h" in tokens or "--help" in tokens:
        print(_help(prog))
        raise SystemExit(0)
    start, flags, computed = _read_flags(tokens)
    layers = [_preset_layer(start.preset), *(_yaml_layer(Path(path)) for path in start.config), flags]
    merged = _merge(layers)
    if read_model is not None and "init_from_hf" in merged:
        layers.insert(0, _folder_layer(merged["init_from_hf"], read_model))
    merged = _merge([_family_layer(layers), *layers])
    for flag, compute in aliases.COMPUTED.items():
        if flag in computed:
            values, written = computed[flag]
            options = compute(written, values[0], typed_values(merged))
            _add(flags, {name: (value,) for name, value in options.items()}, written)
            merged = _merge([merged, flags])
    typed = typed_values(merged)
    groups = {group: cls(**{f.name: typed[f.name] for f in dataclasses.fields(cls)}) for group, cls in GROUPS.items()}
    return Parsed(Config(**groups), start.print_config, start.dry_run)


def to_yaml(config: Config) -> str:
    """The whole configuration by group; `--config` reads it back to an equal `Config`."""
    tree = dataclasses.asdict(config)
    for options in tree.values():
        options.update({name: list(value) for name, value in options.items() if isinstance(value, tuple)})
    return yaml.safe_dump(tree, sort_keys=False)


# ---------------------------------------------------------------------------------------------------------- layers


def _merge(layers: Iterable[Layer]) -> Layer:
    return {name: given for layer in layers for name, given in layer.items()}


def _family_layer(layers: Iterable[Layer]) -> Layer:
    """Options of the family that the layers name. They must agree: a preset or file fits only its own family."""
    named = [layer["arch"] for layer in layers if "arch" in layer]
    if not named:
        return {}
    for other in named[:-1]:
        if other.values != named[-1].values:
            raise UserError(
                named[-1].written,
                f"{other.written} is of the family {other.values[0]}",
                "drop one of the two (single options of a preset or file are overridden by their own flags)",
            )
    arch = named[-1].values[0]
    if arch not in FAMILIES:
        raise UserError(named[-1].written, f"must be one of {', '.join(FAMILIES)}", suggest(arch, FAMILIES))
    return {name: _given(name, value, f"--arch {arch}") for name, value in FAMILIES[arch].options.items()}


def _preset_layer(preset: str | None) -> Layer:
    if preset is None:
        return {}
    if preset not in PRESETS:
        raise UserError(f"--preset {preset}", f"must be one of {', '.join(PRESETS)}", suggest(preset, PRESETS))
    return {name: _given(name, value, f"--preset {preset}") for name, value in PRESETS[preset].items()}


def _folder_layer(folder: Given, read_model: Callable[[str], ModelConfig]) -> Layer:
    """What a Hugging Face folder says of its model; how long samples are is the run's to say."""
    options = dataclasses.asdict(read_model(folder.values[0]))
    of_run = ("seq_len", "hidden_dropout", "attention_dropout", "init_std")
    return {name: _given(name, value, folder.written) for name, value in options.items() if name not in of_run}


def _yaml_layer(path: Path) -> Layer:
    """Options of a YAML file {group: {option: value}}."""
    try:
        tree = yaml.load(path.read_text(encoding="utf-8"), Loader=StrictLoader)
    except OSError as e:
        raise UserError(f"--config {path}", e.strerror or str(e), "give a YAML file that can be read") from None
    except (yaml.YAMLError, UnicodeDecodeError) as e:
        raise UserError(f"--config {path}", f"is not YAML: {e}", "correct the file") from None
    layer: Layer = {}
    for group, options in _mapping(tree, f"--config {path}").items():
        if group not in GROUPS:
            raise UserError(f"{path}: {group}", f"must be one of {', '.join(GROUPS)}", _where_is(group))
        for name, value in _mapping(options, f"{path}: {group}").items():
            if GROUP_OF.get(name) != group:
                raise UserError(f"{path}: {group}.{name}", f"is not an option of {group}", _where_is(name))
            layer[name] = _given(name, value, f"{path}:{group}.{name} {value}")
    return layer


def _mapping(tree: Any, where: str) -> dict[Any, Any]:
    if not isinstance(tree, dict | None):
        raise UserError(where, "must hold 'name: value' lines", "write it as --print-config does")
    return tree or {}


def _where_is(name: Any) -> str:
    flag = str(name).replace("_", "-")
    ours = aliases.RENAMED.get(flag, name)
    if ours in GROUP_OF:
        return f"write {ours} under {GROUP_OF[ours]}"
    if ours in _START:
        return f"give --{flag} on the command line"
    return suggest(str(name), [*GROUPS, *GROUP_OF])


def _given(name: str, value: Any, written: str) -> Given:
    """A Python value (of a family, a preset or YAML) as it would be typed after its flag."""
    kind = kind_of(name)
    fits = {
        bool: kind is bool,
        list: get_origin(kind) is tuple,
        dict: kind is RopeScaling,
        type(None): type(None) in get_args(TYPES[name]),
    }
    if not fits.get(type(value), kind is not bool):
        raise UserError(written, rule_of(name), f"correct the value of {name}")
    if isinstance(value, list):
        return Given(tuple(str(item) for item in value), written)
    return Given((json.dumps(value) if isinstance(value, dict) else str(value),), written)


# ----------------------------------------------------------------------------------------------------------- flags

_START = {f.name: f for f in dataclasses.fields(Start)}


def _read_flags(tokens: list[str]) -> tuple[Start, Layer, dict[str, Given]]:
    """Command line -> (start options, options, flags whose meaning must be computed from other options)."""
    start: dict[str, Any] = {}
    flags: Layer = {}
    computed: dict[str, Given] = {}
    problems: list[tuple[str, str, str]] = []
    for flag, given in _split(tokens):
        name = flag.replace("-", "_")
        if name in ("print_config", "dry_run"):
            _need(given, 0)
            start[name] = True
        elif name == "preset":
            start[name] = _need(given, 1)[0]
        elif name == "config":
            start[name] = (*start.get(name, ()), *_need(given, 1))
        elif flag in aliases.COMPUTED:
            _need(given, 1)
            computed[flag] = given
        elif (options := _meaning(flag, given)) is not None:
            _add(flags, options, given.written)
        else:
            problems.append((flag, *_no_such_flag(flag)))
    if problems:
        # Told together: a Megatron-LM script that is moved here would else take a try for each of its flags.
        flag, rule, remedy = problems[0]
        others = ", ".join(dict.fromkeys(f"--{other}" for other, _, _ in problems if other != flag))
        raise UserError(f"--{flag}", rule, remedy + (f" (no such flags either: {others})" if others else ""))
    return Start(**start), flags, computed


def _split(tokens: Iterable[str]) -> list[tuple[str, Given]]:
    """["--lr=1", "--data", "0.7", "A"] -> flags without dashes, with the values that follow each."""
    found: list[tuple[str, list[str]]] = []
    for token in tokens:
        if token.startswith("--"):
            flag, equals, value = token[2:].partition("=")
            found.append((flag.replace("_", "-"), [value] if equals else []))
        elif token[:1] == "-" and token[1:2].isalpha():
            raise UserError(token, "is not a flag", f"flags have two dashes: -{token}")
        elif not found:
            raise UserError(token, "is not a flag", "options are given as --name value; see --help")
        else:
            found[-1][1].append(token)
    return [(flag, Given(tuple(values), " ".join([f"--{flag}", *values]))) for flag, values in found]


def _meaning(flag: str, given: Given) -> dict[str, Values] | None:
    """What a flag, ours or theirs, says in our options; None if there is no such flag."""
    if flag in aliases.SWITCHES:
        _need(given, 0)
        return {name: (value,) for name, value in aliases.SWITCHES[flag].items()}
    name = aliases.RENAMED.get(flag, flag.replace("-", "_"))
    if name in TYPES and kind_of(name) is bool:
        _need(given, 0)
        return {name: ("True",)}
    if name in TYPES:
        _need(given, None if get_origin(kind_of(name)) is tuple else 1)
        spelled = aliases.VALUES.get(name, {})
        return {name: tuple(spelled.get(value, value) for value in given.values)}
    positive = flag.removeprefix("no-").replace("-", "_")
    if flag.startswith("no-") and positive in TYPES and kind_of(positive) is bool:
        _need(given, 0)
        return {positive: ("False",)}
    return None


def _add(flags: Layer, options: Mapping[str, Values], written: str) -> None:
    """Add what one flag says. Repeated it overrides itself (--data goes on); two flags that disagree are an error."""
    for name, values in options.items():
        given, before = Given(values, written), flags.get(name)
        if before is not None and before.source == given.source:
            if get_origin(kind_of(name)) is tuple:
                given = Given(before.values + values, f"{before.written} {' '.join(values)}")
        elif before is not None and aliases.REFINES.get(before.source) == given.source:
            given = before
        elif before is not None and aliases.REFINES.get(given.source) != before.source and before.values != values:
            raise UserError(written, f"{before.written} says otherwise", "keep one of the two")
        flags[name] = given


def _need(given: Given, count: int | None) -> Values:
    """The values of a flag that takes `count` of them (None: one or more)."""
    if count == 0 and given.values:
        raise UserError(given.written, "takes no value", f"write {given.written.split(' ')[0]} alone, or leave it out")
    if len(given.values) != count and not (count is None and given.values):
        rule = "takes one value" if count else "takes one or more values"
        raise UserError(given.written, rule, "give it" if not given.values else "give one, or see --help")
    return given.values


def _no_such_flag(flag: str) -> tuple[str, str]:
    prefixed = [refusal for prefix, refusal in aliases.REFUSED_PREFIXES.items() if flag.startswith(prefix)]
    for why, instead in [aliases.REFUSED[flag]] if flag in aliases.REFUSED else prefixed:
        return f"is not an option here: {why}", instead
    switches = {f"no-{name}" for name in TYPES if kind_of(name) is bool}
    known = {*TYPES, *_START, *switches, *aliases.RENAMED, *aliases.SWITCHES, *aliases.COMPUTED}
    # Another word for an option is often in its text.
    told = [
        f"--{field.name.replace('_', '-')}"
        for cls in GROUPS.values()
        for field, text in zip(dataclasses.fields(cls), _texts(cls), strict=True)
        if flag.replace("-", " ") in text.lower() or field.name.startswith(f"{flag.replace('-', '_')}_")
    ]
    by_letters = suggest(flag, {name.replace("_", "-") for name in known}, "--")
    if told and not by_letters.startswith("did you mean"):
        return "is an unknown flag", f"did you mean {' or '.join(told[:3])}?"
    return "is an unknown flag", by_letters


# ------------------------------------------------------------------------------------------------------------ help


def _help(prog: str) -> str:
    """All flags by group, one line each."""
    lines = [
        f"usage: torchrun --nproc-per-node N {prog} [--name value ...]",
        "",
        "Order, later wins: defaults, options of the family (--arch), --preset, --config, flags.",
        f"Families: {', '.join(FAMILIES)}.",
        f"Presets: {', '.join(PRESETS)}.",
        "Flags of Megatron-LM and Megatron-DeepSpeed are understood too: see docs/megatron.md.",
    ]
    for group, cls in {"start": Start, **GROUPS}.items():
        lines += ["", f"{group}: {inspect.getdoc(cls)}"]
        lines += [_help_line(field, text) for field, text in zip(dataclasses.fields(cls), _texts(cls), strict=True)]
    return "\n".join(lines)


def _help_line(field: dataclasses.Field[Any], text: str) -> str:
    hint = get_type_hints(Start).get(field.name) or kind_of(field.name)
    flag, metavar = field.name.replace("_", "-"), {int: " INT", float: " NUMBER", bool: ""}.get(hint, " NAME")
    choices = f" {'|'.join(str(choice) for choice in get_args(hint))}" if get_origin(hint) is Literal else ""
    switch = "[no-]" if hint is bool and field.name not in _START else ""
    shown = ("on" if field.default else "off") if hint is bool else field.default
    default = "" if field.default in (None, ()) or field.name in _START else f" [{shown}]"
    return f"  {f'--{switch}{flag}{metavar}':<34} {text}{choices}{default}"


def _texts(cls: type) -> list[str]:
    """The string under each field of a dataclass, in order."""
    (tree,) = ast.parse(textwrap.dedent(inspect.getsource(cls))).body
    assert isinstance(tree, ast.ClassDef)
    return [
        str(under.value.value)
        for field, under in zip(tree.body, tree.body[1:])
        if isinstance(field, ast.AnnAssign) and isinstance(under, ast.Expr) and isinstance(under.value, ast.Constant)
    ]
