"""Hosts of guarded ranks, made of network namespaces: some are in reserve, and any can be killed or cut off."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest

from tests.faults.harness import RUN
from tests.faults.networks import networks, pids_in, store_in
from tests.faults.zygote import Job, Left, Zygote
from tests.ranks import ROOT, reserve_port

RECOVER = ["--recover", "host", "--spare-ranks"]


class Hosts:
    """Hosts, and the ranks that run on them."""

    def __init__(self, zygote: Zygote, address: str, names: list[str]) -> None:
        self.zygote, self.address, self.names = zygote, address.replace(".254", ".1"), names
        self.start: Callable[..., Job]
        self.again: Callable[..., None]

    def come_back(self, rank: int) -> Job:
        """Start a lost rank of the last run again, as its launcher would; rank 0 says when it is in reserve."""
        return self.start(rank)

    def begin(
        self,
        folder: Path,
        flags: list[str],
        spares: int,
        *faults: dict[str, Any],
        each: int = 1,
        count: int = 3,
        launched: bool = False,
        run: list[str] = RUN,
    ) -> list[Job]:
        """Start a run with so many ranks on each of so many hosts, the last ones in reserve.

        `launched`: as torchrun does, with a store on the first host that outlives its ranks: lost ones may `come_back`.
        """
        folder.mkdir(exist_ok=True)
        world, port, jobs = each * count, reserve_port(), list[Job]()
        env = {"WORLD_SIZE": world, "MASTER_ADDR": self.address, "MASTER_PORT": port, "GLOO_SOCKET_IFNAME": "eth0"}
        if launched:
            self.store = store_in(self.names[0], self.address, port)
            env |= {"TORCHELASTIC_RUN_ID": "1", "TORCHELASTIC_USE_AGENT_STORE": "True"}
        arguments = [*run, "--run-dir", str(folder / "run"), *flags, *RECOVER, str(spares)]

        def start(rank: int, *own: dict[str, Any], more: Sequence[str] = ()) -> Job:
            said = folder / f"rank_{rank}"
            said.mkdir(exist_ok=True)
            words = {key: str(value) for key, value in {**env, "RANK": rank, "LOCAL_RANK": rank % each}.items()}
            network = self.names[rank // each]
            return self.zygote.start([*arguments, *more], 1, said, *own, env=words, network=network)

        self.start = start
        for rank in range(world):
            jobs.append(start(rank, *({**fault, "rank": 0} for fault in faults if fault["rank"] in (rank, "all"))))
        for job in jobs[world - spares :]:
            # Not before the reserves are with the others: then a guard has a thread for what it keeps.
            guard = job.pid(0)
            self.zygote.until(lambda guard=guard: len(os.listdir(f"/proc/{guard}/task")) > 1)
        return jobs

    @contextlib.contextmanager
    def torchrun(self, folder: Path, flags: list[str]) -> Iterator[list[subprocess.Popen[bytes]]]:
        """Start a rank on each of three hosts by torchrun, which write to said_HOST; power all off at the end.

        `again` starts that of a host once more, or another Python command there.
        """
        env = os.environ | {"OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "eth0"}
        port, launchers = str(reserve_port()), list[subprocess.Popen[bytes]]()

        def start(host: int, *words: str) -> None:
            command = ["-m", "torch.distributed.run", "--nnodes", "3", "--node-rank", str(host), "--nproc-per-node"]
            command += [
                "1",
                "--master-addr",
                self.address,
                "--master-port",
                port,
                str(ROOT / "pretrain_gpt.py"),
                *flags,
            ]
            command = ["ip", "netns", "exec", self.names[host], sys.executable, *(words or command)]
            with (folder / f"said_{host}").open("a") as log:
                launchers.append(subprocess.Popen(command, cwd=ROOT, env=env, stdout=log, stderr=log))

        self.again = start
        for host in (0, 1, 2):
            start(host)
        try:
            yield launchers
        finally:
            for host in range(len(self.names)):
                self.power_off(host)
            for launcher in launchers:
                launcher.wait()

    def power_off(self, host: int) -> None:
        """Kill all processes of a host."""
        for pid in pids_in(self.names[host]):
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)

    def cable(self, host: int, state: str) -> None:
        subprocess.run(["ip", "link", "set", f"{self.names[host]}c", state], check=True)


@pytest.fixture(scope="module")
def hosts(zygote: Zygote) -> Iterator[Hosts]:
    with networks(6) as (address, names):
        yield Hosts(zygote, address, names)


def end(jobs: list[Job]) -> list[Left]:
    return [job.end()[0] for job in jobs]
