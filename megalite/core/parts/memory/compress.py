"""Compressed sums of gradients over the batch axes (`--compress`): fewer bytes, for an approximation of the sum.

A codec replaces a bucket's reduction, once per step, not per micro-batch. What top-k and PowerSGD drop is kept as a
residual and added to the next step's gradient (error feedback: Seide et al. 2014, section 3; Karimireddy et al. 2019).
int8 keeps no residual. The result depends on dp, tp and the bucket boundaries, but is the same on every run.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from megalite.core.mesh import collectives
from megalite.core.mesh.context import Axis
from megalite.core.mesh.seeding import philox
from megalite.core.optim.shares import INT8_BLOCK


@dataclass(frozen=True)
class BucketParam:
    """A parameter of a bucket: its name, local shape, first element in the bucket, and whether it has matrices."""

    name: str
    shape: torch.Size
    start: int
    matrix: bool

    @property
    def span(self) -> slice:
        """Range of its elements in the bucket."""
        return slice(self.start, self.start + self.shape.numel())


class Codec(ABC):
    """Sums the gradients of a bucket over an axis: `start`, `wait` and, if the step is not skipped, `commit`.

    Without `commit`, residuals stay as they were before the step.

    Args:
        params: parameters of the bucket.
        numel: elements of the bucket, a multiple of the axis size.
        axis: axis of the ranks whose gradients are summed.
        device: device of the bucket.

    Attributes:
        sent: bytes sent by this rank in this step.
        residual: gradient that this rank has not sent yet, flat fp32 [numel], without loss scale; None for codecs
            that drop nothing.
    """

    residual: Tensor | None = None

    def __init__(self, params: Sequence[BucketParam], numel: int, axis: Axis, device: torch.device) -> None:
        self.params, self.axis = params, axis
        self.sent = 0
        self._share = numel // axis.size
        self._works: list[collectives.Work] = []
        # (state carried over to the next step, its value once this step is committed)
        self._next: list[tuple[Tensor, Tensor]] = []

    def start(self, grad: Tensor, owned: slice, scale: float) -> None:
        """Start summing `grad`, flat fp32 [numel], multiplied by the loss scale `scale`.

        `wait` writes the elements `owned` of the sum to `grad`, multiplied by `scale` as well.
        """
        self._grad = grad
        self._owned = owned
        self._scale = scale
        self.sent = 0
        x = grad / scale
        if self.residual is not None:
            x += self.residual
        # Codes cannot express NaN, and a residual would never lose it: other ranks receive zeros, and the NaN norm of
        # this rank makes all ranks skip the step.
        finite = x.isfinite().all()
        self._poison = torch.where(finite, 0.0, torch.nan)
        self._send(x.masked_fill_(~finite, 0.0))

    def wait(self) -> None:
        """Wait for the sum."""
        out = self._grad[self._owned]
        self._receive(out)
        out.mul_(self._scale).add_(self._poison)
        self._works.clear()

    def drop(self) -> None:
        """Wait for transfers in flight and discard them, after an interrupted step."""
        for work in self._works:
            work.wait()
        self._works.clear()
        self._next = []

    def commit(self) -> None:
        """Keep the residuals of this step, whose update is applied."""
        for old, new in self._next:
            old.copy_(new)
        self._next = []

    @abstractmethod
    def _send(self, x: Tensor) -> None:
        """Start summing `x`, which may be overwritten."""

    @abstractmethod
    def _receive(self, out: Tensor) -> None:
        """Write the sum to `out`: the full bucket, or this rank's share."""

    def _begin(self, work: collectives.Work) -> collectives.Work:
        self._works.append(work)
        self.sent += work.sent
        return work


class _Exchange(Codec):
    """Codec in which each rank receives everyone's code of its share, and sums them in fp32 in rank order."""

    def _send_rows(self, message: Tensor) -> None:
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
            # ZeRO-0: the sum is gathered uncompressed, so that it is rounded once and equal on all ranks.
            self._begin(collectives.all_gather(out, total, self.axis)).wait()

    @abstractmethod
    def _add(self, total: Tensor, row: Tensor) -> None:
        """Add the code received from one rank to `total`, the sum of this rank's share."""


