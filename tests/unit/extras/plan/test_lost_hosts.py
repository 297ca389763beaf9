"""`--dry-run --lost K`: ranks and passes counted by hand and what its users may get wrong."""

from __future__ import annotations

from dataclasses import replace

import pytest

from megalite.core.build import build_engine
from megalite.core.mesh.grid import Grid
from megalite.extras.plan.lost_hosts import lost_hosts_table
from megalite.extras.plan.memory.ranks import memory_per_rank
from megalite.runtime.options import cli
from megalite.runtime.options.run import Config
from tests.unit.extras.plan.counted import rank_context
from tests.unit.extras.plan.models import config


def _elastic(flags: str = "") -> Config:
    words = ["--preset", "tiny", "--vocab-size", "512", "--global-batch-size", "64", "--recover", "host", "--elastic"]
    return cli.parse([*words, *flags.split()], world=32).config


def _table(cfg: Config, world: int, most: int, host: int) -> list[list[str]]:
    return [line.split() for line in lost_hosts_table(cfg, Grid.from_config(cfg.parallel, world), most, host)[3:]]


# Flags, ranks that train, ranks of a host; for each number of lost hosts: ranks used and idle, dp, passes, step time.
BY_HAND = [
    ("", 32, 8, ["32 0 32 2 1.00", "24 0 24 3 1.50", "16 0 16 4 2.00", "8 0 8 8 4.00"]),
    # Four stages take three passes more.
    ("--pp 4 --schedule 1f1b", 16, 6, ["16 0 4 16 1.00", "8 2 2 32 1.84", "4 0 1 64 3.53"]),
    ("--num-experts 4 --ep 4 --tp 2", 16, 5, ["16 0 8 8 1.00", "8 3 4 16 2.00"]),
    ("--spare-ranks 4", 8, 4, ["8 4 8 8 1.00", "8 0 8 8 1.00", "4 0 4 16 2.00"]),
]


@pytest.mark.parametrize(("flags", "world", "host", "rows"), BY_HAND)
def test_counted_by_hand(flags: str, world: int, host: int, rows: list[str]) -> None:
    table = _table(_elastic(flags), world, len(rows) - 1, host)
    assert [row[0] for row in table] == [str(lost) for lost in range(len(rows))]
    assert [" ".join(row[1:5]) for row in table] == [row.rpartition(" ")[0] for row in rows]
    # Stages are not quite even.
    expected = [float(row.rpartition(" ")[2]) for row in rows]
    assert [float(row[5]) for row in table] == pytest.approx(expected, rel=0.05)


def test_below_the_minimum_it_says_so() -> None:
    table = _table(_elastic("--min-ranks 20"), 32, 2, 8)
    assert table[1][1] == "24"
    assert " ".join(table[2]) == "2 too few: the last state is saved, and the run ends with code 75"


@pytest.mark.parametrize("zero", [0, 1, 3])
def test_a_rank_loads_what_it_will_hold(zero: int) -> None:
    cfg = config(parallel={"zero": zero}, global_batch_size=12, micro_batch_size=1)
    cfg = replace(cfg, run=replace(cfg.run, recover="host", elastic=True))
    held = [s.flat.nbytes for s in build_engine(cfg, rank_context(Grid.of(3), 1)).optimizer.states()]
    (copy,) = memory_per_rank(cfg, Grid.of(3))
    assert copy.copies / 6 == pytest.approx(sum(held), rel=0.02)
    (_, row) = _table(cfg, 4, 1, 1)
    assert float(row[7]) == pytest.approx(sum(held) / 2**30, abs=6e-4)
