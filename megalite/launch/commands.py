"""The exact commands: torchrun on a host, wrapped in the agent, wrapped in ssh."""

from __future__ import annotations

import os
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from megalite.launch.hostfile import Host

# Marks in front of every line of a rank; the runner turns it into "[host rank N]".
RANK_MARK = "[[rank ${rank}]] "

# Forwarded from the launcher's own environment, since they must be equal on all hosts. No secrets: the ssh command line
# is visible to everybody on both machines.
FORWARDED = (
    "NCCL_",
    "GLOO_",
    "UCX_",
    "TORCH_",
    "PYTORCH_",
    "CUDA_DEVICE_MAX_CONNECTIONS",
    "OMP_NUM_THREADS",
    "MEGALITE_",
)

# ssh's exit code when the connection fails or is lost; every other one is the remote command's.
SSH_FAILED = 255

_DEFAULTS = {
    "OMP_NUM_THREADS": "1",
    "PYTHONUNBUFFERED": "1",
    # Hides torch's host-name lookup warnings, one per rank and store.
    "TORCH_CPP_LOG_LEVEL": "ERROR",
    "TORCHELASTIC_LOG_LINE_PREFIX_TEMPLATE": RANK_MARK,
}


@dataclass(frozen=True)
class LaunchSpec:
    """What is the same on every host. Paths are those of the hosts, which all have the checkout in the same place."""

    script: tuple[str, ...]
    workdir: str
    python: str
    master_addr: str
    master_port: int
    log_dir: str
    env: Mapping[str, str] = field(default_factory=dict)
    ssh_config: str | None = None
    agent: str = str(Path(__file__).with_name("agent.py"))


def launch_environment(own: Mapping[str, str], given: Mapping[str, str]) -> dict[str, str]:
    """Variables for the hosts: our defaults < those of the launcher that concern communication < `--env`."""
    forwarded = {k: v for k, v in own.items() if k.startswith(FORWARDED)}
    return {**_DEFAULTS, **forwarded, **given}


def torchrun_command(
    python: str, script: Sequence[str], *, nnodes: str, nproc: str, node_rank: str, addr: str, port: str
) -> list[str]:
    """torchrun with static rendezvous, as a module of `python` so that it is that environment's torchrun.

    No `--max-restarts`: a restart of one host's ranks leaves the others in collectives that never complete, so
    restarting is done one level up, all hosts at once.
    """
    where = ["--nnodes", nnodes, "--nproc-per-node", nproc, "--node-rank", node_rank]
    master = ["--master-addr", addr, "--master-port", port]
    return [python, "-m", "torch.distributed.run", *where, *master, *script]


def host_command(spec: LaunchSpec, hosts: Sequence[Host], node_rank: int) -> list[str]:
    """The ssh command line for one host."""
    host = hosts[node_rank]
    assert host.slots is not None
    env = {**spec.env, "CUDA_VISIBLE_DEVICES": ",".join(map(str, host.slots))}
    torchrun = torchrun_command(
        spec.python,
        # Each rank writes its own files and torchrun shows them line by line, so ranks do not share a pipe and a
        # launcher that is slow to print never holds a rank up.
        ["--log-dir", os.path.join(spec.log_dir, host.name), "--tee", "3", *spec.script],
        nnodes=str(len(hosts)),
        nproc=str(len(host.slots)),
        node_rank=str(node_rank),
        addr=spec.master_addr,
        port=str(spec.master_port),
    )
    run = ["exec", "env", *(f"{k}={v}" for k, v in env.items()), spec.python, spec.agent, *torchrun]
    return [*ssh_prefix(spec.ssh_config), host.name, f"{shlex.join(['cd', spec.workdir])} && {shlex.join(run)}"]


def ssh_prefix(ssh_config: str | None) -> list[str]:
    """ssh that never asks, and that notices a dead connection after about 11 s (3 keepalives of 3 s)."""
    options = {"BatchMode": "yes", "ConnectTimeout": "10", "ServerAliveInterval": "3", "ServerAliveCountMax": "3"}
    # Its own connection: a shared one (ControlMaster) has the keepalives of whoever opened it.
    options["ControlPath"] = "none"
    config = [] if ssh_config is None else ["-F", ssh_config]
    return ["ssh", *config, "-T", *(word for k, v in options.items() for word in ("-o", f"{k}={v}"))]
