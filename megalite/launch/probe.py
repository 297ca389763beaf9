"""What preflight asks of a host. Sent over ssh on standard input, so it needs no checkout there: standard library only.

Argument: a JSON object `{"python", "dir", "package", "files", "data", "master", "port"}`. Output: a line with the
host's clock as soon as Python runs, then a line with a JSON object, each behind a marker (login scripts print too).
`port` is null on every host but the master's.
"""

from __future__ import annotations

import contextlib
import glob
import hashlib
import json
import os
import shutil
import socket
import subprocess
import sys
import time

MARKER = "MEGALITE-PROBE "
_VARIABLES = ("NCCL_", "GLOO_", "UCX_", "TORCH_", "PYTORCH_", "CUDA_", "OMP_NUM_THREADS", "MEGALITE_")


def versions() -> dict[str, str]:
    """Installed torch and NCCL, from package metadata: importing torch takes seconds and this must not touch a GPU."""
    from importlib import metadata

    names = {"torch": "torch", **{f"nvidia-nccl-cu{n}": "nccl" for n in range(11, 16)}}
    found = {}
    for name, short in names.items():
        with contextlib.suppress(metadata.PackageNotFoundError):
            found[short] = metadata.version(name)
    return found


def digest(paths: list[str], root: str) -> str:
    """SHA-256 over names (relative to `root`) and contents, shortened to 12 digits."""
    total = hashlib.sha256()
    for path in sorted(paths):
        with open(path, "rb") as f:
            total.update(f"{os.path.relpath(path, root)}\0".encode() + f.read() + b"\0")
    return total.hexdigest()[:12]


def gpu_count() -> int:
    """GPUs that nvidia-smi lists (in a container: those it was given); 0 without the driver."""
    if shutil.which("nvidia-smi") is None:
        return 0
    # Slow without persistence mode: it wakes every GPU. No limit here: preflight has one (--preflight-timeout), by
    # which the host is called slow; a probe that gave up sooner would look like a host without Python.
    listed = subprocess.run(["nvidia-smi", "-L"], capture_output=True, text=True)
    return sum(line.startswith("GPU ") for line in listed.stdout.splitlines())


def resolves(name: str) -> bool:
    """Whether this host knows an address for the master."""
    try:
        return bool(socket.getaddrinfo(name, None))
    except OSError:
        return False


def port_is_free(port: int) -> bool:
    """Whether torchrun could listen here on `port`."""
    with socket.socket() as s:
        s.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            s.bind(("", port))
        except OSError:
            return False
    return True


def free_bytes(path: str) -> int | None:
    """Bytes an ordinary user may still write at `path`; None where it does not exist."""
    try:
        return shutil.disk_usage(path).free
    except OSError:
        return None


def probe(ask: dict) -> dict:
    """Every answer for the table; a missing thing is None, never an exception."""
    sources = glob.glob(os.path.join(ask["package"], "**", "*.py"), recursive=True)
    in_dir = {name: os.path.join(ask["dir"], name) for name in ask["files"]}
    return {
        "host": socket.gethostname(),
        "python": ".".join(map(str, sys.version_info[:3])) if shutil.which(ask["python"]) else None,
        "versions": versions(),
        "dir": os.path.isdir(ask["dir"]),
        "code": digest(sources, ask["package"]) if sources else None,
        "files": {n: digest([p], ask["dir"]) if os.path.isfile(p) else None for n, p in in_dir.items()},
        "data": {p: _sizes(os.path.join(ask["dir"], p)) for p in ask["data"]},
        "gpus": gpu_count(),
        "shm": os.statvfs("/dev/shm").f_frsize * os.statvfs("/dev/shm").f_blocks if os.path.isdir("/dev/shm") else 0,
        "disk": free_bytes(ask["dir"]),
        "master": resolves(ask["master"]),
        "port": None if ask["port"] is None else port_is_free(ask["port"]),
        "env": {k: v for k, v in os.environ.items() if k.startswith(_VARIABLES)},
    }


def _sizes(prefix: str) -> list[int] | None:
    try:
        return [os.path.getsize(prefix + end) for end in (".bin", ".idx")]
    except OSError:
        return None


if __name__ == "__main__":
    print(f"{MARKER}{time.time()!r}", flush=True)
    print(MARKER + json.dumps(probe(json.loads(sys.argv[1]))), flush=True)
