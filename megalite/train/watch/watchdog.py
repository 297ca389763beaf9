"""The watchdog process of one rank: ends it when it hangs, and says which rank all the others are waiting for.

Started by `megalite.train.watch.heartbeat`, standard library only. The rank writes heartbeats into shared
memory; what else the watchdog knows comes from the operating system and from the reports of the other ranks' watchdogs,
small files that are written only when something hangs.
"""

from __future__ import annotations

import contextlib
import json
import mmap
import os
import re
import select
import signal
import socket
import struct
import sys
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from megalite.child import stat_of

# Heartbeat: count, step, patience, phase, operation.
LAYOUT = struct.Struct("<Qqb63s64s")
# What counts as life besides a heartbeat: nothing; the processor time and I/O of the rank's children (a save); also its
# own (set-up and the first step, where files are read and kernels compiled).
STRICT, CHILDREN, OWN = 0, 1, 2
# However lively, a rank without a heartbeat for so many timeouts is ended, and so is one whose peers do not report.
MOST_TIMEOUTS = 10
# After the timeout, peers get at most this long to report what they are doing.
GRACE_S = 5.0
STACKS_SIGNAL = signal.SIGUSR2
# A rank that is stuck in the kernel never prints its stacks; one that gets no processor may take long.
_STACKS_S = 10.0
# A process that works uses this share of a processor or moves so many bytes between two looks.
_WORKING_SHARE, _WORKING_BYTES = 0.05, 1 << 16


@dataclass(frozen=True)
class Beat:
    """One heartbeat, as read."""

    count: int
    step: int
    patience: int
    phase: str
    operation: str

    @classmethod
    def read(cls, memory: Any) -> Beat:
        count, step, patience, phase, operation = LAYOUT.unpack_from(memory)
        text = (raw.rstrip(b"\0").decode(errors="replace") for raw in (phase, operation))
        return cls(count, step, patience, *text)

    @property
    def place(self) -> str:
        """Where the rank is, for people."""
        last = f", last operation: {self.operation}" if self.operation else ""
        return f"{self.phase} (step {self.step}{last})"


@dataclass(frozen=True)
class Report:
    """A rank that hangs, as its watchdog sees it.

    Attributes:
        silent: seconds since its last heartbeat.
        state: `STOPPED`, `WAITING` or what else it is doing.
        stacks: its Python stacks, as far as it could print them.
    """

    rank: int
    host: str
    pid: int
    step: int
    place: str
    silent: float
    state: str
    stacks: str

    @property
    def suspicion(self) -> tuple[int, int, float]:
        """Smallest for the rank that holds the others up: what it does speaks first, then who is furthest behind."""
        kind = {STOPPED: 0, STARVED: 2, WAITING: 3}.get(self.state, 1)
        return kind, self.step, -self.silent

    def __str__(self) -> str:
        return f"rank {self.rank} ({self.host}, pid {self.pid}), {self.state}, in {self.place} for {self.silent:.0f} s"


STOPPED, WAITING = "stopped", "waiting for other ranks"
# It may be waiting like the others: it has had no processor to print its stacks.
STARVED = "unable to print its stacks (process state R)"


