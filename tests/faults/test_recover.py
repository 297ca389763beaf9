"""Ranks killed, stopped and hung under `--recover process`: the same run goes on within seconds, bit for bit.

Ranks and guards are real processes; what waits to take over is forked from a process that has imported everything.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tests.faults.test_runtime_faults import RUN, codes, events, outcome
from tests.faults.zygote import Job, Zygote, processes_of

RECOVER = ["--recover", "process"]


def begin(zygote: Zygote, folder: Path, world: int, flags: list[str], *faults: dict[str, Any]) -> Job:
    folder.mkdir(exist_ok=True)
    return zygote.start([*RUN, "--run-dir", str(folder / "run"), *flags], world, folder, *faults)


def kill(rank: int, at: int, folder: Path, place: str = "step", kind: str = "kill") -> dict[str, Any]:
    """A fault that happens once, whoever the rank is then."""
    mark = str(folder / f"{kind}_{place}_{rank}_{at}")
    return {"rank": rank, "kind": kind, "place": place, "at": at, "once": mark}


def repeated(run_dir: Path) -> int:
    """How many steps have a second line."""
    lines = [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]
    steps = [line["step"] for line in lines if "event" not in line]
    return len(steps) - len(set(steps))


def recovers(zygote: Zygote, folder: Path, world: int, flags: list[str], faults: list[dict[str, Any]]) -> None:
    """A run with these faults ends as the one that nothing happens to."""
    assert codes(begin(zygote, folder / "whole", world, flags).end()) == [0] * world
    left = begin(zygote, folder / "hit", world, [*flags, *RECOVER], *faults).end()
    assert codes(left) == [0] * world, left
    assert outcome(folder / "hit" / "run") == outcome(folder / "whole" / "run")
    found = events(folder / "hit" / "run", "recovery")
    assert [event["ranks"] for event in found] == [[fault["rank"]] for fault in faults]
    assert repeated(folder / "hit" / "run") <= len(faults)
    assert not processes_of(folder)


def test_rank_0_is_killed(zygote: Zygote, tmp_path: Path) -> None:
    """With its lock, its log and its part of the save that is being written."""
    recovers(zygote, tmp_path, 2, [], [kill(0, 5, tmp_path)])


@pytest.mark.full
@pytest.mark.parametrize(
    "layout",
    ["--tp 2 --pp 2", "--zero 1", "--zero 3", "--pp 2 --zero 2", "--pp 4 --num-layers 4"],
)
def test_each_rank_is_killed(zygote: Zygote, tmp_path: Path, layout: str) -> None:
    faults = [kill(rank, at, tmp_path) for rank, at in ((2, 2), (0, 4), (1, 5), (3, 8))]
    recovers(zygote, tmp_path, 4, layout.split(), faults)
