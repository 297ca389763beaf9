"""Keys and values of the tokens so far, kept while a text is written: each new token is computed once.

Nothing of the model changes: while a cached pass runs, its layers' `attention` is one that keeps what it is given.
Shapes: B = 1 text, N query heads, G key/value heads, Q new tokens, K tokens with those so far, D head size, V words.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F

from megalite.core.base.log import logger
from megalite.core.batch import Documents, ForwardPass, Mask, MicroBatch, Positions
from megalite.core.ops.attend import attend
from megalite.extras.inference.load import Model


class Cache:
    """A text that a model reads piece by piece; exact up to rounding.

    Args:
        model: model whose every layer attends, see `Cache.of`.
        capacity: most tokens of the text.

    Attributes:
        length: number of tokens that it has read.
    """

    def __init__(self, model: Model, capacity: int) -> None:
        self._model = model
        self._capacity = capacity
        blocks: list[Any] = [*model.stage.layers.values()]
        self._layers = {block.self_attn: _KeptAttention(capacity) for block in blocks}
        self.length = 0

    @staticmethod
    def of(model: Model, capacity: int) -> Cache | None:
        """Return an empty cache; None, with a line in the log, for a model with layers that have a state instead."""
        mixers = [block.self_attn for block in model.stage.layers.values()]
        without = {type(mixer).__name__ for mixer in mixers if not hasattr(mixer, "attention")}
        if without:
            names = ", ".join(sorted(without))
            logger.info(f"no cache: {names} has none, so each token is computed from the whole text")
            return None
        return Cache(model, capacity)

    @torch.no_grad()
    def logits(self, ids: list[int]) -> torch.Tensor:
        """Read further tokens; returns the logits [V] of the one after them."""
        device = next(self._model.stage.parameters()).device
        tokens_SB = torch.tensor(ids, device=device)[:, None]
        # The whole capacity, so that tables of positions are made once.
        positions = Positions(self._capacity, (range(self.length, self.length + len(ids)),))
        own = {mixer: mixer.attention for mixer in self._layers}
        for mixer, kept in self._layers.items():
            mixer.attention = kept
        try:
            batch = MicroBatch(tokens_SB, None, positions)
            out = self._model.stage(tokens_SB, batch, ForwardPass(0, 0, training=False))
        finally:
            for mixer, attention in own.items():
                mixer.attention = attention
        self.length += len(ids)
        return out[-1, 0, : self._model.cfg.vocab]


class _KeptAttention:
    """`ops.attention` of new tokens to those so far and themselves; keeps their keys and values."""

    def __init__(self, capacity: int) -> None:
        self._capacity = capacity
        self._kept: list[torch.Tensor] = []
        self._length = 0

    def __call__(
        self,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor | None,
        mask: Mask,
        documents: Documents | None = None,
        *,
        scale: float | None = None,
        softcap: float | None = None,
        expand: Callable[[torch.Tensor], tuple[torch.Tensor, torch.Tensor]] | None = None,
        sinks: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Attend: q [1, N, Q, D], k and v [1, G, Q, D] -> [1, N, Q, D]; for the options see `ops.attention`."""
        if expand is not None:
            k, v = expand(k)
        assert v is not None
        width, new = v.shape[-1], q.shape[2]
        v = F.pad(v, (0, q.shape[-1] - width))  # kernels take one width
        if not self._kept:
            self._kept = [x.new_empty(1, x.shape[1], self._capacity, x.shape[-1]) for x in (k, v)]
        first, end = self._length, self._length + new
        keys, values = (kept[:, :, :end] for kept in self._kept)
        keys[:, :, first:], values[:, :, first:] = k, v
        self._length = end
        visible = self._visible(first, end, mask.window, documents, q.device)
        out, lse = attend(q, keys, values, visible, scale=scale, softcap=softcap)
        if sinks is not None:
            out = out * (lse - sinks[:, None]).sigmoid().to(out.dtype).unsqueeze(-1)
        return out[..., :width]

    @staticmethod
    def _visible(
        first: int, end: int, window: int | None, documents: Documents | None, device: torch.device
    ) -> torch.Tensor | None:
        """Return which tokens the new ones see, bool [1, 1, Q, K]; None: all."""
        if end - first == 1 and documents is None and (window is None or window >= end):
            return None
        at_Q1 = torch.arange(first, end, device=device)[:, None]
        keys = torch.arange(end, device=device)
        visible = keys <= at_Q1
        if window is not None:
            visible &= keys > at_Q1 - window
        if documents is not None:
            visible &= keys >= documents.starts_SB[first:end]
        return visible[None, None]
