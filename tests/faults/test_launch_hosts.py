"""The launcher over real sshd on "hosts" made of network namespaces: what is trained, and that nothing is left of it.

Every namespace has its own address, host name and sshd; file system and process ids are shared, so what a host has to
itself is named after it, and a "host with another version" is a bind mount in that host's mount namespace.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

REPO = Path(__file__).parents[2]
TRAIN = "tests/faults/launch_train.py"
NODES = ("mlnode1", "mlnode2", "mlnode3")
BRIDGE = "mlbr0"
FOREVER = "1000000"
STARTUP_S = 90
# Fencing 15 s, TERM grace 8 s, KILL; doubled for a loaded machine.
ALL_GONE_S = 60

pytestmark = [pytest.mark.root, pytest.mark.slow]


def missing() -> str | None:
    """Why the hosts cannot be made here, or None."""
    if os.geteuid() != 0:
        return "needs root (network namespaces)"
    absent = [tool for tool in ("ip", "ssh", "ssh-keygen", "unshare", "mount") if shutil.which(tool) is None]
    if not Path("/usr/sbin/sshd").exists():
        absent.append("sshd")
    if absent:
        return f"needs {', '.join(absent)} (iproute2, openssh-server, openssh-client, util-linux)"
    # A name of this run's own: what a killed one has left must not look like a machine that forbids it.
    name = f"mlprobe{os.getpid()}"
    made = subprocess.run(["ip", "netns", "add", name], capture_output=True, text=True)
    subprocess.run(["ip", "netns", "del", name], capture_output=True)
    return f"network namespaces are not allowed here: {made.stderr.strip()}" if made.returncode else None


def sh(command: str) -> str:
    """Run one command line; its output."""
    return subprocess.run(command, shell=True, check=True, capture_output=True, text=True).stdout


def wait_for(condition: Callable[[], object], seconds: float, what: str) -> None:
    """Poll until true, or fail."""
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, f"not within {seconds:g} s: {what}"
        time.sleep(0.2)


class Hosts:
    """Three hosts on one bridge; the launcher runs on the first."""

    def __init__(self, base: Path) -> None:
        self.base = base
        self.ssh_config = base / "ssh_config"
        self.hostfile = base / "hostfile"

    def up(self) -> None:
        """Bridge, namespaces, keys, one sshd each."""
        Path("/run/sshd").mkdir(exist_ok=True)
        for name in ("user_key", "host_key"):
            sh(f"ssh-keygen -q -t ed25519 -N '' -f {self.base / name}")
        shutil.copytree(REPO / "megalite", self.base / "other", ignore=shutil.ignore_patterns("__pycache__"))
        with (self.base / "other/core/base/errors.py").open("a") as f:
            f.write("\n# another version\n")
        sh(f"ip link add {BRIDGE} type bridge && ip addr add 10.77.0.254/24 dev {BRIDGE} && ip link set {BRIDGE} up")
        names = "127.0.0.1 localhost\n" + "".join(f"10.77.0.{i} {n}\n" for i, n in enumerate(NODES, 1))
        for i, node in enumerate(NODES, 1):
            etc = Path("/etc/netns") / node
            etc.mkdir(parents=True)
            (etc / "hosts").write_text(names)
            sh(f"ip netns add {node}")
            sh(f"ip link add ml{i} type veth peer name eth0 netns {node} && ip link set ml{i} master {BRIDGE} up")
            sh(f"ip -n {node} addr add 10.77.0.{i}/24 dev eth0")
            sh(f"ip -n {node} link set eth0 up && ip -n {node} link set lo up")
            conf = self.base / f"sshd_{node}"
            conf.write_text(
                f"ListenAddress 10.77.0.{i}\nHostKey {self.base}/host_key\nPidFile {self.base}/{node}.pid\n"
                f"AuthorizedKeysFile {self.base}/user_key.pub\nPasswordAuthentication no\nStrictModes no\nUsePAM no\n"
                "PermitRootLogin prohibit-password\n"
            )
            bind = f"mount --bind {self.base}/other {REPO}/megalite; " if node == NODES[2] else ""
            start = f"{bind}hostname {node}; exec /usr/sbin/sshd -f {conf} -E {self.base}/{node}.log"
            sh(f"ip netns exec {node} unshare --uts sh -c '{start}'")
        self.ssh_config.write_text(
            f"Host mlnode*\n IdentityFile {self.base}/user_key\n StrictHostKeyChecking no\n"
            " UserKnownHostsFile /dev/null\n LogLevel ERROR\n"
        )
        self.hostfile.write_text("".join(f"{node} slots=2\n" for node in NODES))
        wait_for(self.connected, 60, "every sshd answers")

    def down(self) -> None:
        """Remove all of it, also what a killed test run left."""
        for node in NODES:
            for pid in self.processes(node, sshd=True):
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
            subprocess.run(["ip", "netns", "del", node], capture_output=True)
            shutil.rmtree(Path("/etc/netns") / node, ignore_errors=True)
        subprocess.run(["ip", "link", "del", BRIDGE], capture_output=True)
        if Path("/etc/netns").exists() and not any(Path("/etc/netns").iterdir()):
            Path("/etc/netns").rmdir()

    def processes(self, node: str, sshd: bool = False) -> list[int]:
        """Process ids in a host's namespace, its sshd's own left out unless asked for."""
        listed = subprocess.run(["ip", "netns", "pids", node], capture_output=True, text=True).stdout.split()
        return [int(pid) for pid in listed if sshd or not _is_sshd(pid)]

    def cable(self, i: int, state: str) -> None:
        """Pull ("down") or plug ("up") host i's cable."""
        sh(f"ip link set ml{i} {state}")

    def connected(self) -> bool:
        """Whether every host's sshd can be reached from every other host."""
        pairs = [(a, b) for a in NODES for b in NODES if a != b]
        probes = [["ip", "netns", "exec", a, "timeout", "1", "bash", "-c", f": </dev/tcp/{b}/22"] for a, b in pairs]
        return all(subprocess.run(probe, capture_output=True).returncode == 0 for probe in probes)

    def all_gone(self) -> bool:
        """Whether no process but sshd is left on any host."""
        return not any(self.processes(node) for node in NODES)


