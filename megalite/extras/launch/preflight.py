"""Preflight: query all hosts at once, before any GPU is used, and show one table."""

from __future__ import annotations

import contextlib
import json
import os
import shlex
import signal
import subprocess
import tempfile
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from megalite.core.base.errors import UserError
from megalite.core.base.log import logger
from megalite.extras.launch import probe
from megalite.extras.launch.hosts import SSH_FAILED, Host, LaunchSpec, ssh_prefix
from megalite.extras.launch.probe import MARKER, MAX_CLOCK_SKEW_S

PROBE_TIMEOUT_S = 10.0
# NCCL's shared-memory transport fails inside the 64 MB that containers get by default.
MIN_SHM_BYTES = 512 * 2**20
MIN_DISK_BYTES = 2**30
COLUMNS = ("host", "ssh", "python", "torch", "nccl", "code", "gpus", "/dev/shm", "disk", "clock", "data", "master")
_PARALLEL_PROBES = 64
_SAME_PLACE = "put the checkout in the same place on every host"
_INSTALL = "install the environment there, or give --python PATH"

_Cell = tuple[str, str, str]  # text, what is wrong ("" if nothing is), remedy
_OK = ("ok", "", "")


@dataclass(frozen=True)
class Answer:
    """The answer of one host.

    Attributes:
        facts: result of `megalite.extras.launch.probe.probe`; None if there is no answer.
        clock_s: the host's clock minus the launcher's, in seconds.
        error: reason why there is no answer.
        reached: whether ssh could log in.
        slow: whether Python runs there, but took too long to answer.
    """

    facts: Mapping[str, Any] | None
    clock_s: float = 0.0
    error: str = ""
    reached: bool = False
    slow: bool = False


@dataclass
class PreflightReport:
    """Result of preflight.

    Attributes:
        rows: table row of each host, with "!" after bad cells.
        problems: (host, what is wrong, remedy) of each bad cell.
        notes: remarks that do not stop the launch.
    """

    rows: list[list[str]] = field(default_factory=list)
    problems: list[tuple[str, str, str]] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)


def script_inputs(script: Sequence[str]) -> tuple[list[str], list[str]]:
    """List (files, data prefixes) of the training command: the script (no `-m MODULE`), `--config` files, `--data`."""
    files: list[str] = [] if script[0] == "-m" else [script[0]]
    data: list[str] = []
    flag = ""
    for word in script[1:]:
        name, equals, value = word.partition("=")
        if word.startswith("--"):
            flag, word = name, value
            if not equals:
                continue
        if flag == "--config":
            files.append(word)
        elif flag in ("--data", "--valid-data", "--data-path") and not _is_number(word):
            data.append(word)
    return files, data


def _is_number(word: str) -> bool:
    try:
        float(word)
    except ValueError:
        return False
    return True


def wants_cpu(script: Sequence[str]) -> bool:
    """Whether the training command has `--device cpu`."""
    return "--device=cpu" in script or ("--device", "cpu") in zip(script, script[1:])


def run_preflight(
    spec: LaunchSpec, hosts: Sequence[Host], timeout_s: float = PROBE_TIMEOUT_S
) -> tuple[list[Host], PreflightReport]:
    """Probe all hosts at once, each for `timeout_s`; hosts without a slot count get their number of GPUs."""
    files, data = script_inputs(spec.script)
    package = str(Path(spec.agent).parents[2])
    ask = {"python": spec.python, "dir": spec.workdir, "package": package, "files": files, "data": data}

    def one(rank: int) -> Answer:
        port = spec.master_port if rank == 0 else None
        ssh = [*ssh_prefix(spec.ssh_config), hosts[rank].name]
        return probe_host(ssh, {**ask, "master": spec.master_addr, "port": port}, timeout_s)

    with ThreadPoolExecutor(_PARALLEL_PROBES) as pool:
        answers = list(pool.map(one, range(len(hosts))))
    resolved = [
        replace(h, slots=tuple(range(a.facts["gpus"]))) if h.slots is None and a.facts else h
        for h, a in zip(hosts, answers)
    ]
    return resolved, check_hosts(spec, hosts, answers)


