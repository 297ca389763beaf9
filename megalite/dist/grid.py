"""Which rank sits where: pure arithmetic, no processes.

rank = tp + tp_size * (dp + dp_size * pp): tensor parallel fastest (it talks most, so its ranks sit next to each other),
pipeline slowest. Source: Narayanan et al. 2021, "Efficient Large-Scale Language Model Training", section 3.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

from megalite.errors import UserError


class Coords(NamedTuple):
    """A rank's place on the grid."""

    dp: int
    pp: int
    tp: int


@dataclass(frozen=True)
class Topology:
    """A grid of pp x dp x tp ranks."""

    world: int
    tp: int = 1
    pp: int = 1

    def __post_init__(self) -> None:
        given = f"--tp {self.tp} --pp {self.pp} on {self.world} rank{'s' * (self.world != 1)}"
        if min(self.world, self.tp, self.pp) < 1:
            raise UserError(given, "each must be at least 1", "use --tp 1 or more, and --pp 1 or more")
        size = self.tp * self.pp
        if self.world % size:
            fits = max(1, self.world // size) * size
            raise UserError(
                given,
                f"the number of ranks must be a multiple of tp x pp = {size}",
                f"start {fits} ranks (torchrun --nproc-per-node), or change --tp or --pp",
            )

    @property
    def dp(self) -> int:
        """Data-parallel size: what tp and pp leave."""
        return self.world // (self.tp * self.pp)

    def coords(self, rank: int) -> Coords:
        """Place of a global rank."""
        if not 0 <= rank < self.world:
            raise ValueError(f"rank {rank} is outside a world of {self.world}")
        rest, tp = divmod(rank, self.tp)
        pp, dp = divmod(rest, self.dp)
        return Coords(dp=dp, pp=pp, tp=tp)

    def rank(self, dp: int = 0, pp: int = 0, tp: int = 0) -> int:
        """Global rank at a place."""
        return tp + self.tp * (dp + self.dp * pp)

    def groups(self, axis: str) -> list[tuple[int, ...]]:
        """All groups of an axis, each a tuple of global ranks in the axis's order.

        Args:
            axis: "tp", "dp", "pp", or "model" (tp x pp: one copy of the model).
        """
        tps, dps, pps = range(self.tp), range(self.dp), range(self.pp)
        if axis == "tp":
            return [tuple(self.rank(d, p, t) for t in tps) for p in pps for d in dps]
        if axis == "dp":
            return [tuple(self.rank(d, p, t) for d in dps) for p in pps for t in tps]
        if axis == "pp":
            return [tuple(self.rank(d, p, t) for p in pps) for d in dps for t in tps]
        if axis == "model":
            return [tuple(self.rank(d, p, t) for p in pps for t in tps) for d in dps]
        raise ValueError(f"unknown axis {axis!r}")
