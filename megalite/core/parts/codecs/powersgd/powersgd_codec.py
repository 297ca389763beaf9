"""`--compress powersgd:R`: factors of rank R of each matrix travel; what they leave out waits as a residual."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from megalite.core.mesh import collectives
from megalite.core.mesh.context import Axis
from megalite.core.mesh.seeding import philox
from megalite.core.optim.codec import BucketParam, Codec


class PowerSGD(Codec):
    """Rank-`rank` factors of each matrix, one power iteration per step (Vogels et al. 2019, algorithm 1).

    Vectors, those of stacked experts too, and matrices with no more elements than their factors are sent uncompressed.
    """

    def __init__(self, params: Sequence[BucketParam], numel: int, axis: Axis, device: torch.device, rank: int) -> None:
        super().__init__(params, numel, axis, device)
        self.residual = torch.zeros(numel, device=device)
        self.rank = rank
        self.matrices = [p for p in params if p.matrix and is_worth(rank, *_sides(p))]
        self._dense = [p for p in params if p not in self.matrices]
        self.right = [torch.zeros(_sides(p)[1], rank, device=device) for p in self.matrices]
        self.finish_load()

    def shared_states(self, name: str) -> dict[str, Tensor]:
        """Return the right factor of a parameter, if it is a matrix that is compressed."""
        names = [param.name for param in self.matrices]
        return {"powersgd": self.right[names.index(name)]} if name in names else {}

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


def is_worth(rank: int, rows: int, columns: int) -> bool:
    """Check that a matrix has more elements than its factors."""
    return rank * (rows + columns) < rows * columns


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