def _is_sshd(pid: str) -> bool:
    try:
        return Path(f"/proc/{pid}/comm").read_text().startswith("sshd")
    except (FileNotFoundError, ProcessLookupError):
        return True


@pytest.fixture(scope="module")
def hosts(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Hosts]:
    if why := missing():
        pytest.skip(why)
    made = Hosts(tmp_path_factory.mktemp("hosts"))
    # Names and addresses are the machine's: a second test run on it waits for this one.
    lock = os.open("/run", os.O_RDONLY)
    fcntl.flock(lock, fcntl.LOCK_EX)
    try:
        made.down()
        made.up()
        yield made
    finally:
        made.down()
        os.close(lock)


@pytest.fixture(autouse=True)
def _nothing_left(hosts: Hosts) -> Iterator[None]:
    yield
    for i in (1, 2, 3):
        hosts.cable(i, "up")
    wait_for(hosts.all_gone, ALL_GONE_S, "all processes of the hosts gone")
    # The kernel remembers for a while that a pulled host does not answer.
    wait_for(hosts.connected, 60, "all hosts within reach again")


class Launch:
    """A launcher running on the first host; its output goes to a file."""

    def __init__(self, hosts: Hosts, out: Path, train: list[str], *flags: str, nodes: str = "mlnode1@mlnode2") -> None:
        self.out = out
        self.hosts = hosts
        self.log = out / "launch.log"
        own = [sys.executable, str(REPO / "tools/launch.py"), "--hostfile", str(hosts.hostfile), "--include", nodes]
        own += [
            "--ssh-config",
            str(hosts.ssh_config),
            "--log-dir",
            str(out / "logs"),
            *([] if "--no-preflight" in flags else ["--preflight-timeout", "60"]),
            *flags,
            "--",
            *train,
        ]
        with self.log.open("w") as log:
            self.process = subprocess.Popen(
                ["ip", "netns", "exec", NODES[0], *own], cwd=REPO, stdout=log, stderr=log, start_new_session=True
            )

    def text(self) -> str:
        """All output so far."""
        return self.log.read_text()

    def until_step(self, step: int) -> None:
        """Until rank 0 has reported that step."""
        wait_for(lambda: f"step {step} " in self.text() or self.process.poll() is not None, STARTUP_S, f"step {step}")
        assert self.process.poll() is None, self.text()

    def end(self) -> int:
        """The launcher's exit code."""
        return self.process.wait(ALL_GONE_S + STARTUP_S)

    def pid_of(self, rank: int) -> tuple[int, str]:
        """(process id, host name) of a rank."""
        pid, host = (self.out / f"pid_{rank}").read_text().split()
        return int(pid), host