class Int8(_Exchange):
    """8 bits per element and one fp32 scale per `INT8_BLOCK` elements, no residual (after Dettmers et al. 2022)."""

    def _send(self, x: Tensor) -> None:
        codes, scales = quantize(x.view(self.axis.size, -1))
        self._send_rows(torch.cat((codes.view(torch.uint8), scales.view(torch.uint8)), 1))

    def _add(self, total: Tensor, row: Tensor) -> None:
        codes, scales = row[: self._share], row[self._share :].clone()
        total += dequantize(codes.view(torch.int8), scales.view(torch.float32))


def quantize(x: Tensor) -> tuple[Tensor, Tensor]:
    """Quantize rows [d, n] to int8 codes [d, n] and fp32 scales [d, blocks]: absmax / 127, rounded to nearest even."""
    rows, n = x.shape
    blocks = torch.nn.functional.pad(x, (0, -n % INT8_BLOCK)).view(rows, -1, INT8_BLOCK)
    scales = blocks.abs().amax(2) / 127
    # For denormals the scale may round down, even to 0.
    codes = (blocks / torch.where(scales > 0, scales, 1.0).unsqueeze(2)).round_().clamp_(-127, 127)
    return codes.to(torch.int8).view(rows, -1)[:, :n].contiguous(), scales


def dequantize(codes: Tensor, scales: Tensor) -> Tensor:
    """Undo `quantize` for one row: int8 codes [n], scales [blocks] -> fp32 [n]."""
    return codes.float().mul_(scales.repeat_interleave(INT8_BLOCK)[: len(codes)])


class TopK(_Exchange):
    """The largest elements of each share, as fp32 values and int32 indices (Aji and Heafield 2017)."""

    def __init__(
        self, params: Sequence[BucketParam], numel: int, axis: Axis, device: torch.device, fraction: float
    ) -> None:
        super().__init__(params, numel, axis, device)
        self.residual = torch.zeros(numel, device=device)
        self._k = max(1, round(fraction * self._share))

    def _send(self, x: Tensor) -> None:
        rows = x.view(self.axis.size, -1)
        indices = largest(rows, self._k)
        values = rows.gather(1, indices)
        assert self.residual is not None
        self._next = [(self.residual, rows.scatter_(1, indices, 0.0).view(-1))]
        self._send_rows(torch.cat((values.view(torch.int32), indices.to(torch.int32)), 1))

    def _add(self, total: Tensor, row: Tensor) -> None:
        # The indices of a row are distinct, so the order of additions does not matter.
        total.index_add_(0, row[self._k :], row[: self._k].view(torch.float32))


def largest(rows: Tensor, k: int) -> Tensor:
    """Return the indices [d, k] of the largest absolute values of rows [d, n], ascending; the lowest among equals."""
    # torch.topk returns any of several equal values, so it only finds the smallest one to be sent.
    size = rows.abs()
    least = size.topk(k, sorted=False).values.amin(1, keepdim=True)
    above, equal = size > least, size == least
    chosen = above | (equal & (equal.cumsum(1, dtype=torch.int32) <= k - above.sum(1, keepdim=True)))
    # Each to its place, the others to one column more: `nonzero` would make the host wait.
    places = torch.where(chosen, chosen.cumsum(1) - 1, k)
    out = places.new_empty(len(rows), k + 1)
    return out.scatter_(1, places, torch.arange(rows.shape[1], device=rows.device).expand_as(rows))[:, :k].contiguous()


