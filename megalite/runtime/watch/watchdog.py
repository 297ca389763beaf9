"""The watchdog process of one rank: kills the rank when it hangs, and names the rank that all others wait for.

`megalite.runtime.watch.heartbeat` starts it; standard library only. The rank writes heartbeats into shared memory. All
else comes from the operating system, and from the reports of the other ranks' watchdogs, small files that are written
only when something hangs.
"""

from __future__ import annotations

import contextlib
import json
import mmap
import os
import signal
import socket
import struct
import sys
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, NoReturn

from megalite.core.base.console import write_or_drop
from megalite.runtime.base.child import children, is_stopped, process_state, readable, usage, waits_for_disk
from megalite.runtime.base.untrusted import BadFile, read_json
from megalite.runtime.watch.deaths import Deaths
from megalite.runtime.watch.hang_report import STOPPED, WAITING, HangReport, culprit_of
from megalite.runtime.watch.stacks import is_complete, is_waiting, main_thread

# Heartbeat: count, step, patience, phase, operation.
LAYOUT = struct.Struct("<Qqb63s64s")
# What counts as life besides a heartbeat: nothing; processor time, I/O and waits for the disk of the rank's children (a
# save); also its own processor time and I/O (set-up and the first step, where files are read and kernels compiled).
STRICT = 0
CHILDREN = 1
OWN = 2
# Nothing is expected: a notebook holds the run between two steps.
IDLE = 3
# A rank without a heartbeat for this many timeouts is killed even if it is busy, or if its peers do not report.
MAX_TIMEOUTS = 10
# After the timeout, peers get at most this long to report what they are doing.
GRACE_S = 5.0
STACKS_SIGNAL = signal.SIGUSR2
# A rank that is stuck in the kernel never prints its stacks; one that gets no processor may take long.
_STACKS_S = 10.0
# The flight recorder of NCCL asks the GPU for the state of each entry.
_ANSWER_S = 10.0
_MAX_ANSWER = 1 << 16
# A reader that only lags behind.
_READER_PATIENCE_S = 0.5
# A working process uses at least this share of a processor, or moves this many bytes, between two checks.
_WORKING_SHARE, _WORKING_BYTES = 0.05, 1 << 16


@dataclass(frozen=True)
class Beat:
    """One heartbeat."""

    count: int
    step: int
    patience: int
    phase: str
    operation: str

    @classmethod
    def read(cls, memory: Any) -> Beat:
        """Read the heartbeat that stands in shared memory."""
        count, step, patience, phase, operation = LAYOUT.unpack_from(memory)
        text = (raw.rstrip(b"\0").decode(errors="replace") for raw in (phase, operation))
        return cls(count, step, patience, *text)

    @property
    def place(self) -> str:
        """Describe where the rank is."""
        last = f", last operation: {self.operation}" if self.operation else ""
        return f"{self.phase} (step {self.step}{last})"


