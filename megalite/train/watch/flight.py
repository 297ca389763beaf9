"""On what communication a rank waits, by torch's flight recorder: it notes what every group enqueued, began and ended.

Stacks do not tell where hosts run ahead of their GPUs: all block in some launch, and only the GPU of the culprit has
not begun what the others wait in. The watchdog asks over a socket, and a thread of the rank answers.
"""

from __future__ import annotations

import contextlib
import json
import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch._C import _distributed_c10d as c10d


@contextmanager
def answering_thread() -> Iterator[int]:
    """Start a thread that answers `watchdog.ask`, until the other end is closed. Yields that end, for a child."""
    ours, theirs = socket.socketpair()
    threading.Thread(target=_answer, args=(ours,), daemon=True, name="flight recorder").start()
    with theirs:
        yield theirs.fileno()


def _answer(end: socket.socket) -> None:
    with end, contextlib.suppress(OSError):
        while end.recv(1):
            try:
                text, begun = oldest_unfinished(_recorded())
            except Exception as e:  # torch's format is its own: a hang must be reported without it
                text, begun = f"no flight recorder: {e}"[:200], True
            end.sendall(json.dumps([text, begun]).encode() + b"\n")


def _recorded() -> list[dict[str, Any]]:
    dump = getattr(c10d, "_dump_nccl_trace_json" if torch.cuda.is_available() else "_dump_fr_trace_json")
    return list(json.loads(dump())["entries"])


def oldest_unfinished(entries: list[dict[str, Any]]) -> tuple[str, bool]:
    """Describe the oldest communication that has not ended, and say whether it has begun.

    Args:
        entries: the flight recorder's, in the order in which they were enqueued.

    Returns:
        Nothing unfinished: "" and False, as this rank's GPU waits for no other.
    """
    for entry in entries:
        if not entry["retired"] and entry["state"] != "completed":
            name, group = str(entry["profiling_name"]).partition(":")[2], entry["process_group"][1]
            number = entry["p2p_seq_id"] if entry["is_p2p"] else entry["collective_seq_id"]
            return f"{name} {number} of {group}, {entry['input_sizes']}, {entry['state']}", entry["state"] == "started"
    return "", False
