"""On what communication a rank waits, by torch's flight recorder: it notes what every group enqueued, began and ended.

Stacks do not tell where hosts run ahead of their GPUs: all block in some launch, and only the GPU of the culprit has
not begun what the others wait in. NCCL's groups note beginnings only with TORCH_NCCL_ENABLE_TIMING=1. The watchdog asks
over a socket, and a thread of the rank answers.
"""

from __future__ import annotations

import contextlib
import json
import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from torch._C import _distributed_c10d as c10d


@contextmanager
def answering_thread(cuda: bool) -> Iterator[int]:
    """Start a thread that answers `watchdog.ask`, until the other end is closed. Yields that end, for a child.

    Args:
        cuda: whether the groups are NCCL's, not gloo's.
    """
    ours, theirs = socket.socketpair()
    threading.Thread(target=_answer, args=(ours, cuda), daemon=True, name="flight recorder").start()
    with theirs:
        yield theirs.fileno()


def _answer(end: socket.socket, cuda: bool) -> None:
    with end, contextlib.suppress(OSError):
        while question := end.recv(1):
            try:
                answer = oldest_unfinished(_recorded(cuda))
            except Exception as e:  # torch's format is its own: a hang must be reported without it
                answer = f"no flight recorder: {e}"[:200], True
            # With the question: the one before may have been given up.
            end.sendall(json.dumps([question[0], *answer]).encode() + b"\n")


def _recorded(cuda: bool) -> list[dict[str, Any]]:
    dump = getattr(c10d, "_dump_nccl_trace_json" if cuda else "_dump_fr_trace_json")
    return list(json.loads(dump()).get("entries", []))


def oldest_unfinished(entries: list[dict[str, Any]]) -> tuple[str, bool]:
    """Describe the oldest communication that has not ended, and say whether it may have begun.

    Args:
        entries: the flight recorder's, in the order in which they were enqueued.

    Returns:
        Nothing unfinished: "" and False, as this rank's GPU waits for no other; nothing recorded: "" and True.
    """
    knows_beginnings = any(entry["time_discovered_started_ns"] for entry in entries)
    for entry in entries:
        if not entry["retired"] and entry["state"] != "completed":
            name, group = str(entry["profiling_name"]).partition(":")[2], entry["process_group"][1]
            number = entry["p2p_seq_id"] if entry["is_p2p"] else entry["collective_seq_id"]
            what = f"{name} {number} of {group}, {entry['input_sizes']}"
            if not knows_beginnings:
                return what, True
            return f"{what}, {entry['state']}", entry["state"] == "started"
    return "", not entries
