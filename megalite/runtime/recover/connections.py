"""Connections of a guard: an event loop, messages with descriptors, messages over TCP. Standard library only."""

from __future__ import annotations

import contextlib
import os
import queue
import secrets
import selectors
import socket
import time
from collections.abc import Callable, Sequence
from pathlib import Path

from megalite.runtime.base.child import readable
from megalite.runtime.base.untrusted import BadFile
from megalite.runtime.recover.messages import Message, decode, encode

# Far above any message, which are a line each; the longest names the keeper of every rank.
MAX_MESSAGE = 1 << 17

# Where the hub is if no other host has ranks.
LOOPBACK = "127.0.0.1"

# A host that is gone without a word is noticed within 15 s.
_IDLE_S = 5
_PROBE_S = 2
_PROBES = 5


def network() -> str:
    """Name the network stack that this process uses: two hosts, or two containers, have different ones."""
    return f"{Path('/proc/sys/kernel/random/boot_id').read_text().strip()} {os.readlink('/proc/self/ns/net')}"


def open_server(loopback: bool = False, backlog: int = 1024) -> socket.socket:
    """Listen on a port that the system chooses, of all addresses: that of a host's name may be one of few.

    A name may mean 127.0.1.1 on its own host, or an address that only the others can use.
    """
    both = socket.has_dualstack_ipv6() and not loopback
    family, address = socket.AF_INET6 if both else socket.AF_INET, LOOPBACK if loopback else ""
    return socket.create_server((address, 0), family=family, backlog=backlog, dualstack_ipv6=both)


def is_token(said: object, token: str) -> bool:
    """Whether a stranger has said the token; it may be anything that JSON can be."""
    return secrets.compare_digest(str(said).encode(errors="replace"), token.encode())


def keep_alive(connection: socket.socket) -> None:
    """Have the kernel find out whether the other side of a TCP connection is still there (Linux)."""
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, _IDLE_S)
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, _PROBE_S)
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPCNT, _PROBES)
    # The same for what was sent and not acknowledged, which would be repeated for a quarter of an hour.
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, 1000 * (_IDLE_S + _PROBE_S * _PROBES))


class EventLoop:
    """Calls back when a descriptor is readable, after a time, and as another thread says."""

    def __init__(self) -> None:
        self._selector = selectors.DefaultSelector()
        self._timers: list[tuple[float, Callable[[], None]]] = []
        self._posted: queue.SimpleQueue[Callable[[], object]] = queue.SimpleQueue()
        self._woken, self._wake = socket.socketpair()
        self.watch(self._woken.fileno(), self._take_posted)

    def post(self, callback: Callable[[], object]) -> None:
        """Call back once, at the next turn. Threads may call it."""
        self._posted.put(callback)
        self._wake.send(b"0")

    def _take_posted(self) -> None:
        self._woken.recv(1)
        self._posted.get()()

    def watch(self, descriptor: int, callback: Callable[[], object]) -> None:
        """Call back whenever the descriptor is readable or closed at its other end."""
        self._selector.register(descriptor, selectors.EVENT_READ, callback)

    def forget(self, descriptor: int) -> None:
        """Call back no more; before the descriptor is closed."""
        self._selector.unregister(descriptor)

    def after(self, seconds: float, callback: Callable[[], None]) -> None:
        """Call back once, after this time."""
        self._timers.append((time.monotonic() + seconds, callback))

    def turn(self) -> None:
        """Wait for what comes next, and call back."""
        first = min((when for when, _ in self._timers), default=None)
        events = self._selector.select(None if first is None else max(0.0, first - time.monotonic()))
        for key, _ in events:
            # An earlier callback may have closed it.
            if self._selector.get_map().get(key.fd) is key:
                key.data()
        now = time.monotonic()
        due = [callback for when, callback in self._timers if when <= now]
        self._timers = [timer for timer in self._timers if timer[0] > now]
        for callback in due:
            callback()


class Packets:
    """Messages with file descriptors between a guard and a process of its own: each arrives whole or not at all.

    Args:
        descriptor: one end of a pair of sockets of type SOCK_SEQPACKET.
    """

    def __init__(self, descriptor: int) -> None:
        self.socket = socket.socket(fileno=descriptor)

    def send(self, message: Message, descriptors: Sequence[int] = ()) -> None:
        """Send a message; one that nobody will read is dropped."""
        with contextlib.suppress(BrokenPipeError, ConnectionResetError):
            socket.send_fds(self.socket, [encode(message)], list(descriptors))

    def receive(self, wait: bool = True) -> tuple[Message, list[int]] | None:
        """Return a message and its descriptors; None when the other side is gone or (without `wait`) silent."""
        # `recv_fds` ignores its flags, and a process that the other side has forked may keep its end open.
        if not (wait or readable(self.socket.fileno(), 0)):
            return None
        try:
            data, descriptors, _, _ = socket.recv_fds(self.socket, MAX_MESSAGE, 4)
        except ConnectionResetError:
            return None
        return (decode(data), descriptors) if data else None


class Link:
    """Messages between guards over TCP, a line each.

    Args:
        loop: where it is read.
        connection: the connected socket.
        heard: called with each message, and with None when the other side is gone.

    Attributes:
        ended: whether its process has ended, as its host says; if it is gone and has not, it cannot be reached.
    """

    def __init__(self, loop: EventLoop, connection: socket.socket, heard: Callable[[Message | None], None]) -> None:
        self._loop = loop
        self._socket = connection
        self.heard, self.ended = heard, False
        self._part = b""
        connection.settimeout(10.0)
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        keep_alive(connection)
        # As the other side reaches this one, if it is not on this host.
        self.peer = connection.getpeername()[0].removeprefix("::ffff:")
        loop.watch(connection.fileno(), self._read)

    def send(self, message: Message) -> None:
        """Send a message; whether the other side is gone shows when it is read."""
        with contextlib.suppress(OSError):
            self._socket.sendall(encode(message) + b"\n")

    def close(self) -> None:
        """Hang up. May be called more than once."""
        if self._socket.fileno() >= 0:
            self._loop.forget(self._socket.fileno())
            self._socket.close()

    def _read(self) -> None:
        try:
            data = self._socket.recv(MAX_MESSAGE)
            self.ended = not data
        except OSError as e:
            data, self.ended = b"", isinstance(e, ConnectionResetError)
        *lines, self._part = (self._part + data).split(b"\n")
        if not data or len(self._part) > MAX_MESSAGE:
            self.close()
            self.heard(None)
            return
        for line in lines:
            if self._socket.fileno() < 0:
                return
            try:
                message = decode(line)
            except BadFile:
                self.close()
                self.heard(None)
                return
            self.heard(message)
