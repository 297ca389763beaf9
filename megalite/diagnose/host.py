"""What a rank's host is: versions, device, and the links that it has."""

from __future__ import annotations

import hashlib
import os
import platform
import re
import shutil
import socket
import subprocess
from dataclasses import dataclass, field
from pathlib import Path

import torch

import megalite

# One way, bytes a second of a GPU (NVIDIA's data sheets give both ways together).
_NVLINK = {"A100": 300e9, "H100": 450e9, "H200": 450e9, "B200": 900e9}


@dataclass(frozen=True)
class HostFacts:
    """What one rank knows of its place.

    Attributes:
        host: host name.
        versions: must be the same on all ranks.
        device: kind ("cpu" or "cuda") and name of the device.
        variables: environment variables that steer communication.
        nvlink_bps: what NVLink gives one GPU, one way, bytes a second; None where there is none that is known.
        network_bps: sum of the host's active InfiniBand / RoCE ports, bytes a second; None where there are none.
        local_world: ranks on this host.
    """

    host: str
    versions: dict[str, str]
    device: tuple[str, str]
    variables: dict[str, str] = field(default_factory=dict)
    nvlink_bps: float | None = None
    network_bps: float | None = None
    local_world: int = 1


def host_facts(device: torch.device, local_world: int, variables: dict[str, str]) -> HostFacts:
    """The facts of this rank."""
    on_gpu = device.type == "cuda"
    name = torch.cuda.get_device_name(device) if on_gpu else platform.processor() or platform.machine()
    return HostFacts(
        socket.gethostname(),
        versions(on_gpu),
        (device.type, name),
        variables,
        nvlink_speed(name, topology_matrix()) if on_gpu else None,
        network_speed(),
        local_world,
    )


def versions(on_gpu: bool) -> dict[str, str]:
    """Everything that has to be the same on all ranks; `code` is a hash over megalite's sources."""
    found = {
        "python": platform.python_version(),
        "torch": torch.__version__,
        "megalite": megalite.__version__,
        "code": code_hash(Path(megalite.__file__).parent),
    }
    if on_gpu:
        found["cuda"] = str(torch.version.cuda)
        found["nccl"] = ".".join(map(str, torch.cuda.nccl.version()))
    return found


def code_hash(package: Path) -> str:
    """SHA-256 over names and contents of a package's Python files, shortened to 12 digits."""
    total = hashlib.sha256()
    for path in sorted(package.rglob("*.py")):
        total.update(f"{path.relative_to(package)}\0".encode() + path.read_bytes() + b"\0")
    return total.hexdigest()[:12]


def topology_matrix() -> str:
    """What `nvidia-smi topo -m` prints; empty where it is not there or fails."""
    if shutil.which("nvidia-smi") is None:
        return ""
    try:
        done = subprocess.run(["nvidia-smi", "topo", "-m"], capture_output=True, text=True, timeout=20)
    except subprocess.TimeoutExpired:
        return ""
    return done.stdout if done.returncode == 0 else ""


def nvlink_speed(gpu: str, matrix: str) -> float | None:
    """Bytes a second one way of a GPU's NVLinks; None where `nvidia-smi topo -m` shows none or the GPU is new."""
    if not re.search(r"\bNV\d+\b", matrix):
        return None
    return next((speed for name, speed in _NVLINK.items() if re.search(rf"\b{name}\b", gpu)), None)


def network_speed(root: Path = Path("/sys/class/infiniband")) -> float | None:
    """Sum over the active ports under `root` ("400 Gb/sec (4X NDR)"), bytes a second; None without any."""
    total = 0.0
    for rate in root.glob("*/ports/*/rate"):
        state = rate.with_name("state")
        gigabits = re.match(r"([\d.]+) Gb", rate.read_text())
        if gigabits and state.exists() and "ACTIVE" in state.read_text():
            total += float(gigabits[1]) * 1e9 / 8
    return total or None


def adapters(root: Path = Path("/sys/class/infiniband")) -> list[str]:
    """A line for each InfiniBand / RoCE port: name, state, rate."""
    lines = []
    for rate in sorted(root.glob("*/ports/*/rate")):
        device, port = rate.parts[-4], rate.parts[-2]
        state = rate.with_name("state")
        lines.append(
            f"{device} port {port}: {state.read_text().strip() if state.exists() else '?'}, {rate.read_text().strip()}"
        )
    return lines


def describe_topology() -> str:
    """The first host's hardware as far as it shows: GPUs, adapters, NUMA nodes, cores of this process."""
    nodes = len(list(Path("/sys/devices/system/node").glob("node[0-9]*")))
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    lines = [f"NUMA nodes: {nodes or '?'}; cores for this rank: {cores} of {os.cpu_count()}"]
    lines += adapters() or ["no InfiniBand or RoCE adapters in /sys/class/infiniband"]
    matrix = topology_matrix().rstrip()
    lines += matrix.splitlines() if matrix else ["nvidia-smi topo -m: not there"]
    return "\n".join(lines)
