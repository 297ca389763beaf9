"""The companion of a process: its connection to its guard, or nobody; and how a command becomes a guard."""

from __future__ import annotations

import json
import os
import signal
import sys
import time
from collections.abc import Callable, Sequence
from functools import cache
from pathlib import Path
from typing import NoReturn, TypeVar

from megalite.core.base.errors import require
from megalite.core.base.log import env_int, take_rank
from megalite.runtime.base.child import readable, signal_when_parent_dies
from megalite.runtime.recover import messages
from megalite.runtime.recover.connections import Packets

# A death is known to all guards within a fraction of a second.
_DOUBT_S = 2.0

_T = TypeVar("_T", bound=messages.Message)


def become_guard(spares: int = 0) -> NoReturn:
    """Turn this process into the guard of its rank, which runs the same command again.

    Args:
        spares: how many of the launcher's ranks, the last ones, wait in reserve.

    Raises:
        UserError: the system lacks what a guard needs.
    """
    require(_possible(), "--recover", "requires Linux 5.3 or newer", "use --recover none")
    root, command = str(Path(__file__).resolve().parents[3]), [sys.executable, *sys.orig_argv[1:]]
    code = f"import sys, json; sys.path.insert(0, {root!r}); from megalite.runtime.recover import main as guard"
    code += "; guard.main(json.loads(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3]))"
    words = [json.dumps(command), str(os.getppid()), str(spares)]
    sys.stdout.flush()
    sys.stderr.flush()
    # Without site-packages, user settings and environment variables: it starts in some 20 ms.
    os.execv(sys.executable, [sys.executable, "-I", "-S", "-c", code, *words])


def _possible() -> bool:
    return sys.platform == "linux" and hasattr(os, "pidfd_open")


def become_guard_if_asked(argv: Sequence[str]) -> None:
    """As `become_guard`, if the command line says so: before torch is imported, which takes a second.

    Where that is impossible, the program finds out later, where errors have their message.
    """
    asked = _value_of("--recover", argv) in ("process", "host")
    prints = {"--dry-run", "--print-config"} & set(argv)
    if asked and not prints and find_companion() is NOBODY and _possible():
        become_guard(spare_ranks(argv))


@cache
def find_companion() -> Companion:
    """Connect to the guard of this process, if it has one; its entries call this, and hand the companion on."""
    descriptor = env_int("MEGALITE_GUARD", -1)
    return NOBODY if descriptor < 0 else GuardedRank(descriptor)


def spare_ranks(argv: Sequence[str]) -> int:
    """How many of the launcher's ranks a command line has wait in reserve; 0 if what it says is no number."""
    given = _value_of("--spare-ranks", argv)
    return int(given) if given.isascii() and given.isdecimal() else 0


def run_dir(argv: Sequence[str]) -> str:
    """Return the run's folder, as a command line names it; "" if it does not."""
    return _value_of("--run-dir", argv)


def survives_hosts(argv: Sequence[str]) -> bool:
    """Whether a command line's run goes on without a lost host, or at least saves its last state."""
    return spare_ranks(argv) > 0 or _value_of("--recover", argv) == "host"


def goes_on_with_fewer(argv: Sequence[str]) -> bool:
    """Whether a command line's run goes on with the hosts that are left, and takes back those that return."""
    asked = [word for word in argv if word in ("--elastic", "--no-elastic")]
    return asked[-1:] == ["--elastic"] and _value_of("--recover", argv) == "host"


def _value_of(flag: str, argv: Sequence[str]) -> str:
    """Return the last value of a flag of a command line; "" where it has none."""
    value = ""
    for word, after in zip(argv, [*argv[1:], ""]):
        name, equals, own = word.partition("=")
        if name == flag:
            value = own if equals else after
    return value


class Companion:
    """Guard of a process, as the run sees it; of this class itself it is nobody, and all answers are neutral.

    Attributes:
        turn: the guard's word that this process is the rank.
        met: when all processes had met, as `time.monotonic`.
        listens: descriptor at which this process serves the store of the round; -1 if another one does.
    """

    def __init__(self) -> None:
        self.turn = messages.Turn()
        self.met = 0.0
        self.listens = -1

    @property
    def round(self) -> int:
        """Number of recoveries before this process."""
        return self.turn.go.round

    @property
    def began(self) -> float:
        """When the first process of this rank began to train, as `time.monotonic`; now, if this is the first."""
        return self.turn.began or time.monotonic()

    def say(self, message: messages.FromTrainer) -> None:
        """Send the guard a message that has no answer."""

    def leaving(self, done: bool = True) -> None:
        """Say that all is done and nobody watches this process any more: if it does not end by itself, kill it.

        Not `done`: what this process does next is the user's, and takes as long as it does.
        """

    def lost_a_peer(self) -> None:
        """Say that a connection to another rank is lost; wait to be killed, or return if the run is to end."""

    def pauses(self) -> bool:
        """Whether ranks come or go: all are to copy their states after a step, and to `pause`."""
        return False

    def pause(self) -> None:
        """Say that the state is copied; wait to be killed, or return if the run is to end."""

    def may_be_killed(self) -> None:
        """Wait until a death that has just happened would have ended this process too."""