class Watchdog:
    """Watches one rank until the rank exits or is killed."""

    def __init__(
        self,
        rank: int,
        world: int,
        pid: int,
        timeout: float,
        folder: str,
        beats: int,
        stacks: int,
        alive: int,
        flight: int,
        cuda: bool = False,
        recovers: bool = False,
    ) -> None:
        self.rank = rank
        self.world = world
        self.pid = pid
        self.timeout = timeout
        self.cuda = cuda
        self.recovers = recovers
        self.folder = Path(folder)
        self.stacks = stacks
        self.alive = alive
        self.flight = flight
        self.memory = mmap.mmap(beats, LAYOUT.size, prot=mmap.PROT_READ)
        self.tick = min(1.0, timeout / 20)
        self.report: HangReport | None = None
        self.deaths = Deaths(self.folder, world)
        # Seconds without a heartbeat at the last look at the stacks, and whether they showed a wait for the GPU.
        self.last_look, self.polls_gpu = 0.0, False

    def run(self) -> None:
        """Watch until the rank says goodbye through the pipe, or is gone: the kernel closes it however a rank dies."""
        # A report of an earlier watchdog of this rank, which was killed. Of a folder that cannot be, the rank says so.
        with contextlib.suppress(OSError):
            self.file_of(self.rank).unlink()
        last, effort = Beat.read(self.memory), self.effort(STRICT)
        silent = without_beat = 0.0
        before, parent = time.monotonic(), os.getppid()
        # A process that the rank has forked may keep the pipe open.
        while not readable(self.alive, self.tick) and os.getppid() == parent:
            now = time.monotonic()
            # Anything that also stops the watchdog (Ctrl-Z, a frozen container, a starved host) is not a hang.
            passed = min(now - before, 2 * self.tick)
            silent = silent + passed
            without_beat = without_beat + passed
            before = now
            beat = Beat.read(self.memory)
            previous, effort = effort, self.effort(beat.patience)
            if beat.count != last.count or beat.patience == IDLE:
                last = beat
                silent = 0.0
                without_beat = 0.0
                self.last_look = 0.0
                self.polls_gpu = False
                self.withdraw()
            elif dead := self.deaths.overdue(without_beat, passed):
                self.kill(f"{dead}; killing this rank, which did not end by itself")
            elif without_beat < MAX_TIMEOUTS * self.timeout and (
                self.saves(beat.patience) or (works(previous, effort, passed) and not self.polls(without_beat))
            ):
                silent = 0.0
                self.withdraw()
            elif silent >= self.timeout:
                self.decide(beat, silent)
        said_goodbye = readable(self.alive, 0) and os.read(self.alive, 1)
        if self.world > 1 and not said_goodbye:
            self.deaths.record(self.rank, self.pid, Beat.read(self.memory).place)

    def polls(self, without_beat: float) -> bool:
        """Whether the processor time is that of a wait for the GPU, which never sleeps; looks once per timeout."""
        if self.cuda and without_beat >= self.last_look + self.timeout:
            self.last_look, self.polls_gpu = without_beat, is_waiting(self.dump(), cuda=True)
        return self.polls_gpu

    def effort(self, patience: int) -> tuple[int, int] | None:
        """Measure processor ticks and bytes moved so far by the processes that count under `patience`."""
        if patience == STRICT:
            return None
        pids = [self.pid, *children(self.pid)] if patience == OWN else children(self.pid)
        return usage([pid for pid in pids if pid != os.getpid()])

    def saves(self, patience: int) -> bool:
        """Whether a child that counts under `patience` waits for the disk, which is neither processor time nor I/O."""
        return patience != STRICT and any(waits_for_disk(pid) for pid in children(self.pid) if pid != os.getpid())

    def withdraw(self) -> None:
        """Withdraw the report: the rank is making progress again."""
        if self.report is not None:
            self.report = None
            with contextlib.suppress(OSError):
                self.file_of(self.rank).unlink()
            self.log("recovered")

    def decide(self, beat: Beat, silent: float) -> None:
        """Report this rank; kill it when every rank hangs, or this one is stopped."""
        # Inspecting a process (gdb, py-spy) stops it for a moment.
        was_stopped = self.report is not None and self.report.state == STOPPED
        if self.report is None or (was_stopped and not is_stopped(self.pid)):
            self.report = self.look(beat, silent)
            self.publish(self.report)
            self.log(f"no heartbeat for {silent:.0f} s: {self.report}; stacks in {self.folder}")
        stopped = self.report.state == STOPPED and silent >= self.timeout + min(GRACE_S, self.timeout / 4)
        last = stopped or silent >= MAX_TIMEOUTS * self.timeout
        # Reports are read only once all are there: thousands of watchdogs look every second.
        if not (last or self.all_reported()):
            return
        reports = {report.rank: report for report in [*self.published(), self.report]}
        complete = len(reports) == self.world
        # Where guards recover the run, the culprit's watchdog kills it, and they all others.
        if last or (complete and not (self.recovers and culprit_of(reports).rank != self.rank)):
            self.end(reports)

    def look(self, beat: Beat, silent: float) -> HangReport:
        """Find out what the rank is doing."""
        stopped = is_stopped(self.pid)
        stacks = "" if stopped else self.dump()
        if stopped or is_stopped(self.pid):
            state = STOPPED
        elif not is_complete(stacks):
            state = f"unable to print its stacks (process state {process_state(self.pid) or 'unknown'})"
        elif is_waiting(stacks, self.cuda):
            state = WAITING
        else:
            state = f"at {main_thread(stacks)[0]}"
        # The thread that answers needs the interpreter, which a rank in a collective does not hold.
        waits_in, begun = ask(self.flight) if state == WAITING else ("", True)
        return HangReport(
            self.rank,
            socket.gethostname(),
            self.pid,
            beat.step,
            beat.place,
            silent,
            state,
            stacks,
            progress=beat.count if self.cuda else 0,
            waits_in=waits_in,
            gpu_waits=begun or not self.cuda,
        )

    def dump(self) -> str:
        """Get the rank's Python stacks; faulthandler prints them whatever the interpreter is busy with."""
        os.ftruncate(self.stacks, 0)
        os.lseek(self.stacks, 0, os.SEEK_SET)
        with contextlib.suppress(OSError):
            os.kill(self.pid, STACKS_SIGNAL)
        text, deadline = "", time.monotonic() + _STACKS_S
        while not is_complete(text) and time.monotonic() < deadline and not readable(self.alive, 0.1):
            text = os.pread(self.stacks, 1 << 20, 0).replace(b"\0", b"").decode(errors="replace")
        return text

    def file_of(self, rank: int) -> Path:
        """Return the file of a rank's report."""
        return self.folder / f"rank_{rank}.json"

    def publish(self, report: HangReport) -> None:
        """Write the report for the other watchdogs, and for later inspection."""
        part = self.folder / f"rank_{self.rank}.part"
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
            part.write_text(json.dumps(asdict(report)))
            os.replace(part, self.file_of(self.rank))
            (self.folder / f"rank_{self.rank}.stacks.txt").write_text(report.stacks)
        except OSError as e:
            self.log(f"cannot write {self.folder} ({e.strerror}): the other ranks do not see this report")

    def all_reported(self) -> bool:
        """Check whether there is a report of every other rank, by the names of the files alone."""
        try:
            names = set(os.listdir(self.folder))
        except OSError:
            names = set()
        return all(rank == self.rank or self.file_of(rank).name in names for rank in range(self.world))

    def published(self) -> list[HangReport]:
        """Read the reports of all watchdogs."""
        reports = []
        for path in self.folder.glob("rank_*.json"):
            with contextlib.suppress(OSError, BadFile, TypeError):
                reports.append(HangReport(**read_json(path, 16 << 20)))
        return reports

    def end(self, reports: dict[int, HangReport]) -> None:
        """Name the culprit and kill this rank."""
        culprit = culprit_of(reports)
        missing = [rank for rank in range(self.world) if rank not in reports]
        if missing and culprit.state == WAITING:
            named = f"ranks {missing}, which do not report: they are busy for too long, or they or their hosts are gone"
        else:
            named = f"{culprit}" + (f"; no report from ranks {missing}" if missing else "")
        stacks = culprit.stacks and f"\nstacks of rank {self.rank}:\n{culprit.stacks}"
        self.kill(f"all ranks are waiting for {named}; killing this rank{stacks if culprit.rank == self.rank else ''}")

    def kill(self, why: str) -> NoReturn:
        """Kill this rank and end."""
        self.log(why)
        with contextlib.suppress(ProcessLookupError):
            os.kill(self.pid, signal.SIGKILL)
        # The kernel closes the pipe when the rank is gone.
        readable(self.alive, 10.0)
        sys.exit(0)

    def log(self, text: str) -> None:
        """Print complete lines without waiting for a reader: what follows is more important."""
        lines = "".join(f"[rank {self.rank}] watchdog: {line}\n" for line in text.splitlines())
        with contextlib.suppress(OSError):
            write_or_drop(2, lines.encode(), _READER_PATIENCE_S)


