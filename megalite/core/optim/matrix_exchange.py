"""Full matrices for the update rules that need them: each gathered from flat shares on one rank, and scattered again.

Every tensor-parallel rank has a shard of a logical matrix (q, k, v, gate, up, …), one interval of its bucket, and every
rank that shares the bucket has a share of that interval. One all-to-all collects the shares of a shard on its holder, a
second one, over tp, the shards of a matrix on its owner; two more return the transformed matrix. Holders and owners are
balanced greedily: the largest matrix first, to the rank with the least work. Owners transform matrices of one shape
together, so that many small ones (experts) take few launches.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from megalite.core.base.slices import Slice
from megalite.core.mesh import collectives
from megalite.core.mesh.context import Axis, ParallelContext
from megalite.core.mesh.grid import Grid
from megalite.core.optim.bucket import Bucket
from megalite.core.optim.shares import matrices_at_once, matrix_work, spread
from megalite.core.options.update_rule import MatrixRule
from megalite.core.sharding.parameter import ShardedParameter
from megalite.core.sharding.shard import matrices_in

# Flat tensors to or from each rank of an axis.
Messages = list[list[torch.Tensor]]


@dataclass(frozen=True)
class _Matrix:
    """One logical matrix, or several whose rows take turns.

    Attributes:
        bucket: bucket of the matrix.
        start: first element of this rank's shard in the bucket.
        boxes: box of each tensor-parallel rank's shard in the matrix.
        shape: global shape, [out, in].
        turns: number of rows of each of several, head after head; (): it is one.
        holder: rank that collects the shares of a shard, an index on the bucket's share axis.
        owner: rank that collects the shards of the matrix, an index on tp.
    """

    bucket: Bucket
    start: int
    boxes: tuple[Slice, ...]
    shape: tuple[int, ...]
    turns: tuple[int, ...] = ()
    holder: int = 0
    owner: int = 0

    @property
    def work(self) -> int:
        """See `matrix_work`."""
        return sum(map(matrix_work, matrices_in(self.shape, self.turns)))

    def interval(self, numel: int, rank: int) -> tuple[int, int]:
        """Return the bucket elements [first, end) of a shard of `numel` elements that lie in a rank's share."""
        owned = self.bucket.owned
        share = owned.stop - owned.start
        low = min(max(self.start, share * rank), share * (rank + 1))
        return low, max(low, min(self.start + numel, share * (rank + 1)))


