"""Matrix products in fp32 by oneDNN, for processors on which torch's own leave half of AVX-512 unused.

On CPU torch multiplies fp32 matrices by MKL, whose code for AVX-512 is for Intel's processors. The oneDNN within torch
has it for all: one core of an AMD EPYC of the fifth generation does 200 GFLOP/s instead of 95 (torch 2.13).
"""

from __future__ import annotations

import contextlib
from functools import lru_cache
from pathlib import Path

import torch
from torch import Tensor


@lru_cache(maxsize=1)
def _by_amd() -> bool:
    # Not everywhere is there such a file, or may it be read.
    with contextlib.suppress(OSError):
        return "AuthenticAMD" in Path("/proc/cpuinfo").read_text()
    return False


def why_not(device: torch.device, dtype: torch.dtype) -> str | None:
    """Return why these products cannot run, or would gain nothing; None if they do."""
    if device.type != "cpu":
        return f"for CPU tensors, not {device.type}"
    if dtype != torch.float32:
        return f"for fp32, not {dtype}"
    if not torch.backends.mkldnn.is_available():
        return "torch is built without oneDNN"
    if torch.backends.cpu.get_cpu_capability() != "AVX512" or not _by_amd():
        return "for AMD's processors with AVX-512"
    return None


def product(x: Tensor, w: Tensor) -> Tensor:
    """Return x w^T: x [N, I], w [O, I] of any strides -> [N, O], fp32. N is not 0."""
    return torch.ops.mkldnn._linear_pointwise(x, w, None, "none", [], "")  # type: ignore[no-any-return]


def window(rows: slice, length: int) -> slice:
    """Return `rows` among `length`, with neighbors that make them a multiple of 16 where there are so many.

    oneDNN compiles code for every number of rows, in half a millisecond.
    """
    num = min((rows.stop - rows.start + 15) // 16 * 16, length)
    start = min(rows.start, length - num)
    return slice(start, start + num)
