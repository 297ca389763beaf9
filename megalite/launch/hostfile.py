"""The hostfile and its filters: which hosts take part, in which order, with which device slots.

    file   = { line } ;  line = [ host [ slots ] ] [ "#" comment ]
    slots  = " slots=" N | ":" N            "node1 slots=8", "node1:8", "node1" (all its GPUs, asked at preflight)
    filter = host [ ":" id { "," id } ] { "@" host ... }

The order of lines is the order of node ranks; the first host is the master.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from megalite.errors import UserError

# No leading "-" (ssh would read it as an option), no "@" (it separates filters), no second ":" (IPv6).
_HOST = re.compile(r"(?P<name>[A-Za-z0-9_][A-Za-z0-9_.-]*)(?::(?P<slots>[^:]*))?")
_SSH_REMEDY = "one host per line as 'node1 slots=8', 'node1:8' or 'node1'; users, ports and IPv6 belong in ssh's config"


@dataclass(frozen=True)
class Host:
    """One line of the hostfile after filtering.

    `slots` are device ids (they become CUDA_VISIBLE_DEVICES); None means every GPU the host turns out to have.
    """

    name: str
    slots: tuple[int, ...] | None


def parse_hostfile(path: Path) -> list[Host]:
    """Hosts in file order. Raises UserError (file and line) for duplicates, slots < 1 and unknown words."""
    try:
        text = path.read_text(encoding="utf-8")
    except OSError as e:
        raise UserError(
            f"--hostfile {path}", f"cannot be read ({e.strerror})", "copy hostfile.example and name your hosts"
        ) from e
    except UnicodeDecodeError as e:
        raise UserError(f"--hostfile {path}", "is not a text file", _SSH_REMEDY) from e
    hosts: dict[str, int] = {}
    parsed = []
    for number, line in enumerate(text.splitlines(), start=1):
        words = line.split("#", 1)[0].split()
        if not words:
            continue
        where = f"{path}:{number}: {' '.join(words)!r}"
        host = _parse_line(words, where)
        if host.name in hosts:
            raise UserError(where, f"{host.name} is already on line {hosts[host.name]}", "keep one line per host")
        hosts[host.name] = number
        parsed.append(host)
    if not parsed:
        raise UserError(f"--hostfile {path}", "names no host", _SSH_REMEDY)
    return parsed


def _parse_line(words: list[str], where: str) -> Host:
    match = _HOST.fullmatch(words[0])
    if match is None:
        raise UserError(where, f"{words[0]!r} is not a host name", _SSH_REMEDY)
    count = match["slots"]
    rest = words[1:]
    if rest and count is None and rest[0].startswith("slots="):
        count = rest.pop(0).removeprefix("slots=")
    if rest:
        raise UserError(where, f"unknown word {rest[0]!r}", _SSH_REMEDY)
    if count is None:
        return Host(match["name"], None)
    if not re.fullmatch(r"-?[0-9]+", count):
        raise UserError(where, f"slots {count!r} is not a whole number", _SSH_REMEDY)
    if int(count) < 1:
        raise UserError(where, f"slots {count} must be at least 1", "remove or comment out the host to leave it idle")
    return Host(match["name"], tuple(range(int(count))))


def _parse_filter(text: str, flag: str) -> dict[str, tuple[int, ...] | None]:
    remedy = "write hosts as 'node1:0,1@node2'"
    wanted: dict[str, tuple[int, ...] | None] = {}
    for part in text.split("@"):
        match = re.fullmatch(r"([^:,\s]+)(?::([0-9]+(?:,[0-9]+)*))?", part)
        if match is None:
            raise UserError(f"{flag} {text!r}", f"{part!r} is not HOST or HOST:ID,ID", remedy)
        name, ids = match[1], match[2]
        if name in wanted:
            raise UserError(f"{flag} {text!r}", f"{name} is named twice", remedy)
        slots = None if ids is None else tuple(int(i) for i in ids.split(","))
        if slots is not None and len(set(slots)) != len(slots):
            raise UserError(f"{flag} {text!r}", f"{name} has a slot named twice", remedy)
        wanted[name] = slots
    return wanted


def filter_hosts(hosts: Sequence[Host], include: str | None, exclude: str | None) -> list[Host]:
    """Apply `--include` or `--exclude`; the hostfile's order stays.

    Raises UserError for both at once, for an unknown host or slot, and when nothing is left.
    """
    if include is not None and exclude is not None:
        raise UserError("--include with --exclude", "only one of them may be given", "say it with one of the two")
    if include is None and exclude is None:
        return list(hosts)
    flag, text = ("--include", include) if include is not None else ("--exclude", exclude)
    wanted = _parse_filter(text or "", flag)
    _check_known(hosts, wanted, f"{flag} {text}")
    kept = []
    for host in hosts:
        named, ids = host.name in wanted, wanted.get(host.name)
        if flag == "--include":
            if named:
                kept.append(host if ids is None else replace(host, slots=ids))
        elif not named:
            kept.append(host)
        elif ids is not None and host.slots is not None:
            left = tuple(slot for slot in host.slots if slot not in ids)
            if left:
                kept.append(replace(host, slots=left))
    if not kept:
        raise UserError(f"{flag} {text}", "leaves no host", f"the hostfile has {', '.join(h.name for h in hosts)}")
    return kept


def _check_known(hosts: Sequence[Host], wanted: dict[str, tuple[int, ...] | None], given: str) -> None:
    by_name = {host.name: host for host in hosts}
    for name, ids in wanted.items():
        if name not in by_name:
            raise UserError(given, f"{name} is not in the hostfile", f"it has {', '.join(by_name)}")
        if ids is None:
            continue
        slots = by_name[name].slots
        if slots is None:
            raise UserError(given, f"{name} has no slot count in the hostfile", f"write '{name} slots=N' there")
        unknown = [str(i) for i in ids if i not in slots]
        if unknown:
            raise UserError(given, f"{name} has no slot {', '.join(unknown)}", f"it has 0 to {len(slots) - 1}")


def check_equal_slots(hosts: Sequence[Host]) -> int:
    """The common slot count. Raises UserError when counts differ (tensor-parallel groups would straddle hosts)."""
    groups: dict[int, list[str]] = defaultdict(list)
    for host in hosts:
        if host.slots is None:
            raise UserError(
                f"host {host.name}",
                "its slot count is unknown (only preflight asks the host)",
                f"write '{host.name} slots=N' in the hostfile",
            )
        groups[len(host.slots)].append(host.name)
    if len(groups) > 1:
        told = "; ".join(f"{count}: {', '.join(names)}" for count, names in sorted(groups.items()))
        raise UserError(
            f"slot counts {told}",
            "every host must have equally many, or tensor-parallel groups would straddle hosts",
            "cut the larger ones with --include HOST:ID,ID or leave hosts out with --exclude",
        )
    return next(iter(groups))
