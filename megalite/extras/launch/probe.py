"""Collect facts about the machine that this runs on, for preflight and for the cluster check.

Preflight sends this file over ssh to the standard input of `python3 - JSON`, so it needs no checkout there and uses
only the standard library (Python 3.8 or later). JSON: `{"python", "dir", "package", "files", "data", "master",
"port"}`; `port` is null on every host but the master's. Output: a marked line as soon as Python runs, then a marked
line with the answers as a JSON object (login scripts print lines too).
"""

from __future__ import annotations

import contextlib
import glob
import hashlib
import json
import os
import re
import shutil
import socket
import subprocess
import sys
import time
from collections.abc import Mapping

MARKER = "MEGALITE-PROBE "
# Ranks compare time stamps of files and logs.
MAX_CLOCK_SKEW_S = 2.0
# Environment variables that change what ranks do.
VARIABLES = ("NCCL_", "GLOO_", "UCX_", "TORCH_", "PYTORCH_", "CUDA_", "OMP_NUM_THREADS", "MEGALITE_")
INFINIBAND = "/sys/class/infiniband"


def code_hash(package: str) -> str | None:
    """Hash the Python files of a package; None if it has none."""
    sources = glob.glob(os.path.join(package, "**", "*.py"), recursive=True)
    return digest(sources, package) if sources else None


def digest(paths: list[str], root: str) -> str:
    """Return the SHA-256 of file names (relative to `root`) and contents, shortened to 12 digits."""
    total = hashlib.sha256()
    for path in sorted(paths):
        with open(path, "rb") as f:
            total.update(f"{os.path.relpath(path, root)}\0".encode() + f.read() + b"\0")
    return total.hexdigest()[:12]


def variables(environment: Mapping[str, str]) -> dict[str, str]:
    """Select the variables that change what ranks do."""
    return {k: v for k, v in environment.items() if k.startswith(VARIABLES)}


def nvidia_smi(*arguments: str, timeout: float | None = None) -> str:
    """Return the output of nvidia-smi; empty without the driver, or if it takes longer than `timeout` seconds."""
    if shutil.which("nvidia-smi") is None:
        return ""
    try:
        done = subprocess.run(["nvidia-smi", *arguments], capture_output=True, timeout=timeout)
    except subprocess.TimeoutExpired:
        return ""
    return done.stdout.decode(errors="replace")


def adapters(root: str = INFINIBAND) -> list[str]:
    """Describe every InfiniBand or RoCE port: "mlx5_0 port 1: 4: ACTIVE, 400 Gb/sec (4X NDR)"."""
    lines = []
    for port in sorted(glob.glob(os.path.join(root, "*", "ports", "*"))):
        words = []
        for name in ("state", "rate"):
            try:
                with open(os.path.join(port, name)) as f:
                    words.append(f.read().strip())
            except OSError:
                words.append("?")
        lines.append(f"{port.split(os.sep)[-3]} port {os.path.basename(port)}: {', '.join(words)}")
    return lines


def network_speed(root: str = INFINIBAND) -> float | None:
    """Sum the rates of all active ports, in bytes per second; None if there are none."""
    rates = [re.search(r"ACTIVE, ([\d.]+) Gb", line) for line in adapters(root)]
    return sum(float(rate[1]) for rate in rates if rate) * 1e9 / 8 or None


def hardware() -> str:
    """Describe GPUs, adapters, NUMA nodes and this process's cores, as far as they are visible."""
    nodes = len(glob.glob("/sys/devices/system/node/node[0-9]*"))
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    matrix = nvidia_smi("topo", "-m", timeout=20).rstrip()
    return "\n".join(
        [
            f"NUMA nodes: {nodes or '?'}; cores for this rank: {cores} of {os.cpu_count()}",
            *(adapters() or [f"no InfiniBand or RoCE adapters in {INFINIBAND}"]),
            matrix or "nvidia-smi topo -m: not available",
        ]
    )


def _installed() -> dict[str, str]:
    """Read the versions of torch and NCCL from metadata: importing torch takes seconds and could touch a GPU."""
    from importlib import metadata

    versions = {}
    for name, short in {"torch": "torch", **{f"nvidia-nccl-cu{n}": "nccl" for n in range(11, 16)}}.items():
        with contextlib.suppress(metadata.PackageNotFoundError):
            versions[short] = metadata.version(name)
    return versions


def _resolves(name: str) -> bool:
    try:
        return bool(socket.getaddrinfo(name, None))
    except OSError:
        return False


def _port_is_free(port: int) -> bool:
    with socket.socket() as s:
        s.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            s.bind(("", port))
        except OSError:
            return False
    return True


def _disk(path: str, field: str) -> int | None:
    """Return a field of `shutil.disk_usage` in bytes; None if there is no such path."""
    try:
        return getattr(shutil.disk_usage(path), field)
    except OSError:
        return None


def _sizes(prefix: str) -> list[int] | None:
    try:
        return [os.path.getsize(prefix + end) for end in (".bin", ".idx")]
    except OSError:
        return None


def probe(ask: dict) -> dict:
    """Answer preflight's questions; what is missing is None, never an exception."""
    in_dir = {name: os.path.join(ask["dir"], name) for name in ask["files"]}
    return {
        "python": ".".join(map(str, sys.version_info[:3])) if shutil.which(ask["python"]) else None,
        "versions": _installed(),
        "dir": os.path.isdir(ask["dir"]),
        "code": code_hash(ask["package"]),
        "files": {n: digest([p], ask["dir"]) if os.path.isfile(p) else None for n, p in in_dir.items()},
        "data": {p: _sizes(os.path.join(ask["dir"], p)) for p in ask["data"]},
        # No time limit here: waking GPUs without persistence mode is slow, and preflight then calls the host slow.
        "gpus": len(re.findall("^GPU ", nvidia_smi("-L"), re.MULTILINE)),
        "shm": _disk("/dev/shm", "total") or 0,
        "disk": _disk(ask["dir"], "free"),
        "master": _resolves(ask["master"]),
        "port": None if ask["port"] is None else _port_is_free(ask["port"]),
        "env": variables(os.environ),
        "clock": time.time(),
    }


if __name__ == "__main__":
    print(MARKER, flush=True)
    print(MARKER + json.dumps(probe(json.loads(sys.argv[1]))), flush=True)
