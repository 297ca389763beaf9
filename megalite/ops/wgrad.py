"""Weight gradient of a linear layer, added straight into main_grad.

wgrad_accumulate(main_grad, dy, x) -> None
    main_grad += dy^T x in place. dy [N, out], x [N, in] of one dtype; main_grad [out, in] fp32 (or of that dtype). With
    an fp32 main_grad the sum over micro-batches is fp32. On CUDA so is the product: the GEMM itself writes fp32 (cuBLAS
    with beta 1, no buffer of its own). A CPU has no such product: there each one is rounded once before it is added.
"""

from __future__ import annotations

import torch
from torch import Tensor

from megalite.ops import apex
from megalite.ops.registry import Backend, Page


def wgrad_accumulate(main_grad: Tensor, dy: Tensor, x: Tensor) -> None:
    """Torch implementation of `wgrad_accumulate`; see the module's contract."""
    if main_grad.dtype == dy.dtype:
        main_grad.addmm_(dy.t(), x)
    elif dy.is_cuda:
        torch.addmm(main_grad, dy.t(), x, out_dtype=main_grad.dtype, out=main_grad)
    else:
        main_grad.add_(dy.t() @ x)


PAGE = Page(
    "wgrad", ("wgrad_accumulate",), (Backend("torch", lambda: {"wgrad_accumulate": wgrad_accumulate}), apex.WGRAD)
)
