"""Command line of a run: flat flags from the fields of `Config`, presets, YAML files, and Megatron-LM's spellings.

Precedence, lowest first: defaults, options of the family (`--arch`), `--preset`, `--config FILE` (repeatable),
`--accelerate-config FILE`, `--deepspeed-config FILE`, flags.
Each of these is a layer {option: `Given`} of typed values; the layers are merged, and `Config` checks the result.
A mistake is a `UserError`: the value, the rule it breaks, the fix.
"""

from __future__ import annotations

import contextlib
import dataclasses
import inspect
import sys
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any, NamedTuple, get_args, get_origin, get_type_hints

import yaml

from megalite.config import megatron
from megalite.config.model import ModelConfig
from megalite.config.names import suggest
from megalite.config.options import (
    GROUP_OF,
    GROUPS,
    LAYOUT,
    LAYOUT_DETAILS,
    TYPES,
    Given,
    Layer,
    Start,
    StrictLoader,
    choices_of,
    help_texts,
    read_value,
)
from megalite.config.others import layers_of_others
from megalite.config.refused import accept
from megalite.config.run import Config
from megalite.errors import UserError, show
from megalite.families import FAMILIES, PRESETS
from megalite.log import warn_on_rank_0
from megalite.schedules.batch import BatchSizes


class Parsed(NamedTuple):
    """A checked configuration, and whether to only print it (`print_config`) or its layout (`dry_run`).

    `layout` is None, or with `--layout auto` the names of the layout's options that flags have settled. `world` is the
    number of ranks, None where nobody says it.
    """

    config: Config
    print_config: bool
    dry_run: bool
    layout: frozenset[str] | None = None
    world: int | None = None


def parse(
    argv: list[str] | None = None,
    prog: str = "pretrain_gpt.py",
    read_model: Callable[[str], ModelConfig] | None = None,
    world: int | None = None,
) -> Parsed:
    """Parse a command line (default: that of this process).

    `--help` prints the options and raises SystemExit(0).

    Args:
        argv: the words after the program name.
        prog: the program name, for `--help`.
        read_model: reads the model options of an `--init-from-hf` directory; preset, files and flags override them.
        world: number of ranks, None where they are not started.

    Raises:
        UserError: the command line, a file it names, or the configuration they make is wrong.
    """
    tokens = sys.argv[1:] if argv is None else argv
    if "-h" in tokens or "--help" in tokens:
        show(_help(prog))
        raise SystemExit(0)
    flags, computed = _read_flags(tokens)
    start = Start(**{name: flags.pop(name).value for name in _START if name in flags})
    layers = [_preset_layer(start.preset), *(read_yaml(Path(path)) for path in start.config), flags]
    if read_model is not None and "init_from_hf" in (merged := _merge(layers)):
        layers.insert(0, _folder_layer(merged["init_from_hf"], read_model))
    layers.insert(0, _family_layer(layers))
    layers[-1:-1], world = layers_of_others(start, _values(layers[:-1]), flags, world)
    if start.layout is not None:  # a flag, and so above what files say
        chosen = {*LAYOUT, *LAYOUT_DETAILS}
        if unused := sorted(chosen & _merge(layers[:-1]).keys()):
            warn_on_rank_0(f"--layout auto chooses these, whatever files say: {', '.join(unused)}")
        layers = [{name: given for name, given in file.items() if name not in chosen} for file in layers[:-1]] + [flags]
    for flag, (name, kind, compute) in megatron.COMPUTED.items():
        if flag in computed:
            word, written = computed[flag]
            value = compute(f"--{_dashed(name)}", written, read_value(kind, word, written), _values(layers))
            _add(flags, name, value, written)
            for implied, setting in megatron.IMPLIED.get(flag, {}).items():
                _add(flags, implied, setting, written)
    values = _values(layers)
    groups = {group: cls(**{f.name: values[f.name] for f in dataclasses.fields(cls)}) for group, cls in GROUPS.items()}
    settled = None if start.layout is None else frozenset((*LAYOUT, *LAYOUT_DETAILS)) & flags.keys()
    return Parsed(Config(**groups), start.print_config, start.dry_run, settled, world)


def to_yaml(config: Config) -> str:
    """Format the configuration as YAML, by group; `--config` reads it back to an equal `Config`."""
    tree = dataclasses.asdict(config)
    for options in tree.values():
        options.update({name: list(value) for name, value in options.items() if isinstance(value, tuple)})
    return yaml.safe_dump(tree, sort_keys=False)


# ---------------------------------------------------------------------------------------------------------- layers


def _merge(layers: Iterable[Layer]) -> Layer:
    return {name: given for layer in layers for name, given in layer.items()}


