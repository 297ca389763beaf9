"""Files by which guards agree on the next hub once the host of the last one is lost. Standard library only.

The folder is on the disk that all hosts share. `hub_N.json` says where the N-th hub after the first is: the guard that
makes the file is that hub. `round_N` is made by the hub that begins round N: where a network is cut, both halves of a
run may have a hub, and the half whose hub comes second ends. Each file can be made once.
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import socket
from pathlib import Path
from typing import NamedTuple

from megalite.runtime.base.untrusted import BadFile, parse_json

# In the run's folder.
FOLDER = "hub"
# A hub that is there answers at once.
_CALL_S = 5.0


class Offer(NamedTuple):
    """Where a hub is.

    Attributes:
        host, port: as other hosts reach it.
        token: what it wants to hear.
    """

    host: str
    port: int
    token: str


def make_offer(folder: str, number: int, offer: Offer) -> bool:
    """Make the file of a hub, which its user alone can read; return False if another guard was first.

    Raises:
        OSError: the folder cannot be written.
    """
    return _make(Path(folder) / f"hub_{number}.json", json.dumps(offer).encode())


def find_offer(folder: str, number: int) -> Offer | None:
    """Return what a hub says of itself; None if there is none, or it has not said all yet."""
    try:
        host, port, token = parse_json((Path(folder) / f"hub_{number}.json").read_bytes())
        return Offer(str(host), int(port), str(token))
    except (OSError, BadFile, TypeError, ValueError):
        return None


def newest_offer(folder: str) -> Offer | None:
    """Return what the last hub that was ever here says of itself; None if the first one has not moved."""
    number, newest = 1, None
    while (Path(folder) / f"hub_{number}.json").exists():
        number, newest = number + 1, find_offer(folder, number) or newest
    return newest


def call(offer: Offer) -> socket.socket | None:
    """Connect to a hub; None if it cannot be reached."""
    with contextlib.suppress(OSError):
        return socket.create_connection((offer.host, offer.port), timeout=_CALL_S)
    return None


def answering_offer(folder: str) -> Offer | None:
    """Return the newest offer if somebody listens there: others are from an earlier start."""
    if (offer := newest_offer(folder)) and (connection := call(offer)):
        connection.close()
        return offer
    return None


def has_moved(run: str) -> bool:
    """Whether a run's first hub is gone, and another one answers."""
    return answering_offer(str(Path(run) / FOLDER)) is not None


def begin_round(folder: str, number: int) -> bool:
    """Begin a round; return False if another hub has.

    Raises:
        OSError: the folder cannot be written.
    """
    return _make(Path(folder) / f"round_{number}", b"")


def clear(run: Path) -> None:
    """Drop what an earlier start of a run has left in its folder."""
    shutil.rmtree(run / FOLDER, ignore_errors=True)


def _make(path: Path, data: bytes) -> bool:
    path.parent.mkdir(parents=True, exist_ok=True)
    with contextlib.suppress(FileExistsError):
        descriptor = os.open(path, os.O_CREAT | os.O_EXCL | os.O_WRONLY, 0o600)
        with open(descriptor, "wb") as file:
            file.write(data)
        return True
    return False
