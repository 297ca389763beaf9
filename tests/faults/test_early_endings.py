"""What happens to a rank before it trains: its launcher is killed while it imports, or it is asked for its stacks while
it waits for the others."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist

from tests.faults.zygote import WITHIN_S
from tests.ranks import PYTHONPATH, reserve_port

# torchrun, as far as a rank knows it: it dies while its rank is between two imports.
LAUNCHER = """
import os, signal, subprocess, sys
rank = subprocess.Popen([sys.executable, "-c", sys.argv[1]], stdout=subprocess.PIPE)
rank.stdout.readline()
os.kill(os.getpid(), signal.SIGKILL)
"""
ORPHAN = """
import os
launcher = os.getppid()
import megalite
print(flush=True)
while os.getppid() == launcher:
    pass
from megalite.core.mesh.rendezvous import init_process_group
from megalite.runtime.start.exit import leaving_together
import torch
with leaving_together():
    init_process_group(torch.device("cpu"))
"""
MEETS = """
import torch
import torch.distributed as dist
from megalite.core.mesh.rendezvous import init_process_group
from megalite.runtime.start.exit import leaving_together
with leaving_together():
    print(flush=True)
    init_process_group(torch.device("cpu"))
    # The other still connects when this one has: it must not see it leave.
    dist.barrier()
"""


def environment(rank: int, port: int) -> dict[str, str]:
    launched = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "WORLD_SIZE": "2", "RANK": str(rank)}
    return {**os.environ, **launched, "OMP_NUM_THREADS": "1", "PYTHONPATH": PYTHONPATH}


@pytest.mark.full
def test_a_lost_store_is_no_mistake_of_the_user() -> None:
    """It was said to be a port in use, with exit code 2: what no launcher tries again, and what ends a whole Job."""
    store: Any = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    # Of an earlier attempt: whoever takes it says so.
    store.set("megalite/rendezvous/offer", "early")
    env = {**environment(1, store.port), "TORCHELASTIC_USE_AGENT_STORE": "True", "TORCH_CPP_LOG_LEVEL": "FATAL"}
    with subprocess.Popen([sys.executable, "-c", MEETS], env=env, stderr=subprocess.PIPE, text=True) as rank:
        store.wait(["early/here/1"], timedelta(seconds=WITHIN_S))
        del store
        assert rank.stderr is not None
        assert rank.stderr.read() == "[rank 1] exiting: another rank failed first, or the network between them\n"
    assert rank.returncode == 1


def test_a_rank_whose_launcher_was_killed_while_it_imported_ends() -> None:
    """Nobody is left to meet: it used to wait in the rendezvous for ten minutes."""
    launched = {**environment(1, reserve_port()), "TORCHELASTIC_RUN_ID": "1"}
    command = [sys.executable, "-c", LAUNCHER, ORPHAN]
    # Its output is read until its rank, which has inherited it, has ended too.
    done = subprocess.run(command, env=launched, stderr=subprocess.PIPE, text=True, timeout=WITHIN_S)
    assert done.returncode == -signal.SIGKILL
    assert done.stderr == ""


@pytest.mark.full
@pytest.mark.parametrize("early", [0, 1])
def test_stacks_can_be_asked_for_in_the_rendezvous(tmp_path: Path, early: int) -> None:
    """Sockets that wait are interrupted by the handler, and must wait on."""
    port, said = reserve_port(), tmp_path / "err"
    command = [sys.executable, "-c", MEETS]
    with said.open("w") as err:
        waiting = subprocess.Popen(command, env=environment(early, port), stderr=err, stdout=subprocess.PIPE)
    with waiting:
        assert waiting.stdout is not None
        waiting.stdout.readline()
        deadline = time.monotonic() + WITHIN_S
        while said.read_text().count(" in init_process_group") < 20 and waiting.poll() is None:
            assert time.monotonic() < deadline, said.read_text()
            waiting.send_signal(signal.SIGUSR1)
            time.sleep(0.05)
        assert waiting.poll() is None, said.read_text()
        late = subprocess.run(
            command, env=environment(1 - early, port), timeout=WITHIN_S, capture_output=True, text=True
        )
        assert late.returncode == 0, late.stderr
        assert waiting.wait(WITHIN_S) == 0, said.read_text()
