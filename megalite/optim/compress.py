"""Compressed sums of gradients over the batch axes (`--compress`): fewer bytes, for an approximation of the sum.

A codec takes the place of a bucket's reduction, once per step and never per micro-batch. What top-k and PowerSGD leave
out stays behind as the residual and joins the next step's gradient (error feedback: Seide et al. 2014, section 3;
Karimireddy et al. 2019). int8 leaves nothing behind. The result depends on dp, tp and the bounds of buckets, but is the
same on every run.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from megalite.dist import collectives
from megalite.dist.context import Axis
from megalite.dist.seeding import philox
from megalite.optim.shares import INT8_BLOCK


@dataclass(frozen=True)
class Piece:
    """A parameter of a bucket: its name, local shape, and first element in the bucket."""

    name: str
    shape: torch.Size
    start: int

    @property
    def span(self) -> slice:
        """Its elements in the bucket."""
        return slice(self.start, self.start + self.shape.numel())


class Codec(ABC):
    """Sums gradients of a bucket over an axis. A step is `start`, `wait` and, if its update is made, `commit`.

    Without `commit` a step leaves no trace: residuals are those from before it.

    Args:
        pieces: parameters of the bucket.
        numel: elements of the bucket, a multiple of the ranks of the axis.
        axis: ranks whose gradients are summed.
        device: of the bucket.

    Attributes:
        sent: bytes that this rank has sent in this step.
        residual: what this rank has not sent yet, flat fp32 as the bucket, without loss scale; None if nothing is kept.
    """

    residual: Tensor | None = None

    def __init__(self, pieces: Sequence[Piece], numel: int, axis: Axis, device: torch.device) -> None:
        self.pieces, self.axis = pieces, axis
        self.sent = 0
        self._share = numel // axis.size
        self._works: list[collectives.Work] = []
        # (what is carried to the next step, its value if this step's update is made)
        self._next: list[tuple[Tensor, Tensor]] = []

    def start(self, grad: Tensor, owned: slice, scale: float) -> None:
        """Start the sum of `grad`, whole, fp32, flat and multiplied by the loss scale `scale`.

        `wait` leaves the elements `owned` of the sum in `grad`, multiplied by `scale` too.
        """
        self._grad, self._owned, self._scale, self.sent = grad, owned, scale, 0
        x = grad / scale
        if self.residual is not None:
            x += self.residual
        # No code stands for NaN, and a residual would keep it for good: other ranks get zeros, and this rank's NaN norm
        # makes all ranks skip the step.
        finite = x.isfinite().all()
        self._poison = torch.where(finite, 0.0, torch.nan)
        self._send(x.masked_fill_(~finite, 0.0))

    def wait(self) -> None:
        """Wait for the sum."""
        out = self._grad[self._owned]
        self._receive(out)
        out.mul_(self._scale).add_(self._poison)
        self._works.clear()

    def commit(self) -> None:
        """Keep what this step left behind: its update is made."""
        for old, new in self._next:
            old.copy_(new)
        self._next = []

    @abstractmethod
    def _send(self, x: Tensor) -> None:
        """Start the sum of `x`, which is this codec's to change."""

    @abstractmethod
    def _receive(self, out: Tensor) -> None:
        """Put the sum into `out`: the whole bucket, or this rank's share."""

    def _begin(self, work: collectives.Work) -> collectives.Work:
        self._works.append(work)
        self.sent += work.sent
        return work


class _Exchange(Codec):
    """Each rank gets what all have sent for its share, and sums it in fp32 in the order of the ranks."""

    def _trade(self, message: Tensor) -> None:
        """Start sending row i of `message` to rank i."""
        self._message = torch.empty_like(message)
        self._begin(collectives.all_to_all(self._message, message, self.axis))

    def _receive(self, out: Tensor) -> None:
        self._works[0].wait()
        total = torch.zeros(self._share, device=out.device)
        for row in self._message:
            self._add(total, row)
        del self._message
        if len(out) == self._share:
            out.copy_(total)
        else:
            # ZeRO-0: the sum travels as it is, so that it is rounded once and equal everywhere.
            self._begin(collectives.all_gather(out, total, self.axis)).wait()

    @abstractmethod
    def _add(self, total: Tensor, row: Tensor) -> None:
        """Add what one rank has sent to the sum of this rank's share."""


class Int8(_Exchange):
    """8 bits per element and an fp32 scale per `INT8_BLOCK` elements; nothing is kept (after Dettmers et al. 2022)."""

    def _send(self, x: Tensor) -> None:
        codes, scales = quantize(x.view(self.axis.size, -1))
        self._trade(torch.cat((codes.view(torch.uint8), scales.view(torch.uint8)), 1))

    def _add(self, total: Tensor, row: Tensor) -> None:
        codes, scales = row[: self._share], row[self._share :].clone()
        total += dequantize(codes.view(torch.int8), scales.view(torch.float32))


def quantize(x: Tensor) -> tuple[Tensor, Tensor]:
    """Quantize rows [d, n] to int8 codes [d, n] and fp32 scales [d, blocks]: absmax / 127, rounded to nearest even."""
    rows, n = x.shape
    blocks = torch.nn.functional.pad(x, (0, -n % INT8_BLOCK)).view(rows, -1, INT8_BLOCK)
    scales = blocks.abs().amax(2) / 127
    # The scale of denormal numbers may round to 0, or down.
    codes = (blocks / torch.where(scales > 0, scales, 1.0).unsqueeze(2)).round_().clamp_(-127, 127)
    return codes.to(torch.int8).view(rows, -1)[:, :n].contiguous(), scales