NOBODY = Companion()


class GuardedRank(Companion):
    """A guard, as its process talks to it.

    Attributes:
        slots: descriptors of the memory that holds the copies.
    """

    def __init__(self, descriptor: int) -> None:
        super().__init__()
        os.set_inheritable(descriptor, False)
        self._packets = Packets(descriptor)
        self.slots: list[int] = []
        self._kept, self._end, self._pauses = -1, False, False
        # A guard is killed with all that it guards.
        signal_when_parent_dies(signal.SIGKILL)

    def wait_for_turn(
        self,
        find_hub: Callable[[bool], str],
        rehearse: Callable[[], None],
        identify: Callable[[], tuple[str, str]] = lambda: ("", ""),
        elastic: bool = False,
        folder: str = "",
    ) -> None:
        """Return when this process is to be the rank.

        Args:
            find_hub: called if the guard of this rank knows no other, with whether it is in reserve: if not, the run
                may have begun, and its place be taken. Returns what `meet` takes, "" if the run has not begun.
            rehearse: called if the turn does not come at once.
            identify: called if there is a hub; returns the identity, see `Listen`, and the digest of `Data`.
            elastic: whether hosts may come and go.
            folder: see `messages.Meet`.
        """
        self.say(messages.Here())
        told, self.slots = self._receive(messages.Wait, messages.Turn)
        first = isinstance(told, messages.Turn) and told.go.round == 0 and (told.spares > 0 or elastic)
        alone = isinstance(told, messages.Wait) and told.alone
        hub = find_hub(not first) if first or alone else ""
        if hub or not isinstance(told, messages.Turn):
            rehearse()  # before the others know of this one, and wait for it
            if hub:
                identity, data = identify()
                self.meet(-1, hub, elsewhere=True, leaves=elastic, identity=identity, data=data, folder=folder)
            self.turn, self.slots = self._receive(messages.Turn)
        else:
            self.turn = told
        if self.turn.serves:
            self.listens = self.slots.pop()
        if self.turn.go.rank >= 0:
            take_rank(self.turn.go.rank, self.turn.go.world, self.turn.go.store)

    def host(self, listen: messages.Listen) -> str:
        """On rank 0: make the guard the hub of all guards; return its port, and the token that the others need."""
        self.say(listen)
        hub, _ = self._receive(messages.Listening)
        return f"{hub.port} {hub.token}"

    def meet(
        self,
        rank: int,
        hub: str,
        elsewhere: bool,
        leaves: bool = False,
        identity: str = "",
        data: str = "",
        folder: str = "",
    ) -> None:
        """Connect the guard to the hub, of which `hub` names host, port and token; rank -1 waits in reserve."""
        host, port, token = hub.split()
        self.say(messages.Meet(rank, host, int(port), token, elsewhere, leaves, identity, data, folder))

    def say(self, message: messages.FromTrainer) -> None:
        self._packets.send(message)

    def leaving(self, done: bool = True) -> None:
        self.say(messages.Leaving(time.monotonic() if done else 0.0))

    def keep(self, slots: list[int]) -> None:
        """Give the guard memory for copies."""
        self.slots = slots
        self._packets.send(messages.Slots(), slots)

    def wait_kept(self, number: int) -> None:
        """Wait until a copy is whole on another host, or the run ends."""
        while self._kept < number and not self._end:
            self._receive(messages.Kept, messages.Leave)

    def lost_a_peer(self) -> None:
        self.say(messages.Lost())
        if not self._end:
            self._receive(messages.Leave)

    def pauses(self) -> bool:
        while not self._pauses and not self._end and readable(self._packets.socket.fileno(), 0):
            self._receive(messages.Kept, messages.Pause, messages.Leave)
        return self._pauses

    def pause(self) -> None:
        self.say(messages.Paused(self.round))
        while not self._end:
            self._receive(messages.Leave)

    def may_be_killed(self) -> None:
        until = time.monotonic() + _DOUBT_S
        while not self._end and readable(self._packets.socket.fileno(), max(0.0, until - time.monotonic())):
            self._receive(messages.Kept, messages.Pause, messages.Leave)

    def _receive(self, *wanted: type[_T]) -> tuple[_T, list[int]]:
        """Wait for a message of one of these types."""
        while True:
            packet = self._packets.receive()
            if packet is None:
                # It died before the kernel knew whom to kill with it.
                os._exit(1)
            message, descriptors = packet
            match message:
                case messages.Kept():
                    self._kept = message.number
                case messages.Pause():
                    self._pauses = True
                case messages.Leave():
                    self._end = True
            if isinstance(message, wanted):
                return message, descriptors
