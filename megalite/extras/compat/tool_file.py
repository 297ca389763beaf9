"""Configuration files of other tools: each key is mapped to an option, ignored, or refused with a reason.

A translator pops the keys that it knows; `check_remaining` checks all others against tables, and reports all mistakes
of a file at once. Keys that are ignored, or have another meaning here, are logged.
"""

from __future__ import annotations

import difflib
import json
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

from megalite.core.base.errors import UserError
from megalite.core.base.log import warn_on_rank_0
from megalite.core.options.values import read_value
from megalite.extras.compat.table import Refusal, all_patterns
from megalite.runtime.options.fields import TYPES, Layer, OptionValue

_ONE_VALUE: tuple[type, ...] = (str, int, float, type(None))
_CORRECT = "correct the file"
# Mistakes that an error lists, and characters of each.
_LISTED, _LONGEST = 10, 300
# Bytes of a file.
LIMIT = 4 << 20
# JSON of values that switch a feature off.
_OFF = ("false", "null", '"none"', "0", "0.0", "{}", "[]")


class ToolFile:
    """A configuration file of another tool: its keys, and the options made of them.

    Args:
        path: path of the file, for messages.
        tree: its content; "auto" counts as not given.
        flags: options of the command line, which take precedence.
        lower: values of all options without the file and the flags.

    Attributes:
        leaves: dotted key (`optimizer.params.lr`) -> value, of the keys that have not been popped yet.
        auto: keys with the value "auto".
        blocks: dotted keys that contain others.
        layer: options that the file gives.
        by_default: options that it gives only through the defaults of a block.
        batch: numbers for `resolve_batch_sizes`.
        processes: number of ranks that the file is for.
        ignored: keys without effect here.
        notes: lines to log.
        mistakes: lines of the error to raise.
        known: keys that a translator has asked for.
    """

    def __init__(self, path: Path, tree: Mapping[str, Any], flags: Layer, lower: Mapping[str, Any]) -> None:
        self.path = path
        self.flags = flags
        self.lower = lower
        self.leaves = {key: value for key, value in _leaves(tree) if value != "auto"}
        self.auto = {key for key, value in _leaves(tree) if value == "auto"}
        self.blocks = {key.rpartition(".")[0] for key, _ in _leaves(tree)} | {k for k, v in tree.items() if v == {}}
        self.layer: Layer = {}
        self.by_default: set[str] = set()
        self.batch: dict[str, OptionValue] = {}
        self.processes: OptionValue | None = None
        self.ignored: list[str] = []
        self.notes: list[str] = []
        self.mistakes: list[str] = []
        self.known: set[str] = set()

    def has(self, block: str) -> bool:
        """Check for a block, also an empty one."""
        return block in self.blocks or any(name.startswith(f"{block}.") for name in self.blocks)

    def value(self, option: str) -> Any:
        """Return the value that an option will have."""
        setting = self.flags.get(option, self.layer.get(option))
        return self.lower[option] if setting is None else setting.value

    def drop(self, block: str, *, ignored: bool = False) -> None:
        """Forget the keys of a block that is refused, or ignored as a whole."""
        if ignored and any(key.startswith(f"{block}.") for key in self.leaves):
            self.ignored.append(block)
        self.leaves = {key: value for key, value in self.leaves.items() if not key.startswith(f"{block}.")}

    def pop(self, key: str, otherwise: Any = None, kinds: tuple[type, ...] = _ONE_VALUE) -> Any:
        """Remove a key and return its value, or `otherwise` if it is not given or not of one of the `kinds`."""
        self.known.add(key)
        value = self.leaves.pop(key, otherwise)
        if value is otherwise or isinstance(value, kinds):
            return value
        self.refuse(key, value, f"must be {'one value' if kinds is _ONE_VALUE else kinds[0].__name__}", _CORRECT)
        return otherwise

    def set(self, option: str, value: Any, key: str, *, default: bool = False) -> None:
        """Set an option; `default`: it is not in the file, but implied by its block."""
        if isinstance(value, float) and value.is_integer() and TYPES[option] in (int, int | None):
            value = int(value)  # 5e8
        written = f"{self.path}: {key} {_shown(value)}"
        try:
            self.layer[option] = OptionValue(read_value(TYPES[option], value, written), written)
        except UserError as e:
            self.mistakes.append(str(e))
        if default:
            self.by_default.add(option)

    def copy(self, key: str, option: str, otherwise: Any = None) -> None:
        """Set an option to the value of a key; if the key is missing, to `otherwise`, unless that is None."""
        in_file = key in self.leaves
        value = self.pop(key, None if key in self.auto else otherwise)
        if value is not None:
            self.set(option, value, key, default=not in_file)

    def refuse(self, key: str, value: Any, why: str, instead: str) -> None:
        self.mistakes.append(str(UserError(f"{self.path}: {key} {_shown(value)}", why, instead)))

    def pop_count(self, key: str) -> OptionValue | None:
        """Remove a key and return its value, a whole number of at least 1; None if it is not given."""
        value = self.pop(key)
        if value is None:
            return None
        if not isinstance(value, int) or isinstance(value, bool) or value < 1:
            self.refuse(key, value, "must be a whole number of at least 1", _CORRECT)
            return None
        return OptionValue(value, f"{self.path}: {key} {value}")

    def check_remaining(self, refusals: Sequence[Refusal], ignored: Iterable[str]) -> None:
        """Check the keys that have not been popped.

        Args:
            refusals: keys that are accepted at some values only, written as JSON; without any, only if switched off.
            ignored: patterns of keys without effect here.

        Raises:
            UserError: all mistakes of the file.
        """
        patterns = list(ignored)
        names = [*self.known, *all_patterns(refusals), *patterns]
        for key, value in self.leaves.items():
            refusal = next((row for row in refusals if row.covers(key)), None)
            if refusal is not None and not refusal.accepts(key, json.dumps(value, default=str), _OFF):
                self.refuse(key, value, refusal.why, refusal.instead)
            elif refusal is not None or any(fnmatchcase(key, pattern) for pattern in patterns):
                self.ignored.append(key)
            elif not (value in ({}, None) and any(name.startswith(f"{key}.") for name in names)):
                self.refuse(key, value, "is an unknown key", _nearest(key, names))
        if self.mistakes:
            count = f"{len(self.mistakes)} keys of {self.path}: must be changed, as listed below\n  "
            more = len(self.mistakes) - _LISTED
            listed = [m if len(m) <= _LONGEST else f"{m[:_LONGEST]} ..." for m in self.mistakes[:_LISTED]]
            message = "\n  ".join([*listed, *([f"and {more} more"] if more > 0 else [])])
            raise UserError.from_message(self.mistakes[0] if len(self.mistakes) == 1 else count + message)

    def log_notes(self) -> None:
        """Log which keys are ignored, what differs, and which flags override the file."""
        if self.ignored:
            warn_on_rank_0(f"{self.path}: ignored, without effect here: {', '.join(self.ignored)}")
        for note in self.notes:
            warn_on_rank_0(f"{self.path}: {note}")
        for name, option in self.layer.items():
            by_flag = self.flags.get(name)
            if by_flag is not None and name not in self.by_default and by_flag.value != option.value:
                warn_on_rank_0(f"{by_flag.written} overrides {option.written}")


