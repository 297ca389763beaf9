"""Choice of the device, and the order and time limits of groups, as far as they can be checked without a GPU."""

from __future__ import annotations

import faulthandler
import math
import os
import sys
import threading
from collections.abc import Callable
from datetime import timedelta
from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist

from megalite.core.base.errors import UserError
from megalite.core.build import build_engine
from megalite.core.mesh import context as context_module
from megalite.core.mesh.collectives import all_reduce
from megalite.core.mesh.context import ParallelContext, neighbor_pairs
from megalite.core.mesh.device import pick_device
from megalite.core.mesh.grid import Grid
from megalite.core.mesh.rendezvous import backend_of, group_timeout
from megalite.extras.estimate.record import Communication, recorded_world
from tests.parity import jobs


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


LAYOUTS: list[dict[str, Any]] = [
    *({"tp": tp, "pp": pp} for tp in (1, 2, 3, 4) for pp in (1, 2, 3, 4)),
    {"cp": 2},
    {"cp": 4, "pp": 3},
    {"cp": 2, "tp": 2, "pp": 4},
    {"ep": 4},
    {"ep": 2, "pp": 3},
    {"ep": 4, "etp": "1", "tp": 2, "pp": 3},
    {"ep": 8, "etp": "1", "tp": 2, "cp": 2, "pp": 4},
    {"ep": 2, "cp": 2, "tp": 2, "pp": 3},
]


def groups_made(
    monkeypatch: pytest.MonkeyPatch, grid: Grid, build: Callable[[ParallelContext], object]
) -> list[list[tuple[int, ...]]]:
    """Ranks of the groups that each rank makes, in its order."""
    made, new_group = list[tuple[int, ...]](), dist.new_group

    def recorded(ranks: list[int], **options: Any) -> dist.ProcessGroup:
        made.append(tuple(ranks))
        return new_group(ranks, **options)

    monkeypatch.setattr(dist, "new_group", recorded)
    calls = []
    for rank in range(grid.world):
        with recorded_world(rank, grid):
            build(ParallelContext.create(grid, torch.device("cpu")))
        calls.append(made.copy())
        made.clear()
    return calls


def assert_partitions(calls: list[list[tuple[int, ...]]]) -> None:
    """Backends that split the world's communicator need every rank in every call (NCCL from torch 2.15 on)."""
    assert len({len(groups) for groups in calls}) == 1
    for groups in zip(*calls):
        assert all(rank in group for rank, group in enumerate(groups))
        assert sum(map(len, set(groups))) == len(calls)


@pytest.mark.parametrize("layout", LAYOUTS, ids=lambda sizes: "-".join(f"{k}{v}" for k, v in sizes.items()))
def test_every_call_that_makes_groups_partitions_the_world(
    monkeypatch: pytest.MonkeyPatch, layout: dict[str, Any]
) -> None:
    sizes = {name: layout.get(name, 1) for name in ("tp", "pp", "cp")}
    grid = Grid.of(4 * math.prod(sizes.values()), ep=layout.get("ep", 1), etp=layout.get("etp", "tp"), **sizes)

    def build(context: ParallelContext) -> None:
        context.split("dp", "cp", size=2)
        assert context.axis("ends").size == (2 if sizes["pp"] > 1 and context.pp.rank in (0, sizes["pp"] - 1) else 1)

    assert_partitions(groups_made(monkeypatch, grid, build))


@pytest.mark.parametrize(
    "layout",
    [{"cp": 2, "zero_group": "2"}, {"ep": 2, "zero_group": "2"}, {"ep": 2, "tp": 2, "etp": "1", "zero_group": "4"}],
)
def test_stages_without_experts_make_their_groups_too(monkeypatch: pytest.MonkeyPatch, layout: dict[str, Any]) -> None:
    """Also where a group of hybrid sharding is made with the first bucket that needs it."""
    model = jobs.llama(3, num_experts=4, moe_topk=2, moe_ffn_size=24, moe_dense_layers=(0,))
    cfg = jobs.make_config(model, {"pp": 3, "zero": 3, "zero_whole_below": 0, **layout}, micro_batch_size=1)
    grid = Grid.from_config(cfg.parallel, 24)
    assert_partitions(groups_made(monkeypatch, grid, partial(build_engine, cfg)))