class PowerSGD(Codec):
    """Rank-`rank` factors of each matrix, one power iteration per step (Vogels et al. 2019, algorithm 1).

    Vectors, those of stacked experts too, and matrices with no more elements than their factors are sent uncompressed.
    """

    def __init__(self, params: Sequence[BucketParam], numel: int, axis: Axis, device: torch.device, rank: int) -> None:
        super().__init__(params, numel, axis, device)
        self.residual = torch.zeros(numel, device=device)
        self.rank = rank
        self.matrices = [p for p in params if p.matrix and rank * sum(_sides(p)) < p.shape.numel()]
        self._dense = [p for p in params if p not in self.matrices]
        self.right = [torch.zeros(_sides(p)[1], rank, device=device) for p in self.matrices]
        self.finish_load()

    def finish_load(self) -> None:
        """Initialize right factors that no checkpoint has filled with random values."""
        for param, q in zip(self.matrices, self.right):
            if not q.any():
                draws = philox(0, "powersgd", param.name).standard_normal(tuple(q.shape), dtype="float32")
                q.copy_(torch.from_numpy(draws))

    def _send(self, x: Tensor) -> None:
        self._x = x
        left = [_matrix(x, param) @ q for param, q in zip(self.matrices, self.right)]
        self._first = _concat_flat([*left, *(x[param.span] for param in self._dense)], x)
        self._begin(collectives.all_reduce(self._first, self.axis))

    def _receive(self, out: Tensor) -> None:
        self._works[0].wait()
        sizes = [_sides(param)[0] * self.rank for param in self.matrices]
        *left, uncompressed = self._first.split([*sizes, len(self._first) - sum(sizes)])
        dense = uncompressed.split([param.shape.numel() for param in self._dense])
        # By one rank: linear algebra libraries of different machines may round differently.
        if self.axis.rank == 0:
            orthonormalize([p.view(-1, self.rank) for p in left])
        factors = self._first[: sum(sizes)]
        self._begin(collectives.broadcast(factors, self.axis)).wait()
        lefts = [p.view(-1, self.rank) for p in left]
        second = _concat_flat([_matrix(self._x, param).t() @ p for param, p in zip(self.matrices, lefts)], out)
        self._begin(collectives.all_reduce(second, self.axis)).wait()
        right = second.split([_sides(param)[1] * self.rank for param in self.matrices])
        rights = [q.view(-1, self.rank) for q in right]
        total = torch.zeros_like(self._x)
        for param, p, q in zip(self.matrices, lefts, rights):
            _matrix(total, param).copy_(p @ q.t())
        self._x.sub_(total, alpha=1 / self.axis.size)
        for param, value in zip(self._dense, dense):
            total[param.span] = value
            self._x[param.span] = 0.0
        out.copy_(total[self._owned])
        assert self.residual is not None
        self._next = [(self.residual, self._x), *zip(self.right, rights)]
        del self._x, self._first


def orthonormalize(matrices: Sequence[Tensor]) -> None:
    """Replace the columns of each matrix [m, r], all of one r, by an orthonormal basis of what they span.

    Cholesky QR in fp64: P = Q R with R^T R = P^T P, all factorizations in one call (a QR is one of many kernels). What
    is dependent up to rounding stays small instead of becoming a direction of its own.
    """
    if not matrices:
        return
    wide = [p.double() for p in matrices]
    gram = torch.stack([p.t() @ p for p in wide])
    diagonal = gram.diagonal(dim1=1, dim2=2)
    diagonal += 1e-14 * diagonal.sum(1, keepdim=True) + torch.finfo(torch.float32).tiny
    factors = torch.linalg.cholesky_ex(gram).L
    for p, columns, lower in zip(matrices, wide, factors):
        p.copy_(torch.linalg.solve_triangular(lower.t(), columns, upper=True, left=False))


def _sides(param: BucketParam) -> tuple[int, int]:
    return param.shape[:-1].numel(), param.shape[-1]  # a stack of experts: their matrices one below the other


def _matrix(flat: Tensor, param: BucketParam) -> Tensor:
    return flat[param.span].view(_sides(param))


def _concat_flat(tensors: Sequence[Tensor], like: Tensor) -> Tensor:
    return torch.cat([x.reshape(-1) for x in tensors]) if tensors else like.new_empty(0)


def make_codec(spec: str, params: Sequence[BucketParam], numel: int, axis: Axis, device: torch.device) -> Codec | None:
    """Make the codec of a bucket from a valid `--compress`; None without compression, or for a single rank."""
    name, _, number = spec.partition(":")
    if name == "none" or axis.size == 1:
        return None
    if name == "int8":
        return Int8(params, numel, axis, device)
    if name == "topk":
        return TopK(params, numel, axis, device, float(number))
    return PowerSGD(params, numel, axis, device, int(number))
