"""LAMB and LARS over a bucket's share: trust ratios from norms over all shards of a parameter.

As in the authors' code, apex and timm, parameters without weight decay (norms, biases) take no trust ratio.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property

import torch

from megalite.dist import collectives
from megalite.dist.context import ParallelContext
from megalite.ops import Ops
from megalite.optim.bucket import Bucket

LARS_TRUST = 0.001
"""Largest move of a parameter per step at learning rate 1, relative to its norm (eta; You et al. 2017, section 5)."""


@dataclass(frozen=True)
class TrustRatioUpdate:
    """The update of one bucket.

    Args:
        bucket: weights and gradients.
        ctx: this rank's axes: norms are summed over dp (where shares are cut) and tp (where parameters are).
        ops: the kernels in use.
    """

    bucket: Bucket
    ctx: ParallelContext
    ops: Ops

    @cached_property
    def offsets(self) -> tuple[int, ...]:
        """Where this rank's part of each parameter starts in the share; the last one is the share's end."""
        owned = self.bucket.owned
        return (*(segment.at for segment in self.bucket.segments), owned.stop - owned.start)

    def lamb(self, master: torch.Tensor, update: torch.Tensor, out: torch.Tensor | None, lr: float) -> None:
        """master -= lr * |master| / |update| * update, parameter by parameter (You et al. 2020, algorithm 2).

        Args:
            master: this rank's share of the weights, fp32.
            update: direction of the step, of the same elements.
            out: weights in the model's type, written too; None where they are the master.
            lr: learning rate.
        """
        ratios = self._ratios(master, update, lambda weight, step: weight / step)
        self.ops.lamb_apply(master, update, out, ratios, self.offsets, lr)

    def lars(
        self,
        master: torch.Tensor,
        grad: torch.Tensor,
        velocity: torch.Tensor,
        out: torch.Tensor | None,
        *,
        lr: float,
        momentum: float,
        weight_decay: float,
    ) -> None:
        """velocity = momentum * velocity + lr * ratio * (grad + weight_decay * master); master -= velocity.

        The ratio is LARS_TRUST * |master| / (|grad| + weight_decay * |master|) (You et al. 2017, algorithm 1).

        Args:
            master: this rank's share of the weights, fp32.
            grad: fp32, clipped; overwritten.
            velocity: of the same elements.
            out: weights in the model's type, written too; None where they are the master.
            lr, momentum, weight_decay: of this step.
        """
        ratios = self._ratios(master, grad, lambda weight, step: LARS_TRUST * weight / (step + weight_decay * weight))
        grad.add_(master, alpha=weight_decay)
        velocity.mul_(momentum)
        self.ops.lamb_apply(velocity, grad, None, ratios, self.offsets, -lr)
        master.sub_(velocity)
        if out is not None:
            out.copy_(master)

    def _ratios(
        self,
        master: torch.Tensor,
        update: torch.Tensor,
        ratio: Callable[[torch.Tensor, torch.Tensor], torch.Tensor],
    ) -> torch.Tensor:
        """`ratio`(norm of each whole parameter, of its update), 1 where one of them is 0: [parameters], fp32."""
        if not self.bucket.kind.weight_decay:
            return torch.ones(len(self.bucket.params), device=master.device)
        squares = torch.stack([self.ops.segment_norms(x, self.offsets).square() for x in (master, update)])
        squares = squares.to(self.ctx.device)  # offloaded state is on the host
        if self.bucket.sharded.state:
            collectives.all_reduce(squares, self.bucket.shards).wait()
        # A replicated parameter counts on one rank only.
        squares *= torch.tensor([p.shard.is_first("tp") for p in self.bucket.params], device=squares.device)
        collectives.all_reduce(squares, self.ctx.tp).wait()
        weight, step = squares.sqrt().to(master.device)
        return torch.where((weight > 0) & (step > 0), ratio(weight, step), 1.0)