def train(out: Path, steps: str, *more: str) -> list[str]:
    """The training command."""
    return [TRAIN, "--steps", steps, "--out", str(out), *more]


def pretrain(run_dir: Path) -> list[str]:
    """Four ranks of the real thing: tp 2 within a host, pp 2 across."""
    model = "--num-layers 2 --hidden-size 32 --num-heads 2 --vocab-size 128 --seq-len 32 --mock-data --device cpu"
    batch = "--tp 2 --pp 2 --micro-batch-size 1 --global-batch-size 4 --train-steps 4 --save-every 0"
    return ["pretrain_gpt.py", *model.split(), *batch.split(), "--run-dir", str(run_dir)]


def metrics(run_dir: Path) -> list[tuple[float, float]]:
    """(loss, gradient norm) of every step."""
    lines = [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]
    return [(line["loss"], line["grad_norm"]) for line in lines if "event" not in line]


def test_two_hosts_train_as_one(hosts: Hosts, tmp_path: Path) -> None:
    two = Launch(hosts, tmp_path, pretrain(tmp_path / "two"))
    assert two.end() == 0, two.text()
    subprocess.run(
        [
            *(sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "4"),
            *pretrain(tmp_path / "one"),
        ],
        cwd=REPO,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        check=True,
    )
    assert len(metrics(tmp_path / "one")) == 4
    # Bit by bit: sums over two ranks have one order only.
    assert metrics(tmp_path / "two") == metrics(tmp_path / "one")
    assert len(list(tmp_path.glob("logs/mlnode[12]/*/attempt_0/[01]/stderr.log"))) == 4
    spoken = [line for line in two.text().splitlines() if "step 4/4" in line]
    assert len(spoken) == 1
    assert re.match(r"\[mlnode\d rank \d\] ", spoken[0])


def test_a_failing_rank_is_named_in_its_own_words(hosts: Hosts, tmp_path: Path) -> None:
    run = Launch(hosts, tmp_path, train(tmp_path, FOREVER, "--fail-rank", "2"))
    assert run.end() == 1
    text = run.text()
    assert "first failure: rank 2 on mlnode2, exit code 1" in text
    assert text.splitlines()[-1].endswith("    ValueError: rank 2 was told to fail")
    assert "ChildFailedError" not in text


