"""The check at the start: ranks that work on buckets together have made the same ones."""

from __future__ import annotations

from collections.abc import Sequence

from megalite.core.base.errors import require
from megalite.core.mesh.collectives import gather_digests
from megalite.core.mesh.context import ParallelContext
from megalite.core.optim.bucket import Bucket


def describe(buckets: Sequence[Bucket]) -> tuple[str, str]:
    """Write down what every rank of a stage must have in common: a line a bucket, with names and local shapes.

    Returns:
        All buckets, and those whose gradients are summed over "ends", by the names of what is tied.
    """
    ends = [bucket for bucket in buckets if "ends" in bucket.kind.reduce]
    names = [[p.shard.spec.name for p in bucket.params] for bucket in buckets]
    tied = [[p.shard.spec.tied_to or p.shard.spec.name for p in bucket.params] for bucket in ends]
    return _lines(buckets, names), _lines(ends, tied)


def _lines(buckets: Sequence[Bucket], names: Sequence[Sequence[str]]) -> str:
    lines = []
    for bucket, own in zip(buckets, names):
        params = " ".join(f"{name} {tuple(param.shape)}" for name, param in zip(own, bucket.params))
        lines.append(f"{bucket.kind} {bucket.sharded} {bucket.numel}: {params}")
    return "\n".join(lines)


def check_buckets(buckets: Sequence[Bucket], ctx: ParallelContext) -> None:
    """Compare the buckets of all ranks of each pipeline stage, and those of its ends; every rank calls it.

    Sums over tensor-parallel ranks, replicas and the ends of a tied embedding go bucket by bucket: with other buckets
    on some rank, they would wait for ever, or add up unlike parameters. One message of 16 bytes a rank.

    Raises:
        UserError: some rank has others; raised on every rank.
    """
    stage, ends = zip(*gather_digests(describe(buckets), ctx.world, ctx.device))
    grid = ctx.grid
    stages = grid.groups(*(name for name in grid.names if name != "pp"))
    pairs = [(ranks[0], ranks[-1]) for ranks in grid.groups("pp")]
    for digests, groups in ((stage, stages), (ends, pairs)):
        for first, *others in groups:
            for rank in others:
                require(
                    digests[rank] == digests[first],
                    f"the parameters of rank {rank}",
                    f"must lie in the same buckets as those of rank {first}, by name, size and order",
                    "give all ranks the same megalite and the same layers and rules of your own, or report it",
                )
