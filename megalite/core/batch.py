"""What passes through the stages together: the micro-batch with its positions and documents, and the pass it is on.

Made once per step (`microbatches.to_microbatches`); every stage reads the same description, and nothing of it is sent:
only tensors of the shape of `Message` are.
Shapes: S tokens of a sample, B samples, F features.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple, TypeVar

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor
from torch.nn import functional as F

T = TypeVar("T")


@dataclass(frozen=True)
class Mask:
    """Which keys a query sees: itself and those before it.

    Attributes:
        window: how many positions it sees at most, itself included (sliding-window layers); None: no limit.
    """

    window: int | None = None


def runs_of(length: int, ranks: int, rank: int) -> tuple[range, ...]:
    """Return the positions that a rank holds where `ranks` ranks share samples: equal work under a causal mask.

    Of 2 `ranks` chunks a rank has one from the head and its mirror image from the tail; neighbors are one run. Source:
    Megatron-LM's context parallelism; Zhu 2024, "ring-flash-attention", zigzag.
    """
    mirror = 2 * ranks - 1 - rank
    head, tail = (range(i * length // (2 * ranks), (i + 1) * length // (2 * ranks)) for i in (rank, mirror))
    return (range(head.start, tail.stop),) if head.stop == tail.start else (head, tail)


def in_order(x: Tensor) -> Tensor:
    """Put what `ranks` ranks hold, [ranks, tokens of a rank, ...], in the order of positions: [S, ...]."""
    heads, tails = x.unflatten(1, (2, -1)).unbind(1)
    return torch.cat((heads, tails.flip(0))).flatten(0, 1)


def by_rank(x: Tensor, ranks: int) -> Tensor:
    """Put x [S, ...] in the order of the ranks that hold it: [ranks, tokens of a rank, ...]."""
    heads, tails = x.view(2, ranks, -1, *x.shape[1:]).unbind()
    return torch.stack((heads, tails.flip(0)), 1).flatten(1, 2)


@dataclass(frozen=True, eq=False)
class Documents:
    """Documents of unsplit samples: a query sees no key of another document.

    Attributes:
        starts_SB: int64 [S, B], position in the sample at which each token's document starts.
        bounds: int32 [documents + 1], where documents start in the samples laid end to end, then S B; on a GPU only.
        longest: number of tokens of the longest document, where there are bounds.
        host_starts_BS: the same starts on the host, [B, S], where a GPU holds the others.
    """

    starts_SB: Tensor
    bounds: Tensor | None = None
    longest: int = 0
    host_starts_BS: npt.NDArray[np.int64] | None = None
    _made: dict[Any, Any] = field(default_factory=dict, init=False, repr=False)

    @classmethod
    def of(cls, starts_BS: npt.NDArray[np.int64], starts_SB: Tensor) -> Documents:
        """Describe documents by where they start, on the host and on the device of the tokens."""
        if starts_SB.device.type != "cuda":
            return cls(starts_SB)
        # Bounds are found on the host: a GPU would have to be asked how many documents there are.
        bounds = document_bounds(starts_BS)
        longest = int(np.diff(bounds).max())
        return cls(starts_SB, uploaded(torch.from_numpy(bounds), starts_SB.device), longest, host_starts_BS=starts_BS)

    def visible(self, window: int) -> Tensor:
        """Return [B, 1, S, S] bool, True where a query (row) sees a key (column); kept for the other layers."""
        if torch.compiler.is_compiling():
            return self._compute_mask(window)
        return self.once(window, lambda: self._compute_mask(window))

    def once(self, key: Any, make: Callable[[], T]) -> T:
        """Return what `make` returns, which is kept for the other layers."""
        if key not in self._made:
            self._made[key] = make()
        made: T = self._made[key]
        return made

    def host_starts(self, positions: range) -> npt.NDArray[np.int64]:
        """Return, on the host, where the documents start that some positions of the samples are in: [B, positions]."""
        at, host = slice(positions.start, positions.stop), self.host_starts_BS
        starts: npt.NDArray[np.int64] = self.starts_SB[at].t().cpu().numpy() if host is None else host[:, at]
        return starts

    def without_masks(self) -> Documents:
        """Return the same documents for the layers of one pass: the masks of a whole step would fill the memory."""
        return replace(self)

    def _compute_mask(self, window: int) -> Tensor:
        at = torch.arange(len(self.starts_SB), device=self.starts_SB.device)
        first_BS = torch.maximum(self.starts_SB.t(), at - (window - 1))
        return ((at <= at[:, None]) & (at >= first_BS[..., None])).unsqueeze(1)


def uploaded(host: Tensor, device: torch.device) -> Tensor:
    """Copy a tensor of the host to the device without waiting for its work, as a copy from pageable memory would."""
    return host.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else host.to(device)


def document_bounds(starts_BS: npt.NDArray[np.integer[Any]]) -> npt.NDArray[np.int32]:
    """Return where documents begin in samples laid end to end, and the number of tokens, int32 [documents + 1]."""
    begins = np.flatnonzero(starts_BS == np.arange(starts_BS.shape[1]))
    return np.append(begins, starts_BS.size).astype(np.int32)


@dataclass(frozen=True, eq=False)
class Positions:
    """Positions of a micro-batch's tokens: everything that depends on a token's position asks here, and only here.

    Attributes:
        length: number of tokens S of a sample.
        runs: the tokens' positions in the sample, in their order, as ranges of neighbors; an unsplit sample is one run.
        in_documents_SB: int64 [tokens, B], positions counted from the start of each token's document; None: a sample is
            one document.
    """

    length: int
    runs: tuple[range, ...]
    in_documents_SB: Tensor | None = None

    @classmethod
    def of_samples(cls, length: int, documents: Documents | None = None) -> Positions:
        """Return the positions of all tokens of samples of `length` tokens."""
        if documents is None:
            return cls(length, (range(length),))
        starts_SB = documents.starts_SB
        return cls(length, (range(length),), torch.arange(length, device=starts_SB.device)[:, None] - starts_SB)

    def shared(self, ranks: int, rank: int) -> Positions:
        """Return those of the tokens that a rank holds where `ranks` ranks share whole samples."""
        runs, starts = runs_of(self.length, ranks, rank), self.in_documents_SB
        return Positions(self.length, runs, None if starts is None else _rows(starts, runs))

    def between(self, begin: int, end: int) -> Positions:
        """Return the positions of the tokens `begin` up to, but not including, `end`, counted among these tokens."""
        runs, before = [], 0
        for run in self.runs:
            runs.append(run[max(begin - before, 0) : max(end - before, 0)])
            before += len(run)
        in_documents_SB = None if self.in_documents_SB is None else self.in_documents_SB[begin:end]
        return Positions(self.length, tuple(run for run in runs if run), in_documents_SB)

    def numbers(self, device: torch.device) -> Tensor:
        """Return the tokens' positions in the sample, int32 [tokens]."""
        return torch.cat([torch.arange(run.start, run.stop, dtype=torch.int32, device=device) for run in self.runs])

    def look_up(self, table: Tensor) -> Tensor:
        """Return the rows of `table` [at least S, F] at these positions, [tokens, B, F].

        Without documents samples are alike: the result is [tokens, 1, F], a view where the tokens are one run.
        """
        if self.in_documents_SB is not None:
            return F.embedding(self.in_documents_SB, table)
        rows = [table[run.start : run.stop] for run in self.runs]
        return (rows[0] if len(rows) == 1 else torch.cat(rows)).unsqueeze(1)


