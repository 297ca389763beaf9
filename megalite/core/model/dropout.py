"""Dropout whose masks belong to samples: the same in every layout, for any size of micro-batches, under recomputation.

A mask is a function of (seed, step, place in the model, number of the sample in the global batch, position of the token
in the sample, column): the feature on the residual stream, head and key in attention. See `core/ops/dropout.py`.

Shapes: S tokens of this rank (s = S / tp with sequence parallelism), B micro-batch, H hidden.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from megalite.core.batch import ForwardPass
from megalite.core.mesh.context import Axis
from megalite.core.mesh.seeding import derive
from megalite.core.ops.dropout import HeadDropout, SampleWords
from megalite.core.ops.mixing import mix_, pair

VERSION_OF_MASKS = 2
"""Recorded in checkpoints. Of the first version, which recorded none, were masks of a replica's micro-batch."""

_backward: Any = torch.ops.aten.native_dropout_backward


class MaskWords:
    """Two words for each sample of a pass, and for each of its tokens here: what its masks are made of.

    Args:
        seed: of the run.
        tp: tensor-parallel axis.
        sequence_parallel: whether it shares the tokens of the residual stream.
    """

    def __init__(self, seed: int, tp: Axis, sequence_parallel: bool) -> None:
        self.seed = seed
        self._shards, self._shard = (tp.size, tp.rank) if sequence_parallel else (1, 0)
        self._last: tuple[ForwardPass, SampleWords, Tensor] | None = None

    def of(self, fwd: ForwardPass, device: torch.device) -> tuple[SampleWords, Tensor]:
        """Return words of the samples, and of the residual stream's tokens, int32 [2, s, B], of a pass."""
        # One layer after the other asks for the same.
        if self._last is None or self._last[0] is not fwd:
            assert fwd.positions is not None, "a pass with dropout needs its samples and positions"
            key = pair(derive(self.seed, "dropout", fwd.step))
            numbers = torch.arange(fwd.samples.start, fwd.samples.stop, dtype=torch.int32, device=device)
            samples = torch.stack([mix_(numbers ^ half) for half in key])
            every = fwd.positions.numbers(device)
            own = every.tensor_split(self._shards)[self._shard]
            self._last = fwd, SampleWords(samples), mix_(samples[:, None] ^ own[:, None])
        return self._last[1:]


class Dropout:
    """Dropout at one place of the model, in training only.

    Args:
        rate: probability that an element becomes 0.
        words: those of this rank.
        place: (layer, site); layer -1 stands for what comes before the blocks.
        keep_mask: the op.
    """

    def __init__(self, rate: float, words: MaskWords, place: tuple[int, str], keep_mask: Callable[..., Tensor]) -> None:
        self.rate = rate
        self.words = words
        self.keep_mask = keep_mask
        self.key = pair(derive(words.seed, "dropout", *place))

    def __call__(self, x_SBH: Tensor, fwd: ForwardPass) -> Tensor:
        """Drop elements of this rank's part of the residual stream, and scale the others by 1 / (1 - rate)."""
        if not (self.rate and fwd.training):
            return x_SBH
        _, tokens = self.words.of(fwd, x_SBH.device)
        keep = self.keep_mask(tokens, self.key, range(x_SBH.shape[2]), self.rate)
        return _Kept.apply(x_SBH, keep, 1 / (1 - self.rate))

    def of_heads(self, fwd: ForwardPass, first: int, device: torch.device) -> dict[str, HeadDropout]:
        """Return the option `dropout` of attention with the heads from number `first` on; in evaluation none."""
        if not (self.rate and fwd.training):
            return {}
        samples, _ = self.words.of(fwd, device)
        return {"dropout": HeadDropout(self.rate, samples, self.key, first, self.keep_mask)}


class _Kept(torch.autograd.Function):
    """x * keep * scale in one pass; only the mask is kept."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, keep: Tensor, scale: float) -> Tensor:
        ctx.save_for_backward(keep)
        ctx.scale = scale
        return _backward(x, keep, scale)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor, None, None]:
        (keep,) = ctx.saved_tensors
        return _backward(dy, keep, ctx.scale), None, None
