"""The guard of one rank: it starts the process that trains, keeps that process's last states, and never computes.

When any rank's process dies, the hub has every guard kill its own, and the next process, which has waited with all
imports done, takes over from the newest copy that all guards hold. A launcher sees the guard alone. Standard library
only, and Linux: pidfd, memfd, PR_SET_CHILD_SUBREAPER.

Messages of a process: {"here"}, {"listen": world, "limit", "alone"}, {"meet": rank, ...}, {"ready"}, {"slots"} with
descriptors, {"commit": number, ...}, {"loaded": number}, {"lost"}. Of the guard: {"wait"}, {"turn": round, ...} with
the slots' descriptors, {"port", "token"}, {"end"}.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from types import FrameType
from typing import Any, NoReturn

from megalite.base.child import children, signal_when_parent_dies
from megalite.base.console import write_or_drop
from megalite.base.log import unfinished_code
from megalite.train.recover.hub import UNFINISHED, Hub
from megalite.train.recover.messages import EventLoop, Link, Packets
from megalite.train.recover.processes import Member, as_exit_code, kill

_PR_SET_CHILD_SUBREAPER = 36
# Who lost a connection may be first to say so; the guard of the rank that died names the cause.
_CAUSE_S = 3.0
# Ranks that are told of another's failure get this long to end by themselves.
_LEAVE_S = 25.0
# Before that they get this long to tell what they know.
_TELL_S = 2.0
_CONNECT_S = 30.0
# A killed process is gone in milliseconds.
_LOOK_S = 0.01
# A host on which processes die before they can wait has no memory for another.
_MAX_FAILURES = 3


class Guard:
    """Serves one rank until its end.

    Args:
        start: starts a process of the rank, which inherits the given descriptor; returns its pid.
        launcher: process through whose store the ranks meet; 0: rank 0's own.
    """

    def __init__(self, start: Callable[[int], int], launcher: int = 0) -> None:
        self._start_process, self._launcher, self._loop = start, launcher, EventLoop()
        self._rank = -1
        self._hub: Link | None = None
        self._server: Hub | None = None
        self._round, self._broken, self._ending = 0, False, False
        self._code: int | None = None
        self._next: dict[str, Any] | None = {"turn": 0, "copies": []}
        self._copies: list[dict[str, Any]] = []
        self._slots: list[int] = []
        self._trainer: Member | None = None
        self._spare: Member | None = None
        self._failures, self._asked = 0, 0
        self._began, self._run_id = 0.0, ""
        self._outcome = 1

    def serve(self) -> NoReturn:
        """Start the rank, and exit with its code."""
        ctypes.CDLL(None).prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
        for number in (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1):
            signal.signal(number, self._relay)
        self._start()
        while True:
            self._loop.turn()

    def _relay(self, number: int, _frame: FrameType | None) -> None:
        """Pass a signal on; one that asks for a stop waits for a process that is taking over."""
        if number != signal.SIGUSR1:
            self._asked = number
            if not (self._trainer and self._trainer.ready):
                self._leave_if_orphaned()
                if self._round or self._broken:
                    return
        if member := self._trainer or self._spare:
            kill(member.pid, number)

    # -------------------------------------------------------------------------------------------- its processes

    def _start(self) -> None:
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        pid = self._start_process(theirs.fileno())
        theirs.close()
        member = self._spare = Member(pid, os.pidfd_open(pid), Packets(ours.detach()))
        self._loop.watch(member.alive, lambda: self._ended(member))
        self._loop.watch(member.packets.socket.fileno(), lambda: self._hear(member))

    def _hear(self, member: Member) -> bool:
        """Take in one message; return whether there was one."""
        packet = member.packets.receive(wait=False)
        if packet is None:
            if not member.silent:
                member.silent = True
                self._loop.forget(member.packets.socket.fileno())
            return False
        message, descriptors = packet
        if "here" in message:
            member.here, self._failures = True, 0
            if not self._hand_over():
                member.packets.send({"wait": True})
        elif "slots" in message:
            self._slots = descriptors  # once: later processes get these
        elif "commit" in message:
            # Two are whole; the slot of a third is written over from here on.
            self._copies, self._run_id = [*self._copies[-1:], message], message["run_id"]
            if self._spare is None and self._failures < _MAX_FAILURES:
                self._start()  # not earlier: its imports would compete with a first step
        elif "loaded" in message:
            self._copies = [copy for copy in self._copies if copy["commit"] <= message["loaded"]]
        elif "listen" in message:
            self._server = Hub(self._loop, message["listen"], message["limit"], message["alone"])
            member.packets.send({"port": self._server.port, "token": self._server.token})
        elif "meet" in message:
            self._meet(message)
        elif "ready" in message:
            member.ready, self._began = True, self._began or time.monotonic()
            if self._asked and self._round:
                kill(member.pid, self._asked)
        elif "lost" in message:
            self._lost(member)
        return True

    def _hand_over(self) -> bool:
        """Let the process that waits be the rank, if a round has begun without one."""
        if self._next is None or self._spare is None or not self._spare.here:
            return False
        self._spare.packets.send(self._next, self._slots)
        assert self._trainer is None
        self._trainer, self._spare, self._next = self._spare, None, None
        return True

    def _ended(self, member: Member) -> None:
        # What it has said before it died counts.
        while self._hear(member):
            pass
        self._loop.forget(member.alive)
        os.close(member.alive)
        member.packets.socket.close()
        code = os.waitstatus_to_exitcode(os.waitpid(member.pid, 0)[1])
        if member is self._trainer:
            self._trainer = None
            if self._broken and not self._ending:
                self._clear()
            else:
                self._judge(code)
            return
        self._spare, self._failures = None, self._failures + 1
        # Otherwise another one starts at the next commit.
        if self._trainer is None and self._broken and self._failures < _MAX_FAILURES:
            self._start()
        elif self._next is not None:
            self._judge(code)

    def _judge(self, code: int) -> None:
        """The rank's process has ended by itself: an unasked signal is an accident, a code an outcome."""
        if self._hub is None or self._ending:
            # Where all ranks fail alike, the first to say so has this one ended before it could.
            told = self._ending and code == -signal.SIGTERM
            self._leave(self._outcome if told else as_exit_code(code))
        if code < 0 and -code != self._asked:
            cause = f"rank {self._rank} died ({signal.Signals(-code).name})"
            self._tell({"broken": self._round, "cause": cause, "died": True})
            return
        self._code = as_exit_code(code)
        done = code in (0, UNFINISHED, unfinished_code())
        self._tell({"done": self._round} if done else {"final": self._code})

    def _clear(self) -> None:
        """Nothing of the rank trains any more: end what it has left, and say which copies there are."""
        kept = set() if self._spare is None else {self._spare.pid, *children(self._spare.pid)}
        if left := set(children(os.getpid())) - kept:
            for pid in left:
                kill(pid, signal.SIGKILL)
                # Its own children have become this process's. One that waits for a disk must not stop this process too.
                with contextlib.suppress(ChildProcessError):
                    os.waitpid(pid, os.WNOHANG)
            self._loop.after(_LOOK_S, self._clear)
            return
        if self._spare is None:
            self._start()
        self._tell({"killed": self._round, "held": [[copy["commit"], copy["step"]] for copy in self._copies]})

    # ------------------------------------------------------------------------------------------ the other ranks

    def _meet(self, message: dict[str, Any]) -> None:
        """Connect to the hub."""
        self._rank = message["meet"]
        address = message["host"], message["port"]
        try:
            connection = socket.create_connection(address, timeout=_CONNECT_S)
        except OSError as e:
            self._leave(1, f"the guard of rank 0 at {address[0]}:{address[1]} cannot be reached ({e})")
        self._hub = Link(self._loop, connection, self._hear_hub)
        self._hub.send({"hello": self._rank, "token": message["token"]})

    def _tell(self, message: dict[str, Any]) -> None:
        if self._hub is not None and not self._ending:
            self._hub.send(message)

    def _lost(self, member: Member) -> None:
        """The process has lost a connection, and waits: for its end, or for the word that it should leave."""
        if self._hub is None or self._ending:
            member.packets.send({"end": True})
            return
        cause = f"rank {self._rank} lost the connection to another rank"
        told = {"broken": self._round, "cause": cause, "died": False}
        self._loop.after(_CAUSE_S, lambda: self._tell(told))

    def _hear_hub(self, message: dict[str, Any] | None) -> None:
        if message is None:
            if not self._ending:
                self._leave(1, "the guard of rank 0 is gone: ending this rank")
        elif "break" in message:
            self._leave_if_orphaned()
            # A turn that nobody has taken yet is void.
            self._broken, self._next = True, None
            if self._trainer is None:
                self._clear()
            else:
                kill(self._trainer.pid, signal.SIGKILL)
        elif "go" in message:
            self._leave_if_orphaned()
            self._round, self._broken, self._code = message["go"], False, None
            self._copies = [copy for copy in self._copies if copy["commit"] in message["numbers"]]
            kept = {"copies": self._copies, "began": self._began, "run_id": self._run_id}
            self._next = {**message, "turn": self._round, **kept}
            if self._spare is None:
                self._start()
            self._hand_over()
        else:
            self._end(message)

    def _end(self, message: dict[str, Any]) -> None:
        """The run ends, with the code of this rank's own process if that ends by itself."""
        self._ending, self._outcome = True, message["end"]
        if message["kill"] or self._trainer is None:
            code = self._code if self._trainer is None and self._code is not None else message["end"]
            self._leave(code, message["why"] if self._rank == 0 else "")
        pid = self._trainer.pid
        self._trainer.packets.send({"end": True})
        # Not at once: an error that all ranks raise is told by rank 0, which may come to it later than others.
        self._loop.after(_TELL_S, lambda: kill(pid, signal.SIGTERM))
        self._loop.after(_LEAVE_S, lambda: self._leave(1, "this rank did not end by itself: killing it"))

    def _leave_if_orphaned(self) -> None:
        """Where the launcher is gone, with the store in it, no processes can meet."""
        if self._launcher and os.getppid() != self._launcher:
            self._leave(1, "the launcher is gone: ending this rank")

    def _leave(self, code: int, why: str = "") -> NoReturn:
        """Exit; what is left of the rank dies with this process."""
        if why:
            with contextlib.suppress(OSError):
                write_or_drop(2, f"[rank {self._rank}] guard: {why}\n".encode(), 0.5)
        for pid in children(os.getpid()):
            kill(pid, signal.SIGKILL)
        os._exit(code)


def main(command: list[str], parent: int) -> None:
    """Guard the rank that `command` starts.

    Args:
        command: program and arguments.
        parent: the launcher's process.
    """

    def start(descriptor: int) -> int:
        # A session of its own: what a terminal or a launcher sends to the guard's group is passed on, once.
        env = {**os.environ, "MEGALITE_GUARD": str(descriptor)}
        process = subprocess.Popen(command, pass_fds=[descriptor], env=env, start_new_session=True)
        process.returncode = 0  # the guard waits for it: a later Popen must not
        return process.pid

    launched = "TORCHELASTIC_RUN_ID" in os.environ
    if launched:
        # As its ranks do themselves where they have no guard.
        signal_when_parent_dies(signal.SIGTERM)
        if os.getppid() != parent:
            sys.exit(as_exit_code(-signal.SIGTERM))
    Guard(start, parent if launched else 0).serve()
