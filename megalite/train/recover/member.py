"""A rank's connection to its guard (`--recover process`), and how a command becomes its guard."""

from __future__ import annotations

import json
import os
import signal
import sys
from collections.abc import Callable, Sequence
from functools import cache
from pathlib import Path
from typing import Any, NoReturn

from megalite.base.child import readable, signal_when_parent_dies
from megalite.base.errors import UserError
from megalite.base.log import env_int
from megalite.train.recover.messages import Packets

# A death is known to all guards within a fraction of a second.
_DOUBT_S = 2.0


def become_guard() -> NoReturn:
    """Turn this process into the guard of its rank, which runs the same command again.

    Raises:
        UserError: the system lacks what a guard needs.
    """
    if not _possible():
        raise UserError("--recover process", "requires Linux 5.3 or newer", "use --recover none")
    root, command = str(Path(__file__).resolve().parents[3]), [sys.executable, *sys.orig_argv[1:]]
    code = f"import sys, json; sys.path.insert(0, {root!r}); from megalite.train.recover import guard"
    code += "; guard.main(json.loads(sys.argv[1]), int(sys.argv[2]))"
    sys.stdout.flush()
    sys.stderr.flush()
    # Without site-packages, user settings and environment variables: it starts in some 20 ms.
    os.execv(sys.executable, [sys.executable, "-I", "-S", "-c", code, json.dumps(command), str(os.getppid())])


def _possible() -> bool:
    return sys.platform == "linux" and hasattr(os, "pidfd_open")


def become_guard_if_asked(argv: Sequence[str]) -> None:
    """As `become_guard`, if the command line says so: before torch is imported, which takes a second.

    Where that is impossible, the program finds out later, where errors have their message.
    """
    asked = "--recover=process" in argv or ("--recover", "process") in zip(argv, argv[1:])
    prints = {"--dry-run", "--print-config"} & set(argv)
    if asked and not prints and guard() is None and _possible():
        become_guard()


class GuardedRank:
    """What a process and its guard tell each other.

    Attributes:
        turn: what the guard said when this process became the rank: "turn" (number of the round), "copies", and from
            the second round on "ranks" and "cause" of the death, and when it "died" and all were "gone" (seconds of
            `time.monotonic` on rank 0's host); "gave_up" says why only a save is left to do; when the run "began" on
            this host, and its "run_id".
        slots: descriptors of the memory that holds the copies.
        met: when all processes had met, as `time.monotonic`.
    """

    def __init__(self, descriptor: int) -> None:
        os.set_inheritable(descriptor, False)
        self._packets = Packets(descriptor)
        self.turn: dict[str, Any] = {}
        self.slots: list[int] = []
        self.met = 0.0
        # A guard is killed with all that it guards.
        signal_when_parent_dies(signal.SIGKILL)

    @property
    def round(self) -> int:
        """Number of recoveries before this process."""
        return int(self.turn.get("turn", 0))

    def wait_for_turn(self, rehearse: Callable[[], None]) -> None:
        """Return when this process is to be the rank; call `rehearse` if that is not at once."""
        self._packets.send({"here": True})
        message, self.slots = self._receive()
        if "wait" in message:
            rehearse()
            message, self.slots = self._receive()
        self.turn = message

    def host(self, world: int, limit: int, alone: bool) -> tuple[int, str]:
        """On rank 0: have the guard be the hub of all guards, which are `alone` if no other host has ranks.

        Returns:
            Its port, and the token that the others need.
        """
        self._packets.send({"listen": world, "limit": limit, "alone": alone})
        message, _ = self._receive()
        return message["port"], message["token"]

    def meet(self, rank: int, host: str, port: int, token: str) -> None:
        """Have the guard connect to the hub."""
        self._packets.send({"meet": rank, "host": host, "port": port, "token": token})

    def ready(self) -> None:
        """Say that SIGTERM is a request to save and stop from here on."""
        self._packets.send({"ready": True})

    def keep(self, slots: list[int]) -> None:
        """Give the guard memory for copies."""
        self.slots = slots
        self._packets.send({"slots": True}, slots)

    def commit(self, copy: dict[str, Any]) -> None:
        """Say that a copy is whole."""
        self._packets.send(copy)

    def loaded(self, number: int) -> None:
        """Say from which copy the run goes on (-1: none): later ones are void."""
        self._packets.send({"loaded": number})

    def lost_a_peer(self) -> None:
        """Say that a connection to another rank is lost; wait to be killed, or return if the run is to end."""
        self._packets.send({"lost": True})
        self._receive()

    def may_be_killed(self) -> None:
        """Wait until a death that has just happened would have ended this process too."""
        readable(self._packets.socket.fileno(), _DOUBT_S)

    def _receive(self) -> tuple[dict[str, Any], list[int]]:
        packet = self._packets.receive()
        if packet is None:
            # It died before the kernel knew whom to kill with it.
            os._exit(1)
        return packet


@cache
def guard() -> GuardedRank | None:
    """Return this process's connection to its guard; None without one."""
    descriptor = env_int("MEGALITE_GUARD", -1)
    return None if descriptor < 0 else GuardedRank(descriptor)
