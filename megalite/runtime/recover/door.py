"""Where guards come to the hub, and who of them is let in. Standard library only."""

from __future__ import annotations

import contextlib
import secrets
import socket
from collections.abc import Callable

from megalite.runtime.recover.connections import EventLoop, Link, is_token
from megalite.runtime.recover.messages import Hello, Message
from megalite.runtime.recover.peers import OTHER, OTHER_DATA, Peer, has_other_data, refuse
from megalite.runtime.recover.roster import Roster


class Door:
    """Lets in guards that know the token, and in reserve those alone that have what the run has.

    Args:
        loop: where it is read.
        server: listens.
        token: what is to be said; "" for a new one.
        identity: see `Listen`.
        roster: guards that are in.
        named: called with each guard first, to take away a rank that it cannot have.
        enters: called with each that is let in.

    Attributes:
        port, token: where it is, and what is to be said.
        data: digest of what the run trains on; "" before it is known.
        for_all: whether any options will do: stand-ins are forks of those that are here.
    """

    def __init__(
        self,
        loop: EventLoop,
        server: socket.socket,
        token: str,
        identity: str,
        roster: Roster,
        named: Callable[[Peer], None],
        enters: Callable[[Peer], None],
    ) -> None:
        self._loop, self._server, self._identity, self._roster = loop, server, identity, roster
        self._named, self._enters = named, enters
        self.port, self.token = server.getsockname()[1], token or secrets.token_hex(16)
        self.data, self.for_all = "", False
        loop.watch(server.fileno(), self._accept)

    def _accept(self) -> None:
        with contextlib.suppress(OSError):  # whoever it was has hung up
            link = Link(self._loop, self._server.accept()[0], lambda _: None)
            link.heard = lambda message: self.introduce(link, message)

    def introduce(self, link: Link, message: Message | None) -> None:
        """Take in a guard that knows the token; hang up on anybody else."""
        if not (isinstance(message, Hello) and is_token(message.token, self.token)):
            link.close()
            return
        peer = Peer(link, message.rank, message.port, message.network, message.host, data=message.data)
        self._named(peer)
        if peer.rank < 0 and message.identity != self._identity and not self.for_all:
            refuse(peer, OTHER)
        elif has_other_data(peer, self.data):
            refuse(peer, OTHER_DATA)
        else:
            self._enters(peer)

    def learn_data(self, digest: str) -> None:
        """Hear which data the run has: reserves that came earlier may have others."""
        self.data = digest
        for peer in [peer for peer in self._roster.reserves if has_other_data(peer, digest)]:
            self._roster.reserves.remove(peer)
            refuse(peer, OTHER_DATA)

    def close(self) -> None:
        """Let nobody in any more: nobody takes this hub for that of the next attempt."""
        self._loop.forget(self._server.fileno())
        self._server.close()
