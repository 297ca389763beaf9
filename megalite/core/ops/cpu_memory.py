"""Keep freed memory in the process: on CPU, several times the speed of every operation with a large temporary.

glibc maps every allocation above a threshold (initially 128 KB, at most 32 MB) and unmaps it when it is freed, so that
the kernel zeroes the pages of every temporary of every training step. Backward pass of RMSNorm over 1M elements (torch
2.13, one thread): 7.3 ms with these page faults, 1.1 ms without.

Allocations of 32 MB and more are still mapped: otherwise small tensors would fragment the freed blocks, the next large
tensor would not fit, and the process would grow to a multiple of its largest tensors.
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
        False if the C library has no `mallopt` (musl, macOS); nothing is changed then.
    """
    try:
        mallopt = ctypes.CDLL(None).mallopt
    except (OSError, AttributeError):
        return False
    return bool(mallopt(_M_MMAP_THRESHOLD, _LARGE)) and bool(mallopt(_M_TRIM_THRESHOLD, _NEVER))
