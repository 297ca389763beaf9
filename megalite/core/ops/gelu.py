"""GELU (Hendrycks and Gimpel 2016).

gelu(x, approximate="none", weights=None) -> y
    x [..., F] fp32 / bf16 / fp16; approximate "none" (erf) or "tanh"; weights fp32 [...], one for each row, or None for
    ones; y like x. Backward keeps only x (and weights).
"""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor

from megalite.core.ops.op import TORCH, Op, triton
from megalite.core.ops.weigh import weighed


def gelu(x: Tensor, approximate: str = "none", weights: Tensor | None = None) -> Tensor:
    """Torch reference of `gelu`; see the module's contract."""
    return weighed(lambda x: F.gelu(x, approximate=approximate), x, weights)


OP = Op("gelu", (gelu,), (triton("activation"), TORCH))
