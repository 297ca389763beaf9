"""The hosts of a run (hostfile and filters, in order, with device slots) and the ssh command line of each.

    file   = { line } ;  line = [ host [ slots ] ] [ "#" comment ]
    slots  = " slots=" N | ":" N            "node1 slots=8", "node1:8", "node1" (all its GPUs, counted by preflight)
             then " max_slots=" M           of Open MPI: at least N
    filter = host [ ":" id { "," id } ] { "@" host ... }

The order of lines is the order of node ranks; the first host is the master.
"""

from __future__ import annotations

import os
import re
import shlex
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

from megalite.core.base.errors import UserError, require
from megalite.extras.launch.probe import VARIABLES
from megalite.runtime.recover.member import survives_hosts

# ssh's exit code when the connection fails or is lost; every other one is the remote command's.
SSH_FAILED = 255
# More must be a typing error: no host has so many GPUs, or cores for so many ranks.
_MOST_SLOTS = 1024
# Prefix of every line of a rank; the runner turns it into "[host rank N]".
RANK_MARK = "[[rank ${rank}]] "
_DEFAULTS = {
    "OMP_NUM_THREADS": "1",
    "PYTHONUNBUFFERED": "1",
    # Hides torch's host-name lookup warnings, one per rank and store.
    "TORCH_CPP_LOG_LEVEL": "ERROR",
    "TORCHELASTIC_LOG_LINE_PREFIX_TEMPLATE": RANK_MARK,
}
# No leading "-" (ssh would read it as an option), no "@" (it separates filters), no second ":" (IPv6).
_HOST = re.compile(r"(?P<name>[A-Za-z0-9_][A-Za-z0-9_.-]*)(?::(?P<slots>[^:]*))?")
_MOST = re.compile("max[-_]slots=(.*)")
_LINES = "one host per line as 'node1 slots=8', 'node1:8' or 'node1'; users, ports and IPv6 belong in ssh's config"
_FILTERS = "write hosts as 'node1:0,1@node2'"

Slots = tuple[int, ...] | None


@dataclass(frozen=True)
class Host:
    """A host of the run.

    Attributes:
        name: name for ssh.
        slots: device ids, which become CUDA_VISIBLE_DEVICES; None: all GPUs that preflight finds.
    """

    name: str
    slots: Slots


def parse_hostfile(path: Path) -> list[Host]:
    """Read hosts in file order. Raises UserError (file and line) for duplicates, slots < 1 and unknown words."""
    try:
        text = path.read_text(encoding="utf-8-sig")
    except OSError as e:
        remedy = "copy hostfile.example and name your hosts"
        raise UserError(f"--hostfile {path}", f"cannot be read ({e.strerror})", remedy) from None
    except UnicodeDecodeError:
        raise UserError(f"--hostfile {path}", "is not a text file", _LINES) from None
    lines: dict[str, int] = {}
    hosts = []
    for number, line in enumerate(text.splitlines(), start=1):
        words = line.split("#", 1)[0].split()
        if words:
            where = f"{path}:{number}: {' '.join(words)!r}"
            host = _parse_line(words, where)
            known = lines.setdefault(host.name, number)
            require(known == number, where, f"{host.name} is already on line {known}", "keep one line per host")
            hosts.append(host)
    require(bool(hosts), f"--hostfile {path}", "names no host", _LINES)
    return hosts


def _parse_line(words: list[str], where: str) -> Host:
    match = _HOST.fullmatch(words[0])
    if match is None:
        raise UserError(where, f"{words[0]!r} is not a host name", _LINES)
    count, further = match["slots"], [word for word in words[1:] if not _MOST.match(word)]
    if further and count is None and further[0].startswith("slots="):
        count = further.pop(0).removeprefix("slots=")
    if further:
        raise UserError(where, f"unknown word {further[0]!r}", _LINES)
    if count is None:
        require(not any(map(_MOST.match, words)), where, "max_slots goes with slots", "write slots=N before it")
        return Host(match["name"], None)
    require(re.fullmatch(r"-?[0-9]+", count) is not None, where, f"slots {count!r} is not a whole number", _LINES)
    ok = len(count) < 10 and int(count) <= _MOST_SLOTS
    require(ok, where, f"slots {count[:20]} must be at most {_MOST_SLOTS}", "write the number of its GPUs")
    require(int(count) >= 1, where, f"slots {count} must be at least 1", "remove or comment out the host instead")
    for most in (found[1] for word in words if (found := _MOST.match(word))):
        fits = re.fullmatch("[0-9]{1,9}", most) is not None and int(most) >= int(count)
        require(
            fits, where, f"max_slots {most[:20]!r} is not a number of at least slots {count}", "correct or remove it"
        )
    return Host(match["name"], tuple(range(int(count))))


