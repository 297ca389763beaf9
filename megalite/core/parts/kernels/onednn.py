"""Matrix products in fp32 by oneDNN, for processors on which torch's own leave half of AVX-512 unused.

On CPU torch multiplies fp32 matrices by MKL, whose code for AVX-512 is for Intel's processors. The oneDNN within torch
has it for all: one core of an AMD EPYC of the fifth generation does 200 GFLOP/s instead of 95 (torch 2.13).
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Mapping, Sequence
from functools import lru_cache
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from megalite.core.ops.grouped import groups
from megalite.core.ops.matmul import linear_wgrad
from megalite.core.ops.op import Backend, Op

# oneDNN's product needs a transposed copy, and its result another addition: worth it for as many rows.
_MANY_ROWS = 32


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


def _linear(x: Tensor, w: Tensor, sizes: Sequence[int]) -> Tensor:
    y = x.new_empty(len(x), w.shape[1])
    for matrix, rows in zip(w, groups(sizes), strict=True):
        if rows.start < rows.stop:
            near = window(rows, len(x))
            y[rows] = product(x[near], matrix)[rows.start - near.start : rows.stop - near.start]
    return y


def _dgrad(dy: Tensor, w: Tensor, sizes: Sequence[int]) -> Tensor:
    return _linear(dy, w.transpose(1, 2), sizes)


def _wgrad(main_grad: Tensor, dy: Tensor, x: Tensor, sizes: Sequence[int], accumulate: bool = True) -> None:
    for grad, rows in zip(main_grad, groups(sizes), strict=True):
        if rows.stop - rows.start < _MANY_ROWS:
            linear_wgrad(grad, dy[rows], x[rows], accumulate)
            continue
        near = window(rows, len(x))
        dy_t = dy.new_zeros(dy.shape[1], near.stop - near.start)  # neighbors count as zeros
        dy_t[:, rows.start - near.start : rows.stop - near.start] = dy[rows].t()
        (grad.add_ if accumulate else grad.copy_)(product(dy_t, x[near].t()))


def _load(op: Op) -> Mapping[str, Callable[..., Any]]:
    return {"grouped_linear": _linear, "grouped_dgrad": _dgrad, "grouped_wgrad": _wgrad}


BACKENDS: dict[str, Callable[[str], Backend]] = {"onednn": lambda _: Backend("onednn", _load, why_not)}
