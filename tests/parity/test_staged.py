"""Rehearses on a CPU how ranks share a GPU (tests/gpu/ranks.py), through the collectives that NCCL would carry."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from megalite.core.mesh import collectives
from megalite.core.mesh.context import ParallelContext
from megalite.core.mesh.grid import Grid
from tests.gpu import ranks
from tests.gpu.ranks import assert_equal
from tests.rows import always_run
from tests.workers import WorkerPool


def meet(rank: int, world: int, folder: str) -> None:
    """Replace the default process group by a staged one."""
    import torch.distributed as dist

    from tests.gpu import staged

    dist.barrier()  # a rank that leaves early would end the connections that others still make
    dist.destroy_process_group()
    staged.init_process_group(dist.FileStore(f"{folder}/store", world), rank, world)


def check(rank: int, world: int, folder: str, known: Path, rows: list[str]) -> dict[str, dict[str, Any]]:
    meet(rank, world, folder)
    return ranks.check_rows(known, rows, torch.device("cpu"))


@pytest.fixture(scope="module")
def known(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What one process makes of each model."""
    ranks.write_expected(folder := tmp_path_factory.mktemp("known"))
    return folder


# A rehearsal of what GPUs run, where each row is another way of messages.
REHEARSED = [
    *("tp2-pp2-zb-h1-zero3", "pp2-zb-v-zero2", "zero3-groups", "zero3-offload", "tp2-pp2-topk"),
    *("cp2-ring", "cp2-a2a-pp2", "ep4-tp2-allgather-zero3"),
]


@pytest.mark.parametrize("row", always_run(REHEARSED, REHEARSED[0]))
def test_a_layout(pool: WorkerPool, row: str, known: Path, tmp_path: Path) -> None:
    found = pool.run(8, check, 8, str(tmp_path), known, [row])
    assert_equal(found, [row])


def sums_late(rank: int, world: int, folder: str) -> list[float]:
    """A sum before, and after, the other rank takes part."""
    import torch.distributed as dist

    meet(rank, world, folder)
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


def sums_in_bf16(rank: int, world: int, folder: str) -> list[float]:
    """This rank's slice of a sum over ranks, sent in bf16."""
    meet(rank, world, folder)
    axis = ParallelContext.create(Grid.of(world), torch.device("cpu")).world
    out = torch.empty(2)
    x = torch.full((8,), 256.0 if rank == 0 else 1.0, dtype=torch.bfloat16)
    collectives.reduce_scatter(out, x, axis).wait()
    return out.tolist()


def test_what_is_sent_in_bf16_is_summed_in_fp32(pool: WorkerPool, tmp_path: Path) -> None:
    # In bf16 the neighbors of 256 are 255 and 258.
    assert pool.run(4, sums_in_bf16, 4, str(tmp_path)) == [[259.0, 259.0]] * 4


def test_a_post_waits_for_nobody(pool: WorkerPool, tmp_path: Path) -> None:
    first, second = pool.run(2, sums_late, 2, str(tmp_path))
    assert first == [1.0, 3.0]
    assert second[1] == 3.0