def filter_hosts(hosts: Sequence[Host], include: str | None, exclude: str | None) -> list[Host]:
    """Apply `--include` or `--exclude`, keeping the order of the hostfile.

    Raises UserError if both are given, for an unknown host or slot, and if no host remains.
    """
    both = include is not None and exclude is not None
    require(not both, "--include with --exclude", "only one of them may be given", "use one of the two")
    if include is not None:
        flag, text = "--include", include
    elif exclude is not None:
        flag, text = "--exclude", exclude
    else:
        return list(hosts)
    named_slots = dict(_parse_filter(text, flag))
    for name, ids in named_slots.items():
        _check_known(hosts, name, ids, f"{flag} {text}")
    remaining = []
    for host in hosts:
        named, ids = host.name in named_slots, named_slots.get(host.name)
        if include is not None:
            slots = (ids or host.slots) if named else ()
        elif ids and host.slots:
            slots = tuple(slot for slot in host.slots if slot not in ids)
        else:
            slots = () if named else host.slots
        if slots != ():
            remaining.append(replace(host, slots=slots))
    require(bool(remaining), f"{flag} {text}", "leaves no host", f"the hostfile has {', '.join(h.name for h in hosts)}")
    return remaining


def _parse_filter(text: str, flag: str) -> Iterator[tuple[str, Slots]]:
    """Yield the host names of a filter, each with the slots that it names."""
    seen = set()
    for part in text.split("@"):
        match = re.fullmatch(r"([^:,\s]+)(?::([0-9]{1,6}(?:,[0-9]{1,6})*))?", part)
        if match is None:
            raise UserError(f"{flag} {text!r}", f"{part!r} is not HOST or HOST:ID,ID", _FILTERS)
        name, ids = match[1], [int(i) for i in match[2].split(",")] if match[2] else []
        require(name not in seen, f"{flag} {text!r}", f"{name} is named twice", _FILTERS)
        require(len(set(ids)) == len(ids), f"{flag} {text!r}", f"{name} has a slot named twice", _FILTERS)
        seen.add(name)
        yield name, tuple(ids) or None


def _check_known(hosts: Sequence[Host], name: str, ids: Slots, flag: str) -> None:
    by_name = {host.name: host for host in hosts}
    require(name in by_name, flag, f"{name} is not in the hostfile", f"it has {', '.join(by_name)}")
    if ids is not None:
        slots = by_name[name].slots
        if slots is None:
            raise UserError(flag, f"{name} has no slot count in the hostfile", f"write '{name} slots=N' there")
        unknown = ", ".join(str(i) for i in ids if i not in slots)
        require(not unknown, flag, f"{name} has no slot {unknown}", f"it has 0 to {len(slots) - 1}")


def check_equal_slots(hosts: Sequence[Host]) -> int:
    """Return the common slot count. Raises UserError if counts differ or are unknown."""
    groups: dict[int, list[str]] = defaultdict(list)
    for host in hosts:
        if host.slots is None:
            unknown = "its slot count is unknown (only preflight counts its GPUs)"
            raise UserError(f"host {host.name}", unknown, f"write '{host.name} slots=N' in the hostfile")
        groups[len(host.slots)].append(host.name)
    counts = "; ".join(f"{count}: {', '.join(names)}" for count, names in sorted(groups.items()))
    rule = "every host must have the same number, or tensor-parallel groups would straddle hosts"
    remedy = "reduce the larger ones with --include HOST:ID,ID, or skip hosts with --exclude"
    require(len(groups) == 1, f"slot counts {counts}", rule, remedy)
    return next(iter(groups))