def data_ranks(value: Callable[[str], int], world: int) -> int:
    """Return dp of a number of ranks, given the value of an option by name."""
    from megalite.core.mesh.grid import AXES  # numpy, which the help does without

    others = math.prod(value(axis.name) for axis in AXES if axis.name != "dp")
    return max(1, world // max(1, others))


def resolve_batch_sizes(file: ToolFile, world: int) -> None:
    """Derive micro-batch size and global batch size from the numbers in `file.batch`; flags take precedence.

    These are "samples" per step, "micro" samples per pass and rank, and "accumulation" passes per step: with the
    data-parallel size, any two give the third.

    Args:
        file: translated file.
        world: number of ranks.

    Raises:
        UserError: the three numbers contradict each other.
    """
    flags, dp = file.flags, data_ranks(file.value, world)
    samples, micro, steps = (file.batch.get(name) for name in ("samples", "micro", "accumulation"))
    if micro is not None:
        file.layer["micro_batch_size"] = micro
    if samples is not None:
        file.layer["global_batch_size"] = samples
    if steps is None:
        return
    by_flag = flags.get("global_batch_size") or (flags.get("micro_batch_size") if samples else None)
    if by_flag is not None:
        warn_on_rank_0(f"{by_flag.written} overrides {steps.written}")
        return
    micro = flags.get("micro_batch_size", micro)
    if samples is None:
        size = micro.value if micro else file.lower["micro_batch_size"]
        file.layer["global_batch_size"] = OptionValue(size * steps.value * dp, steps.written)
        return
    passes = steps.value * dp
    if micro is None and samples.value % passes == 0:
        file.layer["micro_batch_size"] = OptionValue(samples.value // passes, samples.written)
    elif micro is None or micro.value * passes != samples.value:
        rule = f"must be {micro.value if micro else 'a multiple of 1'} x {steps.value} accumulation steps x dp {dp} = "
        remedy = "drop one of the three numbers, or correct it"
        raise UserError(samples.written, f"{rule}{passes * (micro.value if micro else 1)}", remedy)


def unreadable(flag: str, path: Path, error: Exception, kind: str) -> UserError:
    """Return the error of a file that cannot be read or parsed."""
    if isinstance(error, OSError):
        return UserError(f"{flag} {path}", error.strerror or str(error), f"give a readable {kind} file")
    return UserError(f"{flag} {path}", f"is not valid {kind}: {error!s:.200}", "correct the file")


def _leaves(tree: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    for name, value in tree.items():
        key = f"{prefix}{name}"
        if isinstance(value, Mapping) and value:
            yield from _leaves(value, f"{key}.")
        else:
            yield key, value


def _shown(value: Any) -> str:
    text = json.dumps(value, default=str)
    return text if len(text) <= 100 else f"{text[:80]} ..."


def _nearest(key: str, known: Iterable[str]) -> str:
    """Return the remedy for an unknown key. Levels are compared one by one, to find the one that is misspelled."""
    names = [name for name in known if "*" not in name.partition(".")[0]]
    parts = key.split(".")
    for depth in range(len(parts)):
        levels = [n.split(".") for n in names if n.count(".") >= depth]
        beneath = {level[depth] for level in levels if level[:depth] == parts[:depth]}
        if parts[depth] not in beneath and "*" not in beneath:
            close = difflib.get_close_matches(parts[depth], sorted(beneath), n=1)
            at = ".".join([*parts[:depth], close[0]]) if close else ""
            return f"did you mean {at}?" if close else "drop it"
    return "drop it"
