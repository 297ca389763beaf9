"""A Slurm of virtual nodes, gone after the test, and the batch scripts that are emitted for it."""

from __future__ import annotations

import contextlib
import fcntl
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest

from tests.faults.harness import wait_for
from tests.ranks import ROOT

# Child processes must find their own socket and key, not those of a Slurm that is installed here.
CONF = """
ClusterName=test
SlurmctldHost={host}({address})
SlurmctldPort={ctld_port}
SlurmUser=root
SlurmdUser=root
AuthType=auth/munge
AuthInfo=socket={base}/munge.socket
CryptoType=crypto/munge
StateSaveLocation={base}/state
SlurmdSpoolDir={base}/spool_%n
SlurmctldPidFile={base}/slurmctld.pid
SlurmdPidFile={base}/slurmd_%n.pid
SlurmctldLogFile={base}/slurmctld.log
SlurmdLogFile={base}/slurmd_%n.log
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
SelectType=select/cons_tres
SlurmdParameters=config_overrides
MpiDefault=none
ReturnToService=2
KillWait=5
SlurmdTimeout=15
{nodes}
PartitionName=all Nodes=ALL Default=YES MaxTime=INFINITE State=UP
"""


def free_ports(count: int) -> list[int]:
    """So many free ports.

    The daemons listen on them only seconds later: the system gives these to nobody who asks for just any, and jobs have
    theirs from 20000 on.
    """
    for first in range(10000, 20000, count):
        with contextlib.suppress(OSError), contextlib.ExitStack() as stack:
            for port in range(first, first + count):
                stack.enter_context(socket.create_server(("", port)))
            return list(range(first, first + count))
    raise RuntimeError("no free ports in a row")


