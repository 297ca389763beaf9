"""The guard of rank 0 decides for all guards: when a round is broken, which copy all go back to, when the run ends.

Every guard, also that of rank 0, has one connection to it. Standard library only.

Messages of a guard: {"hello", "token"}; {"broken": round, "cause", "died"}; {"killed": round, "held": [[number, step],
...]}; {"done": round}; {"final": code}. Of the hub: {"break": round}; {"go": round, ...}; {"end": code, "kill", "why"}.
"""

from __future__ import annotations

import secrets
import socket
import time
from collections import Counter
from typing import Any

from megalite.base.log import unfinished_code
from megalite.train.recover.messages import EventLoop, Link

# A rank that dies this often at one step has a cause that no repetition cures.
_DEATHS_AT_A_STEP = 3
# A killed process is gone in milliseconds, unless a driver or a disk holds it.
_GATHER_S = 60.0
# Where the hub is if no other host has ranks.
LOOPBACK = "127.0.0.1"
# What a scheduler takes for "start it again" (EX_TEMPFAIL).
UNFINISHED = 75


class Hub:
    """Hears all guards, and tells all of them the same.

    Args:
        loop: where it is read.
        world: number of guards.
        limit: recoveries before the run is given up.
        alone: whether all guards are on this host.
    """

    def __init__(self, loop: EventLoop, world: int, limit: int, alone: bool) -> None:
        self._loop, self._world, self._limit = loop, world, limit
        # Not at the address of this host's name: here it may be 127.0.1.1, or one that only the others can use.
        both = socket.has_dualstack_ipv6() and not alone
        family, address = socket.AF_INET6 if both else socket.AF_INET, LOOPBACK if alone else ""
        self._server = socket.create_server((address, 0), family=family, backlog=1024, dualstack_ipv6=both)
        self.port, self.token = self._server.getsockname()[1], secrets.token_hex(16)
        self._guards: dict[int, Link] = {}
        self._round, self._recoveries, self._gave_up, self._ended = 0, 0, "", False
        self._broken: dict[str, Any] | None = None
        self._held: dict[int, set[tuple[int, int]]] = {}
        self._done: set[int] = set()
        self._deaths: Counter[tuple[int, int]] = Counter()
        loop.watch(self._server.fileno(), self._accept)

    def _accept(self) -> None:
        try:
            connection = self._server.accept()[0]
        except OSError:
            return  # whoever it was has hung up
        link = Link(self._loop, connection, lambda _: None)
        link.heard = lambda message: self._introduce(link, message)

    def _introduce(self, link: Link, message: dict[str, Any] | None) -> None:
        """Take in a guard that knows the token; hang up on anybody else."""
        token = str((message or {}).get("token")).encode(errors="replace")
        if message is None or not secrets.compare_digest(token, self.token.encode()):
            link.close()
            return
        rank = int(message["hello"])
        self._guards[rank] = link
        link.heard = lambda message: self._hear(rank, message)
        if self._broken is not None:
            link.send({"break": self._round})

    def _tell(self, message: dict[str, Any]) -> None:
        for link in self._guards.values():
            link.send(message)

    def _hear(self, rank: int, message: dict[str, Any] | None) -> None:
        if self._ended:
            return
        if message is None:
            self._end(1, f"the guard of rank {rank} is gone, and with it what it kept", kill=True)
        elif "final" in message:
            self._end(message["final"], "")
        elif message.get("broken") == self._round:
            self._break(rank, message)
        elif message.get("killed") == self._round:
            self._held[rank] = {(number, step) for number, step in message["held"]}
            if len(self._held) == self._world:
                self._go()
        elif message.get("done") == self._round and self._broken is None:
            self._done.add(rank)
            if len(self._done) == self._world:
                self._end(0, "")

    def _break(self, rank: int, message: dict[str, Any]) -> None:
        """Have all trainers killed; what is broken meanwhile is part of it."""
        dead = {rank} if message["died"] else set()
        if self._broken is not None:
            self._broken["dead"] |= dead
            return
        cause = message["cause"]
        self._broken = {"rank": rank, "dead": dead, "cause": cause, "died": time.monotonic()}
        if self._gave_up:
            self._end(unfinished_code() or UNFINISHED, f"{cause} while the last state was being saved", kill=True)
            return
        self._tell({"break": self._round})
        self._loop.after(_GATHER_S, lambda number=self._round: self._give_up_waiting(number))  # type: ignore[misc]

    def _give_up_waiting(self, number: int) -> None:
        if number == self._round and not self._ended:
            missing = sorted(set(range(self._world)) - self._held.keys())
            self._end(1, f"rank {missing} could not be ended within {_GATHER_S:.0f} s", kill=True)

    def _go(self) -> None:
        """All trainers are dead: begin the next round with the copies that all guards hold."""
        assert self._broken is not None
        common = sorted(set.intersection(*self._held.values()), reverse=True)
        # Where nobody has died, who lost a connection counts.
        ranks = sorted(self._broken["dead"]) or [self._broken["rank"]]
        cause, died = self._broken["cause"], self._broken["died"]
        for rank in ranks:
            at = (rank, common[0][0] if common else -1)
            self._deaths[at] += 1
            if self._deaths[at] == _DEATHS_AT_A_STEP:
                self._gave_up = f"rank {rank} has died {_DEATHS_AT_A_STEP} times at one step"
        self._recoveries += 1
        if not self._gave_up and self._recoveries > self._limit:
            self._gave_up = f"there were more than --max-recoveries {self._limit} recoveries"
        if self._gave_up and not common:
            self._end(
                unfinished_code() or UNFINISHED, f"{cause}; {self._gave_up}, and there is no state to save", kill=True
            )
            return
        self._round, self._broken, self._held, self._done = self._round + 1, None, {}, set()
        numbers = [number for number, _ in common]
        go = {
            "go": self._round,
            "numbers": numbers,
            "ranks": ranks,
            "cause": cause,
            "died": died,
            "gone": time.monotonic(),
        }
        self._tell({**go, "gave_up": self._gave_up})

    def _end(self, code: int, why: str, kill: bool = False) -> None:
        self._ended = True
        self._tell({"end": code, "why": why, "kill": kill})
