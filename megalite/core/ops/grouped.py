"""Products of groups of rows, each with a matrix of its own: the experts of a layer.

Rows x [R, I] lie group after group; sizes holds the number of rows of each of E groups (0 allowed, sum R): numbers of
the host, or `Sizes`, which the device knows first; weights w [E, O, I].

grouped_linear(x, w, sizes) -> y
    y = x_e w_e^T for every group e; y [R, O]. x and w of one dtype.

grouped_dgrad(dy, w, sizes) -> dx
    dx = dy_e w_e, the input's gradient. dy [R, O]; dx [R, I].

grouped_wgrad(main_grad, dy, x, sizes, accumulate=True) -> None
    main_grad_e += dy_e^T x_e in place; without `accumulate`, main_grad_e = dy_e^T x_e, 0 for a group without rows.
    main_grad [E, O, I], of the dtypes of `linear_wgrad`.

These functions are not differentiable: `tensor_parallel.grouped_linear` defines their backward. On CUDA in bf16,
torch's grouped GEMM computes the first two in one kernel, where O and I are multiples of 8, and Triton the last: the
host need not know the sizes. Where torch has none (fp16, GPUs other than Hopper and Blackwell data-center GPUs), Triton
computes all three (core/parts/kernels/triton/grouped.py): from sm_80 on, and in fp32 only when asked for by name.
Elsewhere groups are multiplied one after another, on CPU in fp32 by oneDNN where that is faster
(core/parts/kernels/onednn.py).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from functools import cached_property
from itertools import accumulate
from typing import Any, overload

import torch
from torch import Tensor

from megalite.core.batch import uploaded
from megalite.core.ops.matmul import linear_wgrad
from megalite.core.ops.op import ONEDNN, TORCH, Backend, Op, triton


class Sizes(Sequence[int]):
    """Rows of each group, of which the device knows; the host waits for them when it first asks for one.

    Args:
        counts: int64 [E], on the device.
        wait: returns them on the host.
    """

    def __init__(self, counts: Tensor, wait: Callable[[], list[int]]) -> None:
        self.counts = counts
        self._wait = wait

    @cached_property
    def ends(self) -> Tensor:
        """Where each group begins, and the last ends, int32 [E + 1], on the device."""
        ends = self.counts.new_zeros(len(self.counts) + 1, dtype=torch.int32)
        torch.cumsum(self.counts, 0, dtype=torch.int32, out=ends[1:])
        return ends

    @cached_property
    def _host(self) -> list[int]:
        return self._wait()

    def __len__(self) -> int:
        return len(self.counts)

    @overload
    def __getitem__(self, index: int) -> int: ...

    @overload
    def __getitem__(self, index: slice) -> list[int]: ...

    def __getitem__(self, index: int | slice) -> int | list[int]:
        return self._host[index]


def counts_of(sizes: Sequence[int], like: Tensor) -> Tensor:
    """Return the sizes on the device of `like`, int64 [E]."""
    return sizes.counts if isinstance(sizes, Sizes) else numbers(sizes, like, torch.int64)


def ends_of(sizes: Sequence[int], like: Tensor) -> Tensor:
    """Return where each group begins, and the last ends, on the device of `like`, int32 [E + 1]."""
    return sizes.ends if isinstance(sizes, Sizes) else numbers((0, *accumulate(sizes)), like, torch.int32)


def groups(sizes: Sequence[int]) -> list[slice]:
    """Return the rows of each group."""
    ends = list(accumulate(sizes))
    return [slice(end - size, end) for size, end in zip(sizes, ends)]


def grouped_linear(x: Tensor, w: Tensor, sizes: Sequence[int]) -> Tensor:
    """Torch implementation of `grouped_linear`; see the module's contract."""
    y = x.new_empty(len(x), w.shape[1])
    for matrix, rows in zip(w, groups(sizes), strict=True):
        torch.mm(x[rows], matrix.t(), out=y[rows])
    return y


