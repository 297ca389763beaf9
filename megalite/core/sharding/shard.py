"""How a parameter is sharded, which replica owns it, and over which axes its gradient is summed.

Each parameter is declared once (`ParamSpec`); initialization, slicing, optimizer groups, checkpoints, Hugging Face
conversion and the parameter count all read that declaration. A parameter has a *global* tensor, whose name and shape do
not depend on the layout, and a *local* tensor on each rank (`Shard`). `Shard.slices` maps boxes of one to the other's.
"""

from __future__ import annotations

import math
import os
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import cached_property
from itertools import product
from typing import TYPE_CHECKING, Literal

import numpy as np

from megalite.core.base.slices import Index, Slice, box_index, contiguous_boxes, flat_index, flat_range, unravel
from megalite.core.mesh.grid import Grid
from megalite.core.mesh.seeding import philox

if TYPE_CHECKING:  # plans read declarations alone, and start without torch
    import torch

# Elements per block of random values: initializing a slice takes the memory of a block, not of the tensor.
_INIT_BLOCK = 1 << 22


@dataclass(frozen=True)
class ParamSpec:
    """Declaration of one parameter.

    Attributes:
        name: global name with Hugging Face leaf names ("layers.3.self_attn.qkv_proj.weight").
        shape: global shape, without vocabulary padding.
        sharded_dims: (mesh axis, tensor dimension) pairs: (("tp", 0),), experts (("ep", 0), ("tp", 1)). The parameter
            is replicated over all other axes.
        parts: sizes of what is packed along the last sharded dimension (q|k|v, gate|up), each sharded by itself.
        turns: for each part, the sizes of what takes turns in it, head after head (query and gate); (): nothing does.
        padded: whether the last sharded dimension (the vocabulary) is padded with zeros to `Layout.multiple`.
        init, std: "normal" times the standard deviation `std`, "zeros", "ones", or "log", the logarithms of
            numbers from 0.01 to 16 (rates of decay: Mamba).
        weight_decay: whether decoupled weight decay applies.
        decoupled_lr: whether `--decoupled-lr` sets the learning rate (embedding and output layer).
        matrix: whether each part, or what takes turns in it, is a matrix of a block, which matrix-wise update rules
            apply to.
        width: muP's multiplier of the width, for matrices of blocks; 1 otherwise.
        readout: whether muP divides its outputs, which do not grow with the width, by its multiplier.
        tied_to: name of the parameter that this one is a copy of (same values, gradients summed).
        partial: axes that replicate it, but not its gradient; "sequence" stands for those that shard the sequence.
    """

    name: str
    shape: tuple[int, ...]
    sharded_dims: tuple[tuple[str, int], ...] = ()
    parts: tuple[int, ...] = ()
    turns: tuple[tuple[int, ...], ...] = ()
    padded: bool = False
    init: Literal["normal", "zeros", "ones", "log"] = "normal"
    std: float = 0.02
    weight_decay: bool = True
    decoupled_lr: bool = False
    matrix: bool = False
    width: float = 1.0
    readout: bool = False
    tied_to: str | None = None
    partial: tuple[str, ...] = ()

    @property
    def numel(self) -> int:
        return math.prod(self.shape)

    @property
    def turns_of_parts(self) -> tuple[tuple[int, ...], ...]:
        """Return `turns`, one for each part; a parameter without parts is one part."""
        return self.turns or ((),) * max(1, len(self.parts))

    @property
    def ndim(self) -> int:
        """Number of dimensions, where experts are stacked that of one."""
        return len(self.shape) - any(axis == "ep" for axis, _ in self.sharded_dims)


@dataclass(frozen=True)
class Layout:
    """What all parameters of one rank have in common.

    Attributes:
        grid, rank: grid of ranks, and this rank. The parameters of a layer live on one coordinate of "pp".
        multiple: padded dimensions are multiples of this times the number of ranks that they are sharded over.
        batch: axes whose ranks see different samples: gradients are summed over them.
        sequence: axes that shard activations between layers along the sequence (tp with sequence parallelism).
        tied: names of parameters with a copy on another pipeline stage.
    """

    grid: Grid = field(default_factory=Grid)
    rank: int = 0
    multiple: int = 1
    batch: tuple[str, ...] = ("dp",)
    sequence: tuple[str, ...] = ()
    tied: frozenset[str] = frozenset()


