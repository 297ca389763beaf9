"""The processes of one start of a training run: started in one of three ways, ended in time, none left behind."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from megalite.runtime.base.child import children, process_state
from tests.faults.zygote import ROOT, Zygote
from tests.ranks import reserve_port
from tests.soak.fuzz import Failed

# Long after any end that is due: a limit on a hang, not on a busy machine.
END_S = 600.0
GONE_S = 120.0


class Attempt:
    """The processes of one start of a run.

    Attributes:
        mark: a value of SOAK_ID in the environment of everything that the ranks start.
        ranks: their process ids.
        launcher: the process that started them, if it is one of the run's own.
    """

    def __init__(self, folder: Path, world: int, number: int) -> None:
        self.folder, self.world = folder, world
        self.mark = f"{os.getpid()}-{folder.name}-{number}"
        self.env = {"SOAK_ID": self.mark, "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": "", "PYTHONPATH": str(ROOT)}
        self.ranks: list[int] = []
        self.launcher: subprocess.Popen[bytes] | None = None
        self._job: Any = None
        self._processes: list[subprocess.Popen[bytes]] = []
        self.log = folder / f"stderr_{number}.txt"

    def fork(self, zygote: Zygote, words: list[str], env: dict[str, str]) -> None:
        """Start the ranks by forking: quick, and the library of disk faults is only in what they start."""
        self._job = zygote.start(words, self.world, self.folder, env={**self.env, **env})
        self.ranks = [self._job.pid(rank) for rank in range(self.world)]

    def launch(self, words: list[str], env: dict[str, str]) -> None:
        """Start the ranks with `megalite train`, in a session of their own."""
        command = [sys.executable, "-m", "megalite", "train", "--nproc", str(self.world), *words]
        self.launcher = self._start(command, env)

    def start_each(self, commands: Iterable[list[str]], env: dict[str, str]) -> None:
        """Start one process a rank, each with a command of its own."""
        base = {**env, "WORLD_SIZE": str(self.world), "MASTER_PORT": str(reserve_port())}
        for rank, command in enumerate(commands):
            self._start(command, {**base, "RANK": str(rank), "LOCAL_RANK": str(rank)})
        self.ranks = [p.pid for p in self._processes]

    def _start(self, command: list[str], env: dict[str, str]) -> subprocess.Popen[bytes]:
        with self.log.open("ab") as log:
            process = subprocess.Popen(
                command, env={**os.environ, **self.env, **env}, cwd=ROOT, stdout=log, stderr=log, start_new_session=True
            )
        self._processes.append(process)
        return process

    def ended(self) -> bool:
        if self._job is not None:
            self._job.zygote.listen(0)
            return all(name in self._job.zygote.codes for name in self._job.names)
        return all(p.poll() is not None for p in self._processes)

    def codes(self) -> list[int]:
        if self._job is not None:
            return [self._job.zygote.codes[name] for name in self._job.names]
        return [p.returncode for p in self._processes]

    def text(self) -> str:
        """Everything that the ranks and their children said."""
        paths = self._job.errors if self._job is not None else [self.log]
        return "\n".join(p.read_text(errors="replace") for p in paths if p.exists())

    def find_ranks(self) -> list[int]:
        """The ranks, also those that a launcher has started meanwhile."""
        if self.launcher is not None:
            found = [pid for pid in children(self.launcher.pid) if "pretrain_gpt.py" in _command(pid)]
            self.ranks = found if len(found) == self.world else self.ranks
        return self.ranks

    def child(self, rank: int, module: str) -> int | None:
        """A rank's writer or watchdog."""
        found = [pid for pid in children(self.ranks[rank]) if module in _command(pid)]
        return found[0] if found else None

    def left(self) -> dict[int, str]:
        """Processes of this attempt that live."""
        found = {}
        for path in Path("/proc").glob("[0-9]*"):
            with contextlib.suppress(OSError):
                pid = int(path.name)
                marked = f"SOAK_ID={self.mark}".encode() in (path / "environ").read_bytes().split(b"\0")
                if (marked or pid in self.ranks) and process_state(pid) not in ("", "Z"):
                    found[pid] = f"{process_state(pid)} {_command(pid)[:300]}"
        return found

    def wait(self, seconds: float) -> None:
        """Wait for the end of everything; raises `Failed` for a hang or an orphan, and ends them."""
        deadline = time.monotonic() + seconds
        try:
            while not self.ended():
                if time.monotonic() > deadline:
                    raise Failed(f"not over after {seconds:.0f} s: {self.left()}\n{self.text()[-3000:]}")
                time.sleep(0.02)
            deadline = time.monotonic() + GONE_S
            while left := self.left():
                if time.monotonic() > deadline:
                    raise Failed(
                        f"processes are left behind {GONE_S:.0f} s after the end: {left}\n{self.text()[-3000:]}"
                    )
                time.sleep(0.05)
        finally:
            for pid in self.left():
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)

    def send(self, pids: Iterable[int | None], signum: signal.Signals) -> None:
        for pid in pids:
            if pid is not None:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signum)


def _command(pid: int) -> str:
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace")
    except OSError:
        return ""
