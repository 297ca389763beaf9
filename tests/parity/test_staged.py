"""Rehearses on a CPU how ranks share a GPU (tests/gpu/ranks.py), through the collectives that NCCL would carry."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from megalite.dist import collectives
from megalite.dist.context import ParallelContext
from megalite.dist.grid import Grid
from tests.gpu import ranks
from tests.gpu.test_ranks import assert_equal
from tests.workers import WorkerPool


def check(rank: int, world: int, folder: str, rows: list[str]) -> dict[str, dict[str, Any]]:
    import torch.distributed as dist

    from tests.gpu import staged

    dist.destroy_process_group()
    staged.init_process_group(dist.FileStore(f"{folder}/store", world), rank, world)
    return ranks.check_rows(Path(folder), rows, torch.device("cpu"))


@pytest.mark.parametrize(
    "row", [pytest.param(row, marks=() if row == "tp2-pp2-zb-h1-zero3" else pytest.mark.full) for row in ranks.ROWS]
)
def test_a_layout(pool: WorkerPool, row: str, tmp_path: Path) -> None:
    ranks.write_expected(tmp_path)
    found = pool.run(8, check, 8, str(tmp_path), [row])
    assert_equal(found, [row])


def sums_late(rank: int, world: int, folder: str) -> list[float]:
    """A sum before, and after, the other rank takes part."""
    import torch.distributed as dist

    from tests.gpu import staged

    dist.destroy_process_group()
    staged.init_process_group(dist.FileStore(f"{folder}/store", world), rank, world)
    world_axis = ParallelContext.create(Grid.of(world), torch.device("cpu")).world
    store = dist.FileStore(f"{folder}/turns", world)
    x = torch.tensor([1.0 + rank])
    if rank == 1:
        store.wait(["rank 0 has looked"])
    work = collectives.all_reduce(x, world_axis)
    seen = x.item()
    if rank == 0:
        store.set("rank 0 has looked", "")
    work.wait()
    return [seen, x.item()]


def test_a_post_waits_for_nobody(pool: WorkerPool, tmp_path: Path) -> None:
    first, second = pool.run(2, sums_late, 2, str(tmp_path))
    assert first == [1.0, 3.0]
    assert second[1] == 3.0
