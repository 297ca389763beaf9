"""Which rank sits where: pure arithmetic, no processes."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from megalite.core.base.errors import UserError


class MeshAxis(NamedTuple):
    """One axis of a run's grid.

    Attributes:
        name: name of the axis, and of the option that sets its size.
        cuts_batch: whether its ranks see different tokens of a batch: gradients are summed and ZeRO's shares cut over
            all such axes together.
    """

    name: str
    cuts_batch: bool = False


AXES: tuple[MeshAxis, ...] = (
    MeshAxis("pp"),
    MeshAxis("dp", cuts_batch=True),
    MeshAxis("cp", cuts_batch=True),
    MeshAxis("tp"),
)
"""The axes of a run, slowest first. Ranks of "dp" read different samples, those of "cp" share theirs; "dp" has the
ranks that the others leave.

Tensor parallel is fastest (it communicates most, so its ranks are neighbors), pipeline slowest. Source: Narayanan et
al. 2021, "Efficient Large-Scale Language Model Training", section 3.
"""


@dataclass(frozen=True)
class Grid:
    """Named axes over the ranks of a world, slowest first: a rank is its C-order index.

    Several grids may lie over the same ranks (experts: pp, edp, ep, tp beside pp, dp, tp).

    Attributes:
        axes: (name, size) pairs.
        batch: names of the axes whose ranks see different tokens of a batch.
        experts: grid of the experts over the same ranks; None: they live on this one.
    """

    axes: tuple[tuple[str, int], ...] = ()
    batch: tuple[str, ...] = ("dp",)
    experts: Grid | None = None

    @classmethod
    def from_config(cls, parallel: object, world: int | None = None) -> Grid:
        """The grid of a run.

        Args:
            parallel: options with the size of every axis of `AXES` but dp (`ParallelConfig`).
            world: number of ranks; None: as few as the options need.

        Raises:
            UserError: as `of`.
        """
        sizes = {axis.name: getattr(parallel, axis.name) for axis in AXES if axis.name != "dp"}
        ep, etp = getattr(parallel, "ep", 1), getattr(parallel, "etp", "tp")
        # Experts share the ranks of the other axes: dp is at least what they need.
        shared = math.prod(sizes.values()) // (sizes["pp"] * (sizes["tp"] if etp == "tp" else 1))
        fewest = math.prod(sizes.values()) * (ep // math.gcd(ep, shared))
        return cls.of(fewest if world is None else world, ep=ep, etp=etp, **sizes)

    @classmethod
    def of(cls, world: int, ep: int = 1, etp: str = "tp", **sizes: int) -> Grid:
        """The grid of `world` ranks over `AXES`, given the sizes of axes other than dp (1 unless given).

        Args:
            world: number of ranks.
            ep, etp: see `ParallelConfig`.

        Raises:
            UserError: the axes do not divide the world.
        """
        names = [axis.name for axis in reversed(AXES) if axis.name != "dp"]
        if unknown := sizes.keys() - set(names):
            raise ValueError(f"unknown axis {sorted(unknown)[0]!r}")
        sizes = {name: sizes.get(name, 1) for name in names}
        # Few runs use every axis, and messages speak of those in use.
        named = [name for name in names if sizes[name] != 1 or name in ("tp", "pp")]
        flags = [f"--{name}" for name in named]
        words = " ".join(f"--{name} {sizes[name]}" for name in named)
        given = f"{words} on {world} rank{'s' * (world != 1)}"
        if min(world, *sizes.values()) < 1:
            raise UserError(given, "each must be at least 1", f"use {', and '.join(f'{f} 1 or more' for f in flags)}")
        size = math.prod(sizes.values())
        if world % size:
            fits = max(1, world // size) * size
            raise UserError(
                given,
                f"the number of ranks must be a multiple of {' x '.join(named)} = {size}",
                f"start {fits} ranks (--nproc of megalite train, --nproc-per-node of torchrun), or change "
                + " or ".join(flags),
            )
        sizes["dp"] = world // size
        batch = tuple(axis.name for axis in AXES if axis.cuts_batch)
        return cls(tuple((axis.name, sizes[axis.name]) for axis in AXES), batch, _experts(world, sizes, ep, etp))

    @property
    def names(self) -> tuple[str, ...]:
        """Names of the axes, slowest first."""
        return tuple(name for name, _ in self.axes)

    @property
    def world(self) -> int:
        """Number of ranks."""
        return math.prod(size for _, size in self.axes)

    @property
    def batch_ranks(self) -> int:
        """Number of ranks that see different tokens of a batch."""
        return math.prod(self[name] for name in self.batch)

    @property
    def batches(self) -> tuple[tuple[str, ...], ...]:
        """Batch axes of the parameters, and of the experts where those lie on another grid."""
        return (self.batch,) if self.experts is None else (self.batch, self.experts.batch)

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
        return dict(zip(self.names, map(int, np.unravel_index(rank, [size for _, size in self.axes]))))

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
        """Decide which replica is the owner: whether `rank` is the first on each of the named axes."""
        coords = self.coords(rank)
        return all(coords.get(name, 0) == 0 for name in names)

    def is_first_except(self, rank: int, *names: str) -> bool:
        """Whether `rank` is the first on each axis but the named ones."""
        return self.is_first(rank, *(name for name in self.names if name not in names))


def _experts(world: int, sizes: Mapping[str, int], ep: int, etp: str) -> Grid | None:
    """Make the grid of experts: ep has the nearest neighbors of each stage, or of those at one place of tp."""
    cut = etp == "tp" or sizes["tp"] == 1
    if ep == 1 and cut:
        return None
    tp = sizes["tp"] if cut else 1
    ranks = world // (sizes["pp"] * tp)
    if ranks % ep:
        over = "dp x cp" if cut else "tp x cp x dp"
        fits = [n for n in range(1, ranks + 1) if ranks % n == 0]
        whole = "give --etp 1, " if cut and ranks * sizes["tp"] % ep == 0 else ""
        raise UserError(
            f"--ep {ep} --etp {etp} on {world} rank{'s' * (world != 1)}",
            f"must divide the {ranks} ranks of {over} that share a layer's experts",
            f"use one of {', '.join(map(str, fits))}, {whole}or start more ranks",
        )
    axes = (("pp", sizes["pp"]), ("edp", ranks // ep), ("ep", ep), ("tp", tp))
    return Grid(axes if cut else axes[:-1], ("edp",))
