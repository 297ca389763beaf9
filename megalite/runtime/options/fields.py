"""Options by name: their types, groups and descriptions."""

from __future__ import annotations

import ast
import dataclasses
import inspect
import sys
from collections import defaultdict
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple, get_type_hints

from megalite.core.base.errors import in_range, require
from megalite.core.options.names import dashed, description_of
from megalite.runtime.options.run import Config


@dataclass(frozen=True)
class StartOptions:
    """Where to start from, and what to print instead of training."""

    preset: str | None = None
    """Model by name; --config files and flags override its options."""
    config: tuple[str, ...] = ()
    """YAML file of options, as --print-config writes it; repeatable, later files win."""
    print_config: bool = False
    """Print the resolved options as YAML, and exit."""
    dry_run: bool = False
    """Print layout, parameters and memory per rank, and exit."""
    lost: int = 0
    """With --dry-run and --elastic: also print what is left of the run while one host is lost, and more up to this
    number: ranks used and idle, passes, step time, memory, and what is loaded."""
    ranks_per_host: int = 0
    """With --lost: number of ranks of each host. 0: as the launcher says (LOCAL_WORLD_SIZE)."""
    layout: Literal["auto"] | None = None
    """Choose tp, cp, pp, micro-batch size and the rest of the layout to fit the available devices; layout flags that
    you give are kept."""

    def __post_init__(self) -> None:
        in_range(self, "lost ranks_per_host", 0, 10**6)
        for name in ("lost", "ranks_per_host"):
            given, asked = f"--{dashed(name)} {getattr(self, name)}", self.dry_run and self.lost > 0
            require(not getattr(self, name) or asked, given, "applies to the page of --dry-run --lost K", "give both")


class OptionValue(NamedTuple):
    """The value of an option, and the words to quote in an error."""

    value: Any
    written: str

    @property
    def source(self) -> str:
        """The flag it was given with; `--x` and `--no-x` count as one."""
        return self.written.split(" ")[0].replace("--no-", "--")


Layer = dict[str, OptionValue]
"""Options that one source gives, by name."""


_HINTS = get_type_hints(Config)
GROUPS: dict[str, type] = {group: _HINTS[group] for group in ("model", "parallel", "data", "train", "optim", "run")}
"""Group of options (key of the YAML file, heading of the help) -> dataclass."""

TYPES: dict[str, Any] = {
    name: hint for cls in GROUPS.values() for name, hint in get_type_hints(cls, include_extras=True).items()
}
"""Option -> its type. Names are unique over the groups, so that flags need no prefix."""

GROUP_OF: dict[str, str] = {f.name: group for group, cls in GROUPS.items() for f in dataclasses.fields(cls)}
"""Option -> its group."""

LAYOUT = (
    *("tp", "cp", "ep", "etp", "pp", "vp", "sequence_parallel", "schedule", "moe_overlap", "micro_batch_size"),
    *("recompute", "zero", "zero_group", "offload"),
)
"""Options that `--layout auto` chooses."""
LAYOUT_DETAILS = ("cp_comm", "pipeline_layout", "zero_keep", "zero_reduce", "offload_dir")
"""Options that belong to some of these choices only."""


def help_texts(cls: type) -> dict[str, str]:
    """Return the string under each field of a dataclass, read from the source, as Python does not keep it.

    Where it says {each}, stand the names that the option takes, each with what its part says of itself.
    """
    classes = [base for base in reversed(cls.__mro__) if inspect.get_annotations(base)]
    texts = {name: text for base in classes for name, text in _own_texts(base)}
    marks = {name: description_of(hint) for name, hint in get_type_hints(cls, include_extras=True).items()}
    return {name: text.replace("{each}", mark.each) if (mark := marks[name]) else text for name, text in texts.items()}


def _own_texts(cls: type) -> Iterator[tuple[str, str]]:
    module = ast.parse(inspect.getsource(sys.modules[cls.__module__]))
    body = next(node.body for node in module.body if isinstance(node, ast.ClassDef) and node.name == cls.__name__)
    for field, under in zip(body, body[1:]):
        if isinstance(field, ast.AnnAssign) and isinstance(under, ast.Expr) and isinstance(under.value, ast.Constant):
            yield ast.unparse(field.target), str(under.value.value)


def by_group(config: Config) -> dict[str, dict[str, Any]]:
    """Return all options, {group: {option: value}}, as files hold them."""
    return {group: dataclasses.asdict(getattr(config, group)) for group in GROUPS}


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
