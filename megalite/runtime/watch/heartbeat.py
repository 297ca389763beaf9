"""The rank's side of its watchdog: heartbeats in shared memory, one write of about 150 bytes each."""

from __future__ import annotations

import contextlib
import faulthandler
import mmap
import os
import secrets
import subprocess
import threading
from functools import cache
from pathlib import Path

from megalite.core.base.log import logger
from megalite.core.mesh.collectives import gather_texts
from megalite.core.mesh.context import ParallelContext
from megalite.core.pipeline.observe import Observer
from megalite.core.pipeline.schedule import Op
from megalite.runtime.base.child import shared_memory, start_child
from megalite.runtime.base.waits import on_wait
from megalite.runtime.watch import watchdog
from megalite.runtime.watch.flight import answering_thread
from megalite.runtime.watch.watchdog import LAYOUT, STACKS_SIGNAL, STRICT

# The phase in which a rank waits for the thread that reads ahead.
READING = "reading data"
# A host that kills it this often has no memory for it.
_MAX_STARTS = 10
# This process's ends of the pipes to its watchdogs.
_pipes: set[int] = set()


def say_goodbye() -> None:
    """Tell the watchdog that this process ends by itself now, and that the others know why."""
    for pipe in list(_pipes):
        # A watchdog that was killed reads nothing.
        with contextlib.suppress(OSError):
            os.write(pipe, b".")


class Heartbeat(Observer):
    """Reports to this rank's watchdog process where the rank is; starts and ends that process. Every rank makes one.

    Args:
        run_dir: the run's folder; reports go to logs/watchdog_ID/ in it, and only when something hangs.
        ctx: this rank's axes.
        timeout: seconds without a heartbeat before the watchdog acts; 0: no watchdog.
        recovers: whether guards replace a rank that is killed.
    """

    def __init__(self, run_dir: Path, ctx: ParallelContext, timeout: float, recovers: bool = False) -> None:
        # A name of its own: reports of an earlier run must not be mistaken for this one's.
        name = gather_texts(secrets.token_hex(4), ctx.world, ctx.device)[0]
        self._files = [shared_memory("heartbeat", LAYOUT.size), shared_memory("stacks", 0)] if timeout else []
        self._memory = mmap.mmap(self._files[0] if timeout else -1, LAYOUT.size)
        self._count, self._now = 0, (0, STRICT, b"")
        self._process: subprocess.Popen[bytes] | None = None
        self._starts, self._thread = 0, threading.get_ident()
        on_wait.append(self.alive)
        self.beat("set-up", patience=watchdog.OWN)
        if timeout:
            settings = {
                "rank": ctx.rank,
                "world": ctx.world.size,
                "timeout": timeout,
                "cuda": ctx.device.type == "cuda",
                "recovers": recovers,
            }
            self._settings: dict[str, object] = settings | {
                "folder": str(run_dir.resolve() / "logs" / f"watchdog_{name}")
            }
            self._start()

    def _start(self) -> None:
        beats, stacks = self._files
        # faulthandler writes from the signal's handler, without the interpreter lock.
        faulthandler.register(STACKS_SIGNAL, file=stacks, all_threads=True, chain=False)
        read_end, self._alive = os.pipe()
        _pipes.add(self._alive)
        with answering_thread(bool(self._settings["cuda"])) as flight:
            files = {"beats": beats, "stacks": stacks, "alive": read_end, "flight": flight}
            self._starts += 1
            self._process = start_child(
                watchdog.__name__, self._settings | {"pid": os.getpid(), **files}, list(files.values()), isolated=True
            )
        os.close(read_end)

    def beat(self, phase: str, step: int = 0, patience: int = STRICT) -> None:
        """Report that the rank has entered `phase`.

        Args:
            phase: what it is doing, at most 63 bytes.
            step: number of the step it is in or after.
            patience: `watchdog.STRICT`, or what else counts as a sign of life during this phase: CHILDREN, OWN.
        """
        if step != self._now[0]:
            self._restart_if_gone()
        self._now = step, patience, phase.encode()
        self._write(b"")

    def alive(self) -> None:
        """Report that this rank waits for a store, which is bounded, and for nothing else."""
        if threading.get_ident() == self._thread or self._now[2] == READING.encode():
            self._write(b"a store is at work")

    def _restart_if_gone(self) -> None:
        """Start another watchdog if this one was killed: unwatched, a rank that hangs would never be named."""
        if self._process is None or self._process.poll() is None:
            return
        event = f"the watchdog of this rank ended (code {self._process.returncode})"
        if self._starts == _MAX_STARTS:
            logger.warning(f"{event} for the {_MAX_STARTS}th time: a hang of this rank will not be noticed")
            self.close()
            return
        logger.warning(f"{event}: starting another")
        self._close_pipe()
        self._start()

    def _close_pipe(self) -> None:
        _pipes.remove(self._alive)
        os.close(self._alive)

    def _write(self, operation: bytes) -> None:
        self._count += 1
        LAYOUT.pack_into(self._memory, 0, self._count, *self._now, operation)

    def begin(self, op: Op) -> None:
        """Report an operation of the pipeline, as part of the current phase."""
        self._write(_description(op))

    def finished(self) -> None:
        """Report that no operation is left in this step."""
        self._write(b"all of the schedule")

    def close(self) -> None:
        """End the watchdog. May be called more than once."""
        if self.alive in on_wait:
            on_wait.remove(self.alive)
        if self._process is None:
            return
        say_goodbye()
        self._close_pipe()
        self._process.wait()
        self._process = None
        faulthandler.unregister(STACKS_SIGNAL)
        for file in self._files:
            os.close(file)


@cache
def _description(op: Op) -> bytes:
    # Formatted once per operation, so that a heartbeat costs only a write.
    return f"{op.kind} of micro-batch {op.microbatch} on stage {op.stage}".encode()