class Slurm:
    """munged, slurmctld and one slurmd per virtual node, all in one directory.

    Args:
        base: the directory.
        address: of slurmctld.
        nodes: address of each node, and what its commands begin with.
    """

    def __init__(
        self, base: Path, address: str = "127.0.0.1", nodes: Sequence[tuple[str, list[str]]] = (("127.0.0.1", []),) * 2
    ) -> None:
        self.base, self.address = base, address
        self.nodes = {f"sn{i}": node for i, node in enumerate(nodes, 1)}
        self.daemons: list[subprocess.Popen] = []
        self.env = {**os.environ, "SLURM_CONF": str(base / "slurm.conf"), "OMP_NUM_THREADS": "1"}

    def up(self) -> None:
        """Start everything and wait until all nodes are idle."""
        host = socket.gethostname().split(".")[0]
        (self.base / "state").mkdir()
        port, *ports = free_ports(1 + len(self.nodes))
        lines = [
            f"NodeName={name} NodeHostname={host} NodeAddr={address} Port={own} CPUs=2 RealMemory=500"
            for (name, (address, _)), own in zip(self.nodes.items(), ports)
        ]
        conf = CONF.format(base=self.base, host=host, address=self.address, ctld_port=port, nodes="\n".join(lines))
        (self.base / "slurm.conf").write_text(conf.lstrip())
        (self.base / "munge.key").write_bytes(os.urandom(128))
        (self.base / "munge.key").chmod(0o600)
        munge = [f"--{name}-file={self.base}/munge.{name}" for name in ("key", "pid", "log", "seed")]
        self.start("munged", "--foreground", "--force", f"--socket={self.base}/munge.socket", *munge)
        wait_for((self.base / "munge.socket").exists, lambda: "munged's socket")
        self.start("slurmctld", "-D")
        # The nodes' names resolve for what runs on them only: their own mount namespace has its own /etc/hosts.
        hosts = self.base / "hosts"
        names = "".join(f"{address} {name}\n" for name, (address, _) in self.nodes.items())
        hosts.write_text(f"{Path('/etc/hosts').read_text()}\n{names}")
        for node, (_, before) in self.nodes.items():
            daemon = f"mount --bind '{hosts}' /etc/hosts && exec slurmd -D -N {node}"
            self.start(*before, "unshare", "--mount", "sh", "-c", daemon)
        idle = ["idle", str(len(self.nodes))]
        wait_for(lambda: self.run("sinfo", "-h", "-o", "%T %D").split() == idle, self.logs)

    def start(self, *command: str) -> None:
        log = (self.base / f"{command[0]}.out").open("a")
        self.daemons.append(subprocess.Popen(command, env=self.env, stdout=log, stderr=log, cwd=self.base))
        log.close()

    def run(self, *command: str) -> str:
        """A Slurm client command's output."""
        return subprocess.run(command, env=self.env, capture_output=True, text=True, cwd=ROOT).stdout

    def submit(self, script: str, out: Path) -> str:
        """sbatch; the job's id."""
        ran = subprocess.run(
            ["sbatch", "--parsable", f"--output={out}"],
            input=script,
            env=self.env,
            capture_output=True,
            text=True,
            cwd=ROOT,
        )
        assert ran.returncode == 0, ran.stderr
        return ran.stdout.strip()

    def state(self, job: str) -> str:
        """The job's state word and exit code."""
        shown = self.run("scontrol", "show", "job", job)
        found = re.search(r"JobState=(\w+).*ExitCode=(\d+):", shown, re.DOTALL)
        return f"{found[1]} {found[2]}" if found else shown

    def ended(self, job: str) -> bool:
        """Whether nothing of the job runs or is being cleared away any more."""
        return self.state(job).split()[0] not in ("PENDING", "RUNNING", "COMPLETING")

    def logs(self) -> str:
        """What the daemons said last."""
        return "\n".join(f"{p.name}: {p.read_text()[-1500:]}" for p in self.base.glob("*.log"))

    def down(self) -> None:
        """End every job and every daemon."""
        if self.daemons:
            self.run("scancel", "--user=root", "--full")
            with contextlib.suppress(AssertionError):
                wait_for(lambda: not self.run("squeue", "-h"), self.logs, within=30)
        for daemon in reversed(self.daemons):
            daemon.send_signal(signal.SIGTERM)
            try:
                daemon.wait(20)
            except subprocess.TimeoutExpired:
                daemon.kill()
                daemon.wait()


def check_slurm() -> None:
    """Skip where there is none."""
    if os.geteuid() != 0:
        pytest.skip("needs root (slurmd)")
    absent = [tool for tool in ("munged", "slurmctld", "slurmd", "sbatch", "srun") if shutil.which(tool) is None]
    if absent:
        pytest.skip(f"needs {', '.join(absent)} (slurm-wlm, munge)")
    allowed = subprocess.run(["unshare", "--mount", "true"], capture_output=True, text=True)
    if allowed.returncode:
        pytest.skip(f"mount namespaces are not allowed here: {allowed.stderr.strip()}")


@contextlib.contextmanager
def running(made: Slurm) -> Iterator[Slurm]:
    """A Slurm from here to the end."""
    # Job ids decide the master port, and every new Slurm counts from 1: a second test run waits for this one. Not on
    # /run, which ssh_hosts.py locks: its tests run beside these.
    lock = os.open("/var", os.O_RDONLY)
    fcntl.flock(lock, fcntl.LOCK_EX)
    try:
        made.up()
        yield made
    finally:
        made.down()
        os.close(lock)


def emitted(*words: str, nodes: int = 2, slots: int = 2) -> str:
    """What `launch.py --emit slurm` prints for nodes of CPU ranks."""
    command = [sys.executable, "tools/launch.py", "--emit", "slurm", "--nodes", str(nodes), "--slots", str(slots)]
    ran = subprocess.run([*command, *words], cwd=ROOT, capture_output=True, text=True, check=True)
    # The virtual nodes have no GPUs; the tests' training script has no --device to say so.
    return ran.stdout.replace(f"#SBATCH --gpus-per-node={slots}\n", "")
