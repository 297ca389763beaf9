"""A peer dies while gloo's own thread has no processor: what this rank posts meanwhile must fail, not wait forever."""

from __future__ import annotations

import os
import subprocess
import sys

from tests.faults.zygote import WITHIN_S
from tests.ranks import PYTHONPATH, reserve_port

# The thread that reads sockets is held in a signal's handler from before the peer's death until the gather is posted.
# The peer's last message comes after its part of the gather: this rank knows that the peer is ready to receive.
GATHER = """
import contextlib, ctypes, os, signal, socket
from pathlib import Path
import torch, torch.distributed as dist
from megalite.core.mesh.collectives import all_gather
from megalite.core.mesh.context import Axis

rank, others = int(os.environ["RANK"]), set(os.listdir("/proc/self/task"))
dist.init_process_group("gloo")
axis, out, message = Axis("dp", 2, rank, (0, 1), dist.group.WORLD), torch.zeros(8), torch.tensor([os.getpid()])
mine = torch.ones(4)
if rank == 1:
    pending = all_gather(out, mine, axis)
    dist.send(message, 0, group=axis.group, tag=1)
    pending.wait()
dist.recv(message, 1, group=axis.group, tag=1)
libc = ctypes.CDLL(None)
libc.signal(signal.SIGUSR1, ctypes.cast(libc.pause, ctypes.c_void_p))
libc.signal(signal.SIGUSR2, ctypes.cast(libc.getpid, ctypes.c_void_p))
threads = [int(task) for task in set(os.listdir("/proc/self/task")) - others]
for thread in threads:
    assert libc.tgkill(os.getpid(), thread, signal.SIGUSR1) == 0
peer = Path(f"/proc/{int(message)}/stat")
os.kill(int(message), signal.SIGKILL)
while peer.exists() and peer.read_text().rpartition(")")[2].split()[0] != "Z":
    pass

def has_reset():
    for name in os.listdir("/proc/self/fd"):
        with contextlib.suppress(OSError), socket.socket(fileno=os.dup(int(name))) as connection:
            if connection.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, 1)[0] == 7:  # TCP_CLOSE
                return True

first = dist.isend(message, 1, group=axis.group, tag=2)  # answered by a reset
while not has_reset():
    pass
pending = all_gather(out, mine, axis)
for thread in threads:
    assert libc.tgkill(os.getpid(), thread, signal.SIGUSR2) == 0
try:
    pending.wait()
except RuntimeError as e:
    print(e, flush=True)
os._exit(0)
"""


def test_a_gather_posted_on_a_broken_connection_fails() -> None:
    launched = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(reserve_port()), "WORLD_SIZE": "2"}
    environment = {**os.environ, **launched, "OMP_NUM_THREADS": "1", "PYTHONPATH": PYTHONPATH}
    command = [sys.executable, "-c", GATHER]
    with subprocess.Popen(command, env={**environment, "RANK": "1"}) as peer:
        done = subprocess.run(
            command, env={**environment, "RANK": "0"}, capture_output=True, text=True, timeout=WITHIN_S
        )
        peer.kill()
    assert "Connection" in done.stdout, done
