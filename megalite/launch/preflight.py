"""Preflight: ask every host at once, before any GPU is touched, and show one table."""

from __future__ import annotations

import contextlib
import json
import os
import shlex
import signal
import subprocess
import threading
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from megalite.errors import UserError
from megalite.launch.commands import SSH_FAILED, LaunchSpec, ssh_prefix
from megalite.launch.hostfile import Host
from megalite.launch.probe import MARKER
from megalite.log import logger

PROBE_TIMEOUT_S = 10.0
MAX_CLOCK_SKEW_S = 2.0
# NCCL's shared-memory transport fails inside the 64 MB that containers get by default.
MIN_SHM_BYTES = 512 * 2**20
MIN_DISK_BYTES = 2**30
_PARALLEL_PROBES = 64


@dataclass(frozen=True)
class Answer:
    """One host's answer: `facts` of probe.py, or None and what was said instead (by ssh, unless it got through).

    `clock_s`: host minus launcher, seconds. `slow`: Python runs there, but the answers took too long.
    """

    facts: Mapping[str, Any] | None
    clock_s: float = 0.0
    error: str = ""
    reached: bool = False
    slow: bool = False


@dataclass
class Report:
    """The table (a row a host, "!" behind a bad cell), the problems with their cures, and notes that stop nothing."""

    rows: list[list[str]] = field(default_factory=list)
    problems: list[tuple[str, str, str]] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)


def script_inputs(script: Sequence[str]) -> tuple[list[str], list[str]]:
    """(files, data prefixes) that the training command names: the script, `--config` files, `--data` prefixes."""
    files, data, flag = [script[0]], [], ""
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
    """Whether the training command asks for `--device cpu`."""
    return "--device=cpu" in script or ("--device", "cpu") in zip(script, script[1:])


def run_preflight(
    spec: LaunchSpec, hosts: Sequence[Host], timeout_s: float = PROBE_TIMEOUT_S
) -> tuple[list[Host], Report]:
    """Probe all hosts (`timeout_s` each); hosts without a slot count get their GPU count."""
    files, data = script_inputs(spec.script)
    ask: dict[str, Any] = {
        "python": spec.python,
        "dir": spec.workdir,
        "package": str(Path(spec.agent).parents[1]),
        "files": files,
        "data": data,
        "master": spec.master_addr,
    }

    def one(rank: int) -> Answer:
        port = spec.master_port if rank == 0 else None
        return probe_host([*ssh_prefix(spec.ssh_config), hosts[rank].name], {**ask, "port": port}, timeout_s)

    with ThreadPoolExecutor(_PARALLEL_PROBES) as pool:
        answers = list(pool.map(one, range(len(hosts))))
    resolved = [
        replace(h, slots=tuple(range(a.facts["gpus"]))) if h.slots is None and a.facts else h
        for h, a in zip(hosts, answers)
    ]
    return resolved, judge(spec, hosts, answers)


def probe_host(ssh: Sequence[str], ask: Mapping[str, Any], timeout_s: float) -> Answer:
    """Run probe.py on a host, with the chosen Python or, where that is missing, with whatever python3 there is."""
    choose = 'P=$1; command -v "$P" >/dev/null 2>&1 || P=python3; exec "$P" - "$2"'
    remote = shlex.join(["sh", "-c", choose, "sh", ask["python"], json.dumps(ask)])
    process = subprocess.Popen(
        [*ssh, remote],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        errors="replace",
        start_new_session=True,
    )
    assert process.stdin is not None
    assert process.stdout is not None
    assert process.stderr is not None
    expired = threading.Event()

    def expire() -> None:
        # Told before the kill, which wakes the reader below.
        expired.set()
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)

    timer = threading.Timer(timeout_s, expire)
    timer.start()
    marked: list[tuple[float, str]] = []
    try:
        try:
            process.stdin.write(Path(__file__).with_name("probe.py").read_text(encoding="utf-8"))
            process.stdin.close()
        except BrokenPipeError:
            pass  # ssh has given up; its stderr says why
        for line in process.stdout:
            if line.startswith(MARKER):
                marked.append((time.time(), line.removeprefix(MARKER)))
        error = " ".join(process.stderr.read().split())
        process.wait()
    finally:
        timer.cancel()
    if len(marked) < 2:
        if expired.is_set():
            return Answer(None, error=f"no answer within {timeout_s:g} s", slow=bool(marked))
        # ssh's own failures are 255; anything else was said on the host.
        reached = process.returncode != SSH_FAILED
        return Answer(None, error=error or f"exit code {process.returncode}", reached=reached)
    (heard, clock), (_, facts) = marked
    return Answer(json.loads(facts), clock_s=float(clock) - heard, reached=True)


