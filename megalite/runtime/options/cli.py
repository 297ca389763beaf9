"""Command line of a run: flat flags from the fields of `Config`, presets, and YAML files.

Precedence, lowest first: defaults, options of the family (`--arch`), `--preset`, `--config FILE` (repeatable), files of
other tools (as a `Dialect` reads them), flags.
Each of these is a layer {option: `OptionValue`} of typed values; the layers are merged, and `Config` checks the result.
A mistake is a `UserError`: the value, the rule it breaks, the fix.
"""

from __future__ import annotations

import contextlib
import dataclasses
import re
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple, get_type_hints

import yaml

from megalite.core.base.errors import UserError
from megalite.core.base.log import warn_on_rank_0
from megalite.core.options.batch_sizes import BatchSizes
from megalite.core.options.model import ModelConfig
from megalite.core.options.names import dashed, suggest
from megalite.core.options.values import StrictLoader, read_value
from megalite.core.parts.families import FAMILIES, PRESETS
from megalite.core.parts.options.expert_options import BALANCING
from megalite.runtime.base.urls import check_url
from megalite.runtime.options.dialect import PLAIN, Dialect
from megalite.runtime.options.fields import (
    GROUP_OF,
    GROUPS,
    LAYOUT,
    LAYOUT_DETAILS,
    TYPES,
    Layer,
    OptionValue,
    by_group,
)
from megalite.runtime.options.flags import add_flag, read_flags
from megalite.runtime.options.run import Config


class CommandLine(NamedTuple):
    """What a command line asks for.

    Attributes:
        config: the checked configuration.
        print_config: whether to print the configuration and exit.
        dry_run: whether to print layout and memory and exit.
        layout: with `--layout auto`, names of the layout options that are given as flags; else None.
        world: number of ranks; None if it is not known.
        theirs: our flags -> those of another tool that they were given with.
        lost: with `--dry-run`, up to how many lost hosts the page is to cover.
        ranks_per_host: number of ranks of each of these; 0: not given.
    """

    config: Config
    print_config: bool
    dry_run: bool
    layout: frozenset[str] | None = None
    world: int | None = None
    theirs: Mapping[str, str] = MappingProxyType({})
    lost: int = 0
    ranks_per_host: int = 0


def parse(
    argv: list[str] | None = None,
    read_model: Callable[[str, str], ModelConfig] | None = None,
    world: int | None = None,
    dialect: Dialect = PLAIN,
) -> CommandLine:
    """Parse a command line (default: that of this process).

    Args:
        argv: the words after the program name.
        read_model: reads the model options of an `--init-from-hf` directory, given that and the `--cache-dir`; preset,
            files and flags override them.
        world: number of ranks; None if they are not started.
        dialect: spellings and files of other tools to accept.

    Raises:
        UserError: the command line, a file that it names, or the resulting configuration is invalid.
    """
    tokens = sys.argv[1:] if argv is None else argv
    flags, computed = read_flags(tokens, dialect)
    start = dialect.start(
        **{f.name: flags.pop(f.name).value for f in dataclasses.fields(dialect.start) if f.name in flags}
    )
    layers = [_preset_layer(start.preset), *(read_yaml(Path(path), dialect) for path in start.config), flags]
    folder = _merge(layers).get("init_from_hf")
    # A file that holds every option has null.
    if read_model is not None and folder is not None and folder.value is not None:
        layers.insert(0, _folder_layer(folder, _values(layers)["cache_dir"], read_model))
    if world is None and not (start.print_config or start.dry_run):
        world = 1
    lower = _values([_family_layer(layers), *layers[:-1]])
    layers[-1:-1], world = dialect.read_files(start, lower, flags, world)
    ranks = (world or 1) if start.layout is None else 0
    layers.insert(0, dialect.defaults(flags, computed.keys(), _merge(layers), ranks))
    layers.insert(0, _family_layer(layers))
    if start.layout is not None:  # a flag, and so above what files say
        layers = [*_without_layout(layers[:-1]), flags]
    for flag, (name, hint, compute) in dialect.computed.items():
        if flag in computed:
            word, written = computed[flag]
            options = {**_values(layers), "world": world or 1}
            value = compute(f"--{dashed(name)}", written, read_value(hint, word, written), options)
            for setting, chosen in {name: value, **dialect.implied.get(flag, {})}.items():
                add_flag(flags, setting, chosen, written, dialect)
    values = _values(layers)
    settled = None if start.layout is None else frozenset((*LAYOUT, *LAYOUT_DETAILS)) & flags.keys()
    theirs = {f"--{dashed(n)}": option.source for n, option in flags.items() if option.source[2:] in dialect.renamed}
    with in_words_given(theirs):
        config = Config(**{group: cls(**_fields_of(cls, values)) for group, cls in GROUPS.items()})
    printed = start.print_config, start.dry_run
    return CommandLine(config, *printed, settled, world, theirs, start.lost, start.ranks_per_host)


@contextlib.contextmanager
def in_words_given(theirs: Mapping[str, str]) -> Iterator[None]:
    """Let errors name options by the flags of another tool that they were given with (`CommandLine.theirs`)."""
    try:
        yield
    except UserError as e:
        said = re.sub(r"(?<![^\s(])--[a-z][a-z0-9-]*(?=[\s:;,)]|$)", lambda flag: theirs.get(flag[0], flag[0]), str(e))
        if said == str(e):
            raise
        raise type(e).from_message(said) from None


