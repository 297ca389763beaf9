"""Faults of one attempt of a training run: signals to its processes, disks that fail, power cuts, cut networks."""

from __future__ import annotations

import errno
import os
import signal
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from random import Random

from tests.faults.zygote import Zygote
from tests.soak.attempt import END_S, Attempt
from tests.soak.fuzz import Failed
from tests.soak.history import losses
from tests.soak.network import Network

# Short enough to wait for, long enough that a busy machine reaches it only in a stopped process.
_TIMEOUT_S = 15
WRITER, WATCHDOG, TOKENIZER = "checkpoint.writer", "watch.watchdog", "stream.worker"
_ANY_END = (0, 1, 2, -signal.SIGKILL, -signal.SIGTERM)


@dataclass(frozen=True)
class Fault:
    """A fault and when it happens.

    Attributes:
        name: key of `KINDS`.
        step: it happens after this step of the attempt.
        after: seconds after that.
        rank: drawn from 0 to 11, and taken modulo the number of ranks.
        how: of a disk fault.
        launched: by `megalite train`.
        disk_library: of disk faults.
        codes: exit codes that may follow.
    """

    name: str
    step: int
    after: float
    rank: int
    how: str = ""
    launched: bool = False
    disk_library: Path | None = None
    codes: tuple[int, ...] = _ANY_END

    def __str__(self) -> str:
        how = f" ({self.how})" if self.how else ""
        return (
            f"{self.name}{how} of rank {self.rank} {self.after:.3f} s after step {self.step}"
            + ", launched" * self.launched
        )

    def world(self, wanted: int) -> int:
        """The number of ranks: a cut network is between two, and a launcher takes seconds for each."""
        return 2 if self.name.startswith("network") else min(wanted, 2) if self.launched else wanted

    def run(self, attempt: Attempt, zygote: Zygote, words: list[str]) -> bool:
        """Start the ranks, make the fault happen, and wait for the end of everything.

        Returns:
            Whether the ranks, and what it hits, still lived when it was due.
        """
        words = [*words, "--watchdog-timeout", str(_TIMEOUT_S if self.name in _HANGS else 600)]
        if self.name == "disk_warns":
            words += ["--save-errors", "warn"]
        if self.name.startswith("network"):
            with Network() as network:
                cut_s = None if self.name in _HANGS else 3 * self.after
                return network.run(attempt, words, lambda: self._reached(attempt), cut_s)
        env = self._disk(attempt)
        if self.launched:
            attempt.launch(words, env)
        else:
            attempt.fork(zygote, words, env)
        if hit := self._reached(attempt):
            time.sleep(self.after)
            hit = self._act(attempt, zygote, words)
        attempt.wait(END_S)
        if self.name == "power_cut":
            lose_unsynced(attempt.folder / "run" / "checkpoints", attempt.folder / "journal")
        return hit

    def _disk(self, attempt: Attempt) -> dict[str, str]:
        if self.disk_library is None:
            return {}
        env = {"LD_PRELOAD": str(self.disk_library), "SOAK_DISK_PATH": str(attempt.folder / "run" / "checkpoints")}
        if self.name == "power_cut":
            (attempt.folder / "journal").unlink(missing_ok=True)
            return env | {"SOAK_DISK_JOURNAL": str(attempt.folder / "journal")}
        return env | {"SOAK_DISK_FAULT": self.how}

    def _reached(self, attempt: Attempt) -> bool:
        """Wait until the attempt has done the step; False if it ended before."""
        before, deadline = len(losses(attempt.folder / "run")), time.monotonic() + END_S
        while len(losses(attempt.folder / "run")) < before + self.step:
            if attempt.ended():
                return False
            if time.monotonic() > deadline:
                attempt.wait(0)
            time.sleep(0.005)
        return len(attempt.find_ranks()) == attempt.world

    def _act(self, attempt: Attempt, zygote: Zygote, words: list[str]) -> bool:
        """Return whether there was a process to hit."""
        rank = self.rank % attempt.world
        one, every = [attempt.ranks[rank]], attempt.ranks
        acts: dict[str, tuple[Sequence[int | None], signal.Signals]] = {
            "kill_rank": (one, signal.SIGKILL),
            "kill_all": (every, signal.SIGKILL),
            "power_cut": (list(attempt.left()), signal.SIGKILL),
            "kill_writer": ([attempt.child(rank, WRITER)], signal.SIGKILL),
            "kill_watchdog": ([attempt.child(rank, WATCHDOG)], signal.SIGKILL),
            "kill_tokenizer": ([attempt.child(rank, TOKENIZER)], signal.SIGKILL),
            "kill_launcher": ([attempt.launcher.pid] if attempt.launcher else [], signal.SIGKILL),
            "sigterm": (one, signal.SIGTERM),
            "sigterm_all": (every, signal.SIGTERM),
            "sigterm_launcher": ([attempt.launcher.pid] if attempt.launcher else [], signal.SIGTERM),
            "pause_rank": (one, signal.SIGSTOP),
            "pause_all": (every, signal.SIGSTOP),
            "pause_writer": ([attempt.child(rank, WRITER)], signal.SIGSTOP),
            "stop_rank": (one, signal.SIGSTOP),
            "stop_writer": ([attempt.child(rank, WRITER)], signal.SIGSTOP),
        }
        target, signum = acts.get(self.name, ([], signal.SIGCONT))
        attempt.send(target, signum)
        if self.name.startswith("pause"):
            time.sleep(3 * self.after)
            attempt.send(target, signal.SIGCONT)
        if self.name == "second_start":
            self._start_second(attempt, zygote, words)
        return not target or any(pid is not None for pid in target)

    def _start_second(self, attempt: Attempt, zygote: Zygote, words: list[str]) -> None:
        """A second job in the same folder; the first must not notice."""
        # Stopped, so that it does not end before the other one has looked.
        attempt.send(attempt.ranks, signal.SIGSTOP)
        other = Attempt(attempt.folder, 1, 1000)
        other.fork(zygote, _without_layout(words), {})
        try:
            other.wait(END_S)
        finally:
            attempt.send(attempt.ranks, signal.SIGCONT)
        if other.codes() != [2] or "is in use by run" not in other.text():
            raise Failed(f"a second start was not refused: {other.codes()}\n{other.text()[-2000:]}")


