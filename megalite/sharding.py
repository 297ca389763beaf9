"""Where a parameter lives, who else holds it, which replica speaks for it, and over which axes its gradient is summed.

One declaration per parameter (`ParamSpec`); init, slicing, optimizer groups, checkpoints, Hugging Face conversion and
the parameter count all read it. A parameter has a *global* tensor, whose name and shape do not depend on the layout,
and on each rank a *local* one (`Shard`). `Shard.slices` says which box of the one is which box of the other; everything
else about slicing follows from that list.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from itertools import product
from typing import TYPE_CHECKING, Literal

import numpy as np

from megalite.dist.grid import Grid
from megalite.dist.seeding import philox
from megalite.slices import Slice, box_index, contiguous_parts, flat_index, flat_range, unravel

if TYPE_CHECKING:  # plans read declarations alone, and start without torch
    import torch

# Rows are drawn in blocks of about this many elements: a slice costs the memory of a block, not of the tensor.
_INIT_BLOCK = 1 << 22


@dataclass(frozen=True)
class ParamSpec:
    """Declaration of one parameter.

    Attributes:
        name: global name, Hugging Face leaf names ("layers.3.self_attn.qkv_proj.weight").
        shape: global shape, without vocabulary padding.
        cut: (mesh axis, tensor dimension) pairs: (("tp", 0),), experts (("ep", 0), ("tp", 1)). Every rank of any other
            axis holds all of it.
        parts: sizes of the packed parts along the dimension of the last cut (q|k|v, gate|up), each cut by itself;
            () = one part.
        padded: that dimension (the vocabulary) is padded in memory to a multiple of the layout's choosing, with zeros.
        init: "normal" (times `std`), "zeros" or "ones".
        std: standard deviation of "normal".
        weight_decay: whether decoupled weight decay applies.
        decoupled_lr: whether it has the learning rate of `--decoupled-lr` (embedding and output layer).
        tied_to: name of the parameter that this one is a copy of (same values, gradients summed).
        partial: axes whose ranks hold all of it but see only part of its gradient; "sequence" stands for those that
            cut the sequence.
    """

    name: str
    shape: tuple[int, ...]
    cut: tuple[tuple[str, int], ...] = ()
    parts: tuple[int, ...] = ()
    padded: bool = False
    init: Literal["normal", "zeros", "ones"] = "normal"
    std: float = 0.02
    weight_decay: bool = True
    decoupled_lr: bool = False
    tied_to: str | None = None
    partial: tuple[str, ...] = ()

    @property
    def numel(self) -> int:
        return math.prod(self.shape)


@dataclass(frozen=True)
class Layout:
    """What all parameters of one rank have in common.

    Attributes:
        grid, rank: the grid of ranks and this one. Parameters of a layer live on one coordinate of "pp".
        multiple: a padded dimension is a multiple of this times the number of ranks it is cut over.
        batch: axes that see different samples: gradients are summed over them.
        sequence: axes over which activations between layers are cut along the sequence (tp with sequence parallelism).
        tied: names of parameters that have a copy on another pipeline stage.
    """

    grid: Grid = field(default_factory=Grid)
    rank: int = 0
    multiple: int = 1
    batch: tuple[str, ...] = ("dp",)
    sequence: tuple[str, ...] = ()
    tied: frozenset[str] = frozenset()


@dataclass(frozen=True)
class Shard:
    """What one rank holds of a parameter, who else holds it, and where its gradient is summed."""

    spec: ParamSpec
    layout: Layout = field(default_factory=Layout)

    @property
    def copies(self) -> tuple[str, ...]:
        """Axes over which the parameter is replicated."""
        cut = {axis for axis, _ in self.spec.cut}
        return tuple(name for name in self.layout.grid.names if name not in cut and name != "pp")

    @property
    def reduce(self) -> tuple[str, ...]:
        """Axes over which the gradient is summed: the batch's, those of partial gradients, "ends" for tied copies."""
        layout, grid = self.layout, self.layout.grid
        partial = [axis for name in self.spec.partial for axis in (layout.sequence if name == "sequence" else (name,))]
        tied = ("ends",) if self.spec.name in layout.tied else ()
        return (*layout.batch, *(axis for axis in partial if grid[axis] > 1 and axis in self.copies), *tied)

    def is_first(self, *axes: str) -> bool:
        """Whether this rank is the first of those along `axes` that hold the same."""
        return self.layout.grid.is_first(self.layout.rank, *(axis for axis in axes if axis in self.copies))

    def is_primary(self, shared: tuple[str, ...] = ()) -> bool:
        """Whether this replica speaks for the parameter: it counts in norms and is written to checkpoints.

        Args:
            shared: axes whose ranks each own a part of what they hold (ZeRO), and each speak for that part.
        """
        return self.spec.tied_to is None and self.is_first(*(axis for axis in self.copies if axis not in shared))

    @cached_property
    def _extents(self) -> list[tuple[int, list[tuple[int, int, int]]]]:
        """Of every dimension: local extent, and the (local start, global start, length) intervals it holds."""
        spec, layout = self.spec, self.layout
        coords = layout.grid.coords(layout.rank)
        packed = spec.cut[-1][1] if spec.cut else None
        out = []
        for dim, extent in enumerate(spec.shape):
            size, rank = 1, 0
            for axis, at in spec.cut:
                if at == dim:
                    size, rank = size * layout.grid[axis], rank * layout.grid[axis] + coords.get(axis, 0)
            parts = spec.parts if dim == packed and spec.parts else (extent,)
            padded = spec.padded and dim == packed
            local = start = 0
            held = []
            for part in parts:
                rows = -(-part // (layout.multiple * size)) * layout.multiple if padded else part // size
                assert padded or rows * size == part, f"{spec.name}: part of {part} is not divisible by {size} ranks"
                low, high = rank * rows, min((rank + 1) * rows, part)
                if high > low:
                    held.append((local, start + low, high - low))
                local, start = local + rows, start + part
            out.append((local, held))
        return out

    @property
    def shape(self) -> tuple[int, ...]:
        """Local shape, padding included."""
        return tuple(extent for extent, _ in self._extents)

    @cached_property
    def slices(self) -> list[Slice]:
        """Boxes of the global tensor that lie in the local one, `at` the local element of each one's first."""
        out = []
        for intervals in product(*(held for _, held in self._extents)):
            local, offset, shape = zip(*intervals)
            out.append(Slice(offset, shape, flat_index(self.shape, local)))
        return out

    def local(self, piece: Slice) -> Slice:
        """The box of the local tensor that holds one of `slices`."""
        return Slice(unravel(self.shape, piece.at), piece.shape)

    def flat_slices(self, start: int, stop: int) -> list[Slice]:
        """Boxes of the global tensor that elements [start, stop) of the flattened local one hold, as ZeRO cuts it.

        Each is contiguous in the flat tensor from `at` on; padding is in none.
        """
        out = []
        for box in flat_range(self.shape, start, stop):
            for piece in self.slices:
                local = self.local(piece)
                met = box.meet(local)
                for part in contiguous_parts(self.shape, *met) if met else ():
                    offset = tuple(l - p + g for l, p, g in zip(part.offset, local.offset, piece.offset))
                    out.append(Slice(offset, part.shape, part.at))
        return out

    def take(self, full: torch.Tensor) -> torch.Tensor:
        """The local tensor cut out of the global one (padding zero)."""
        import torch

        out = torch.zeros(self.shape, dtype=full.dtype)
        for piece in self.slices:
            out[self.local(piece).index] = full[piece.index]
        return out

    def initial(self, seed: int) -> torch.Tensor:
        """The local initial value, fp32: a function of (seed, global name), cut to this rank's pieces."""
        import torch

        if self.spec.init != "normal":
            value = 1.0 if self.spec.init == "ones" else 0.0
            return self.take(torch.full(self.spec.shape, value))
        out = torch.zeros(self.shape)
        for box, values in _normal_blocks(self.spec, seed, self.slices):
            for piece in self.slices:
                if met := box.meet(piece):
                    low, shape = met
                    local = tuple(l - g + p for l, g, p in zip(low, piece.offset, self.local(piece).offset))
                    first = tuple(l - b for l, b in zip(low, box.offset))
                    out[box_index(local, shape)] = values[box_index(first, shape)]
        return out


def _normal_blocks(spec: ParamSpec, seed: int, wanted: list[Slice]) -> Iterator[tuple[Slice, torch.Tensor]]:
    """Draw every block of rows that some box needs, each from a generator of its own."""
    import torch

    rows_per_block = max(1, _INIT_BLOCK // math.prod(spec.shape[1:]))
    name = spec.tied_to or spec.name
    for row in range(0, spec.shape[0], rows_per_block):
        shape = (min(rows_per_block, spec.shape[0] - row), *spec.shape[1:])
        box = Slice((row, *(0 for _ in spec.shape[1:])), shape)
        if any(box.meet(piece) for piece in wanted):
            values = philox(seed, "init", name, row // rows_per_block).standard_normal(shape, dtype=np.float32)
            yield box, torch.from_numpy(values).mul_(spec.std)


@dataclass(frozen=True)
class StateTensor:
    """What this rank holds of one logical tensor of the optimizer's state: the contract with checkpoints.

    Attributes:
        name: global parameter name (for a tied copy: the name it is tied to).
        role: "master", "exp_avg" or "exp_avg_sq"; of compressed gradients "residual" and "powersgd".
        shape: global shape, without vocabulary padding.
        flat: fp32 1-D view; write into it to load.
        slices: boxes of the logical tensor in `flat`; empty when nothing of it lies here.
        primary: true on exactly one rank per element; only that one writes it to a checkpoint.
        part: (i, n): this is summand i of n, each saved as a tensor of its own; loaded into another number of them,
            each becomes an equal part of their sum. None: the tensor itself.
    """

    name: str
    role: str
    shape: tuple[int, ...]
    flat: torch.Tensor
    slices: list[Slice]
    primary: bool
    part: tuple[int, int] | None = None

    @property
    def kind(self) -> str:
        """What a checkpoint files it under: its role, with the number of the summand."""
        return self.role if self.part is None else f"{self.role}_{self.part[0]}"


def count_parameters(specs: Mapping[str, ParamSpec]) -> int:
    """Number of distinct parameters: tied copies count once."""
    return sum(s.numel for s in specs.values() if s.tied_to is None)
