"""A rank that dies without a word (SIGKILL, no memory left, a crash): the watchdogs of the others end their ranks.

Nothing in a rank may notice: NCCL and CUDA calls wait for a peer that is gone, and gloo loses the error of a connection
that breaks while a message is on its way. But the watchdog of a dead rank outlives it, and leaves a file that those of
silent ranks look for. Standard library only.
"""

from __future__ import annotations

import contextlib
import json
import socket
import time
from pathlib import Path

from megalite.runtime.base.untrusted import BadFile, read_json

# A rank gets this long to end by itself, and to let a save in progress finish.
GRACE_S = 10.0
# A rank whose last heartbeat is younger is not looked for: in most steps nobody reads anything.
_SILENT_S = 1.0
# All watchdogs together look at most this often per second: what serves a shared folder may serve many runs.
_LOOKS_PER_S = 500


class Deaths:
    """The first death among the ranks of a run, in a file of the folder where the watchdogs report.

    Args:
        folder: the watchdogs', of a name that no other start of the run has.
        world: number of ranks.
    """

    def __init__(self, folder: Path, world: int) -> None:
        self._path, self._every = folder / "first_death.json", max(1.0, world / _LOOKS_PER_S)
        self._next_look = 0.0
        self._known_for = 0.0
        self._what = ""

    def record(self, rank: int, pid: int, place: str) -> None:
        """Write that a rank has died, unless another was first: ranks follow one another."""
        what = f"rank {rank} ({socket.gethostname()}, pid {pid}) died in {place}"
        with contextlib.suppress(OSError):
            self._path.parent.mkdir(parents=True, exist_ok=True)
            with self._path.open("x") as file:
                json.dump({"what": what, "time": time.time()}, file)

    def overdue(self, silent: float, passed: float) -> str:
        """Say which rank died, once this one has had its time to end; otherwise "".

        Args:
            silent: seconds since the last heartbeat of this rank.
            passed: seconds since the last call.
        """
        if self._what:
            self._known_for += passed
            return self._what if min(silent, self._known_for) >= GRACE_S else ""
        self._next_look -= passed
        if silent >= _SILENT_S and self._next_look <= 0:
            self._next_look = self._every
            # Also while the file is being written.
            with contextlib.suppress(OSError, BadFile, KeyError, TypeError):
                self._what = str(read_json(self._path, 1 << 16)["what"])
        return ""