def dequantize(codes: Tensor, scales: Tensor) -> Tensor:
    """Undo `quantize` for one row: int8 codes [n], scales [blocks] -> fp32 [n]."""
    return codes.float().mul_(scales.repeat_interleave(INT8_BLOCK)[: len(codes)])


class TopK(_Exchange):
    """The largest elements of each rank's share, as fp32 values and int32 indices (Aji and Heafield 2017)."""

    def __init__(self, pieces: Sequence[Piece], numel: int, axis: Axis, device: torch.device, fraction: float) -> None:
        super().__init__(pieces, numel, axis, device)
        self.residual = torch.zeros(numel, device=device)
        self._k = max(1, round(fraction * self._share))

    def _send(self, x: Tensor) -> None:
        rows = x.view(self.axis.size, -1)
        indices = largest(rows, self._k)
        values = rows.gather(1, indices)
        assert self.residual is not None
        self._next = [(self.residual, rows.scatter_(1, indices, 0.0).view(-1))]
        self._trade(torch.cat((values.view(torch.int32), indices.to(torch.int32)), 1))

    def _add(self, total: Tensor, row: Tensor) -> None:
        # Indices of one row differ, so that the order within it does not matter.
        total.index_add_(0, row[self._k :], row[: self._k].view(torch.float32))


def largest(rows: Tensor, k: int) -> Tensor:
    """Return the indices [d, k] of the largest absolute values of rows [d, n]; of equal ones, the lowest."""
    # torch.topk may take any of equal ones.
    return rows.abs().sort(dim=1, descending=True, stable=True).indices[:, :k].contiguous()


class PowerSGD(Codec):
    """Each matrix as a product of two of rank `rank`, found from the last step's (Vogels et al. 2019, algorithm 1).

    Vectors, and matrices that have no more elements than the factors, travel as they are.
    """

    def __init__(self, pieces: Sequence[Piece], numel: int, axis: Axis, device: torch.device, rank: int) -> None:
        super().__init__(pieces, numel, axis, device)
        self.residual = torch.zeros(numel, device=device)
        self.rank = rank
        self.matrices = [p for p in pieces if len(p.shape) > 1 and rank * sum(_sides(p)) < p.shape.numel()]
        self._dense = [p for p in pieces if p not in self.matrices]
        self.right = [torch.zeros(_sides(p)[1], rank, device=device) for p in self.matrices]
        self.finish_load()

    def finish_load(self) -> None:
        """Start from random matrices where there is nothing to start from."""
        for piece, q in zip(self.matrices, self.right):
            if not q.any():
                draws = philox(0, "powersgd", piece.name).standard_normal(tuple(q.shape), dtype="float32")
                q.copy_(torch.from_numpy(draws))

    def _send(self, x: Tensor) -> None:
        self._x = x
        left = [_matrix(x, piece) @ q for piece, q in zip(self.matrices, self.right)]
        self._first = _joined([*left, *(x[piece.span] for piece in self._dense)], x)
        self._begin(collectives.all_reduce(self._first, self.axis))

    def _receive(self, out: Tensor) -> None:
        self._works[0].wait()
        sizes = [_sides(piece)[0] * self.rank for piece in self.matrices]
        *left, rest = self._first.split([*sizes, len(self._first) - sum(sizes)])
        dense = rest.split([piece.shape.numel() for piece in self._dense])
        # Orthonormalized by one rank: libraries of different machines may round differently.
        if self.axis.rank == 0:
            for p in left:
                columns = p.view(-1, self.rank)
                columns.copy_(torch.linalg.qr(columns).Q)
        factors = self._first[: sum(sizes)]
        self._begin(collectives.broadcast(factors, self.axis)).wait()
        lefts = [p.view(-1, self.rank) for p in left]
        second = _joined([_matrix(self._x, piece).t() @ p for piece, p in zip(self.matrices, lefts)], out)
        self._begin(collectives.all_reduce(second, self.axis)).wait()
        parts = second.split([_sides(piece)[1] * self.rank for piece in self.matrices])
        rights = [q.view(-1, self.rank) for q in parts]
        total = torch.zeros_like(self._x)
        for piece, p, q in zip(self.matrices, lefts, rights):
            _matrix(total, piece).copy_(p @ q.t())
        self._x.sub_(total, alpha=1 / self.axis.size)
        for piece, value in zip(self._dense, dense):
            total[piece.span] = value
            self._x[piece.span] = 0.0
        out.copy_(total[self._owned])
        assert self.residual is not None
        self._next = [(self.residual, self._x), *zip(self.right, rights)]
        del self._x, self._first


def _sides(piece: Piece) -> tuple[int, int]:
    return piece.shape[0], piece.shape[1:].numel()


def _matrix(flat: Tensor, piece: Piece) -> Tensor:
    return flat[piece.span].view(_sides(piece))


def _joined(parts: Sequence[Tensor], like: Tensor) -> Tensor:
    return torch.cat([part.reshape(-1) for part in parts]) if parts else like.new_empty(0)


def make_codec(spec: str, pieces: Sequence[Piece], numel: int, axis: Axis, device: torch.device) -> Codec | None:
    """Make the codec of a bucket for a `--compress` that the config has checked; None where nothing is compressed."""
    name, _, number = spec.partition(":")
    if name == "none" or axis.size == 1:
        return None
    if name == "int8":
        return Int8(pieces, numel, axis, device)
    if name == "topk":
        return TopK(pieces, numel, axis, device, float(number))
    return PowerSGD(pieces, numel, axis, device, int(number))