def ask(flight: int) -> tuple[str, bool]:
    """Ask the rank at the other end of a socket for its `flight.oldest_unfinished`; ("", True): it does not answer."""
    question = bytes([time.monotonic_ns() % 256])
    text = b""
    deadline = time.monotonic() + _ANSWER_S
    with contextlib.suppress(OSError, ValueError, TypeError):
        os.write(flight, question)
        while readable(flight, max(0.0, deadline - time.monotonic())) and (part := os.read(flight, _MAX_ANSWER)):
            *lines, text = (text + part).split(b"\n")
            for number, what, begun in map(json.loads, lines):
                if number == question[0]:
                    return str(what), bool(begun)
    return "", True


def works(previous: tuple[int, int] | None, effort: tuple[int, int] | None, seconds: float) -> bool:
    """Whether the processes used processor time or moved bytes between two checks."""
    if previous is None or effort is None:
        return False
    # Sums shrink when a child exits: a sign of life as well.
    ticks, moved = abs(effort[0] - previous[0]), abs(effort[1] - previous[1])
    return ticks >= max(1.0, _WORKING_SHARE * seconds * os.sysconf("SC_CLK_TCK")) or moved >= _WORKING_BYTES


def main(**settings: Any) -> None:
    """Watch a rank; takes the arguments of `Watchdog`."""
    Watchdog(**settings).run()
