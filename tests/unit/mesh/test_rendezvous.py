from __future__ import annotations

import inspect
import os
import socket
import subprocess
import sys
from concurrent.futures import Future, ThreadPoolExecutor
from concurrent.futures import TimeoutError as FutureTimeout
from datetime import timedelta
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch.distributed.elastic.rendezvous import dynamic_rendezvous

from megalite.core.base.errors import UserError
from megalite.core.base.log import env_rank
from megalite.core.mesh.rendezvous import check_adopted, fresh_store, init_process_group, local_world_size, world_size
from tests.ranks import ROOT, reserve_port

WORLD = 3
PATIENCE = timedelta(seconds=120)


@pytest.fixture
def server() -> dist.TCPStore:
    return dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False, timeout=PATIENCE)


def test_a_restart_never_reads_what_an_earlier_life_wrote(server: dist.TCPStore) -> None:
    """The ranks that come before rank 0 find the offer of the last life, and wait for the new one."""

    def live(rank: int, life: int) -> set[int]:
        store = dist.TCPStore("127.0.0.1", server.port, is_master=False, timeout=PATIENCE)
        corner = fresh_store(store, rank, WORLD, PATIENCE)
        assert rank == 0 or not corner.check([f"life of {rank}"])
        corner.set(f"life of {rank}", str(life))
        return {int(corner.get(f"life of {other}")) for other in range(WORLD)}

    with ThreadPoolExecutor(WORLD) as threads:
        for life in range(3):
            early: list[Future[set[int]]] = [threads.submit(live, rank, life) for rank in (1, 2)]
            if life:
                with pytest.raises(FutureTimeout):
                    early[0].result(timeout=1.5)
            lives = [threads.submit(live, 0, life), *early]
            assert [one.result(120) for one in lives] == [{life}] * WORLD


def test_a_rank_that_never_comes(server: dist.TCPStore) -> None:
    client = dist.TCPStore("127.0.0.1", server.port, is_master=False, timeout=PATIENCE)
    client.set_timeout(timedelta(seconds=0.5))
    with pytest.raises(dist.DistStoreError):
        fresh_store(client, 0, 2, timedelta(seconds=0.5))
    with pytest.raises(dist.DistStoreError):
        fresh_store(client, 1, 2, timedelta(seconds=0.5))


OPEN_MPI = "OMPI_COMM_WORLD_RANK=5 OMPI_COMM_WORLD_LOCAL_RANK=1 OMPI_COMM_WORLD_SIZE=8 OMPI_COMM_WORLD_LOCAL_SIZE=4"
MPICH = "PMI_RANK=5 MPI_LOCALRANKID=1 PMI_SIZE=8 MPI_LOCALNRANKS=4"
SLURM = "SLURM_PROCID=5 SLURM_LOCALID=1 SLURM_NTASKS=8 SLURM_NTASKS_PER_NODE=4"
DAEMON = "SLURM_PROCID=1 SLURM_LOCALID=0 SLURM_NTASKS=2 SLURM_NTASKS_PER_NODE=1"


def say(text: str) -> dict[str, str]:
    return dict(word.split("=") for word in text.split())


@pytest.mark.parametrize(
    "said",
    [
        OPEN_MPI,
        MPICH,
        SLURM,
        f"{DAEMON} {OPEN_MPI}",
        f"{DAEMON} {MPICH}",
        f"PMI_RANK=5 PMI_SIZE=8 {SLURM}",
        "PMI_RANK=5 PMI_LOCAL_RANK=1 PMI_SIZE=8 PMI_LOCAL_SIZE=4",
        OPEN_MPI.replace("OMPI", "MV2"),
    ],
)
def test_the_ranks_of_any_launcher_are_adopted(monkeypatch: pytest.MonkeyPatch, said: str) -> None:
    place = {"MASTER_ADDR": "node1", "MASTER_PORT": "29500"}
    monkeypatch.setattr("os.environ", say(said) | place)
    check_adopted()
    assert (world_size(), env_rank(), os.environ["LOCAL_RANK"], local_world_size()) == (8, 5, "1", 4)
    monkeypatch.setattr("os.environ", say(said) | place | {"RANK": "0", "WORLD_SIZE": "2"})
    assert (world_size(), env_rank()) == (2, 0)


