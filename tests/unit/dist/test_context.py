"""Choice of the device, and the order and time limits of groups, as far as they can be checked without a GPU."""

from __future__ import annotations

import os
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist

from megalite.dist.device import pick_device
from megalite.dist.context import ParallelContext, neighbor_pairs
from megalite.dist.rendezvous import backend_of, group_timeout
from megalite.dist.grid import Grid
from megalite.base.errors import UserError
from megalite.extras.estimate.record import recorded_world


def test_neighbors_meet_in_three_rounds() -> None:
    assert neighbor_pairs(1) == []
    assert neighbor_pairs(2) == [(0, 1)]
    for size in (3, 4, 5, 16):
        pairs = neighbor_pairs(size)
        assert sorted(map(sorted, pairs)) == sorted(sorted((i, (i + 1) % size)) for i in range(size))
        # Each pair meets as soon as both of its ranks are free.
        free = [0] * size
        for a, b in pairs:
            free[a] = free[b] = max(free[a], free[b]) + 1
        assert max(free) <= 3


def test_groups_outlast_the_watchdog() -> None:
    assert group_timeout(600.0) == group_timeout(0.0) == timedelta(minutes=30)
    assert group_timeout(3600.0) == timedelta(hours=2)


@pytest.mark.parametrize("tp", [1, 2, 3, 4])
@pytest.mark.parametrize("pp", [1, 2, 3, 4])
def test_every_call_that_makes_groups_partitions_the_world(
    monkeypatch: pytest.MonkeyPatch, tp: int, pp: int
) -> None:
    """Backends that split the world's communicator need every rank in every call (NCCL from torch 2.15 on)."""
    world, made = 4 * tp * pp, list[tuple[int, ...]]()
    new_group = dist.new_group

    def recorded(ranks: list[int], **options: object) -> dist.ProcessGroup:
        made.append(tuple(ranks))
        return new_group(ranks, **options)

    monkeypatch.setattr(dist, "new_group", recorded)
    calls = []
    for rank in range(world):
        with recorded_world(rank, world):
            context = ParallelContext.create(Grid.of(world, tp=tp, pp=pp), torch.device("cpu"))
            context.split("dp", size=2)
        calls.append(made.copy())
        made.clear()
        ends = {0, pp - 1} if pp > 1 else set()
        assert context.axis("ends").size == (2 if context.pp.rank in ends else 1)
    assert len({len(groups) for groups in calls}) == 1
    for groups in zip(*calls):
        assert all(rank in group for rank, group in enumerate(groups))
        assert sum(map(len, set(groups))) == world


def test_the_backend_whose_groups_are_known(monkeypatch: pytest.MonkeyPatch) -> None:
    cuda = torch.device("cuda", 0)
    monkeypatch.setattr(dist.Backend, "backend_list", ["gloo", "nccl"])
    assert (backend_of(torch.device("cpu")), backend_of(cuda)) == ("gloo", "nccl")
    monkeypatch.setattr(dist.Backend, "backend_list", ["gloo", "nccl", "nccl2", "nccl-lazy", "nccl-legacy"])
    assert backend_of(cuda) == "nccl-legacy"


@pytest.fixture
def one_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    monkeypatch.setattr(torch.cuda, "set_device", lambda device: None)
    for name in ("CUDA_DEVICE_MAX_CONNECTIONS", "PYTORCH_ALLOC_CONF"):
        monkeypatch.setenv(name, "")  # restored afterward
    monkeypatch.setenv("LOCAL_RANK", "3")


@pytest.mark.usefixtures("one_gpu")
def test_one_gpu_per_task_is_number_0(monkeypatch: pytest.MonkeyPatch) -> None:
    assert pick_device("cuda") == torch.device("cuda", 0)
    # torchrun gives all ranks one environment: three of them lack a GPU.
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "x")
    with pytest.raises(UserError, match="requires its own GPU, and this host has 1"):
        pick_device("cuda")


@pytest.mark.parametrize(
    ("tp", "zero", "offload", "queues"),
    [(2, 1, "none", "1"), (1, 1, "none", None), (2, 3, "none", None), (2, 1, "activations", None)],
)
@pytest.mark.usefixtures("one_gpu")
def test_what_cuda_reads_at_its_start(
    monkeypatch: pytest.MonkeyPatch, tp: int, zero: int, offload: str, queues: str | None
) -> None:
    for name in ("CUDA_DEVICE_MAX_CONNECTIONS", "PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF"):
        monkeypatch.delenv(name, raising=False)
    pick_device("cuda", tp, zero, offload)
    assert os.environ.get("CUDA_DEVICE_MAX_CONNECTIONS") == queues
    assert os.environ["PYTORCH_ALLOC_CONF"] == "expandable_segments:True"
