from __future__ import annotations

import itertools
from pathlib import Path

import pytest

from megalite.extras.launch.failure import FailedRank, RankTail, first_failure, is_explained, parse_report

REPORT = (Path(__file__).parents[3] / "data" / "torchrun_report.txt").read_text()


def tail(*lines: str, at: float) -> RankTail:
    made = RankTail()
    for line in lines:
        made.add(line, at)
    return made


def test_torchruns_report() -> None:
    assert parse_report("n1", REPORT, 5.0) == [
        FailedRank("n1", 4, 0, -15, 5.0),
        FailedRank("n1", 5, 1, -15, 5.0),
        FailedRank("n1", 7, 3, -6, 5.0),
    ]
    assert parse_report("n1", "DistNetworkError: address already in use", 5.0) == []
    assert [f.cause() for f in parse_report("n1", REPORT, 5.0)][-1] == "killed by signal 6"


def test_the_cause_comes_before_its_consequences() -> None:
    trace = "Traceback (most recent call last):"
    tails = {
        0: tail(trace, "RuntimeError: [pair.cc:553] Connection closed by peer [10.0.0.2]:1", at=1.0),
        1: tail("starting", at=0.5),
        2: tail(trace, "ValueError: boom", at=1.1),
        3: tail("exiting: another rank failed first: another rank failed first", at=0.9),
    }
    failed = [FailedRank("a", 0, 0, 1, 2.0), FailedRank("a", 1, 1, -15, 2.0), FailedRank("b", 2, 0, 1, 2.2)]
    failed.append(FailedRank("b", 3, 1, 1, 2.2))
    for order in itertools.permutations(failed):
        assert first_failure(order, tails) == failed[2]
    assert [is_explained([f], tails) for f in failed] == [False, False, True, False]
    assert is_explained(failed, tails)
    assert not is_explained([], tails)
    # Killed from outside: no last words at all, still before those that lost it and those torchrun ended.
    killed = FailedRank("b", 4, 2, -9, 2.2)
    assert first_failure([failed[0], failed[1], failed[3], killed], tails) == killed
    # Killed by its own watchdog, which saw that another was.
    waited = FailedRank("a", 6, 2, -9, 2.0)
    told = "watchdog: rank 4 (b, pid 7) died in save (step 3); killing this rank, which did not end by itself"
    tails[6] = tail(told, at=1.2)
    assert first_failure([waited, killed], tails) == killed
    # Two causes: the one seen first.
    other = FailedRank("b", 5, 3, 1, 2.1)
    assert first_failure([failed[2], other], {**tails, 5: tail(trace, "KeyError: 1", at=1.05)}) == other
    assert first_failure([], {}) is None


def test_last_words_start_at_the_traceback() -> None:
    chained = ["noise", "Traceback (most recent call last):", "KeyError: 1", "", "During handling", "ValueError: 2"]
    assert tail(*chained, at=0.0).last_words() == chained[1:]
    assert tail("loading", "error: --tp 3: rule; remedy", at=0.0).last_words() == ["error: --tp 3: rule; remedy"]
    many = [f"line {i}" for i in range(1000)]
    assert tail(*many, at=0.0).last_words() == many[-20:]


def test_a_tail_is_judged_again_only_after_new_lines(monkeypatch: pytest.MonkeyPatch) -> None:
    """It is asked of all failed ranks whenever another one fails."""
    judged = 0
    last_words = RankTail.last_words

    def counted(tail: RankTail) -> list[str]:
        nonlocal judged
        judged += 1
        return last_words(tail)

    monkeypatch.setattr(RankTail, "last_words", counted)
    tails = {rank: tail("Broken pipe", at=1.0) for rank in range(50)}
    for count in range(1, 51):
        assert not is_explained([FailedRank("a", rank, 0, 1, 2.0) for rank in range(count)], tails)
    assert judged == 50
    tails[7].add("error: --lr 0: must be positive", 2.0)
    assert is_explained([FailedRank("a", 7, 0, 1, 2.0)], tails)
