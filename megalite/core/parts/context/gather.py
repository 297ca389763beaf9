"""Gather the keys and values of all ranks, as Llama 3 does (arXiv:2407.21783, section 3.3.2), or what they are made of:
the latents of latent attention are much narrower.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable

from megalite.core.batch import by_rank, in_order
from megalite.core.mesh import collectives
from megalite.core.mesh.context import Axis
from megalite.core.parts.context.blocks import Case, Total, pack, unpack


@dataclass(frozen=True)
class Gather:
    """Keys and values by all-gather, their gradients by reduce-scatter; see `blocks.Exchange`."""

    cp: Axis

    def attend(self, case: Case, total: Total, q: Tensor, kv: Tensor) -> None:
        """Attend to the keys of all ranks at once."""
        keys = self.of_all(kv)
        case.attend(total, q, keys, (range(len(keys)),))

    def gradients(self, case: Case, dq: Tensor, *saved: Tensor) -> Tensor:
        """Gather again, and sum the gradients of this rank's keys over the ranks."""
        dout, q, kv, out, lse = saved
        keys = self.of_all(kv)
        return self.sum_of_mine(case.gradients(dq, dout, q, keys, out, lse, (range(len(keys)),)))

    def attend_latents(self, case: Case, q: Tensor, latents: Tensor, expand: Callable[..., Any]) -> Tensor:
        """Attend to keys and values that `expand` makes of this rank's latents [s, B, C] and those of the others."""
        return _LatentAttention.apply(q, latents, expand, self, case)

    def of_all(self, x: Tensor) -> Tensor:
        """Gather x [s, ...] of all ranks, in the order of positions."""
        by_ranks, work = collectives.start_all_gather(x, self.cp)
        work.wait()
        return in_order(by_ranks.unflatten(0, (self.cp.size, -1)))

    def sum_of_mine(self, dx: Tensor) -> Tensor:
        """Sum the gradient of what was gathered over the ranks, each for its own tokens."""
        mine, work = collectives.start_reduce_scatter(by_rank(dx, self.cp.size).flatten(0, 1), self.cp)
        work.wait()
        return mine


class _LatentAttention(torch.autograd.Function):
    """Saves what one process would, less keys and values: backward gathers and expands again."""

    @staticmethod
    def forward(ctx: Any, q: Tensor, latents: Tensor, expand: Callable[..., Any], gather: Gather, case: Case) -> Tensor:
        total, (k, v) = Total(q), expand(gather.of_all(latents))
        case.attend(total, q, pack(k, _filled(v, q)), (range(k.shape[2]),))
        out = total.out.to(q.dtype)
        ctx.save_for_backward(q, latents, out, total.lse)
        ctx.expand = expand
        ctx.gather = gather
        ctx.case = case
        return out[..., : v.shape[-1]]

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dout: Tensor) -> tuple[Tensor, Tensor, None, None, None]:
        q, latents, out, lse = ctx.saved_tensors
        whole = ctx.gather.of_all(latents).requires_grad_()
        with torch.enable_grad():
            k, v = ctx.expand(whole)
        dq, kv = torch.zeros_like(q, dtype=lse.dtype), pack(k.detach(), _filled(v.detach(), q))
        dkv = ctx.case.gradients(dq, _filled(dout, q), q, kv, out, lse, (range(len(whole)),))
        dk, dv = unpack(dkv.to(k.dtype))
        torch.autograd.backward((k, v), (dk, dv[..., : v.shape[-1]]))
        assert whole.grad is not None
        return dq.to(q.dtype), ctx.gather.sum_of_mine(whole.grad.to(lse.dtype)).to(q.dtype), None, None, None


def _filled(x: Tensor, like: Tensor) -> Tensor:
    """Fill heads up with zeros to the width of `like`."""
    return F.pad(x, (0, like.shape[-1] - x.shape[-1]))
