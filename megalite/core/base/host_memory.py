"""The memory of the host: how much there is, how much is left, and what pinned memory takes of it. Without torch."""

from __future__ import annotations

import os
import resource


def installed_memory() -> int:
    """Get the bytes of the host's memory, or what its control group allows."""
    installed = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    limit = _lines("/sys/fs/cgroup/memory.max")
    return min([installed, *_sizes("/proc/meminfo", "MemTotal"), *(int(line) for line in limit if line.isdecimal())])


def process_memory() -> int:
    """Get the bytes of host memory that this process can still use: the tightest of its limits and the host's."""
    status = "/proc/self/status"
    free = [installed_memory() - sum(_sizes(status, "VmRSS"))]
    for kind, used in ((resource.RLIMIT_AS, "VmSize"), (resource.RLIMIT_DATA, "VmData")):
        soft, _ = resource.getrlimit(kind)
        if soft != resource.RLIM_INFINITY:
            free.append(soft - sum(_sizes(status, used)))
    return max(0, min(free))


def available_memory(root: str = "/") -> int:
    """Get the bytes that processes can still allocate: the host's free memory, or what our control groups allow.

    Args:
        root: folder that contains /proc and /sys.
    """
    free = _sizes(os.path.join(root, "proc/meminfo"), "MemAvailable")
    if not free:
        free = [os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")]
    for line in _lines(os.path.join(root, "proc/self/cgroup")):
        _, controllers, path = line.split(":", 2)
        if controllers and "memory" not in controllers.split(","):
            continue
        # Version 2 of control groups has no list of controllers.
        base = os.path.join(root, "sys/fs/cgroup", "memory" if controllers else "")
        names = ("limit_in_bytes", "usage_in_bytes") if controllers else ("max", "current")
        parts = [part for part in path.split("/") if part]
        for depth in range(len(parts) + 1):
            folder = os.path.join(base, *parts[:depth])
            limit, used = (_lines(os.path.join(folder, f"memory.{name}")) for name in names)
            if limit and used and limit[0].isdecimal():
                cache = [row.split() for row in _lines(os.path.join(folder, "memory.stat"))]
                reclaimable = sum(int(row[1]) for row in cache if row[0] == "inactive_file")
                free.append(int(limit[0]) - int(used[0]) + reclaimable)
    return max(0, min(free))


def _sizes(path: str, name: str) -> list[int]:
    """Read a row of a table in /proc, in bytes; empty if there is none."""
    rows = [line.split() for line in _lines(path)]
    return [int(row[1]) * 1024 for row in rows if row[:1] == [f"{name}:"] and row[2:] == ["kB"]]


def _lines(path: str) -> list[str]:
    try:
        with open(path) as f:
            return f.read().splitlines()
    except OSError:
        return []


def pinned_bytes(size: int) -> int:
    """Compute what torch allocates for `size` bytes of pinned memory: the next power of two."""
    return 1 << (size - 1).bit_length() if size else 0
