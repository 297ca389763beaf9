"""LAMB over a bucket's share: trust ratios from norms over all shards of a parameter (You et al. 2020, algorithm 2).

As in the authors' code and apex, parameters without weight decay (norms, biases) take no trust ratio.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from megalite.dist import collectives
from megalite.dist.context import ParallelContext
from megalite.ops import Ops
from megalite.optim.grad_buffer import Bucket


@dataclass(frozen=True)
class LambUpdate:
    """How one bucket is updated.

    Args:
        bucket: weights and gradients.
        ctx: this rank's axes: norms are summed over dp (where shares are cut) and tp (where parameters are).
        ops: the kernels in use.
    """

    bucket: Bucket
    ctx: ParallelContext
    ops: Ops

    @property
    def offsets(self) -> tuple[int, ...]:
        """Where this rank's part of each parameter starts in the share; the last one is the share's end."""
        owned = self.bucket.owned
        starts = [min(max(start, owned.start), owned.stop) - owned.start for start in self.bucket.starts]
        return (*starts, owned.stop - owned.start)

    def apply(self, master: torch.Tensor, update: torch.Tensor, out: torch.Tensor | None, lr: float) -> None:
        """master -= lr * ratio * update, parameter by parameter.

        Args:
            master: this rank's share of the weights, fp32.
            update: direction of the step, of the same elements.
            out: weights in the model's type, written too; None where they are the master.
            lr: learning rate.
        """
        offsets = self.offsets
        if self.bucket.kind.weight_decay:
            ratios = self._ratios(master, update, offsets)
        else:
            ratios = torch.ones(len(self.bucket.params), device=master.device)
        self.ops.lamb_apply(master, update, out, ratios, offsets, lr)

    def _ratios(self, master: torch.Tensor, update: torch.Tensor, offsets: tuple[int, ...]) -> torch.Tensor:
        squares = torch.stack([self.ops.segment_norms(x, offsets).square() for x in (master, update)])
        if self.bucket.zero:
            collectives.all_reduce(squares, self.ctx.dp).wait()
        # A replicated parameter counts on one rank only.
        speaks = [p.shard.spec.tp_dim is not None or self.ctx.tp.rank == 0 for p in self.bucket.params]
        squares *= torch.tensor(speaks, device=squares.device)
        collectives.all_reduce(squares, self.ctx.tp).wait()
        weight, step = squares.sqrt()
        return torch.where((weight > 0) & (step > 0), weight / step, 1.0)