class Watchdog:
    """Watches one rank until the rank ends or is ended."""

    def __init__(
        self, rank: int, world: int, pid: int, timeout: float, folder: str, beats: int, stacks: int, alive: int
    ) -> None:
        self.rank, self.world, self.pid, self.timeout = rank, world, pid, timeout
        self.folder, self.stacks, self.alive = Path(folder), stacks, alive
        self.memory = mmap.mmap(beats, LAYOUT.size, prot=mmap.PROT_READ)
        self.tick = min(1.0, timeout / 20)
        self.report: Report | None = None

    def run(self) -> None:
        """Until the rank's end of the pipe is closed, which the kernel does however the rank dies."""
        last, effort = Beat.read(self.memory), self.effort(STRICT)
        silent = without_beat = 0.0
        before = time.monotonic()
        while not select.select([self.alive], [], [], self.tick)[0]:
            now = time.monotonic()
            # Whatever stops the watchdog too (Ctrl-Z, a frozen container, a starved host) is no sign of a hang.
            passed = min(now - before, 2 * self.tick)
            silent, without_beat, before = silent + passed, without_beat + passed, now
            beat = Beat.read(self.memory)
            previous, effort = effort, self.effort(beat.patience)
            if beat.count != last.count:
                last, silent, without_beat = beat, 0.0, 0.0
                self.withdraw()
            elif without_beat < MOST_TIMEOUTS * self.timeout and works(previous, effort, passed):
                silent = 0.0
                self.withdraw()
            elif silent >= self.timeout:
                self.judge(beat, silent)

    def effort(self, patience: int) -> tuple[int, int] | None:
        """Processor ticks and bytes moved so far by whom `patience` trusts."""
        if patience == STRICT:
            return None
        pids = [self.pid, *children(self.pid)] if patience == OWN else children(self.pid)
        return usage([pid for pid in pids if pid != os.getpid()])

    def withdraw(self) -> None:
        """The rank moves after all."""
        if self.report is not None:
            self.report = None
            with contextlib.suppress(OSError):
                self.file_of(self.rank).unlink()
            self.say("goes on after all")

    def judge(self, beat: Beat, silent: float) -> None:
        """Report this rank; end it when every rank hangs, or this one is stopped."""
        # Whoever looks into a process (gdb, py-spy) stops it for a moment.
        seen_stopped = self.report is not None and self.report.state == STOPPED
        if self.report is None or (seen_stopped and not is_stopped(self.pid)):
            self.report = self.look(beat, silent)
            self.publish(self.report)
            self.say(f"no heartbeat for {silent:.0f} s: {self.report}; stacks in {self.folder}")
        reports = {report.rank: report for report in [*self.published(), self.report]}
        everyone = len(reports) == self.world
        stopped = self.report.state == STOPPED and silent >= self.timeout + min(GRACE_S, self.timeout / 4)
        if everyone or stopped or silent >= MOST_TIMEOUTS * self.timeout:
            self.end(reports)

    def look(self, beat: Beat, silent: float) -> Report:
        """What the rank is doing."""
        stopped = is_stopped(self.pid)
        stacks = "" if stopped else self.dump()
        if stopped or is_stopped(self.pid):
            doing = STOPPED
        elif not is_whole(stacks):
            doing = f"unable to print its stacks (process state {process_state(self.pid) or 'unknown'})"
        elif is_waiting(stacks):
            doing = WAITING
        else:
            doing = f"at {main_thread(stacks)[0]}"
        return Report(self.rank, socket.gethostname(), self.pid, beat.step, beat.place, silent, doing, stacks)

    def dump(self) -> str:
        """The rank's Python stacks; faulthandler prints them whatever the interpreter is busy with."""
        os.ftruncate(self.stacks, 0)
        os.lseek(self.stacks, 0, os.SEEK_SET)
        with contextlib.suppress(OSError):
            os.kill(self.pid, STACKS_SIGNAL)
        text, deadline = "", time.monotonic() + _STACKS_S
        while not is_whole(text) and time.monotonic() < deadline and not select.select([self.alive], [], [], 0.1)[0]:
            text = os.pread(self.stacks, 1 << 20, 0).replace(b"\0", b"").decode(errors="replace")
        return text

    def file_of(self, rank: int) -> Path:
        return self.folder / f"rank_{rank}.json"

    def publish(self, report: Report) -> None:
        """For the other watchdogs, and for whoever looks into it afterwards."""
        part = self.folder / f"rank_{self.rank}.part"
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
            part.write_text(json.dumps(asdict(report)))
            os.replace(part, self.file_of(self.rank))
            (self.folder / f"rank_{self.rank}.stacks.txt").write_text(report.stacks)
        except OSError as e:
            self.say(f"cannot write {self.folder} ({e.strerror}): the other ranks do not learn of it")

    def published(self) -> list[Report]:
        found = []
        for path in self.folder.glob("rank_*.json"):
            with contextlib.suppress(OSError, ValueError, TypeError):
                found.append(Report(**json.loads(path.read_text())))
        return found

    def end(self, reports: dict[int, Report]) -> None:
        """Name the culprit and kill the rank."""
        culprit = min(reports.values(), key=lambda report: report.suspicion)
        missing = [rank for rank in range(self.world) if rank not in reports]
        unheard = f"; no report from ranks {missing}" if missing else ""
        self.say(f"all wait for {culprit}{unheard}; ending this rank")
        if culprit.rank == self.rank and culprit.stacks:
            self.say(f"stacks of rank {self.rank}:\n{culprit.stacks}")
        with contextlib.suppress(ProcessLookupError):
            os.kill(self.pid, signal.SIGKILL)
        # The kernel closes the pipe when the rank is gone.
        select.select([self.alive], [], [], 10.0)
        sys.exit(0)

    def say(self, text: str) -> None:
        """One write, so that lines of several ranks stay whole."""
        lines = "".join(f"[rank {self.rank}] watchdog: {line}\n" for line in text.splitlines())
        with contextlib.suppress(OSError):
            os.write(2, lines.encode())


