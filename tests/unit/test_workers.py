"""The pool of workers that the parity tests share."""

from tests.workers import WorkerPool


def _returns_at_once(rank: int) -> int:
    return rank


def test_functions_that_send_nothing_end_on_all_ranks(pool: WorkerPool) -> None:
    # Without a barrier some rank in a hundred of these lost the connection that it was making to one that had left.
    for _ in range(30):
        assert pool.run(4, _returns_at_once) == [0, 1, 2, 3]
