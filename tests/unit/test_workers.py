"""The pool of workers that the parity tests share."""

import time
from typing import Any

import pytest
import torch
import torch.distributed as dist

from tests import workers
from tests.workers import WorkerPool


def _returns_at_once(rank: int) -> int:
    return rank


def test_functions_that_send_nothing_end_on_all_ranks(pool: WorkerPool) -> None:
    # Without a barrier some rank in a hundred of these lost the connection that it was making to one that had left.
    for _ in range(30):
        assert pool.run(4, _returns_at_once) == [0, 1, 2, 3]


_sent: list[Any] = []


def _receives_late(rank: int) -> float:
    message = torch.full((1,), float(1 - rank))
    if rank == 0:
        _sent.append(dist.isend(message, 1))
    else:
        time.sleep(0.5)
        dist.recv(message, 0)
    return message.item()


def test_a_rank_stays_until_its_last_message_has_arrived(pool: WorkerPool) -> None:
    assert pool.run(2, _receives_late) == [1, 1]


def _named(rank: int, name: str) -> str:
    return name


def test_a_run_that_is_interrupted_leaves_no_result(pool: WorkerPool, monkeypatch: pytest.MonkeyPatch) -> None:
    """A test that takes too long is ended so; the next one got its results."""

    def interrupt(*_: Any) -> Any:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(workers, "wait", interrupt)
        with pytest.raises(KeyboardInterrupt):
            pool.run(2, _named, "first")
    assert pool.run(2, _named, "second") == ["second"] * 2
