"""Guards and their hub, without ranks."""

from __future__ import annotations

import json
import socket
from typing import Any

import pytest

from megalite.train.recover.guard import Guard
from megalite.train.recover.hub import Hub
from megalite.train.recover.loop import EventLoop


@pytest.mark.parametrize(
    "words", [b"GET / HTTP/1.1\n", b"5\n", b'{"hello": 0}\n', b'{"hello": 0, "token": "\xc3\xa9"}\n']
)
def test_a_stranger_at_the_port_is_hung_up_on(words: bytes) -> None:
    """It used to end the guard of rank 0, and so the run."""
    loop = EventLoop()
    hub = Hub(loop, world=1, limit=1)
    with socket.create_connection(("localhost", hub.port)) as stranger:
        stranger.sendall(words)
        loop.turn()
        loop.turn()
        assert stranger.recv(1) == b""
    with socket.create_connection(("localhost", hub.port)) as rank:
        for message in ({"hello": 0, "token": hub.token}, {"broken": 0, "cause": "rank 0 died (SIGKILL)"}):
            rank.sendall(json.dumps(message).encode() + b"\n")
        loop.turn()
        loop.turn()
        assert json.loads(rank.makefile().readline()) == {"break": 0}


def test_a_turn_that_nobody_took_is_void_once_its_round_is_broken(monkeypatch: pytest.MonkeyPatch) -> None:
    """A process that was ready a moment later was started with it, and the next turn went to another beside it."""
    guard: Any = Guard(lambda descriptor: 0)
    monkeypatch.setattr(guard, "_clear", lambda: None)
    assert guard._next is not None
    guard._hear_hub({"break": 0})
    assert guard._next is None
