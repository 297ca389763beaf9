"""L2 norm of a flat buffer, also used as the overflow check.

l2_norm(flat) -> 0-dim fp32 tensor on flat's device
    sqrt(sum(flat^2)), flat [n] fp32 / bf16 / fp16, contiguous; 0 for n = 0. It is not finite
    if and only if an element is not finite or the sum of squares overflows fp32: `isfinite(norm)` is the overflow
    flag, without another pass. Summed in two stages of short rows, in an order that depends only on n: deterministic,
    and accurate to 1e-6, where a single fp32 running sum over 16M elements is off by 6e-4.
"""

from __future__ import annotations

import torch
from torch import Tensor

from megalite.core.ops.op import CPP, CUDA, TORCH, Op, apex, triton

_ROW = 256
# Elements converted to fp32 at a time, so that the copy stays in cache.
_GROUP = 1 << 18


def _row_norms(flat: Tensor) -> Tensor:
    end = flat.numel() // _ROW * _ROW
    rows = torch.linalg.vector_norm(flat[:end].view(-1, _ROW), dim=1)
    return torch.cat((rows, torch.linalg.vector_norm(flat[end:]).view(1)))


def l2_norm(flat: Tensor) -> Tensor:
    """Torch reference of `l2_norm`; see the module's contract."""
    if flat.dtype == torch.float32 or flat.is_cuda:
        rows = _row_norms(flat.float())
    else:
        rows = torch.cat([_row_norms(group.float()) for group in flat.split(_GROUP)])
    return torch.linalg.vector_norm(rows, dtype=torch.float64).float()


OP = Op("l2_norm", (l2_norm,), (CUDA, triton("flat"), CPP, apex("l2_norm"), TORCH))
