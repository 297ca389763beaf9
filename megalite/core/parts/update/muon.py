"""Muon: momentum whose matrices are orthogonalized (Jordan et al. 2024; scaled as in Moonlight, Liu et al. 2025).

The orthogonalization keeps the singular vectors of the momentum and makes all singular values about 1, by Newton-Schulz
iterations. It is that of a whole matrix: of a tensor-parallel shard, or of q, k and v packed into one, it is another
update. `torch.optim.Muon` with `adjust_lr_fn="match_rms_adamw"` computes the same.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

from megalite.core.base.errors import in_range
from megalite.core.options.update_rule import MatrixRule, Share

if TYPE_CHECKING:
    from torch import Tensor

COEFFICIENTS = 3.4445, -4.7750, 2.0315
"""Of the quintic polynomial that is iterated on the singular values."""
_EPS = 1e-7


@dataclass(frozen=True, eq=False, repr=False)
class MuonOptions:
    """The momentum, and how it is orthogonalized."""

    muon_ns: Literal["bf16", "fp32"] = "bf16"
    """muon: type of the Newton-Schulz products. bf16 is as good and faster on a GPU, fp32 is the same in every
    layout to 1e-5."""
    muon_momentum: float = 0.95
    """muon: decay rate of the momentum."""
    muon_ns_steps: int = 5
    """muon: number of Newton-Schulz steps."""


class Muon(MatrixRule):
    """master = (1 - lr * weight_decay) * master - lr * 0.2 * sqrt(max(out, in)) * orthogonalized Nesterov momentum.

    The factor gives an update the root mean square of AdamW's (Moonlight, section 2.2), so that learning rate and
    weight decay of AdamW serve.
    """

    about = "orthogonalized momentum of the blocks' matrices, AdamW for everything else"
    states = ("exp_avg",)
    options = MuonOptions
    batched = True
    width_power = 0.5  # an update grows with the square root of the width already

    def check_optim(self, cfg: Any) -> None:
        in_range(cfg, "muon_momentum", 0, 1)
        in_range(cfg, "muon_ns_steps", 1, 10**10)

    def direction(self, share: Share, cfg: Any) -> None:
        """Update the momentum, an average of gradients; look ahead by one step (Nesterov)."""
        grad, (momentum,) = share.scaled_grad(), share.states
        momentum.lerp_(grad, 1 - cfg.muon_momentum)
        grad.lerp_(momentum, cfg.muon_momentum)

    def transform(self, matrix: Tensor, cfg: Any) -> Tensor:
        """Orthogonalize matrices [..., out, in], and scale them to AdamW's root mean square."""
        x = matrix if cfg.muon_ns == "fp32" else matrix.bfloat16()
        return orthogonalized(x, cfg.muon_ns_steps).to(matrix.dtype).mul_(0.2 * math.sqrt(max(matrix.shape[-2:])))

    def transform_dtype(self, cfg: Any) -> str:
        return str(cfg.muon_ns)

    def transform_flops(self, out: int, inner: int, cfg: Any) -> float:
        """Count three products per iteration: X X^T, its square, and their polynomial times X."""
        small, large = sorted((out, inner))
        return cfg.muon_ns_steps * (4 * small**2 * large + 2 * small**3)

    def update(self, share: Share, cfg: Any) -> None:
        """Decay the masters and subtract the transformed matrices."""
        share.master.mul_(1 - share.lr * share.weight_decay).sub_(share.grad, alpha=share.lr)
        share.round_weights()


def orthogonalized(matrix: Tensor, steps: int) -> Tensor:
    """Make the singular values of matrices [..., out, in] about 1 (0.7 to 1.2 after five steps), in their dtype."""
    a, b, c = COEFFICIENTS
    wide = matrix.shape[-2] <= matrix.shape[-1]
    x = matrix if wide else matrix.mT
    x = x / x.norm(dim=(-2, -1), keepdim=True).clamp(min=_EPS)
    add_product = type(x).baddbmm if x.dim() > 2 else type(x).addmm
    for _ in range(steps):
        square = x @ x.mT
        polynomial = add_product(square, square, square, beta=b, alpha=c)
        x = add_product(x, polynomial, x, beta=a)
    return x if wide else x.mT


RULE = Muon()
