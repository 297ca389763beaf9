"""Configuration files of other tools: each key is mapped to an option, ignored, or refused with a reason.

A reader takes the keys it translates; `Reading.rest` does the remaining ones by tables, and reports all mistakes of a
file at once. What is ignored, and what means something else here, is logged.
"""

from __future__ import annotations

import difflib
import json
import re
from collections.abc import Iterable, Iterator, Mapping
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any, NamedTuple

from megalite.config.options import TYPES, Given, Layer, read_value
from megalite.errors import UserError
from megalite.log import warn_on_rank_0


class Only(NamedTuple):
    """A key that is accepted at some values, at which it asks for nothing or for what is done here anyway."""

    values: tuple[Any, ...]
    why: str
    instead: str


_ONE_VALUE: tuple[type, ...] = (str, int, float, type(None))
_CORRECT = "correct the file"
# Mistakes that an error lists, and characters of each.
_LISTED, _LONGEST = 10, 300
# Bytes of a file.
LIMIT = 4 << 20

OFF: tuple[Any, ...] = (False, None, "none", 0, 0.0, {}, [])


def only_table(text: str) -> dict[str, Only]:
    """Read a table: a line `why -> what to do instead`, under it keys, each with its values in JSON (`a=1|1.0`).

    A key without values is accepted where it is switched off.
    """
    table = {}
    for why, instead, keys in re.findall(r"^(\S.*) -> (.*)\n((?: +.*\n)+)", text, re.M):
        for word in keys.split():
            key, _, values = word.partition("=")
            table[key] = Only(tuple(map(json.loads, values.split("|"))) if values else OFF, why, instead)
    return table