def _rows(x: Tensor, runs: tuple[range, ...]) -> Tensor:
    return torch.cat([x[run.start : run.stop] for run in runs])


@dataclass(frozen=True)
class MicroBatch:
    """Samples that pass through the stages together, or this rank's tokens of them; then S counts those.

    Attributes:
        tokens_SB: token ids, int64 [S, B].
        targets_SB: int64 [S, B], ids to predict, negative ones are ignored; with None the last stage returns logits.
        positions: positions of these tokens.
        documents: documents in the whole samples; attention looks back no further than to the start of each token's
            document. None: a sample is one document.
        weights_SB: fp32 [S, B], weight of each target in the loss; None: 1.
        further: the same positions with the tokens and targets 1, 2, ... further on, for modules that predict those.
        router_weights_SB: fp32 [S, B], weight of each token in the losses of routers, which count the tokens that have
            one; None: 1.
        owners_SB, references_SB: int64 and fp64 [S, B], of preferences: see `Rows`.
    """

    tokens_SB: Tensor
    targets_SB: Tensor | None
    positions: Positions
    documents: Documents | None = None
    weights_SB: Tensor | None = None
    further: tuple[MicroBatch, ...] = ()
    router_weights_SB: Tensor | None = None
    owners_SB: Tensor | None = None
    references_SB: Tensor | None = None

    @classmethod
    def of_samples(
        cls,
        tokens_SB: Tensor,
        targets_SB: Tensor | None = None,
        documents: Documents | None = None,
        weights_SB: Tensor | None = None,
    ) -> MicroBatch:
        """Make a micro-batch of unsplit samples."""
        positions = Positions.of_samples(len(tokens_SB), documents)
        return cls(tokens_SB, targets_SB, positions, documents, weights_SB)

    def in_chunks(self, sizes: Iterable[int | None]) -> dict[int | None, Documents | None]:
        """Return the documents cut into chunks of each of some sizes, counted from the start of each document as its
        positions are, or from that of the sample where it is one (Llama 4); None: not cut. Masks are those of one pass,
        see `without_masks`.
        """
        whole = self.documents and self.documents.without_masks()
        return {size: whole if size is None else self._cut(size) for size in (None, *sizes)}

    def _cut(self, size: int) -> Documents:
        length, samples = self.positions.length, self.tokens_SB.shape[1]
        at_S1 = torch.arange(length, device=self.tokens_SB.device)[:, None]
        if self.documents is None:
            starts_SB: Tensor = at_S1.new_zeros(1, samples)
            host: npt.NDArray[np.int64] | None = np.zeros((samples, length), np.int64)
        else:
            starts_SB, host = self.documents.starts_SB, self.documents.host_starts_BS
        starts_SB = starts_SB + (at_S1 - starts_SB) // size * size
        if host is None:
            return Documents(starts_SB)
        return Documents.of(host + (np.arange(length) - host) // size * size, starts_SB)

    def shared(self, ranks: int, rank: int) -> MicroBatch:
        """Return what a rank holds of whole samples that `ranks` ranks share: the one place where a sequence is cut."""
        positions = self.positions.shared(ranks, rank)
        of_tokens = self.targets_SB, self.weights_SB, self.router_weights_SB, self.owners_SB, self.references_SB
        targets, weights, *others = (None if x is None else _rows(x, positions.runs) for x in of_tokens)
        further = tuple(batch.shared(ranks, rank) for batch in self.further)
        tokens = _rows(self.tokens_SB, positions.runs)
        return MicroBatch(tokens, targets, positions, self.documents, weights, further, *others)


class Message(NamedTuple):
    """Shape and dtype of the tensors sent between stages, the same for every micro-batch of a run."""

    shape: tuple[int, ...]
    dtype: torch.dtype


@dataclass(frozen=True)
class ForwardPass:
    """One micro-batch's way through the stages.

    Dropout masks are a function of step, samples and positions, which no layout changes.

    Attributes:
        step: number of the optimizer step.
        microbatch: index of the micro-batch among those of the replica.
        training: whether dropout and label smoothing apply, and backward follows.
        grad_scale: gradient of the sum of all token losses that backward will start from.
        samples: numbers of its samples in the global batch.
        positions: of its tokens; dropout needs them.
        router_weights_SB: those of the tokens that the blocks work on, see `MicroBatch`.
    """

    step: int
    microbatch: int
    training: bool
    grad_scale: float = 1.0
    samples: range = range(0)
    positions: Positions | None = None
    router_weights_SB: Tensor | None = field(default=None, compare=False)
