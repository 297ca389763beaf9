"""Hosts with sshd, made of network namespaces, and the launcher on the first of them."""

from __future__ import annotations

import contextlib
import fcntl
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.faults.harness import wait_for
from tests.ranks import ROOT

NODES = ("mlnode1", "mlnode2", "mlnode3")
BRIDGE = "mlbr0"


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
        shutil.copytree(ROOT / "megalite", self.base / "other", ignore=shutil.ignore_patterns("__pycache__"))
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
            bind = f"mount --bind {self.base}/other {ROOT}/megalite; " if node == NODES[2] else ""
            start = f"{bind}hostname {node}; exec /usr/sbin/sshd -f {conf} -E {self.base}/{node}.log"
            sh(f"ip netns exec {node} unshare --uts sh -c '{start}'")
        self.ssh_config.write_text(
            f"Host mlnode*\n IdentityFile {self.base}/user_key\n StrictHostKeyChecking no\n"
            " UserKnownHostsFile /dev/null\n LogLevel ERROR\n"
        )
        self.hostfile.write_text("".join(f"{node} slots=2\n" for node in NODES))
        wait_for(self.connected, "every sshd answers")

    def down(self) -> None:
        """Remove all of it, also what a killed test run left."""
        for node in NODES:
            for pid in self.processes(node, sshd=True):
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
            subprocess.run(["ip", "netns", "del", node], capture_output=True)
            shutil.rmtree(Path("/etc/netns") / node, ignore_errors=True)
        subprocess.run(["ip", "link", "del", BRIDGE], capture_output=True)
        with contextlib.suppress(OSError):  # there are hosts of another test in it
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
        probes = [["ip", "netns", "exec", a, "timeout", "10", "bash", "-c", f": </dev/tcp/{b}/22"] for a, b in pairs]
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
def nothing_left(hosts: Hosts) -> Iterator[None]:
    """Whatever a test has started on them is gone after it."""
    yield
    for i in (1, 2, 3):
        hosts.cable(i, "up")
    wait_for(hosts.all_gone, "all processes of the hosts gone")
    # The kernel remembers for a while that a pulled host does not answer.
    wait_for(hosts.connected, "all hosts within reach again")


class Launch:
    """A launcher running on the first host; its output goes to a file."""

    def __init__(self, hosts: Hosts, out: Path, train: list[str], *flags: str, nodes: str = "mlnode1@mlnode2") -> None:
        self.out = out
        self.hosts = hosts
        self.log = out / "launch.log"
        own = [sys.executable, str(ROOT / "tools/launch.py"), "--hostfile", str(hosts.hostfile), "--include", nodes]
        own += [
            "--ssh-config",
            str(hosts.ssh_config),
            "--log-dir",
            str(out / "logs"),
            *([] if "--no-preflight" in flags else ["--preflight-timeout", "240"]),
            *flags,
            "--",
            *train,
        ]
        with self.log.open("w") as log:
            self.process = subprocess.Popen(
                ["ip", "netns", "exec", NODES[0], *own], cwd=ROOT, stdout=log, stderr=log, start_new_session=True
            )

    def text(self) -> str:
        """All output so far."""
        return self.log.read_text()

    def until_step(self, step: int) -> None:
        """Until rank 0 has reported that step."""
        wait_for(lambda: f"step {step} " in self.text() or self.process.poll() is not None, f"step {step}")
        assert self.process.poll() is None, self.text()

    def end(self) -> int:
        """The launcher's exit code."""
        # With a restart of all hosts in it: ssh, imports and a rendezvous again, on a busy machine.
        return self.process.wait(400)

    def pid_of(self, rank: int) -> tuple[int, str]:
        """(process id, host name) of a rank."""
        pid, host = (self.out / f"pid_{rank}").read_text().split()
        return int(pid), host
