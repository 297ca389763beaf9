"""The emitted batch script on a Slurm of two virtual nodes, made for the test and gone after it."""

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
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import pytest

REPO = Path(__file__).parents[2]
TRAIN = "tests/faults/launch_train.py"
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

pytestmark = [pytest.mark.root, pytest.mark.slow]


def wait_for(condition: Callable[[], object], seconds: float, what: Callable[[], str]) -> None:
    """Poll until true, or fail."""
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, f"not within {seconds:g} s: {what()}"
        time.sleep(0.3)


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
        wait_for((self.base / "munge.socket").exists, 30, lambda: "munged's socket")
        self.start("slurmctld", "-D")
        # The nodes' names resolve for what runs on them only: their own mount namespace has its own /etc/hosts.
        hosts = self.base / "hosts"
        names = "".join(f"{address} {name}\n" for name, (address, _) in self.nodes.items())
        hosts.write_text(f"{Path('/etc/hosts').read_text()}\n{names}")
        for node, (_, before) in self.nodes.items():
            daemon = f"mount --bind '{hosts}' /etc/hosts && exec slurmd -D -N {node}"
            self.start(*before, "unshare", "--mount", "sh", "-c", daemon)
        idle = ["idle", str(len(self.nodes))]
        wait_for(lambda: self.run("sinfo", "-h", "-o", "%T %D").split() == idle, 60, self.logs)

    def start(self, *command: str) -> None:
        log = (self.base / f"{command[0]}.out").open("a")
        self.daemons.append(subprocess.Popen(command, env=self.env, stdout=log, stderr=log, cwd=self.base))
        log.close()

    def run(self, *command: str) -> str:
        """A Slurm client command's output."""
        return subprocess.run(command, env=self.env, capture_output=True, text=True, cwd=REPO).stdout

    def submit(self, script: str, out: Path) -> str:
        """sbatch; the job's id."""
        ran = subprocess.run(
            ["sbatch", "--parsable", f"--output={out}"],
            input=script,
            env=self.env,
            capture_output=True,
            text=True,
            cwd=REPO,
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
                wait_for(lambda: not self.run("squeue", "-h"), 30, self.logs)
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
    # /run, which the tests of test_launch_hosts.py lock: they run beside these.
    lock = os.open("/var", os.O_RDONLY)
    fcntl.flock(lock, fcntl.LOCK_EX)
    try:
        made.up()
        yield made
    finally:
        made.down()
        os.close(lock)


@pytest.fixture(scope="module")
def slurm(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Slurm]:
    check_slurm()
    with running(Slurm(tmp_path_factory.mktemp("slurm"))) as made:
        yield made


def emitted(*words: str, nodes: int = 2, slots: int = 2) -> str:
    """What `launch.py --emit slurm` prints for nodes of CPU ranks."""
    command = [sys.executable, "tools/launch.py", "--emit", "slurm", "--nodes", str(nodes), "--slots", str(slots)]
    ran = subprocess.run([*command, *words], cwd=REPO, capture_output=True, text=True, check=True)
    # The virtual nodes have no GPUs; the training script of this test has no --device to say so.
    return ran.stdout.replace(f"#SBATCH --gpus-per-node={slots}\n", "")


def test_two_nodes_train_as_one(slurm: Slurm, tmp_path: Path) -> None:
    out = tmp_path / "it's a place"  # quoting, through sbatch, srun and two shells
    out.mkdir()
    log = tmp_path / "job.log"
    job = slurm.submit(emitted("--", TRAIN, "--steps", "5", "--out", str(out)), log)
    wait_for(lambda: slurm.ended(job), 180, lambda: log.read_text() + slurm.logs())
    assert slurm.state(job).startswith("COMPLETED"), log.read_text()
    assert len(list(out.glob("pid_*"))) == 4
    one = subprocess.run(
        [
            *(sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "4"),
            *(TRAIN, "--steps", "5", "--out", str(out)),
        ],
        cwd=REPO,
        env=slurm.env,
        stdout=subprocess.PIPE,
        text=True,
        check=True,
    )
    losses = re.findall(r"step \d+ loss [0-9.]+", one.stdout)
    assert len(losses) == 5
    assert re.findall(r"step \d+ loss [0-9.]+", log.read_text()) == losses


@pytest.mark.full
def test_a_warning_signal_lets_the_ranks_save(slurm: Slurm, tmp_path: Path) -> None:
    """`--signal=B:TERM@120` sends what scancel sends here; what has been told to stop is not restarted."""
    log = tmp_path / "job.log"
    job = slurm.submit(emitted("--max-restarts", "1", "--", TRAIN, "--steps", "1000000", "--out", str(tmp_path)), log)
    wait_for(lambda: log.exists() and "step 2 " in log.read_text(), 180, slurm.logs)
    slurm.run("scancel", "--batch", "--signal=TERM", job)
    wait_for(lambda: slurm.ended(job), 90, slurm.logs)
    assert sorted(p.name for p in tmp_path.glob("saved_*")) == [f"saved_{rank}" for rank in range(4)], log.read_text()
    assert "attempt 0 ended" not in log.read_text()


@pytest.mark.full
def test_one_task_per_rank_without_torchrun(slurm: Slurm, tmp_path: Path) -> None:
    log = tmp_path / "job.log"
    where = ["--nodes=2", "--ntasks-per-node=2", "--gpus-per-node=0", f"--output={log}", "--parsable"]
    model = "--num-layers 2 --hidden-size 32 --num-heads 2 --vocab-size 128 --seq-len 32 --mock-data --device cpu"
    batch = "--tp 2 --pp 2 --micro-batch-size 1 --global-batch-size 4 --train-steps 2"
    example = "examples/slurm/one_task_per_rank.sbatch"
    path = f"{Path(sys.executable).parent}:{os.environ['PATH']}"  # the environment is active where one submits
    job = subprocess.run(
        ["sbatch", *where, example, *model.split(), *batch.split(), "--run-dir", str(tmp_path / "run")],
        env={**slurm.env, "PATH": path},
        cwd=REPO,
        capture_output=True,
        text=True,
        check=True,
    ).stdout.strip()
    wait_for(lambda: slurm.ended(job), 180, slurm.logs)
    assert slurm.state(job).startswith("COMPLETED"), log.read_text()
    assert len((tmp_path / "run" / "metrics.jsonl").read_text().splitlines()) >= 2
    assert len(list((tmp_path / "run" / "logs").glob("rank_*.log"))) == 4


@pytest.mark.full
def test_a_failing_rank_ends_the_job(slurm: Slurm, tmp_path: Path) -> None:
    log = tmp_path / "job.log"
    words = ["--max-restarts", "1", "--", TRAIN, "--steps", "4", "--out", str(tmp_path), "--fail-rank", "3"]
    job = slurm.submit(emitted(*words), log)
    wait_for(lambda: slurm.ended(job), 240, slurm.logs)
    text = log.read_text()
    assert "ValueError: rank 3 was told to fail" in text
    assert re.search(r"attempt 0 ended with exit code \d+", text)
    assert slurm.state(job).startswith("COMPLETED"), text
    assert len(re.findall(r"step 3 loss", text)) == 1


@pytest.mark.parametrize("flags", [[], pytest.param(["--spare-ranks", "1"], marks=pytest.mark.full)])
def test_a_mistake_is_not_repeated(slurm: Slurm, tmp_path: Path, flags: list[str]) -> None:
    """srun's own code is that of the tasks it kills when one ends with 2; with reserves the batch script has to.

    The task did, with scancel, which a container usually lacks.
    """
    script, log = tmp_path / "mistaken.py", tmp_path / "job.log"
    script.write_text(
        "import os, sys, time\n"
        "print('begun', flush=True)\n"
        "if os.environ['RANK'] == '2':\n"
        "    sys.exit(2)\n"
        "time.sleep(600)\n"
    )
    text = emitted("--max-restarts", "2", "--", str(script), *flags)
    assert text.count("--label bash -c") == 1
    job = slurm.submit(text.replace("--label bash -c", "--label env PATH=/no/slurm /bin/bash -c"), log)
    wait_for(lambda: slurm.ended(job), 180, lambda: log.read_text() + slurm.logs())
    assert slurm.state(job) == "FAILED 2", log.read_text()
    assert log.read_text().count("begun") <= 4