def _without_layout(words: Sequence[str]) -> list[str]:
    """The words without the options of a layout of several ranks."""
    out, skip = [], False
    for word in words:
        if skip:
            skip = False
        elif word in ("--tp", "--pp", "--vp"):
            skip = True
        else:
            out.append(word)
    return out


def lose_unsynced(folder: Path, journal: Path) -> None:
    """Cut every file back to what was flushed to the disk: all that is sure to be there after a power cut."""
    size: dict[int, int] = {}
    for line in journal.read_text().splitlines() if journal.exists() else []:
        what, inode, now = line.split()
        size.setdefault(int(inode), 0)
        if what == "s":
            size[int(inode)] = int(now)
    for path in folder.rglob("*"):
        if path.is_file() and not path.is_symlink():
            keep = size.get(path.stat().st_ino)
            if keep is not None and keep < path.stat().st_size:
                os.truncate(path, keep)


# The watchdogs must end these.
_HANGS = ("stop_rank", "stop_writer", "network_cut")
_DISK = ("disk", "disk_warns", "disk_short", "disk_slow", "disk_kill", "power_cut")
# What ends well: the fault must not be noticed, or is answered by saving.
_UNHARMED = (
    *(
        "kill_watchdog",
        "kill_tokenizer",
        "pause_rank",
        "pause_all",
        "pause_writer",
        "second_start",
        "sigterm",
        "sigterm_all",
    ),
    *("sigterm_launcher", "disk_warns", "disk_short", "disk_slow", "network_pause"),
)
_LAUNCHED = ("kill_launcher", "sigterm_launcher")
# Kind of fault -> how often it is drawn.
_OFTEN = "kill_rank kill_all kill_writer disk disk_kill power_cut"
_AT_TIMES = (
    "sigterm sigterm_all sigterm_launcher kill_launcher kill_watchdog kill_tokenizer pause_rank pause_all pause_writer"
)
_SELDOM = "stop_rank stop_writer network_cut network_pause"
KINDS = {
    **dict.fromkeys(_OFTEN.split(), 6),
    **dict.fromkeys([*_AT_TIMES.split(), "second_start", "disk_warns", "disk_short", "disk_slow"], 2),
    **dict.fromkeys(_SELDOM.split(), 1),
}


def draw(rng: Random, library: Path | None, kinds: Sequence[str] = ()) -> Fault:
    """Draw a fault, of the given kinds if any; those that need a compiler or root are left out where there is none."""
    names = list(kinds) or [k for k in KINDS if library is not None or k not in _DISK]
    names = [k for k in names if not k.startswith("network") or Network.possible()]
    name = rng.choices(names, [KINDS[k] for k in names])[0]
    step, after, rank = (
        rng.randint(1, 12),
        rng.choice((0.0, rng.uniform(0, 0.05), rng.uniform(0, 0.3))),
        rng.randrange(12),
    )
    launched = name in _LAUNCHED or (name in ("kill_rank", "disk") and rng.random() < 0.15)
    nth = rng.choice((rng.randint(1, 12), rng.randint(1, 60)))
    call = rng.choice(("any", "any", "write", "fsync", "rename", "make", "remove"))
    error, forever = rng.choice((errno.ENOSPC, errno.EIO, errno.EROFS, errno.EDQUOT)), rng.randrange(2)
    how = {
        "disk": f"{call} {nth} {error} {forever}",
        "disk_warns": f"{call} {nth} {error} 0",
        "disk_short": "write 1 0 1",
        "disk_slow": f"fsync {1 + nth // 4} -2 0",
        "disk_kill": f"{call} {nth} -1000 0",
    }.get(name, "")
    codes = (0,) if name in _UNHARMED else _ANY_END
    return Fault(name, step, after, rank, how, launched, library if name in _DISK else None, codes)