def judge(spec: LaunchSpec, hosts: Sequence[Host], answers: Sequence[Answer]) -> Report:
    """Compare the answers with what the run needs and with each other."""
    report = Report()
    common = _Common(answers, cpu=wants_cpu(spec.script))
    for rank, (host, answer) in enumerate(zip(hosts, answers)):
        cells = _judge_host(spec, host, answer, common, is_master=rank == 0)
        row = [host.name]
        for text, bad, cure in cells:
            row.append(text + " !" if bad else text)
            if bad:
                report.problems.append((host.name, bad, cure))
        report.rows.append(row + ["-"] * (len(COLUMNS) - len(row)))
    report.notes = common.notes(spec)
    return report


COLUMNS = ("host", "ssh", "python", "torch", "nccl", "code", "gpus", "/dev/shm", "disk", "clock", "data", "master")
_Cell = tuple[str, str, str]  # text, what is wrong ("" when all is well), cure


class _Common:
    """What most hosts say, so that the odd one out is the one that gets named."""

    def __init__(self, answers: Sequence[Answer], cpu: bool) -> None:
        self.facts = [a.facts for a in answers if a.facts is not None]
        self.cpu = cpu or not any(f["gpus"] for f in self.facts)
        clocks = sorted(a.clock_s for a in answers if a.facts is not None)
        self.clock_s = clocks[len(clocks) // 2] if clocks else 0.0

    def most(self, key: str, entry: str | None = None) -> Any:
        values = [json.dumps(f[key] if entry is None else f[key].get(entry)) for f in self.facts]
        return json.loads(Counter(values).most_common(1)[0][0])

    def notes(self, spec: LaunchSpec) -> list[str]:
        found = []
        for name in sorted({k for f in self.facts for k in f["env"]} - set(spec.env) - {"CUDA_VISIBLE_DEVICES"}):
            values = {f["env"].get(name) for f in self.facts}
            if len(values) > 1:
                shown = ", ".join("unset" if v is None else repr(v) for v in sorted(values, key=str))
                found.append(f"{name} differs between hosts ({shown}); set it for all with --env {name}=...")
        if self.cpu and self.facts and not wants_cpu(spec.script):
            found.append("no host has a GPU: the ranks will run on CPU")
        return found


def _judge_host(spec: LaunchSpec, host: Host, answer: Answer, common: _Common, is_master: bool) -> list[_Cell]:
    facts = answer.facts
    if facts is None and answer.slow:
        return [("slow", answer.error, "look at its load and file systems, or give --preflight-timeout")]
    if facts is None and answer.reached:
        wrong = f"neither {spec.python} nor a python3 of 3.8 or later runs there: {answer.error}"
        return [("ok", "", ""), ("-", wrong, "install the environment there, or give --python PATH")]
    if facts is None:
        return [("no", f"ssh: {answer.error}", f"make 'ssh {host.name}' work without a password (key, known_hosts)")]
    same = f"make it the same on every host, or leave {host.name} out with --exclude {host.name}"
    cells: list[_Cell] = [("ok", "", "")]
    python, usual = facts["python"], common.most("python")
    if python is None:
        cells.append(("-", f"{spec.python} does not exist", "install the environment there, or give --python PATH"))
    else:
        cells.append((python, "" if python == usual else f"Python {python}, others have {usual}", same))
    for package in ("torch", "nccl"):
        has, usual = facts["versions"].get(package), common.most("versions", package)
        wrong = "" if has == usual else f"{package} {has}, others have {usual}"
        if package == "torch" and has is None:
            wrong = f"torch is not installed for {spec.python}"
        cells.append((has or "-", wrong if python else "", same))
    cells.append(_code_cell(spec, facts, common, same))
    cells.append(_gpu_cell(host, facts, common))
    small = not common.cpu and facts["shm"] < MIN_SHM_BYTES
    wrong = f"/dev/shm has {_size(facts['shm'])}, NCCL needs {_size(MIN_SHM_BYTES)}" if small else ""
    cells.append((_size(facts["shm"]), wrong, "mount it larger (docker --shm-size, Kubernetes emptyDir medium Memory)"))
    disk = facts["disk"]
    wrong = f"{_size(disk)} free in {spec.workdir}" if disk is not None and disk < MIN_DISK_BYTES else ""
    cells.append((_size(disk), wrong, "free some space: logs and checkpoints go there"))
    skew = answer.clock_s - common.clock_s
    wrong = f"its clock is {skew:+.1f} s off" if abs(skew) > MAX_CLOCK_SKEW_S else ""
    cells.append((f"{skew:+.1f} s", wrong, "start NTP (chrony, systemd-timesyncd) there"))
    cells.append(_data_cell(facts, common))
    cells.append(_master_cell(spec, facts, is_master))
    return cells


def _code_cell(spec: LaunchSpec, facts: Mapping[str, Any], common: _Common, same: str) -> _Cell:
    if not facts["dir"]:
        return (
            "-",
            f"directory {spec.workdir} does not exist",
            "put the checkout in the same place on every host, or --dir",
        )
    if facts["code"] is None:
        return "-", f"no megalite in {Path(spec.agent).parents[1]}", "put the checkout in the same place on every host"
    missing = [name for name, found in facts["files"].items() if found is None]
    if missing:
        return facts["code"], f"no {', '.join(missing)} in {spec.workdir}", "copy it there, or give --dir"
    if facts["code"] != common.most("code"):
        return facts["code"], "its megalite is another version than the others'", same
    for name, found in facts["files"].items():
        if found != common.most("files", name):
            return facts["code"], f"its {name} is not the others'", same
    return facts["code"], "", ""


def _gpu_cell(host: Host, facts: Mapping[str, Any], common: _Common) -> _Cell:
    count = facts["gpus"]
    if host.slots is None and count == 0:
        return "0", "has no GPU to count as slots", f"write '{host.name} slots=N' for N ranks on CPU"
    if host.slots is not None and not common.cpu and max(host.slots) >= count:
        return (
            str(count),
            f"{count} GPUs, the hostfile needs device {max(host.slots)}",
            "lower slots= or look at nvidia-smi there",
        )
    return str(count), "", ""


def _data_cell(facts: Mapping[str, Any], common: _Common) -> _Cell:
    for prefix, sizes in facts["data"].items():
        if sizes is None:
            return "no", f"{prefix}.bin or .idx is missing", "copy or mount the data there"
        usual = common.most("data", prefix)
        if sizes != usual:
            return (
                "differs",
                f"{prefix} has {sizes} bytes, others {usual}",
                "copy the data again: ranks must read the same",
            )
    return ("ok" if facts["data"] else "-"), "", ""


def _master_cell(spec: LaunchSpec, facts: Mapping[str, Any], is_master: bool) -> _Cell:
    if not facts["master"]:
        return "unknown", f"cannot resolve {spec.master_addr}", "give --master-addr a name or address all hosts know"
    if is_master and not facts["port"]:
        return "busy", f"port {spec.master_port} is in use", "give another --master-port, or end what listens there"
    return "ok", "", ""


def _size(count: int | None) -> str:
    return "-" if count is None else f"{count / 2**30:.1f} GiB"


def table(rows: Sequence[Sequence[str]]) -> str:
    """The report's rows under their headings, columns aligned."""
    every = [COLUMNS, *rows]
    widths = [max(len(row[i]) for row in every) for i in range(len(COLUMNS))]
    return "\n".join("  ".join(cell.ljust(width) for cell, width in zip(row, widths)).rstrip() for row in every)


def require_green(report: Report) -> None:
    """Show the table and the notes. Raises UserError naming host and cure when a cell is bad."""
    logger.info("preflight\n%s", table(report.rows))
    for note in report.notes:
        logger.warning("preflight: %s", note)
    if not report.problems:
        return
    for host, wrong, cure in report.problems[1:]:
        logger.error("preflight: %s: %s; %s", host, wrong, cure)
    host, wrong, cure = report.problems[0]
    more = f" (and {len(report.problems) - 1} more above)" if len(report.problems) > 1 else ""
    raise UserError(f"preflight: host {host}", wrong, cure + more)