@pytest.mark.parametrize(
    ("said", "message"),
    [
        (
            SLURM,
            "SLURM_PROCID 5 SLURM_NTASKS 8: ranks of one launcher meet by MASTER_ADDR and MASTER_PORT, which the "
            "environment does not set; export MASTER_ADDR=HOST_OF_RANK_0 MASTER_PORT=29500, or start the ranks with "
            "torchrun; for one process alone, unset SLURM_PROCID",
        ),
        (f"{SLURM} MASTER_ADDR=node1", "meet by MASTER_PORT, which"),
        (OPEN_MPI, "OMPI_COMM_WORLD_RANK 5 OMPI_COMM_WORLD_SIZE 8: "),
        (MPICH, "PMI_RANK 5 PMI_SIZE 8: "),
        ("PMI_RANK=0 PMI_SIZE=8 MASTER_ADDR=a MASTER_PORT=1", "meet by MPI_LOCALRANKID and MPI_LOCALNRANKS, which"),
        ("PMIX_RANK=1 MASTER_ADDR=a MASTER_PORT=1", "PMIX_RANK 1: ranks of one launcher meet by RANK and WORLD_SIZE"),
    ],
)
def test_no_rank_of_a_launcher_trains_alone(monkeypatch: pytest.MonkeyPatch, said: str, message: str) -> None:
    monkeypatch.setattr("os.environ", say(said))
    assert world_size() == 1
    with pytest.raises(UserError) as caught:
        init_process_group(torch.device("cpu"))
    assert message in str(caught.value)
    monkeypatch.setattr(dist, "is_initialized", lambda: True)  # by the user's own means
    check_adopted()


@pytest.mark.parametrize(
    "said", ["", "SLURM_NTASKS=8", "SLURM_PROCID=0 SLURM_NTASKS=1", f"{SLURM} RANK=0 WORLD_SIZE=1", "PMIX_RANK=0"]
)
def test_what_runs_alone_may(monkeypatch: pytest.MonkeyPatch, said: str) -> None:
    monkeypatch.setattr("os.environ", say(said))
    init_process_group(torch.device("cpu"))


def test_a_task_of_slurm_without_a_meeting_place_says_so(tmp_path: Path) -> None:
    words = [
        "--mock-data",
        "--vocab-size",
        "64",
        "--train-steps",
        "1",
        "--device",
        "cpu",
        "--run-dir",
        str(tmp_path / "r"),
    ]
    result = subprocess.run(
        [sys.executable, str(ROOT / "pretrain_gpt.py"), *words, "--tp", "2"],
        env={**os.environ, **say(SLURM.replace("PROCID=5", "PROCID=0"))},
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert result.returncode == 2
    (line,) = result.stderr.splitlines()
    assert "SLURM_PROCID 0 SLURM_NTASKS 8: " in line


POLICIES = """
import contextlib, os, torch, torch.distributed as dist
from megalite.core.mesh.rendezvous import init_process_group
init_process_group(torch.device("cpu"))
dist.all_reduce(torch.ones(1))
for task in os.listdir("/proc/self/task"):
    # A thread that only connected may end meanwhile.
    with contextlib.suppress(OSError), open(f"/proc/self/task/{task}/comm") as name:
        print(name.read().strip(), os.sched_getscheduler(int(task)) == os.SCHED_BATCH)
dist.destroy_process_group()
"""


@pytest.mark.full
@pytest.mark.skipif(not hasattr(os, "SCHED_BATCH"), reason="Linux only")
def test_no_thread_of_gloo_preempts_another() -> None:
    place = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(reserve_port()), "WORLD_SIZE": "2"}
    ranks = [
        subprocess.Popen(
            [sys.executable, "-c", POLICIES], env={**os.environ, **place, "RANK": rank}, stdout=subprocess.PIPE
        )
        for rank in ("0", "1")
    ]
    for rank in ranks:
        lines = [line.rsplit(" ", 1) for line in rank.communicate(timeout=120)[0].decode().splitlines()]
        assert {name for name, policy in lines if policy == "True"} >= {"gloo_tcp_loop", "pt_gloo_runloop"}
        assert [name for name, policy in lines if policy == "False" and "gloo" in name] == []
        assert lines[0][1] == "True"  # the main thread


# ----------------------------------------------------------------------- what SECURITY.md says of torch, while it is so


def test_torch_listens_on_all_addresses(server: dist.TCPStore) -> None:
    """Not only on the one that it was given, 127.0.0.1."""
    socket.create_connection(("127.0.0.2", server.port), timeout=120).close()


def test_torch_elastic_unpickles_what_the_store_holds() -> None:
    assert "pickle.loads(" in inspect.getsource(dynamic_rendezvous)