def works(previous: tuple[int, int] | None, effort: tuple[int, int] | None, seconds: float) -> bool:
    """Whether processor time or bytes moved between two looks."""
    if previous is None or effort is None:
        return False
    # Sums shrink when a child ends, which is life as well.
    ticks, moved = abs(effort[0] - previous[0]), abs(effort[1] - previous[1])
    return ticks >= max(1.0, _WORKING_SHARE * seconds * os.sysconf("SC_CLK_TCK")) or moved >= _WORKING_BYTES


def children(pid: int) -> list[int]:
    """All processes that a process has started, and those that they have."""
    found: list[int] = []
    threads: list[str] = []
    # It may end meanwhile, and so may one of its threads.
    with contextlib.suppress(OSError):
        threads = os.listdir(f"/proc/{pid}/task")
    for thread in threads:
        with contextlib.suppress(OSError):
            for child in map(int, Path(f"/proc/{pid}/task/{thread}/children").read_text().split()):
                found += [child, *children(child)]
    return found


def usage(pids: list[int]) -> tuple[int, int]:
    """Processor ticks and bytes read and written, of all these processes together."""
    ticks = moved = 0
    for pid in pids:
        with contextlib.suppress(OSError):
            if fields := stat_of(pid):
                ticks += int(fields[11]) + int(fields[12])
            moved += sum(int(n) for n in re.findall(r"[rw]char: (\d+)", Path(f"/proc/{pid}/io").read_text()))
    return ticks, moved


def process_state(pid: int) -> str:
    """The letter that ps shows: R, S, D, T, Z; empty where there is no /proc."""
    return next(iter(stat_of(pid)), "")


def is_stopped(pid: int) -> bool:
    """By a signal or a debugger."""
    return process_state(pid) in ("T", "t")


def is_whole(stacks: str) -> bool:
    """Whether a faulthandler dump is all there: the main thread comes last, and its outermost frame, or what stands for
    the rest of a deep stack."""
    return stacks.endswith((" in <module>\n", " in _run_module_as_main\n", "\n  ...\n"))


def main_thread(stacks: str) -> list[str]:
    """The main thread's frames in a faulthandler dump, innermost first: "path, line N in function"."""
    threads = [
        re.findall(r'^  File "(.+)", (line \d+ in .+)$', block, re.MULTILINE)
        for block in re.split(r"^(?=Thread |Current thread |Stack )", stacks, flags=re.MULTILINE)
    ]
    threads = [frames for frames in threads if frames]
    for frames in threads:
        if frames[-1][1].endswith("in <module>"):
            return [f"{path}, {line}" for path, line in frames]
    return [f"{path}, {line}" for path, line in threads[-1]] if threads else []


def is_waiting(stacks: str) -> bool:
    """Whether the main thread sits in a collective: in the wait for it, or (CUDA) in reading what came of it."""
    frames = main_thread(stacks)
    if not frames:
        return False
    path = frames[0].rpartition(", ")[0]
    return path.endswith("dist/collectives.py") or "/torch/distributed/" in path


def main(**settings: Any) -> None:
    """Watch the rank that `Watchdog`'s arguments describe."""
    Watchdog(**settings).run()