def _fields_of(cls: type, values: Mapping[str, Any]) -> dict[str, Any]:
    return {f.name: values[f.name] for f in dataclasses.fields(cls)}


def to_yaml(config: Config) -> str:
    """Format the configuration as YAML, by group; `--config` reads it back to an equal `Config`."""
    tree = by_group(config)
    for options in tree.values():
        options.update({name: list(value) for name, value in options.items() if isinstance(value, tuple)})
    return yaml.safe_dump(tree, sort_keys=False)


# ---------------------------------------------------------------------------------------------------------- layers


def _merge(layers: Iterable[Layer]) -> Layer:
    return {name: option for layer in layers for name, option in layer.items()}


def _values(layers: Iterable[Layer]) -> dict[str, Any]:
    """Return the values of all options, defaults included."""
    defaults = {f.name: f.default for cls in GROUPS.values() for f in dataclasses.fields(cls)}
    values = {name: option.value for name, option in _merge(layers).items()}
    if values.get("batch_size_schedule") is not None and "global_batch_size" not in values:
        with contextlib.suppress(ValueError):  # `TrainConfig` refuses what cannot be read
            values["global_batch_size"] = BatchSizes.read(values["batch_size_schedule"]).sizes[-1]
    return defaults | values


def _without_layout(layers: Sequence[Layer]) -> list[Layer]:
    """Remove from the layers of files what `--layout auto` chooses, and log it."""
    chosen = {*LAYOUT, *LAYOUT_DETAILS}
    if unused := sorted(chosen & _merge(layers).keys()):
        warn_on_rank_0(f"--layout auto overrides these options of files: {', '.join(unused)}")
    return [{name: value for name, value in layer.items() if name not in chosen} for layer in layers]


def _layer(options: Mapping[str, Any], written: str) -> Layer:
    return {name: OptionValue(read_value(TYPES[name], value, written), written) for name, value in options.items()}


def _family_layer(layers: Iterable[Layer]) -> Layer:
    """Return the options of the family that the layers name. They must agree: a preset or file fits one family only."""
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


def _folder_layer(folder: OptionValue, cache_dir: str, read_model: Callable[[str, str], ModelConfig]) -> Layer:
    """Return the options of the model in a Hugging Face folder, without those that belong to a run."""
    run_options = ("seq_len", "mtp_num_layers", "hidden_dropout", "attention_dropout", "init_std", *BALANCING)
    check_url("--init-from-hf", folder.value)
    options = vars(read_model(folder.value, cache_dir))
    return {name: OptionValue(value, folder.written) for name, value in options.items() if name not in run_options}


def read_yaml(path: Path, dialect: Dialect = PLAIN) -> Layer:
    """Read the options of a YAML file {group: {option: value}}; `dialect` explains names of other tools in errors.

    Raises:
        UserError: the file cannot be read, or does not have this form.
    """
    try:
        return _read_groups(path, dialect)
    except UserError:
        found = None
        with contextlib.suppress(OSError):
            found = dialect.recognize(path.read_text(encoding="utf-8", errors="replace"))
        if found is None:
            raise
        tool, remedy = found
        raise UserError(f"--config {path}", f"is a configuration of {tool}", remedy) from None


def _read_groups(path: Path, dialect: Dialect) -> Layer:
    layer: Layer = {}
    for group, options in read_mapping(path, f"--config {path}").items():
        if group not in GROUPS:
            raise UserError(f"{path}: {group}", f"must be one of {', '.join(GROUPS)}", _where_is(group, dialect))
        for name, value in _mapping(options, f"{path}: {group}").items():
            if GROUP_OF.get(name) != group:
                raise UserError(f"{path}: {group}.{name}", f"is not an option of {group}", _where_is(name, dialect))
            layer |= _layer({name: value}, f"{path}:{group}.{name} {value}")
    return layer


def read_mapping(path: Path, given: str) -> dict[Any, Any]:
    """Read a YAML file of `name: value` lines; `given` is what an error quotes.

    Raises:
        UserError: the file cannot be read, or does not have this form.
    """
    try:
        tree = yaml.load(path.read_text(encoding="utf-8"), Loader=StrictLoader)
    except OSError as e:
        raise UserError(given, e.strerror or str(e), "give a readable YAML file") from None
    except (yaml.YAMLError, ValueError, RecursionError) as e:
        raise UserError(given, f"is not valid YAML: {e}", "correct the file") from None
    return _mapping(tree, given)


def _mapping(tree: Any, where: str) -> dict[Any, Any]:
    if not isinstance(tree, dict | None):
        raise UserError(where, "must contain 'name: value' lines", "see --print-config for the format")
    return tree or {}


def _where_is(name: Any, dialect: Dialect) -> str:
    flag = dashed(str(name))
    ours = dialect.renamed.get(flag, name)
    if ours in GROUP_OF:
        return f"write {ours} under {GROUP_OF[ours]}"
    if switched := dialect.switches.get(flag):
        return (
            "write " + ", ".join(f"{ours}: {value} under {GROUP_OF[ours]}" for ours, value in switched.items()).lower()
        )
    if ours in get_type_hints(dialect.start):
        return f"give --{flag} on the command line"
    return suggest(str(name), [*GROUPS, *GROUP_OF])