def _values(layers: Iterable[Layer]) -> dict[str, Any]:
    """All options, at their defaults if no layer sets them."""
    defaults = {f.name: f.default for cls in GROUPS.values() for f in dataclasses.fields(cls)}
    given = {name: given.value for name, given in _merge(layers).items()}
    if given.get("batch_size_schedule") is not None and "global_batch_size" not in given:
        with contextlib.suppress(ValueError):  # `TrainConfig` refuses what cannot be read
            given["global_batch_size"] = BatchSizes.read(given["batch_size_schedule"]).sizes[-1]
    return defaults | given


def _layer(options: Mapping[str, Any], written: str) -> Layer:
    return {name: Given(read_value(TYPES[name], value, written), written) for name, value in options.items()}


def _family_layer(layers: Iterable[Layer]) -> Layer:
    """Options of the family that the layers name. They must agree: a preset or file fits its own family only."""
    named = [layer["arch"] for layer in layers if "arch" in layer]
    if not named:
        return {}
    *others, (arch, written) = named
    for other in others:
        if other.value != arch:
            raise UserError(
                written,
                f"{other.written} belongs to the family {other.value}",
                "drop one of the two (to override single options of a preset or file, use their flags)",
            )
    return _layer(FAMILIES[arch].options, f"--arch {arch}")


def _preset_layer(preset: str | None) -> Layer:
    if preset is None:
        return {}
    if preset not in PRESETS:
        raise UserError(f"--preset {preset}", f"must be one of {', '.join(PRESETS)}", suggest(preset, PRESETS))
    return _layer(PRESETS[preset], f"--preset {preset}")


def _folder_layer(folder: Given, read_model: Callable[[str], ModelConfig]) -> Layer:
    """Options of the model in a Hugging Face folder, without those that belong to a run."""
    of_run = ("seq_len", "hidden_dropout", "attention_dropout", "init_std")
    options = vars(read_model(folder.value))
    return {name: Given(value, folder.written) for name, value in options.items() if name not in of_run}


def read_yaml(path: Path) -> Layer:
    """Read the options of a YAML file {group: {option: value}}.

    Raises:
        UserError: it cannot be read, or is not one.
    """
    try:
        tree = yaml.load(path.read_text(encoding="utf-8"), Loader=StrictLoader)
    except OSError as e:
        raise UserError(f"--config {path}", e.strerror or str(e), "give a readable YAML file") from None
    except (yaml.YAMLError, ValueError, RecursionError) as e:
        raise UserError(f"--config {path}", f"is not valid YAML: {e}", "correct the file") from None
    layer: Layer = {}
    for group, options in _mapping(tree, f"--config {path}").items():
        if group not in GROUPS:
            raise UserError(f"{path}: {group}", f"must be one of {', '.join(GROUPS)}", _where_is(group))
        for name, value in _mapping(options, f"{path}: {group}").items():
            if GROUP_OF.get(name) != group:
                raise UserError(f"{path}: {group}.{name}", f"is not an option of {group}", _where_is(name))
            layer |= _layer({name: value}, f"{path}:{group}.{name} {value}")
    return layer


def _mapping(tree: Any, where: str) -> dict[Any, Any]:
    if not isinstance(tree, dict | None):
        raise UserError(where, "must contain 'name: value' lines", "see --print-config for the format")
    return tree or {}


def _where_is(name: Any) -> str:
    flag = _dashed(str(name))
    ours = megatron.RENAMED.get(flag, name)
    if ours in GROUP_OF:
        return f"write {ours} under {GROUP_OF[ours]}"
    if ours in _START:
        return f"give --{flag} on the command line"
    return suggest(str(name), [*GROUPS, *GROUP_OF])


# ----------------------------------------------------------------------------------------------------------- flags


def _dashed(name: str) -> str:
    return name.replace("_", "-")


OTHERS = {"strategy": "layout"}
"""Another spelling -> option."""
_START = get_type_hints(Start)
_HINTS = {**_START, **TYPES}
_VALUED = {_dashed(name): name for name, hint in _HINTS.items() if hint is not bool} | megatron.RENAMED | OTHERS
_SWITCHES = {
    **{_dashed(name): {name: True} for name, hint in _HINTS.items() if hint is bool},
    **{f"no-{_dashed(name)}": {name: False} for name, hint in TYPES.items() if hint is bool},
    **megatron.SWITCHES,
}


