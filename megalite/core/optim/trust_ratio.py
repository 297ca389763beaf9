"""Trust ratios of LAMB and LARS for a bucket's share, from norms of full parameters."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property

import torch

from megalite.core.mesh import collectives
from megalite.core.mesh.context import ParallelContext
from megalite.core.ops import Ops
from megalite.core.optim.bucket import Bucket
from megalite.core.sharding.parameter import ShardedParameter


@dataclass(frozen=True)
class ShareTrustRatios:
    """The `TrustRatios` of one bucket.

    Args:
        bucket: the bucket.
        ctx: this rank's axes; squared norms are summed over the ranks that share the bucket, and over tp where its
            parameters are sharded over it.
        ops: the kernels in use.
    """

    bucket: Bucket
    ctx: ParallelContext
    ops: Ops

    @cached_property
    def offsets(self) -> tuple[int, ...]:
        """Start of each parameter, or expert of a stack, in this rank's share, then the end of the share."""
        owned, starts = self.bucket.owned, []
        for own in self.bucket.param_shares:
            size = own.param.numel() // _experts(own.param)
            firsts = range(0, own.param.numel(), size)
            starts += [own.at + min(max(first, own.start), own.stop) - own.start for first in firsts]
        return (*starts, owned.stop - owned.start)

    def __call__(
        self,
        weights: torch.Tensor,
        update: torch.Tensor,
        ratio: Callable[[torch.Tensor, torch.Tensor], torch.Tensor],
    ) -> torch.Tensor:
        """Return `ratio`(norms of `weights`, norms of `update`), fp32 [parameters and experts]; 1 where a norm is 0."""
        if not self.bucket.kind.weight_decay:
            return torch.ones(len(self.offsets) - 1, device=weights.device)
        squares = torch.stack([self.ops.segment_norms(x, self.offsets).square() for x in (weights, update)])
        squares = squares.to(self.ctx.device)  # offloaded state is on the host
        if self.bucket.sharded.state:
            collectives.all_reduce(squares, self.bucket.share_axis).wait()
        # Of whole experts, tensor-parallel ranks hold different ones; copies are whole on each.
        if "tp" in self.bucket.params[0].shard.layout.grid.names and "tp" not in self.bucket.kind.copies:
            collectives.all_reduce(squares, self.ctx.tp).wait()
        weight, step = squares.sqrt().to(weights.device)
        return torch.where((weight > 0) & (step > 0), ratio(weight, step), 1.0)


def _experts(param: ShardedParameter) -> int:
    """Return the number of experts that a parameter stacks; 1 for any other."""
    return param.shape[0] if ("ep", 0) in param.shard.spec.sharded_dims else 1