@pytest.mark.parametrize(
    ("sizes", "made"),
    [
        ({"dp": 4}, []),
        ({"tp": 4}, []),
        ({"dp": 2, "cp": 2}, ["cp", "dp"]),
        ({"dp": 2, "tp": 2}, ["tp", "dp"]),
        ({"pp": 4}, ["pp", "pp_grad", "ends"]),
    ],
    ids=str,
)
def test_an_axis_of_all_ranks_shares_the_communicator_of_the_world(
    monkeypatch: pytest.MonkeyPatch, sizes: dict[str, int], made: list[str]
) -> None:
    """Each further one costs an NCCL communicator with its buffers; messages keep theirs."""
    grid, names = Grid(tuple((name, sizes.get(name, 1)) for name in ("pp", "dp", "cp", "tp"))), list[str]()
    new_group = dist.new_group

    def recorded(ranks: list[int], group_desc: str, **options: Any) -> dist.ProcessGroup:
        names.append(group_desc)
        return new_group(ranks, group_desc=group_desc, **options)

    monkeypatch.setattr(dist, "new_group", recorded)
    with recorded_world(1, grid) as log:
        context = ParallelContext.create(grid, torch.device("cpu"))
        of_all = [axis for axis in context.axes.values() if axis.ranks == (0, 1, 2, 3) and axis.name != "pp"]
        log.clear()
        for axis in (*of_all, context.world):
            all_reduce(torch.zeros(1), axis).wait()
            assert axis.group is dist.group.WORLD
            assert axis.dropped is context.world.dropped
    assert names == made
    # The estimate lists all of them under one name, as they wait in one stream.
    assert {event.axis for event in log if isinstance(event, Communication)} == {of_all[0].name if of_all else "world"}


def test_a_group_that_takes_long_is_named_with_stacks(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str], caplog: pytest.LogCaptureFixture
) -> None:
    """No watchdog runs yet while groups are made."""
    new_group, said = dist.new_group, threading.Event()

    def slow(ranks: list[int], group_desc: str, **options: Any) -> dist.ProcessGroup:
        if group_desc == "pp":
            assert said.wait(120)
        return new_group(ranks, group_desc=group_desc, **options)

    def dump_traceback(**options: Any) -> None:
        assert sys.__stderr__ is not None
        faulthandler.dump_traceback(**options, file=sys.__stderr__)
        said.set()

    monkeypatch.setattr(dist, "new_group", slow)
    monkeypatch.setattr(context_module, "_SLOW_SETUP", 0.01)
    monkeypatch.setattr(context_module, "faulthandler", SimpleNamespace(dump_traceback=dump_traceback))
    with recorded_world(0, grid := Grid.of(4, pp=4)), caplog.at_level("WARNING"):
        ParallelContext.create(grid, torch.device("cpu"))
    assert "making the process group pp of ranks 0, 1, 2, 3 takes more than" in caplog.text
    assert "in slow" in capfd.readouterr().err


def test_experts_on_all_ranks_have_a_communicator_of_their_own() -> None:
    """Their messages would wait for the sums of gradients in the world's."""
    grid = Grid.of(4, ep=4)
    with recorded_world(1, grid):
        context = ParallelContext.create(grid, torch.device("cpu"))
        assert context.ep.ranks == context.dp.ranks == (0, 1, 2, 3)
        assert context.ep.group is not dist.group.WORLD is context.dp.group


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
    ("tp", "zero", "offload", "copies", "queues"),
    [
        (2, 1, "none", False, "1"),
        (1, 1, "none", False, None),
        (2, 3, "none", False, None),
        (2, 1, "activations", False, None),
        (2, 1, "none", True, None),
    ],
)
@pytest.mark.usefixtures("one_gpu")
def test_what_cuda_reads_at_its_start(
    monkeypatch: pytest.MonkeyPatch, tp: int, zero: int, offload: str, copies: bool, queues: str | None
) -> None:
    for name in ("CUDA_DEVICE_MAX_CONNECTIONS", "PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF"):
        monkeypatch.delenv(name, raising=False)
    pick_device("cuda", tp, zero, offload, copies)
    assert os.environ.get("CUDA_DEVICE_MAX_CONNECTIONS") == queues
    assert os.environ["PYTORCH_ALLOC_CONF"] == "expandable_segments:True"