def grouped_dgrad(dy: Tensor, w: Tensor, sizes: Sequence[int]) -> Tensor:
    """Torch implementation of `grouped_dgrad`; see the module's contract."""
    dx = dy.new_empty(len(dy), w.shape[2])
    for matrix, rows in zip(w, groups(sizes), strict=True):
        torch.mm(dy[rows], matrix, out=dx[rows])
    return dx


def grouped_wgrad(main_grad: Tensor, dy: Tensor, x: Tensor, sizes: Sequence[int], accumulate: bool = True) -> None:
    """Torch implementation of `grouped_wgrad`; see the module's contract."""
    for grad, rows in zip(main_grad, groups(sizes), strict=True):
        linear_wgrad(grad, dy[rows], x[rows], accumulate)


def numbers(values: Iterable[int], like: Tensor, dtype: torch.dtype) -> Tensor:
    """Copy numbers of the host to the device of `like`."""
    return uploaded(torch.tensor(list(values), dtype=dtype), like.device)


def _load(op: Op) -> Mapping[str, Callable[..., Any]]:
    # The public name, F.grouped_mm, is newer than some of the versions that megalite runs on.
    # Its rows must start at multiples of 16 bytes, and there must be some.
    def grouped_mm_linear(x: Tensor, w: Tensor, sizes: Sequence[int]) -> Tensor:
        if not len(x) or w.shape[1] % 8 or w.shape[2] % 8:
            return grouped_linear(x, w, sizes)
        return torch._grouped_mm(x, w.transpose(1, 2), offs=ends_of(sizes, x)[1:])

    def grouped_mm_dgrad(dy: Tensor, w: Tensor, sizes: Sequence[int]) -> Tensor:
        if not len(dy) or w.shape[1] % 8 or w.shape[2] % 8:
            return grouped_dgrad(dy, w, sizes)
        return torch._grouped_mm(dy, w, offs=ends_of(sizes, dy)[1:])

    if _TRITON.why_not(torch.device("cuda"), torch.bfloat16) is None:
        _TRITON.load(op)

    def wgrad(main_grad: Tensor, dy: Tensor, x: Tensor, sizes: Sequence[int], accumulate: bool = True) -> None:
        # An estimate defines it without Triton.
        in_one_launch = getattr(torch.ops.megalite, "triton_grouped_wgrad_", None)
        if dy.is_cuda and in_one_launch is not None:
            in_one_launch(main_grad, dy, x, ends_of(sizes, x), accumulate)
        else:
            grouped_wgrad(main_grad, dy, x, sizes, accumulate)

    return {"grouped_linear": grouped_mm_linear, "grouped_dgrad": grouped_mm_dgrad, "grouped_wgrad": wgrad}


def _why_not(device: torch.device, dtype: torch.dtype) -> str | None:
    if device.type != "cuda":
        return f"for CUDA tensors, not {device.type}"
    if dtype != torch.bfloat16:
        return f"torch's grouped GEMM is for bf16, not {dtype}"
    # Elsewhere torch multiplies groups one after another, and waits for their sizes.
    fast = torch.cuda.get_device_capability(device)[0] in (9, 10)
    return None if fast else "torch's grouped GEMM is for Hopper and Blackwell data-center GPUs"


_TRITON = triton("grouped")


def _why_no_triton_auto(device: torch.device, dtype: torch.dtype) -> str | None:
    if device.type == "cuda" and dtype == torch.float32:
        return "in fp32, cuBLAS multiplies groups one after another"
    if device.type == "cuda" and torch.cuda.get_device_capability(device) < (8, 0):
        return "Triton uses tensor cores from sm_80 on"
    return _TRITON.why_not_auto(device, dtype)


OP = Op(
    "grouped",
    (grouped_linear, grouped_dgrad, grouped_wgrad),
    (
        Backend("cuda", _load, _why_not),
        replace(_TRITON, why_not_auto=_why_no_triton_auto),
        ONEDNN,
        TORCH,
    ),
)
