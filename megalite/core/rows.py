"""Samples side by side, as a training step reads them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import numpy.typing as npt

from megalite.core.base.errors import UserError

Tokens = npt.NDArray[np.int64]

IGNORE = -1
"""Target of a token that predicts nothing; any negative number means the same."""

MAX_WEIGHT = 1e10
"""Largest weight of a target. All targets of a step together weigh at least 1 / MAX_WEIGHT times its tokens."""


def share_of(samples: int, replicas: int, replica: int, size: int = 1) -> range:
    """Return which samples of a global batch one of its data-parallel replicas has: their numbers in the batch.

    Replicas have whole micro-batches of `size` samples, in order, and numbers of them that differ by at most one.
    """
    microbatches = samples // size
    first, end = (r * microbatches // replicas * size for r in (replica, replica + 1))
    return range(first, end)


@dataclass(frozen=True)
class Rows:
    """One or more samples of one length S; every array is [n, S], or [S] for a single sample.

    Attributes:
        inputs: int64 token ids, none negative.
        targets: int64, the id that each token is to predict; negative ones are not in the loss.
        starts: int64, index in its sample of the first token of each token's document: attention looks back no further,
            and positions count from there. None: a sample is one document.
        weights: float32 from 0 to `MAX_WEIGHT`, weight of each target in the mean loss; None: 1.
        padding: bool, places without a token: routers of experts do not count them, and they have no target. A token
            that is not learned is none. None: there is a token everywhere.
        owners: int64, of rows of preferences: number in its row of the document that each target counts for, -1
            elsewhere; 2k is the preferred one of a pair, 2k + 1 the other. Weights are 1 at one target of each pair.
        references: float64, at one target of each document the log-probability of all its targets under the reference
            model, 0 elsewhere. None: 0.
    """

    inputs: Tokens
    targets: Tokens
    starts: Tokens | None = None
    weights: npt.NDArray[np.float32] | None = None
    padding: npt.NDArray[np.bool_] | None = None
    owners: Tokens | None = None
    references: npt.NDArray[np.float64] | None = None

    @classmethod
    def of(cls, tokens: npt.NDArray[np.integer[Any]]) -> Rows:
        """Make rows of plain samples [n, S + 1] or [S + 1]: each token predicts the next.

        Negative ids at the end of a sample are padding: ignored as targets, and 0 as inputs.
        """
        ids: Tokens = tokens.astype(np.int64, copy=False)
        inputs, targets = ids[..., :-1], ids[..., 1:]
        if not ids.size or ids.min() >= 0:
            return cls(inputs, targets)
        padding = np.logical_and.accumulate(ids[..., ::-1] < 0, axis=-1)[..., :0:-1]
        return cls(np.where(padding, 0, inputs), targets, padding=padding)

    @classmethod
    def stack(cls, samples: Sequence[Rows]) -> Rows:
        """Stack single samples. If some have documents, weights or padding, the others are one document, have weight 1
        and no padding.
        """

        def side_by_side(name: str, default: int) -> Any:
            arrays = [getattr(sample, name) for sample in samples]
            if all(x is None for x in arrays):
                return None
            filler = next(np.full_like(x, default) for x in arrays if x is not None)
            return np.stack([filler if x is None else x for x in arrays])

        inputs, targets = (np.stack([getattr(sample, name) for sample in samples]) for name in ("inputs", "targets"))
        fillers = {"starts": 0, "weights": 1, "padding": False, "owners": -1, "references": 0}
        return cls(inputs, targets, *(side_by_side(name, filler) for name, filler in fillers.items()))

    def __len__(self) -> int:
        return len(self.inputs)

    def __getitem__(self, samples: slice | npt.NDArray[np.intp]) -> Rows:
        """Return some of the samples."""
        parts: dict[str, Any] = {name: x if x is None else x[samples] for name, x in vars(self).items()}
        return Rows(**parts)

    def filled(self, samples: int) -> Rows:
        """Return these rows and, behind them, as many without a target or token as make `samples`.

        They repeat the inputs of the first ones, and so what is computed of them is finite where that of those is.
        """
        if len(self) >= samples:
            return self
        numbers = np.arange(samples)
        out, without = self[numbers % len(self)], (numbers >= len(self))[:, None]
        padding = np.broadcast_to(without, out.inputs.shape) if out.padding is None else out.padding | without
        return replace(out, targets=np.where(without, IGNORE, out.targets), padding=padding)

    def ahead(self, steps: int) -> Rows:
        """Return the inputs and targets `steps` tokens further on, at the places of these: [n, S].

        Where those lie in another document or behind the sample, there is padding, and no target.
        """

        def moved(x: npt.NDArray[Any], filler: int) -> Any:
            out = np.full_like(x, filler)
            out[..., : -steps or None] = x[..., steps:]
            return out

        own = np.zeros(self.targets.shape, np.bool_) if self.padding is None else self.padding
        padding = own | moved(own, True)
        if self.starts is not None:
            padding |= moved(self.starts, -1) != self.starts
        targets = np.where(padding, IGNORE, moved(self.targets, IGNORE))
        weights = None if self.weights is None else moved(self.weights, 0)
        return Rows(moved(self.inputs, 0), targets, self.starts, weights, padding)

    def total_weight(self) -> float:
        """Sum the weights of all targets; without weights, count the targets."""
        counted = self.targets >= 0
        return float(counted.sum() if self.weights is None else self.weights[counted].sum(dtype=np.float64))

    def num_tokens(self) -> int:
        """Count the places that are not padding."""
        return self.inputs.size if self.padding is None else int((~self.padding).sum())

    def check_inputs(self, what: str) -> Rows:
        """Return these rows, if a step can train on them.

        Raises:
            UserError: an input is negative (an embedding would return zeros for it, without an error), or a weight is
                not a number from 0 to `MAX_WEIGHT`.
        """
        if self.inputs.size and int(self.inputs.min()) < 0:
            at = tuple(int(i) for i in np.unravel_index(int(self.inputs.argmin()), self.inputs.shape))
            rule = f"token {at[-1]} is followed by others, so its id must not be negative"
            raise UserError(
                f"token id {int(self.inputs[at])} in {what}", rule, "mark ignored tokens in the targets instead"
            )
        if self.weights is not None and (wrong := ~((self.weights >= 0) & (self.weights <= MAX_WEIGHT))).any():
            at = tuple(int(i) for i in np.unravel_index(int(wrong.argmax()), wrong.shape))
            rule = f"the weight of a target, here of token {at[-1]}, is a number from 0 to {MAX_WEIGHT:g}"
            raise UserError(f"weight {self.weights[at]:g} in {what}", rule, "correct it, or set the target to -1")
        return self