@dataclass(frozen=True)
class LaunchSpec:
    """Settings that all hosts share. Paths are on the hosts, which all have the checkout in the same place."""

    script: tuple[str, ...]
    workdir: str
    python: str
    master_addr: str
    master_port: int
    log_dir: str
    env: Mapping[str, str] = field(default_factory=dict)
    ssh_config: str | None = None
    agent: str = str(Path(__file__).with_name("agent.py"))


def launch_environment(inherited: Mapping[str, str], flags: Mapping[str, str]) -> dict[str, str]:
    """Collect the variables for the hosts: our defaults < the launcher's own that affect ranks < `--env`.

    No secrets: the ssh command line is visible to all users of both machines. CUDA_VISIBLE_DEVICES and similar
    variables belong to each host.
    """
    forwarded = tuple(v for v in VARIABLES if v != "CUDA_") + ("CUDA_DEVICE_MAX_CONNECTIONS",)
    return {**_DEFAULTS, **{k: v for k, v in inherited.items() if k.startswith(forwarded)}, **flags}


def torchrun_command(python: str, flags: Mapping[str, object], script: Sequence[str]) -> list[str]:
    """Build a torchrun command line; as a module of `python`, it is that environment's torchrun.

    No `--max-restarts`: restarting the ranks of one host would leave the others in collectives that never complete, so
    the launcher restarts all hosts at once.
    """
    words = [word for name, value in flags.items() for word in (name, str(value))]
    # torchrun substitutes ${local_rank} in the words of the script, and reads "$$" as "$". Behind "--" it takes none of
    # them for its own: else "--n" of a script would be an abbreviation, and a "--" of its own would be gone.
    module, words_of_script = (["-m"], script[1:]) if script[0] == "-m" else ([], script)
    escaped = [word.replace("$", "$$") for word in words_of_script]
    torchrun = "megalite.extras.launch.elastic" if survives_hosts(script) else "torch.distributed.run"
    return [python, "-m", torchrun, *words, *module, "--", *escaped]


def host_command(spec: LaunchSpec, hosts: Sequence[Host], node_rank: int) -> list[str]:
    """Build the ssh command line for one host."""
    host = hosts[node_rank]
    assert host.slots is not None
    env = {**spec.env, "CUDA_VISIBLE_DEVICES": ",".join(map(str, host.slots))}
    flags = {
        "--nnodes": len(hosts),
        "--nproc-per-node": len(host.slots),
        "--node-rank": node_rank,
        "--master-addr": spec.master_addr,
        "--master-port": spec.master_port,
        # Each rank writes its own files, and torchrun prints them line by line: ranks share no pipe, and a launcher
        # that prints slowly never blocks a rank.
        "--log-dir": os.path.join(spec.log_dir, host.name),
        "--tee": 3,
    }
    torchrun = torchrun_command(spec.python, flags, spec.script)
    agent = [spec.python, spec.agent, *(["--kill"] if survives_hosts(spec.script) else [])]
    run = ["exec", "env", *(f"{k}={v}" for k, v in env.items()), *agent, *torchrun]
    return [*ssh_prefix(spec.ssh_config), host.name, f"{shlex.join(['cd', spec.workdir])} && {shlex.join(run)}"]


def ssh_prefix(ssh_config: str | None) -> list[str]:
    """Build the start of an ssh command that never prompts; a dead connection is detected after 11 s (3 keepalives)."""
    options = {"BatchMode": "yes", "ConnectTimeout": "10", "ServerAliveInterval": "3", "ServerAliveCountMax": "3"}
    # A new connection: a shared one (ControlMaster) has the keepalive settings it was opened with.
    options["ControlPath"] = "none"
    config = [] if ssh_config is None else ["-F", ssh_config]
    return ["ssh", *config, "-T", *(word for k, v in options.items() for word in ("-o", f"{k}={v}"))]
