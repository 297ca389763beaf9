"""Which rank sits where: pure arithmetic, no processes."""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np

from megalite.errors import UserError
from megalite.slices import unravel


@dataclass(frozen=True)
class Grid:
    """Named axes over the ranks of a world, slowest first: a rank is its C-order index.

    Several grids may lie over the same ranks (experts: pp, edp, ep, tp beside pp, dp, tp).

    Attributes:
        axes: (name, size) pairs.
    """

    axes: tuple[tuple[str, int], ...] = ()

    @classmethod
    def of(cls, world: int, tp: int = 1, pp: int = 1) -> Grid:
        """The grid of a run: pp x dp x tp, dp being what tp and pp leave.

        Tensor parallel is fastest (it communicates most, so its ranks are neighbors), pipeline slowest. Source:
        Narayanan et al. 2021, "Efficient Large-Scale Language Model Training", section 3.

        Raises:
            UserError: the axes do not divide the world.
        """
        given = f"--tp {tp} --pp {pp} on {world} rank{'s' * (world != 1)}"
        if min(world, tp, pp) < 1:
            raise UserError(given, "each must be at least 1", "use --tp 1 or more, and --pp 1 or more")
        size = tp * pp
        if world % size:
            fits = max(1, world // size) * size
            raise UserError(
                given,
                f"the number of ranks must be a multiple of tp x pp = {size}",
                f"start {fits} ranks (torchrun --nproc-per-node), or change --tp or --pp",
            )
        return cls((("pp", pp), ("dp", world // size), ("tp", tp)))

    @property
    def names(self) -> tuple[str, ...]:
        """Names of the axes, slowest first."""
        return tuple(name for name, _ in self.axes)

    @property
    def world(self) -> int:
        """Number of ranks."""
        return math.prod(size for _, size in self.axes)

    def as_dict(self) -> dict[str, int]:
        """Number of ranks and size of every axis."""
        return {"world": self.world, **dict(self.axes)}

    def __getitem__(self, name: str) -> int:
        """Size of an axis; 1 for an axis that the grid does not have."""
        return dict(self.axes).get(name, 1)

    def coords(self, rank: int) -> dict[str, int]:
        """Place of a rank: coordinate on every axis."""
        if not 0 <= rank < self.world:
            raise ValueError(f"rank {rank} is outside a world of {self.world}")
        return dict(zip(self.names, unravel([size for _, size in self.axes], rank)))

    def rank(self, **coords: int) -> int:
        """Rank at a place; 0 on the axes that are not given."""
        rank = 0
        for name, size in self.axes:
            rank = rank * size + coords.get(name, 0)
        return rank

    def groups(self, *names: str) -> list[tuple[int, ...]]:
        """Ranks that differ on the named axes only, for any product of axes: groups("dp", "cp").

        Each group is in grid order, whatever the order of the names.
        """
        if unknown := set(names) - set(self.names):
            raise ValueError(f"unknown axis {sorted(unknown)[0]!r}")
        ranks = np.arange(self.world).reshape([size for _, size in self.axes])
        inner = [i for i, name in enumerate(self.names) if name in names]
        outer = [i for i, name in enumerate(self.names) if name not in names]
        width = math.prod(self[name] for name in names)
        return [tuple(row) for row in ranks.transpose(outer + inner).reshape(-1, width).tolist()]

    def is_first(self, rank: int, *names: str) -> bool:
        """Decide which replica speaks: whether `rank` is the first on each of the named axes."""
        coords = self.coords(rank)
        return all(coords.get(name, 0) == 0 for name in names)