def probe_host(ssh: Sequence[str], ask: Mapping[str, Any], timeout_s: float) -> Answer:
    """Run probe.py on a host, with the chosen Python or, if that is missing, with any python3."""
    choose = 'P=$1; command -v "$P" >/dev/null 2>&1 || P=python3; exec "$P" - "$2"'
    remote = shlex.join(["sh", "-c", choose, "sh", ask["python"], json.dumps(ask)])
    pipe, source = subprocess.PIPE, Path(probe.__file__).read_text(encoding="utf-8")
    with tempfile.TemporaryFile() as said:
        # A new session, so that a ProxyCommand below ssh, which keeps the pipes open, is killed with it.
        process = subprocess.Popen(
            [*ssh, remote], stdin=pipe, stdout=said, stderr=pipe, text=True, errors="replace", start_new_session=True
        )
        try:
            _, error = process.communicate(source, timeout_s)
            late = False
        except subprocess.TimeoutExpired:
            late = True
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.communicate()
        # When the answer came: the connection may be closed seconds later.
        now = os.fstat(said.fileno()).st_mtime
        said.seek(0)
        out = said.read().decode(errors="replace")
    if late:
        return Answer(None, error=f"no answer within {timeout_s:g} s", slow=MARKER in out)
    marked = [line.removeprefix(MARKER) for line in out.splitlines() if line.startswith(MARKER)]
    if len(marked) < 2:
        # ssh's own failures are 255; any other code comes from the host.
        error = " ".join(error.split()) or f"exit code {process.returncode}"
        return Answer(None, error=error, reached=process.returncode != SSH_FAILED)
    facts = json.loads(marked[1])
    return Answer(facts, clock_s=facts.pop("clock") - now, reached=True)


