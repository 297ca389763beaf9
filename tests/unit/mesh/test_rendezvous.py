from __future__ import annotations

import inspect
import os
import socket
import subprocess
import sys
from concurrent.futures import Future, ThreadPoolExecutor
from concurrent.futures import TimeoutError as FutureTimeout
from datetime import timedelta

import pytest
import torch.distributed as dist
from torch.distributed.elastic.rendezvous import dynamic_rendezvous

from megalite.core.mesh.rendezvous import fresh_store
from tests.ranks import reserve_port

WORLD = 3
PATIENCE = timedelta(seconds=30)


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
            assert [one.result(30) for one in lives] == [{life}] * WORLD


def test_a_rank_that_never_comes(server: dist.TCPStore) -> None:
    client = dist.TCPStore("127.0.0.1", server.port, is_master=False, timeout=PATIENCE)
    client.set_timeout(timedelta(seconds=0.5))
    with pytest.raises(dist.DistStoreError):
        fresh_store(client, 0, 2, timedelta(seconds=0.5))
    with pytest.raises(dist.DistStoreError):
        fresh_store(client, 1, 2, timedelta(seconds=0.5))


POLICIES = """
import os, torch, torch.distributed as dist
from megalite.core.mesh.rendezvous import init_process_group
init_process_group(torch.device("cpu"))
dist.all_reduce(torch.ones(1))
for task in os.listdir("/proc/self/task"):
    with open(f"/proc/self/task/{task}/comm") as name:
        print(name.read().strip(), os.sched_getscheduler(int(task)) == os.SCHED_BATCH)
dist.destroy_process_group()
"""


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
    socket.create_connection(("127.0.0.2", server.port), timeout=10).close()


def test_torch_elastic_unpickles_what_the_store_holds() -> None:
    assert "pickle.loads(" in inspect.getsource(dynamic_rendezvous)