class MatrixExchange:
    """Applies the `MatrixRule` of buckets to each of their logical matrices.

    Args:
        buckets: buckets with a `MatrixRule`, all sharded alike; the same on all ranks of tp and of the batch axes.
        ctx: this rank's axes.
    """

    def __init__(self, buckets: Sequence[Bucket], ctx: ParallelContext) -> None:
        whole = "tp" not in buckets[0].params[0].shard.layout.grid.names
        self._tp = Axis("tp", ranks=(ctx.rank,)) if whole else ctx.tp
        self._none = torch.empty(0, device=ctx.device)
        self._share_axis = buckets[0].share_axis if buckets[0].sharded.state else Axis("shares", ranks=(ctx.rank,))
        matrices = [
            m for b in buckets for p, start in zip(b.params, b.starts) for m in _matrices_of(b, p, start, self._tp)
        ]
        places = spread([m.work for m in matrices], self._share_axis.size * self._tp.size)
        self._matrices = [
            replace(m, holder=place // self._tp.size, owner=place % self._tp.size) for m, place in zip(matrices, places)
        ]
        self._collected = [m for m in self._matrices if m.holder == self._share_axis.rank]
        self._owned = [m for m in self._collected if m.owner == self._tp.rank]
        self._batches = _batches(self._owned)

    @classmethod
    def all_of(cls, buckets: Sequence[Bucket], ctx: ParallelContext) -> list[MatrixExchange]:
        """Make the exchanges of a rank's buckets, one for each grid: experts have their own."""
        by_grid: dict[Grid, list[Bucket]] = {}
        for bucket in buckets:
            if isinstance(bucket.rule, MatrixRule):
                by_grid.setdefault(bucket.params[0].shard.layout.grid, []).append(bucket)
        return [cls(alike, ctx) for alike in by_grid.values()]

    def transform(self, cfg: Any) -> None:
        """Replace every matrix in the gradients by what its rule returns for it."""
        mine, none = self._tp.rank, self._none
        shares, tp = range(self._share_axis.size), range(self._tp.size)
        views = [[self._own_share(m) for m in self._matrices if m.holder == rank] for rank in shares]
        share_sizes = [[_share_size(m, m.boxes[mine].numel, rank) for m in self._collected] for rank in shares]
        shards = [_join(parts) for parts in zip(*_exchange(self._share_axis, views, share_sizes, none))]

        numels = [[m.boxes[rank].numel for m in self._owned] for rank in tp]
        by_owner = [[x for m, x in zip(self._collected, shards) if m.owner == rank] for rank in tp]
        owned = _exchange(self._tp, by_owner, numels, none)
        for batch in self._batches:
            _transform([self._owned[i] for i in batch], [[of_rank[i] for i in batch] for of_rank in owned], cfg)
        shard_sizes = [[len(x) for x in group] for group in by_owner]
        for group, new in zip(by_owner, _exchange(self._tp, owned, shard_sizes, none)):
            _copy(new, group)

        parts = [shard.split([sizes[i] for sizes in share_sizes]) for i, shard in enumerate(shards)]
        outgoing = [[part[rank] for part in parts] for rank in shares]
        view_sizes = [[len(view) for view in group] for group in views]
        for group, new in zip(views, _exchange(self._share_axis, outgoing, view_sizes, none)):
            _copy(new, group)

    def _own_share(self, matrix: _Matrix) -> torch.Tensor:
        """Return the view of a matrix in this rank's share of the gradient."""
        first, end = matrix.interval(matrix.boxes[self._tp.rank].numel, self._share_axis.rank)
        return matrix.bucket.grad_share[first - matrix.bucket.owned.start : end - matrix.bucket.owned.start]


def _matrices_of(bucket: Bucket, param: ShardedParameter, start: int, tp: Axis) -> list[_Matrix]:
    """List a matrix for each packed part of a parameter; of a stack, those of every expert."""
    shard, stacked = param.shard, len(param.shard.shape) - 2
    shards = [replace(shard, layout=replace(shard.layout, rank=rank)) for rank in tp.ranks]
    out = []
    for turns, own, *of_ranks in zip(shard.spec.turns_of_parts, shard.slices, *(s.slices for s in shards), strict=True):
        boxes = [Slice(box.offset[stacked:], box.shape[stacked:]) for box in of_ranks]
        low = tuple(map(min, zip(*(box.offset for box in boxes))))
        high = tuple(map(max, zip(*([o + n for o, n in zip(box.offset, box.shape)] for box in boxes))))
        moved = tuple(replace(box, offset=tuple(o - l for o, l in zip(box.offset, low))) for box in boxes)
        shape, each = tuple(h - l for l, h in zip(low, high)), math.prod(shard.shape[stacked:])
        starts = range(start + own.at, start + own.at + math.prod(shard.shape), each)
        out += [_Matrix(bucket, first, moved, shape, turns) for first in starts]
    return out


def _share_size(matrix: _Matrix, numel: int, rank: int) -> int:
    first, end = matrix.interval(numel, rank)
    return end - first


def _batches(matrices: Sequence[_Matrix]) -> list[list[int]]:
    """Group the indices of matrices that are alike, also in how they are sharded."""
    alike: dict[Any, list[int]] = {}
    for i, m in enumerate(matrices):
        alike.setdefault((m.bucket.kind.rule, m.shape, m.turns, m.boxes), []).append(i)
    batches = []
    for group in alike.values():
        first = matrices[group[0]]
        at_once = matrices_at_once(_rule(first), math.prod(first.shape))
        batches += [group[i : i + at_once] for i in range(0, len(group), at_once)]
    return batches


def _rule(matrix: _Matrix) -> MatrixRule:
    rule = matrix.bucket.rule
    assert isinstance(rule, MatrixRule)
    return rule


def _transform(matrices: Sequence[_Matrix], shards: Sequence[Sequence[torch.Tensor]], cfg: Any) -> None:
    """Assemble matrices that are alike, transform them or each of those in them, and write the results back.

    Args:
        matrices: the matrices.
        shards: flat shards of each rank of tp, in the order of the matrices.
        cfg: options of the rule.
    """
    first, n = matrices[0], len(matrices)
    rule = _rule(first)
    full = shards[0][0].new_empty(n, *first.shape)
    places = [(slice(None), *box.index) for box in first.boxes]
    for place, box, of_rank in zip(places, first.boxes, shards):
        full[place] = torch.stack([*of_rank]).view(n, *box.shape)
    if first.turns:
        for rows in full.unflatten(1, (-1, sum(first.turns))).split(first.turns, 2):
            rows.copy_(_apply(rule, rows.flatten(1, 2), cfg).view(rows.shape))
    else:
        full = _apply(rule, full, cfg)
    for place, of_rank in zip(places, shards):
        # Contiguous, as the shards are: one launch copies all.
        new = full[place].contiguous().view(n, -1)
        torch._foreach_copy_([*of_rank], [*new.unbind(0)])


def _apply(rule: MatrixRule, full: torch.Tensor, cfg: Any) -> torch.Tensor:
    """Transform matrices [n, out, in]: one by itself, as every rule takes it."""
    return rule.transform(full, cfg) if len(full) > 1 else rule.transform(full[0], cfg).unsqueeze(0)


def _join(parts: Sequence[torch.Tensor]) -> torch.Tensor:
    return parts[0] if len(parts) == 1 else torch.cat([*parts])


def _copy(sources: Sequence[torch.Tensor], targets: Sequence[torch.Tensor]) -> None:
    for source, target in zip(sources, targets, strict=True):
        if source.data_ptr() != target.data_ptr():
            target.copy_(source)


def _exchange(axis: Axis, outgoing: Messages, sizes: list[list[int]], none: torch.Tensor) -> Messages:
    """Send the flat tensors outgoing[i] to rank i of the axis; return those received from each rank i, of sizes[i].

    On an axis of one rank these are the same tensors. `none`: what a rank sends that has nothing to send.
    """
    if axis.size == 1:
        return outgoing
    x = torch.cat([none, *(tensor for group in outgoing for tensor in group)])
    counts = [sum(rank_sizes) for rank_sizes in sizes]
    out = x.new_empty(sum(counts))
    collectives.all_to_all(out, x, axis, counts, [sum(map(len, group)) for group in outgoing]).wait()
    received = zip(out.split(counts), sizes)
    return [list(message.split(rank_sizes)) if rank_sizes else [] for message, rank_sizes in received]
