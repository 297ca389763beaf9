"""L2 norm of a flat buffer, which is the overflow check as well.

l2_norm(flat) -> 0-dim fp32 tensor on flat's device
    sqrt(sum(flat^2)), flat [n] fp32 / bf16 / fp16, contiguous; 0 for n = 0. Not finite exactly when an element is not
    finite or the sum of squares exceeds fp32: callers use `isfinite(norm)` as the overflow flag, without another pass.
    Summed in two stages of short rows, in an order that depends on n alone: deterministic, and accurate to 1e-6 where
    a single fp32 running sum over 16M elements is off by 6e-4.
"""

from __future__ import annotations

import torch
from torch import Tensor

from megalite.ops import apex
from megalite.ops.fused import CPP, CUDA, triton_backend
from megalite.ops.op import TORCH, Op

_ROW = 256
# bf16 is converted group by group, so that the fp32 copy stays in cache.
_GROUP = 1 << 18


def _row_norms(flat: Tensor) -> Tensor:
    whole = flat.numel() // _ROW * _ROW
    rows = torch.linalg.vector_norm(flat[:whole].view(-1, _ROW), dim=1)
    return torch.cat((rows, torch.linalg.vector_norm(flat[whole:]).view(1)))


def l2_norm(flat: Tensor) -> Tensor:
    """Torch reference of `l2_norm`; see the module's contract."""
    if flat.dtype == torch.float32 or flat.is_cuda:
        rows = _row_norms(flat.float())
    else:
        rows = torch.cat([_row_norms(part.float()) for part in flat.split(_GROUP)])
    return torch.linalg.vector_norm(rows, dtype=torch.float64).float()


OP = Op("l2_norm", (l2_norm,), (CUDA, triton_backend("flat"), CPP, apex.L2_NORM, TORCH))
