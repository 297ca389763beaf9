"""Exchange tokens for heads and back: each rank attends with some of the heads over whole samples.

Source: Jacobs et al. 2023, "DeepSpeed-Ulysses" (arXiv:2309.14509). Any attention works inside, over whole samples or
over what ranks of another axis hold of them.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.autograd.graph import saved_tensors_hooks

from megalite.core.batch import Documents, Mask, by_rank, in_order
from megalite.core.mesh.collectives import exchange_rows
from megalite.core.mesh.context import Axis


@dataclass(frozen=True)
class HeadExchange:
    """`ops.attention` over the tokens of the ranks of an axis, by one all-to-all before and one after `attention`.

    Where an axis has more ranks than there are key heads, each rank gets a copy of the one that its queries read.

    Attributes:
        axis: neighbors on cp, or all of it.
        attention: attends with this rank's heads.
        again: whether backward exchanges again what would otherwise be kept twice: the output, which the next layer
            keeps too, and copies of keys. Off where attention is recomputed, and thus keeps nothing.
    """

    axis: Axis
    attention: Callable[..., Tensor]
    again: bool

    def __call__(
        self, q: Tensor, k: Tensor, v: Tensor, mask: Mask, documents: Documents | None = None, **options: Any
    ) -> Tensor:
        """Attend; q, k and v are of this rank's tokens, documents of whole samples, sinks of all heads."""
        if "sinks" in options:
            options["sinks"] = options["sinks"].chunk(self.axis.size)[self.axis.rank]
        if "dropout" in options:
            options["dropout"] = options["dropout"].from_head(q.shape[1] // self.axis.size * self.axis.rank)
        received, kept = self.deal_out(q, k, v), _Kept()
        parts = (x.permute(1, 2, 0, 3) for x in received.split(self._heads(q, k, v), 2))
        with saved_tensors_hooks(kept.keep, kept.get) if self.again else nullcontext():
            out = self.attention(*parts, mask, documents, **options)
        if not (self.again and out.requires_grad):
            return self.collect(out)
        copied = self.axis.size > k.shape[1]
        kept.leave_out(out, *[received] * copied)
        return _Collect.apply(out, self, kept, *(x.detach() for x in (q, k, v) if copied))

    def deal_out(self, *tensors: Tensor) -> Tensor:
        """Exchange tokens for heads: [B, all heads, tokens, D] each -> [S, B, this rank's heads of all tensors, D]."""
        ranks = self.axis.size
        each = (x.repeat_interleave(max(1, ranks // x.shape[1]), 1) for x in tensors)
        # [tokens, B, heads, D] -> [ranks, tokens, B, heads of each, D]
        packed = torch.cat([x.permute(2, 0, 1, 3).unflatten(2, (ranks, -1)) for x in each], 3)
        return in_order(self._exchange(packed.permute(2, 0, 1, 3, 4)))

    def collect(self, out: Tensor) -> Tensor:
        """Exchange heads for tokens: [B, this rank's heads, S, D] -> [B, all heads, tokens, D], tokens first."""
        back = self._exchange(by_rank(out.permute(2, 0, 1, 3), self.axis.size))
        # [ranks, tokens, B, heads of each, D] -> [B, heads, tokens, D], which the next layer must not copy
        return back.permute(1, 2, 0, 3, 4).flatten(2, 3).contiguous().permute(1, 2, 0, 3)

    def _heads(self, *tensors: Tensor) -> list[int]:
        return [max(1, x.shape[1] // self.axis.size) for x in tensors]

    def _exchange(self, x: Tensor) -> Tensor:
        each = [1] * self.axis.size
        return exchange_rows(x, self.axis, each, each)


class _Collect(torch.autograd.Function):
    """`collect`, whose backward brings back what `kept` left out, in the message that brings the gradient."""

    @staticmethod
    def forward(ctx: Any, out: Tensor, exchange: HeadExchange, kept: _Kept, *qkv: Tensor) -> Tensor:
        back = exchange.collect(out)
        ctx.exchange, ctx.kept = exchange, kept
        ctx.save_for_backward(back, *qkv)
        return back

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dback: Tensor) -> tuple[Tensor | None, ...]:
        back, *qkv = ctx.saved_tensors
        heads = ctx.exchange._heads(dback)[0]
        dout, out, received = ctx.exchange.deal_out(dback, back, *qkv).tensor_split((heads, 2 * heads), 2)
        dout, out = (x.permute(1, 2, 0, 3) for x in (dout, out))
        # Autograd frees what is saved as it goes, but no attribute.
        kept, ctx.kept = ctx.kept, None
        kept.put_back(out, *[received] * bool(qkv))
        return (dout, None, None, *(None for _ in qkv))


class _Kept:
    """What attention keeps for backward, without some tensors that come again before that."""

    def __init__(self) -> None:
        self._slots: list[list[Any]] = []
        self._missing: list[Tensor] = []  # as they were, on no memory
        self._back: list[Tensor] = []

    def keep(self, x: Tensor) -> list[Any]:
        self._slots.append([x])
        return self._slots[-1]

    def get(self, slot: list[Any]) -> Tensor:
        if isinstance(slot[0], Tensor):
            return slot[0]
        which, *view = slot[0]
        return self._back[which].as_strided(*view)

    def leave_out(self, *missing: Tensor) -> None:
        """Forget the memory of these tensors; views of them are remembered as such.

        One that is part of a larger storage, as a kernel that pads head sizes may return, stays.
        """
        places = {
            x.untyped_storage()._cdata: i for i, x in enumerate(missing) if x.untyped_storage().nbytes() == x.nbytes
        }
        for slot in self._slots:
            (x,) = slot
            which = places.get(x.untyped_storage()._cdata)
            if which is not None:
                slot[:] = [(which, x.shape, x.stride(), x.storage_offset())]
        self._missing = [x.detach().to("meta") for x in missing]
        self._slots.clear()

    def put_back(self, *tensors: Tensor) -> None:
        """Lay these out as those that were left out."""
        self._back = [torch.empty_like(x, device=y.device).copy_(y) for x, y in zip(self._missing, tensors)]
