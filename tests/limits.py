"""A bound on memory that the kernel enforces: peaks of resident memory also count pages of files, which come and go."""

from __future__ import annotations

import contextlib
import resource
from collections.abc import Iterator
from pathlib import Path

# For a process of its own: left to itself glibc moves this threshold as it goes, and what it keeps of freed memory with
# it.
GIVES_BACK = {"MALLOC_MMAP_THRESHOLD_": "131072"}


@contextlib.contextmanager
def memory_limit(growth: int) -> Iterator[None]:
    """Allocations fail beyond so many bytes more than this process has now."""
    status = Path("/proc/self/status").read_text()
    now = int(status.partition("VmData:")[2].split()[0]) * 1024
    before = resource.getrlimit(resource.RLIMIT_DATA)
    resource.setrlimit(resource.RLIMIT_DATA, (now + growth, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_DATA, before)