@dataclass(frozen=True)
class Shard:
    """What one rank holds of a parameter, which ranks hold copies, and over which axes its gradient is summed."""

    spec: ParamSpec
    layout: Layout = field(default_factory=Layout)

    @property
    def copies(self) -> tuple[str, ...]:
        """Axes over which the parameter is replicated."""
        sharded = {axis for axis, _ in self.spec.sharded_dims}
        return tuple(name for name in self.layout.grid.names if name not in sharded and name != "pp")

    @property
    def reduce(self) -> tuple[str, ...]:
        """Axes over which the gradient is summed: batch axes, axes of partial gradients, "ends" for tied copies."""
        layout, grid = self.layout, self.layout.grid
        partial = [axis for name in self.spec.partial for axis in (layout.sequence if name == "sequence" else (name,))]
        tied = ("ends",) if self.spec.name in layout.tied else ()
        return (*layout.batch, *(axis for axis in partial if grid[axis] > 1 and axis in self.copies), *tied)

    def is_first(self, *axes: str) -> bool:
        """Whether this rank is the first along `axes` among those that hold the same shard."""
        return self.layout.grid.is_first(self.layout.rank, *(axis for axis in axes if axis in self.copies))

    def is_owner(self, shared: tuple[str, ...] = ()) -> bool:
        """Whether this replica owns the parameter: counts it in norms and writes it to checkpoints.

        Args:
            shared: axes whose ranks each own a share (ZeRO).
        """
        return self.spec.tied_to is None and self.is_first(*(axis for axis in self.copies if axis not in shared))

    @cached_property
    def _extents(self) -> list[tuple[int, list[tuple[int, int, int]]]]:
        """For every dimension: local extent, and intervals (local start, global start, length)."""
        spec, layout = self.spec, self.layout
        coords = layout.grid.coords(layout.rank)
        packed = spec.sharded_dims[-1][1] if spec.sharded_dims else None
        out = []
        for dim, extent in enumerate(spec.shape):
            size, rank = 1, 0
            for axis, at in spec.sharded_dims:
                if at == dim:
                    size, rank = size * layout.grid[axis], rank * layout.grid[axis] + coords.get(axis, 0)
            parts = spec.parts if dim == packed and spec.parts else (extent,)
            padded = spec.padded and dim == packed
            local = start = 0
            intervals = []
            for part in parts:
                rows = -(-part // (layout.multiple * size)) * layout.multiple if padded else part // size
                assert padded or rows * size == part, f"{spec.name}: part of {part} is not divisible by {size} ranks"
                low, high = rank * rows, min((rank + 1) * rows, part)
                if high > low:
                    intervals.append((local, start + low, high - low))
                local, start = local + rows, start + part
            out.append((local, intervals))
        return out

    @property
    def shape(self) -> tuple[int, ...]:
        """Local shape, padding included."""
        return tuple(extent for extent, _ in self._extents)

    @cached_property
    def slices(self) -> list[Slice]:
        """Boxes of the global tensor in this shard; `at` is the position of each in the flattened local tensor."""
        out = []
        for box in product(*(intervals for _, intervals in self._extents)):
            local, offset, shape = zip(*box)
            out.append(Slice(offset, shape, flat_index(self.shape, local)))
        return out

    def local(self, box: Slice) -> Slice:
        """Return the box of the local tensor that holds one of `slices`."""
        return Slice(unravel(self.shape, box.at), box.shape)

    def flat_slices(self, start: int, stop: int) -> list[Slice]:
        """Return the boxes of the global tensor in elements [start, stop) of the flattened local tensor (a ZeRO share).

        Each is contiguous in the flattened tensor, from `at` on; padding is left out.
        """
        out = []
        for flat_box in flat_range(self.shape, start, stop):
            for box in self.slices:
                local = self.local(box)
                common = flat_box.intersect(local)
                for run in contiguous_boxes(self.shape, *common) if common else ():
                    offset = tuple(r - l + g for r, l, g in zip(run.offset, local.offset, box.offset))
                    out.append(Slice(offset, run.shape, run.at))
        return out

    def take(self, full: torch.Tensor) -> torch.Tensor:
        """Return the local tensor of a global one, with zeros as padding."""
        import torch

        out = torch.zeros(self.shape, dtype=full.dtype)
        for box in self.slices:
            out[self.local(box).index] = full[box.index]
        return out

    def initial(self, seed: int, start: int = 0, stop: int | None = None) -> torch.Tensor:
        """Make the initial value of the local tensor, fp32: this rank's slices of a function of (seed, global name).

        Args:
            seed: seed of the run.
            start, stop: range of the flattened local tensor (a ZeRO share); little more than that is drawn.

        Returns:
            The local tensor; with `stop`, only that range, flat.
        """
        import torch

        width = math.prod(self.shape[1:])
        first, last = (0, self.shape[0]) if stop is None else (start // width, -(-stop // width))
        rows = Slice((first, *(0 for _ in self.shape[1:])), (last - first, *self.shape[1:]))
        out = torch.zeros(rows.shape)
        for block, values in self._initial_blocks(seed, targets := list(self._within(rows))):
            for local, box in targets:
                if common := block.intersect(box):
                    low, shape = common
                    target = tuple(l - g + p for l, g, p in zip(low, box.offset, local))
                    out[box_index(target, shape)] = values[box_index([l - b for l, b in zip(low, block.offset)], shape)]
        return out if stop is None else out.view(-1)[start - first * width : stop - first * width]

    def _within(self, rows: Slice) -> Iterator[tuple[Index, Slice]]:
        """Yield (position in `rows`, box of the global tensor) of each slice in these rows of the local tensor."""
        for box in self.slices:
            local = self.local(box)
            if common := rows.intersect(local):
                low, shape = common
                offset = tuple(l - p + g for l, p, g in zip(low, local.offset, box.offset))
                yield tuple(l - r for l, r in zip(low, rows.offset)), Slice(offset, shape)

    def _initial_blocks(self, seed: int, wanted: Sequence[tuple[Index, Slice]]) -> Iterator[tuple[Slice, torch.Tensor]]:
        """Yield (block, values) for the blocks of the global tensor that overlap with one of the wanted boxes."""
        import torch

        if self.spec.init in ("normal", "log"):
            yield from _random_blocks(self.spec, seed, [box for _, box in wanted])
        else:
            values = torch.full((), 1.0 if self.spec.init == "ones" else 0.0).expand(self.spec.shape)
            yield Slice((0,) * values.ndim, self.spec.shape), values


def _random_blocks(spec: ParamSpec, seed: int, wanted: list[Slice]) -> Iterator[tuple[Slice, torch.Tensor]]:
    """Draw the blocks of rows that overlap with a wanted box, each from its own generator, on this rank's cores.

    A block is drawn whole: where a number stands in Philox's stream depends on those before it.
    """
    import torch

    from megalite.core.mesh.rendezvous import local_world_size

    rows_per_block = max(1, _INIT_BLOCK // math.prod(spec.shape[1:]))
    starts = range(0, spec.shape[0], rows_per_block)
    sizes = (min(rows_per_block, spec.shape[0] - row) for row in starts)
    blocks = [Slice((row, *(0 for _ in spec.shape[1:])), (n, *spec.shape[1:])) for row, n in zip(starts, sizes)]
    blocks = [block for block in blocks if any(block.intersect(box) for box in wanted)]

    def draw(block: Slice) -> torch.Tensor:
        generator = philox(seed, "init", spec.tied_to or spec.name, block.offset[0] // rows_per_block)
        if spec.init == "log":
            return torch.from_numpy(np.log(generator.uniform(0.01, 16.0, block.shape), dtype=np.float32))
        return torch.from_numpy(generator.standard_normal(block.shape, dtype=np.float32)).mul_(spec.std)

    threads = min(len(blocks), max(1, (os.cpu_count() or 1) // local_world_size()))
    if threads < 2:
        yield from ((block, draw(block)) for block in blocks)
        return
    with ThreadPoolExecutor(threads) as pool:
        # Some at a time: all blocks of a large matrix would fill the memory.
        for i in range(0, len(blocks), threads):
            yield from zip(blocks[i : i + threads], pool.map(draw, blocks[i : i + threads]))


def matrices_in(shape: tuple[int, ...], turns: tuple[int, ...]) -> list[tuple[int, ...]]:
    """Return the shapes of the matrices in a part [rows, columns]: itself, or those that take turns in its rows."""
    rows, *columns = shape
    return [(rows // sum(turns) * n, *columns) for n in turns] or [shape]


def count_parameters(specs: Mapping[str, ParamSpec]) -> int:
    """Return the number of distinct parameters; tied copies count once."""
    return sum(s.numel for s in specs.values() if s.tied_to is None)