class Reading:
    """The keys of one file, and what became of them.

    Args:
        path: the file, for messages.
        tree: its content. Values "auto" count as not given.
        flags: options of the command line, which come first.
        lower: all options without the file.
    """

    def __init__(self, path: Path, tree: Mapping[str, Any], flags: Layer, lower: Mapping[str, Any]) -> None:
        self.path, self.flags, self.lower = path, flags, lower
        self.leaves = {key: value for key, value in _leaves(tree) if value != "auto"}
        self.auto = {key for key, value in _leaves(tree) if value == "auto"}
        self.blocks = {key.rpartition(".")[0] for key, _ in _leaves(tree)} | {k for k, v in tree.items() if v == {}}
        self.layer: Layer = {}
        self.batch: dict[str, Given] = {}
        self.processes: Given | None = None
        self.ignored: list[str] = []
        self.notes: list[str] = []
        self.mistakes: list[str] = []
        self.known: set[str] = set()
        self.by_default: set[str] = set()
        """Options that the file sets only through the defaults of a block."""

    def has(self, block: str) -> bool:
        """Check for a block, also an empty one."""
        return block in self.blocks or any(name.startswith(f"{block}.") for name in self.blocks)

    def value(self, option: str) -> Any:
        """Return the value that an option will have."""
        given = self.flags.get(option, self.layer.get(option))
        return self.lower[option] if given is None else given.value

    def drop(self, block: str, *, ignored: bool = False) -> None:
        """Forget the keys of a block that is refused, or ignored as a whole."""
        if ignored and any(key.startswith(f"{block}.") for key in self.leaves):
            self.ignored.append(block)
        self.leaves = {key: value for key, value in self.leaves.items() if not key.startswith(f"{block}.")}

    def take(self, key: str, otherwise: Any = None, kinds: tuple[type, ...] = _ONE_VALUE) -> Any:
        """Take a key's value out of those that are left, `otherwise` where it is not given or of no admitted kind."""
        self.known.add(key)
        value = self.leaves.pop(key, otherwise)
        if value is otherwise or isinstance(value, kinds):
            return value
        self.refuse(key, value, f"must be {'one value' if kinds is _ONE_VALUE else kinds[0].__name__}", _CORRECT)
        return otherwise

    def give(self, option: str, value: Any, key: str, *, default: bool = False) -> None:
        """Set an option; `default`: the file does not say it, its block implies it."""
        if isinstance(value, float) and value.is_integer() and TYPES[option] is int:
            value = int(value)  # 5e8
        written = f"{self.path}: {key} {_shown(value)}"
        try:
            self.layer[option] = Given(read_value(TYPES[option], value, written), written)
        except UserError as e:
            self.mistakes.append(str(e))
        if default:
            self.by_default.add(option)

    def move(self, key: str, option: str, otherwise: Any = None) -> None:
        """Set an option to the value of a key; where the key is not there, to `otherwise`, unless that is None."""
        given = key in self.leaves
        value = self.take(key, None if key in self.auto else otherwise)
        if value is not None:
            self.give(option, value, key, default=not given)

    def refuse(self, key: str, value: Any, why: str, instead: str) -> None:
        self.mistakes.append(str(UserError(f"{self.path}: {key} {_shown(value)}", why, instead)))

    def number(self, key: str) -> Given | None:
        """Take a whole number of at least 1."""
        value = self.take(key)
        if value is None:
            return None
        if not isinstance(value, int) or isinstance(value, bool) or value < 1:
            self.refuse(key, value, "must be a whole number of at least 1", "correct the file")
            return None
        return Given(value, f"{self.path}: {key} {value}")

    def rest(self, only: Mapping[str, Only], ignored: Iterable[str]) -> None:
        """Settle the keys that nobody has taken.

        Args:
            only: keys (patterns) with few values.
            ignored: keys (patterns) without effect here.

        Raises:
            UserError: all mistakes of the file.
        """
        patterns = list(ignored)
        names = [*self.known, *only, *patterns]
        for key, value in self.leaves.items():
            rule = next((rule for pattern, rule in only.items() if fnmatchcase(key, pattern)), None)
            if rule is not None and not any(value == v and type(value) is type(v) for v in rule.values):
                self.refuse(key, value, rule.why, rule.instead)
            elif rule is not None or any(fnmatchcase(key, pattern) for pattern in patterns):
                self.ignored.append(key)
            elif not (value in ({}, None) and any(name.startswith(f"{key}.") for name in names)):
                self.refuse(key, value, "is an unknown key", _nearest(key, names))
        if self.mistakes:
            count = f"{len(self.mistakes)} keys of {self.path}: must be changed, as listed below\n  "
            more = len(self.mistakes) - _LISTED
            listed = [m if len(m) <= _LONGEST else f"{m[:_LONGEST]} ..." for m in self.mistakes[:_LISTED]]
            message = "\n  ".join([*listed, *([f"and {more} more"] if more > 0 else [])])
            raise UserError.from_message(self.mistakes[0] if len(self.mistakes) == 1 else count + message)

    def tell(self) -> None:
        """Log what is ignored, what differs, and which flags override the file."""
        if self.ignored:
            warn_on_rank_0(f"{self.path}: ignored, without effect here: {', '.join(self.ignored)}")
        for note in self.notes:
            warn_on_rank_0(f"{self.path}: {note}")
        for name, given in self.layer.items():
            by_flag = self.flags.get(name)
            if by_flag is not None and name not in self.by_default and by_flag.value != given.value:
                warn_on_rank_0(f"{by_flag.written} overrides {given.written}")


def settle_batch(reading: Reading, world: int) -> None:
    """Make micro-batch size and global batch size of the numbers in `reading.batch`; flags come first.

    These are "samples" a step, "micro" of a pass and rank, and "accumulation" passes: with the data-parallel size any
    two give the third.

    Args:
        reading: a file that has been read.
        world: number of ranks.

    Raises:
        UserError: three numbers that do not multiply up.
    """
    flags, dp = reading.flags, max(1, world // max(1, reading.value("tp") * reading.value("pp")))
    samples, micro, steps = (reading.batch.get(name) for name in ("samples", "micro", "accumulation"))
    if micro is not None:
        reading.layer["micro_batch_size"] = micro
    if samples is not None:
        reading.layer["global_batch_size"] = samples
    if steps is None:
        return
    by_flag = flags.get("global_batch_size") or (flags.get("micro_batch_size") if samples else None)
    if by_flag is not None:
        warn_on_rank_0(f"{by_flag.written} overrides {steps.written}")
        return
    micro = flags.get("micro_batch_size", micro)
    if samples is None:
        size = micro.value if micro else reading.lower["micro_batch_size"]
        reading.layer["global_batch_size"] = Given(size * steps.value * dp, steps.written)
        return
    passes = steps.value * dp
    if micro is None and samples.value % passes == 0:
        reading.layer["micro_batch_size"] = Given(samples.value // passes, samples.written)
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
    """Compare level by level, so that a block's wrong name does not hide behind its keys."""
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
