"""What watchdogs tell one another about a rank that died without a word."""

from __future__ import annotations

from pathlib import Path

import pytest

from megalite.runtime.base.untrusted import read_json
from megalite.runtime.watch import deaths
from megalite.runtime.watch.deaths import GRACE_S, Deaths


def test_the_first_death_is_told_and_a_rank_gets_its_time(tmp_path: Path) -> None:
    folder = tmp_path / "logs" / "watchdog_1"
    survivor = Deaths(folder, 4)
    assert survivor.overdue(silent=100.0, passed=1.0) == ""
    Deaths(folder, 4).record(2, 4242, "training (step 6)")
    Deaths(folder, 4).record(3, 4243, "training (step 6)")
    waits = [survivor.overdue(silent=100.0 + i, passed=1.0) for i in range(int(GRACE_S) + 1)]
    assert not any(waits[:-1])
    assert waits[-1].startswith("rank 2 (")
    assert waits[-1].endswith(", pid 4242) died in training (step 6)")
    # It is still leaving: each heartbeat gives it the same time again.
    assert survivor.overdue(silent=GRACE_S - 1, passed=1.0) == ""


def test_a_file_that_is_being_written_is_read_again(tmp_path: Path) -> None:
    (tmp_path / "first_death.json").write_text('{"wh')
    survivor = Deaths(tmp_path, 2)
    assert survivor.overdue(5.0, 1.0) == ""
    (tmp_path / "first_death.json").write_text('{"what": "rank 1 died"}')
    assert [survivor.overdue(50.0, 1.0) for _ in range(12)][-1] == "rank 1 died"


@pytest.mark.parametrize(("world", "looks"), [(2, 60), (8192, 4)])
def test_looks_do_not_grow_with_the_square_of_the_ranks(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, world: int, looks: int
) -> None:
    """In a minute of silence; and nobody looks while a rank makes progress."""
    reads: list[Path] = []

    def counted(path: Path, limit: int) -> object:
        reads.append(path)
        return read_json(path, limit)

    monkeypatch.setattr(deaths, "read_json", counted)
    survivor = Deaths(tmp_path, world)
    for _ in range(60):
        survivor.overdue(silent=0.5, passed=1.0)
    assert not reads
    for second in range(60):
        survivor.overdue(silent=1.0 + second, passed=1.0)
    assert len(reads) == looks
