"""GELU (Hendrycks and Gimpel 2016).

gelu(x, approximate="none") -> y
    x [..., F] fp32 / bf16 / fp16; approximate "none" (erf) or "tanh"; y like x. Backward keeps only x.
"""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor

from megalite.core.ops.op import TORCH, Op, triton


def gelu(x: Tensor, approximate: str = "none") -> Tensor:
    """Torch reference of `gelu`; see the module's contract."""
    return F.gelu(x, approximate=approximate)


OP = Op("gelu", (gelu,), (triton("activation"), TORCH))
