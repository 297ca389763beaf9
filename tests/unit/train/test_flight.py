"""On what a rank waits: gloo's own entries of torch's flight recorder, and NCCL's as torch documents them."""

from __future__ import annotations

import os
import socket
import time
from typing import Any

import pytest
import torch
import torch.distributed as dist

from megalite.runtime.watch import flight, watchdog
from megalite.runtime.watch.flight import answering_thread, oldest_unfinished
from megalite.runtime.watch.watchdog import ask
from tests.workers import WorkerPool


def late(rank: int) -> tuple[tuple[str, bool], tuple[str, bool]]:
    """What rank 0's flight recorder says before and after rank 1 has joined a sum."""
    group = dist.new_group([0, 1], group_desc="tp")
    store, x = dist.distributed_c10d._get_default_store(), torch.ones(2, 3)
    with answering_thread(cuda=False) as end, pytest.MonkeyPatch.context() as patch:
        patch.setattr(watchdog, "_ANSWER_S", 300.0)
        if rank:
            store.wait(["flight/asked"])
            dist.all_reduce(x, group=group)
            return ("", False), ("", False)
        work = dist.all_reduce(x, group=group, async_op=True)
        assert work is not None
        before = ask(end)
        store.set("flight/asked", "")
        work.wait()
        # gloo's thread notes the end after it has woken this one.
        after, deadline = ask(end), time.monotonic() + 120
        while after[0] and time.monotonic() < deadline:
            after = ask(end)
        return before, after


def test_a_collective_that_a_rank_has_not_joined(pool: WorkerPool) -> None:
    (before, after), _ = pool.run(2, late)
    assert before == ("all_reduce 1 of tp, [[2, 3]]", True)
    assert after == ("", False)


def entry(name: str, group: str, state: str, number: int, **more: Any) -> dict[str, Any]:
    p2p = "send" in name or "recv" in name
    return {
        "profiling_name": f"nccl:{name}",
        "process_group": ["7", group],
        "state": state,
        "retired": False,
        "is_p2p": p2p,
        "p2p_seq_id": number if p2p else 0,
        "collective_seq_id": 0 if p2p else number,
        "input_sizes": [[64]],
        "time_discovered_started_ns": 0 if state == "scheduled" else 1,
        **more,
    }


def test_what_a_gpu_waits_in_and_what_it_has_not_begun() -> None:
    ended = [entry("all_gather", "dp", "completed", 1, retired=True), entry("all_gather", "dp", "completed", 2)]
    begun, enqueued = entry("recv 3<-2", "pp", "started", 9), entry("all_reduce", "tp", "scheduled", 4)
    assert oldest_unfinished([*ended, begun, enqueued]) == ("recv 3<-2 9 of pp, [[64]], started", True)
    assert oldest_unfinished([*ended, enqueued]) == ("all_reduce 4 of tp, [[64]], scheduled", False)
    assert oldest_unfinished(ended) == ("", False)
    # Without TORCH_NCCL_ENABLE_TIMING nothing is said to begin; and nothing may have been recorded.
    untimed = [{**e, "time_discovered_started_ns": 0} for e in (*ended, enqueued)]
    assert oldest_unfinished(untimed) == ("all_reduce 4 of tp, [[64]]", True)
    assert oldest_unfinished([]) == ("", True)


def test_without_an_answer_nothing_is_claimed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(watchdog, "_ANSWER_S", 0.1)
    ours, theirs = socket.socketpair()
    with ours, theirs:
        assert ask(theirs.fileno()) == ("", True)
        for nonsense in (b"not JSON\n", b"7\n", b'[256, "an answer to another question", false]\n'):
            ours.sendall(nonsense)
            assert ask(theirs.fileno()) == ("", True)
        ours.close()
        assert ask(theirs.fileno()) == ("", True)


def test_another_format_is_reported_as_such(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(flight, "_recorded", lambda cuda: [{"state": "started"}])
    monkeypatch.setattr(watchdog, "_ANSWER_S", 300.0)
    with answering_thread(cuda=False) as end:
        end = os.dup(end)
    try:
        assert ask(end) == ("no flight recorder: 'time_discovered_started_ns'", True)
    finally:
        os.close(end)