@pytest.mark.full
def test_a_killed_worker_ends_all_and_a_restart_runs_until_told_to_save(hosts: Hosts, tmp_path: Path) -> None:
    run = Launch(hosts, tmp_path, train(tmp_path, FOREVER), "--max-restarts", "1")
    run.until_step(3)
    os.kill(run.pid_of(3)[0], signal.SIGKILL)
    wait_for(lambda: "restart 1 of 1" in run.text(), ALL_GONE_S, "the restart")
    ended = run.text()
    assert "first failure: rank 3 on mlnode2, killed by signal 9" in ended
    wait_for(lambda: "step 3 " in run.text()[len(ended) :], STARTUP_S, "training again")

    run.process.send_signal(signal.SIGUSR1)
    for rank in range(4):
        stacks = rf"\[mlnode{rank // 2 + 1} rank {rank}\] .*most recent call first"
        wait_for(lambda stacks=stacks: re.search(stacks, run.text()), 60, stacks)

    run.process.send_signal(signal.SIGTERM)
    assert run.end() == 0, run.text()
    assert sorted(p.name for p in tmp_path.glob("saved_*")) == [f"saved_{rank}" for rank in range(4)]


@pytest.mark.full
def test_a_killed_launcher_leaves_nothing(hosts: Hosts, tmp_path: Path) -> None:
    run = Launch(hosts, tmp_path, train(tmp_path, FOREVER))
    run.until_step(1)
    assert len(hosts.processes("mlnode2")) >= 4  # agent, torchrun, two ranks
    run.process.kill()
    wait_for(hosts.all_gone, ALL_GONE_S, "both hosts empty")


def test_a_pulled_cable_ends_both_sides(hosts: Hosts, tmp_path: Path) -> None:
    run = Launch(hosts, tmp_path, train(tmp_path, FOREVER))
    run.until_step(1)
    hosts.cable(1, "down")
    assert run.end() == 255
    assert "mlnode2: connection lost; stopping all hosts" in run.text()
    # The cable stays out: the cut-off host has to find out for itself.
    wait_for(hosts.all_gone, ALL_GONE_S, "both hosts empty, the cut-off one too")


@pytest.mark.parametrize(
    ("lines", "include", "told"),
    [
        ("mlnode1 slots=2\nmlnode9 slots=2\n", "mlnode1@mlnode9", r"error: preflight: host mlnode9: ssh: .*mlnode9"),
        (
            "mlnode1:2\nmlnode2:2\nmlnode3:2\n",
            "mlnode1@mlnode2@mlnode3",
            r"error: .*host mlnode3: its megalite is anot",
        ),
        ("mlnode1 slots=2\nmlnode2\n", "mlnode1@mlnode2", r"error: .*host mlnode2: has no GPU .*'mlnode2 slots=N'"),
    ],
)
def test_preflight_names_host_and_cure(hosts: Hosts, tmp_path: Path, lines: str, include: str, told: str) -> None:
    hostfile = tmp_path / "hostfile"
    hostfile.write_text(lines)
    run = Launch(hosts, tmp_path, train(tmp_path, "1"), "--hostfile", str(hostfile), nodes=include)
    assert run.end() == 2
    assert re.search(told, run.text()), run.text()
    assert not list(tmp_path.glob("pid_*"))


def test_preflight_sees_the_port_the_data_and_the_directory(hosts: Hosts, tmp_path: Path) -> None:
    listen = "import socket, time; s = socket.create_server(('', 29611)); print('up', flush=True); time.sleep(600)"
    busy = subprocess.Popen(
        ["ip", "netns", "exec", "mlnode1", sys.executable, "-c", listen], stdout=subprocess.PIPE, text=True
    )
    try:
        assert busy.stdout is not None
        assert busy.stdout.readline() == "up\n"
        run = Launch(hosts, tmp_path, train(tmp_path, "1", "--data", "0.5", "no/such"), "--master-port", "29611")
        assert run.end() == 2
    finally:
        busy.kill()
        busy.wait()
    assert "no/such.bin or .idx is missing" in run.text()
    assert "port 29611 is in use" in run.text()
    elsewhere = Launch(hosts, tmp_path, train(tmp_path, "1"), "--dir", "/no/such/place", "--python", sys.executable)
    assert elsewhere.end() == 2
    assert "directory /no/such/place does not exist" in elsewhere.text()
