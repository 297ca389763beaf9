"""Keys and values of the tokens so far, kept while texts are written: each new token is computed once.

Nothing of the model changes: while a cached pass runs, its layers' `attention` is one that keeps what it is given.
The new tokens of a micro-batch's texts are one sequence, a text after the other, so that ranks can share it as any
other (sequence parallelism); each knows its position in its text.
Shapes: T texts of a micro-batch, Q new tokens of each, K tokens with those so far, N query heads, G key/value heads,
D head size, V words.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F

from megalite.core.base.log import logger
from megalite.core.batch import Documents, ForwardPass, Mask, MicroBatch, Positions
from megalite.core.model.gpt import GPTStage
from megalite.core.ops.attend import attend
from megalite.core.pipeline.observe import Observer
from megalite.core.pipeline.schedule import Op
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
        self._kept = KeptTexts([model.stage], capacity, capacity)
        self.length = 0

    @staticmethod
    def of(model: Model, capacity: int) -> Cache | None:
        """Return an empty cache; None, with a line in the log, for a model with layers that have a state instead."""
        if without := without_keys([model.stage]):
            names = ", ".join(without)
            logger.info(f"no cache: {names} has none, so each token is computed from the whole text")
            return None
        return Cache(model, capacity)

    @torch.no_grad()
    def logits(self, ids: list[int]) -> torch.Tensor:
        """Read further tokens; returns the logits [V] of the one after them."""
        device = next(self._model.stage.parameters()).device
        batch = self._kept.next_piece([ids], [self.length], device)
        with self._kept.attending():
            out = self._model.stage(batch.tokens_SB, batch, ForwardPass(0, 0, training=False))
        self.length += len(ids)
        return out[-1, 0, : self._model.cfg.vocab]


def without_keys(stages: Iterable[GPTStage]) -> list[str]:
    """Name the kinds of layers that have a state instead of keys and values."""
    mixers = [block.self_attn for stage in stages for block in stage.layers.values()]
    return sorted({type(mixer).__name__ for mixer in mixers if not hasattr(mixer, "attention")})


@dataclass(frozen=True)
class _Piece:
    """What a micro-batch reads next: the positions of its new tokens in their texts, int64 [T, Q]."""

    at_TQ: torch.Tensor
    end: int
    sees_all: bool

    @classmethod
    def of(cls, starts: Sequence[int], length: int, device: torch.device) -> _Piece:
        at_TQ = torch.tensor(starts, device=device)[:, None] + torch.arange(length, device=device)
        return cls(at_TQ, max(starts) + length, length == 1 and len({*starts}) == 1)

    def visible(self, window: int | None, documents: Documents | None) -> torch.Tensor | None:
        """Return which tokens the new ones see, bool [T, 1, Q, K]; None: all."""
        if self.sees_all and documents is None and (window is None or window >= self.end):
            return None
        at_TQ1, keys = self.at_TQ[..., None], torch.arange(self.end, device=self.at_TQ.device)
        visible = keys <= at_TQ1
        if window is not None:
            visible &= keys > at_TQ1 - window
        if documents is not None:
            visible &= keys >= documents.starts_SB[:, 0][at_TQ1]
        return visible[:, None]


class KeptTexts(Observer):
    """Keys and values of the texts of some micro-batches, in the layers of this rank's stages.

    A text may read padding after its last token: what is kept of that is replaced before a token sees it.

    Args:
        stages: stages whose every layer attends.
        capacity: most tokens of a text.
        length: tokens of a sample: what tables of positions are made for.
    """

    def __init__(self, stages: Iterable[GPTStage], capacity: int, length: int) -> None:
        self._length = length
        blocks: list[Any] = [block for stage in stages for block in stage.layers.values()]
        self._layers = {block.self_attn: _KeptAttention(self, capacity) for block in blocks}
        self._pieces: dict[int, _Piece] = {}
        self.microbatch = 0

    @property
    def piece(self) -> _Piece:
        """What the micro-batch that runs now reads."""
        return self._pieces[self.microbatch]

    def begin(self, op: Op) -> None:
        """Follow the executor to the next micro-batch."""
        self.microbatch = op.microbatch

    def next_piece(
        self,
        ids: Sequence[Sequence[int]],
        starts: Sequence[int],
        device: torch.device,
        targets_SB: torch.Tensor | None = None,
        microbatch: int = 0,
    ) -> MicroBatch:
        """Describe the next tokens of a micro-batch's texts.

        Args:
            ids: as many ids of each text.
            starts: position of the first of them in each text.
            device: where they are read.
            targets_SB: see `MicroBatch`, [T Q, 1].
            microbatch: number of the micro-batch.
        """
        piece = self._pieces[microbatch] = _Piece.of(starts, len(ids[0]), device)
        tokens_SB = torch.tensor(ids, device=device).view(-1, 1)
        positions = Positions(self._length, (range(len(tokens_SB)),), piece.at_TQ.view(-1, 1))
        return MicroBatch(tokens_SB, targets_SB, positions)

    @contextmanager
    def attending(self) -> Iterator[None]:
        """Let the layers keep and see what texts have read, inside the context."""
        own = {mixer: mixer.attention for mixer in self._layers}
        for mixer, kept in self._layers.items():
            mixer.attention = kept
        try:
            yield
        finally:
            for mixer, attention in own.items():
                mixer.attention = attention

    def keep(self, rows: Sequence[int], microbatch: int) -> None:
        """Forget all but these texts of a micro-batch, by their number in it."""
        for kept in self._layers.values():
            kept.keep(rows, microbatch)


class _KeptAttention:
    """`ops.attention` of new tokens to those of their text so far and themselves; keeps their keys and values."""

    def __init__(self, texts: KeptTexts, capacity: int) -> None:
        self._texts = texts
        self._capacity = capacity
        self._kept: dict[int, list[torch.Tensor]] = {}

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
        """Attend: q [1, N, T Q, D], k and v [1, G, T Q, D] -> [1, N, T Q, D]; for the options see `ops.attention`."""
        if expand is not None:
            k, v = expand(k)
        assert v is not None
        width, piece = v.shape[-1], self._texts.piece
        v = F.pad(v, (0, q.shape[-1] - width))  # kernels take one width
        texts, new = piece.at_TQ.shape
        q, k, v = (x[0].unflatten(1, (texts, new)).transpose(0, 1) for x in (q, k, v))
        kept = self._kept.get(self._texts.microbatch)
        if kept is None:
            # Zeros: what is not yet written has no weight, and none times what memory held could be no number.
            kept = [x.new_zeros(texts, x.shape[1], self._capacity, x.shape[-1]) for x in (k, v)]
            self._kept[self._texts.microbatch] = kept
        rows_T1 = torch.arange(texts, device=q.device)[:, None]
        for whole, x in zip(kept, (k, v)):
            whole[rows_T1, :, piece.at_TQ] = x.transpose(1, 2)
        keys, values = (whole[:, :, : piece.end] for whole in kept)
        out, lse = attend(q, keys, values, piece.visible(mask.window, documents), scale=scale, softcap=softcap)
        if sinks is not None:
            out = out * (lse - sinks[:, None]).sigmoid().to(out.dtype).unsqueeze(-1)
        return out[..., :width].transpose(0, 1).flatten(1, 2).unsqueeze(0)

    def keep(self, rows: Sequence[int], microbatch: int) -> None:
        """Forget all but these texts of a micro-batch."""
        if microbatch in self._kept:
            self._kept[microbatch] = [whole[rows] for whole in self._kept[microbatch]]