def _read_flags(tokens: Iterable[str]) -> tuple[Layer, dict[str, Given]]:
    """Command line -> (options, flags whose meaning must be computed from other options)."""
    known = {*_VALUED, *_SWITCHES, *megatron.COMPUTED}
    given = accept(_split(tokens), known, lambda flag: _hint(flag, known))
    flags: Layer = {}
    computed: dict[str, Given] = {}
    for flag, words in given:
        written = " ".join([f"--{flag}", *words])
        if flag in _SWITCHES:
            if words:
                raise UserError(written, "takes no value", f"write --{flag} alone, or drop it")
            for name, value in _SWITCHES[flag].items():
                _add(flags, name, read_value(_HINTS[name], value, written), written)
            continue
        option = _VALUED.get(flag)
        is_list = get_origin(TYPES[option] if option in TYPES else megatron.COMPUTED.get(flag, ("", str))[1]) is tuple
        if not words or len(words) > 1 and not is_list:
            rule = "takes one or more values" if is_list else "takes one value"
            raise UserError(written, rule, "give one, or see --help")
        if option is None:
            computed[flag] = Given(words if is_list else words[0], written)
        else:
            spelled = [megatron.VALUES.get(option, {}).get(word, word) for word in words]
            _add(flags, option, read_value(_HINTS[option], spelled if is_list else spelled[0], written), written)
    return flags, computed


def _split(tokens: Iterable[str]) -> list[tuple[str, list[str]]]:
    """["--lr=1", "--data", "0.7", "A"] -> flags without dashes, with the words that follow each."""
    found: list[tuple[str, list[str]]] = []
    for token in tokens:
        if token.startswith("--"):
            flag, equals, value = token[2:].partition("=")
            found.append((_dashed(flag), [value] if equals else []))
        elif token[:1] == "-" and token[1:2].isalpha():
            raise UserError(token, "is not a flag", f"flags have two dashes: -{token}")
        elif not found:
            raise UserError(token, "is not a flag", "options are given as --name value; see --help")
        else:
            found[-1][1].append(token)
    return found


def _add(flags: Layer, name: str, value: Any, written: str) -> None:
    """Add an option. A repeated flag overrides the earlier one (a list is extended); conflicting flags are an error."""
    given, before = Given(value, written), flags.get(name)
    if before is not None and before.source == given.source:
        if isinstance(value, tuple):
            given = Given(before.value + value, f"{before.written} {' '.join(map(str, value))}")
    elif before is not None and megatron.REFINES.get(before.source) == given.source:
        given = before
    elif before is not None and megatron.REFINES.get(given.source) != before.source and before.value != value:
        raise UserError(written, f"{before.written} conflicts with it", "keep one of the two")
    flags[name] = given


def _hint(flag: str, known: Iterable[str]) -> str:
    """Remedy for an unknown flag: a similar word, or an option whose help text has the word."""
    by_letters = suggest(flag, known, "--")
    texts = {name: text for cls in GROUPS.values() for name, text in help_texts(cls).items()}
    in_words, start = flag.replace("-", " "), f"{flag.replace('-', '_')}_"
    mentioned = [f"--{_dashed(n)}" for n, text in texts.items() if in_words in text.lower() or n.startswith(start)]
    if mentioned and not by_letters.startswith("did you mean"):
        return f"did you mean {' or '.join(mentioned[:3])}?"
    return by_letters


# ------------------------------------------------------------------------------------------------------------ help


def _help(prog: str) -> str:
    """List all flags by group, one line each."""
    lines = [
        f"usage: torchrun --nproc-per-node N {prog} [--name value ...]",
        "",
        "Precedence, lowest first: defaults, options of the family (--arch), --preset, --config, --accelerate-config,",
        "--deepspeed-config, flags.",
        f"Presets: {', '.join(PRESETS)}.",
        "Flags of Megatron-LM and Megatron-DeepSpeed are accepted too: see docs/megatron.md.",
    ]
    for group, cls in {"start": Start, **GROUPS}.items():
        lines += ["", f"{group}: {inspect.getdoc(cls)}"]
        texts = help_texts(cls)
        lines += [_help_line(field, texts[field.name]) for field in dataclasses.fields(cls)]
    return "\n".join(lines)


def _help_line(field: dataclasses.Field[Any], text: str) -> str:
    hint = _HINTS[field.name]
    kind = get_args(hint)[0] if type(None) in get_args(hint) else hint
    metavar = {int: " INT", float: " NUMBER", bool: ""}.get(kind, " NAME")
    choices = f" {'|'.join(choices_of(hint))}" if choices_of(hint) else ""
    switch = "[no-]" if kind is bool and field.name not in _START else ""
    shown = ("on" if field.default else "off") if kind is bool else field.default
    default = "" if field.default in (None, ()) or field.name in _START else f" [{shown}]"
    return f"  {f'--{switch}{_dashed(field.name)}{metavar}':<34} {text}{choices}{default}"