class _Majority:
    """What most hosts answer, so that the exceptions can be named."""

    def __init__(self, answers: Sequence[Answer], cpu: bool) -> None:
        self.facts = [a.facts for a in answers if a.facts is not None]
        self.cpu = cpu or not any(f["gpus"] for f in self.facts)
        clocks = sorted(a.clock_s for a in answers if a.facts is not None)
        self.clock_s = clocks[len(clocks) // 2] if clocks else 0.0
        self._most: dict[tuple[str, str | None], Any] = {}

    def most(self, key: str, entry: str | None = None) -> Any:
        if (key, entry) not in self._most:  # asked for every host
            values = [json.dumps(f[key] if entry is None else f[key].get(entry)) for f in self.facts]
            self._most[key, entry] = json.loads(Counter(values).most_common(1)[0][0])
        return self._most[key, entry]

    def odd(self, name: str, has: Any, key: str, entry: str | None = None) -> str:
        """Return what is wrong with a value that is not the usual one; "" for the usual one."""
        usual = self.most(key, entry)
        return "" if has == usual else f"{name} {has}, others have {usual}"

    def notes(self, spec: LaunchSpec) -> Iterator[str]:
        for name in sorted({k for f in self.facts for k in f["env"]} - set(spec.env) - {"CUDA_VISIBLE_DEVICES"}):
            values = {f["env"].get(name) for f in self.facts}
            if len(values) > 1:
                shown = ", ".join("unset" if v is None else repr(v) for v in sorted(values, key=str))
                yield f"{name} differs between hosts ({shown}); set it for all with --env {name}=..."
        if self.cpu and self.facts and not wants_cpu(spec.script):
            yield "no host has a GPU: the ranks will run on CPU"


def check_hosts(spec: LaunchSpec, hosts: Sequence[Host], answers: Sequence[Answer]) -> PreflightReport:
    """Compare the answers with what the run requires, and with each other."""
    common = _Majority(answers, cpu=wants_cpu(spec.script))
    report = PreflightReport(notes=list(common.notes(spec)))
    for rank, (host, answer) in enumerate(zip(hosts, answers)):
        cells = list(_cells(spec, host, answer, common, is_master=rank == 0))
        row = [host.name, *(text + " !" * bool(wrong) for text, wrong, _ in cells)]
        report.rows.append(row + ["-"] * (len(COLUMNS) - len(row)))
        report.problems += [(host.name, wrong, cure) for _, wrong, cure in cells if wrong]
    return report


def _cells(spec: LaunchSpec, host: Host, answer: Answer, common: _Majority, is_master: bool) -> Iterator[_Cell]:
    """Yield the cells of a host's row, without its name."""
    facts = answer.facts
    if facts is None:
        if answer.slow:
            yield "slow", answer.error, "check its load and file systems, or give --preflight-timeout"
        elif answer.reached:
            yield _OK
            yield "-", f"neither {spec.python} nor a python3 of 3.8 or later runs there: {answer.error}", _INSTALL
        else:
            yield "no", f"ssh: {answer.error}", f"make 'ssh {host.name}' work without a password (key, known_hosts)"
        return
    same = f"make it the same on every host, or skip {host.name} with --exclude {host.name}"
    python, versions = facts["python"], facts["versions"]
    yield _OK
    if python is None:
        yield "-", f"{spec.python} does not exist", _INSTALL
    else:
        yield python, common.odd("Python", python, "python"), same
    for package in ("torch", "nccl"):
        wrong = common.odd(package, versions.get(package), "versions", package)
        if package == "torch" and package not in versions:
            wrong = f"torch is not installed for {spec.python}"
        yield versions.get(package, "-"), wrong if python else "", same
    yield facts["code"] or "-", *_code_problem(spec, facts, common, same)
    yield str(facts["gpus"]), *_gpu_problem(host, facts["gpus"], common)
    shm = facts["shm"]
    disk = facts["disk"]
    skew = answer.clock_s - common.clock_s
    wrong = f"/dev/shm has {_size(shm)}, NCCL needs {_size(MIN_SHM_BYTES)}"
    cure = "mount it larger (docker --shm-size, Kubernetes emptyDir medium Memory)"
    yield _size(shm), wrong if not common.cpu and shm < MIN_SHM_BYTES else "", cure
    wrong = f"{_size(disk)} free in {spec.workdir}" if disk is not None and disk < MIN_DISK_BYTES else ""
    yield _size(disk), wrong, "free some space: logs and checkpoints go there"
    wrong = f"its clock is {skew:+.1f} s off" if abs(skew) > MAX_CLOCK_SKEW_S else ""
    yield f"{skew:+.1f} s", wrong, "start NTP (chrony, systemd-timesyncd) there"
    yield _data_cell(facts, common)
    if not facts["master"]:
        wrong = f"cannot resolve {spec.master_addr}"
        yield "unknown", wrong, "give --master-addr a name or address all hosts know"
    elif is_master and not facts["port"]:
        yield "busy", f"port {spec.master_port} is in use", "give another --master-port, or end what listens there"
    else:
        yield _OK


def _code_problem(spec: LaunchSpec, facts: Mapping[str, Any], common: _Majority, same: str) -> tuple[str, str]:
    """Return (what is wrong with the checkout, remedy)."""
    if not facts["dir"]:
        return f"directory {spec.workdir} does not exist", f"{_SAME_PLACE}, or --dir"
    if facts["code"] is None:
        return f"no megalite in {Path(spec.agent).parents[2]}", _SAME_PLACE
    missing = [name for name, found in facts["files"].items() if found is None]
    if missing:
        return f"no {', '.join(missing)} in {spec.workdir}", "copy it there, or give --dir"
    if facts["code"] != common.most("code"):
        return "its megalite is another version than the others'", same
    odd = [name for name, found in facts["files"].items() if found != common.most("files", name)]
    return (f"its {odd[0]} is not the others'" if odd else ""), same


def _gpu_problem(host: Host, count: int, common: _Majority) -> tuple[str, str]:
    """Return (what is wrong with the number of GPUs, remedy)."""
    if host.slots is None:
        return "has no GPU to count as slots" * (count == 0), f"write '{host.name} slots=N' for N ranks on CPU"
    needed = max(host.slots)
    wrong = f"{count} GPUs, the hostfile needs device {needed}" if needed >= count and not common.cpu else ""
    return wrong, "lower slots=, or check nvidia-smi there"


def _data_cell(facts: Mapping[str, Any], common: _Majority) -> _Cell:
    for prefix, sizes in facts["data"].items():
        if sizes is None:
            return "no", f"{prefix}.bin or .idx is missing", "copy or mount the data there"
        if sizes != (usual := common.most("data", prefix)):
            wrong = f"{prefix} has {sizes} bytes, others {usual}"
            return "differs", wrong, "copy the data again: ranks must read the same"
    return ("ok" if facts["data"] else "-"), "", ""


def _size(count: int | None) -> str:
    return "-" if count is None else f"{count / 2**30:.1f} GiB"


def table(rows: Sequence[Sequence[str]]) -> str:
    """Format the report's rows under their headings, columns aligned."""
    every = [COLUMNS, *rows]
    widths = [max(len(row[i]) for row in every) for i in range(len(COLUMNS))]
    return "\n".join("  ".join(cell.ljust(width) for cell, width in zip(row, widths)).rstrip() for row in every)


def require_green(report: PreflightReport) -> None:
    """Show the table and the notes. Raises UserError naming host and remedy if a cell is bad."""
    for line in ("preflight", *table(report.rows).splitlines()):
        logger.info(line)
    for note in report.notes:
        logger.warning(f"preflight: {note}")
    if not report.problems:
        return
    for host, wrong, cure in report.problems[1:]:
        logger.error(f"preflight: {host}: {wrong}; {cure}")
    host, wrong, cure = report.problems[0]
    more = f" (and {len(report.problems) - 1} more above)" if len(report.problems) > 1 else ""
    raise UserError(f"preflight: host {host}", wrong, cure + more)
