"""One declaration per parameter. Init, tensor-parallel slicing, optimizer groups, checkpoints, Hugging Face
conversion and the parameter count all read it.

A parameter has a *global* tensor (its name and shape say nothing of the layout) and, on each tensor-parallel rank, a
*local* one. `pieces` says which rectangle of the local tensor is which rectangle of the global one; everything else
that has to do with slicing follows from that list.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Literal

import numpy as np
import torch

from megalite.dist.seeding import philox

# Rows are drawn in blocks of about this many elements: a slice costs the memory of a block, not of the tensor.
_INIT_BLOCK = 1 << 22


@dataclass(frozen=True)
class ParamSpec:
    """Declaration of one parameter.

    Attributes:
        name: global name, Hugging Face leaf names ("layers.3.self_attn.qkv_proj.weight").
        shape: global shape, without vocabulary padding.
        tp_dim: dimension cut over tensor-parallel ranks; None = every rank holds all of it.
        parts: sizes of the packed parts along `tp_dim` (q|k|v, gate|up); each is cut by itself. () = one part.
        padded: `tp_dim` (the vocabulary) is padded in memory to a multiple of the layout's choosing; padding is zero.
        init: "normal" (times `std`), "zeros" or "ones".
        std: standard deviation of "normal".
        weight_decay: whether decoupled weight decay applies.
        tied_to: name of the parameter that this one is a copy of (same values, gradients summed).
        partial_grad: when each tensor-parallel rank of a replicated parameter sees only part of the gradient, so that
            it must be summed over tp: "never", under "sequence_parallel", or "always" (per-head q/k norms).
    """

    name: str
    shape: tuple[int, ...]
    tp_dim: int | None = None
    parts: tuple[int, ...] = ()
    padded: bool = False
    init: Literal["normal", "zeros", "ones"] = "normal"
    std: float = 0.02
    weight_decay: bool = True
    tied_to: str | None = None
    partial_grad: Literal["never", "sequence_parallel", "always"] = "never"

    @property
    def numel(self) -> int:
        return math.prod(self.shape)


@dataclass(frozen=True)
class Piece:
    """A rectangle: at `local` in the local tensor, at `offset` in the global one, of extent `shape`."""

    local: tuple[int, ...]
    offset: tuple[int, ...]
    shape: tuple[int, ...]


@dataclass(frozen=True)
class Shard:
    """What one tensor-parallel rank holds of a parameter.

    Args:
        spec: the parameter.
        rank, size: this rank on the tensor-parallel axis, and the axis's size.
        multiple: the padded dimension is a multiple of `multiple * size` in memory.
    """

    spec: ParamSpec
    rank: int = 0
    size: int = 1
    multiple: int = 1

    def _parts(self) -> tuple[int, ...]:
        assert self.spec.tp_dim is not None
        return self.spec.parts or (self.spec.shape[self.spec.tp_dim],)

    def _rows(self, part: int) -> int:
        """Local extent of a part of global size `part`."""
        if self.spec.padded:
            unit = self.multiple * self.size
            return -(-part // unit) * self.multiple
        assert part % self.size == 0, f"{self.spec.name}: part of {part} is not divisible by tp {self.size}"
        return part // self.size

    @property
    def shape(self) -> tuple[int, ...]:
        """Local shape, padding included."""
        dim = self.spec.tp_dim
        if dim is None:
            return self.spec.shape
        rows = sum(self._rows(part) for part in self._parts())
        return (*self.spec.shape[:dim], rows, *self.spec.shape[dim + 1 :])

    @property
    def pieces(self) -> list[Piece]:
        """Where the local tensor's (unpadded) content lies in the global one."""
        dim, shape = self.spec.tp_dim, self.spec.shape
        zero = (0,) * len(shape)
        if dim is None:
            return [Piece(zero, zero, shape)]
        out, local_start, global_start = [], 0, 0
        for part in self._parts():
            rows = self._rows(part)
            low, high = self.rank * rows, min((self.rank + 1) * rows, part)
            if high > low:
                local, offset, extent = list(zero), list(zero), list(shape)
                local[dim], offset[dim], extent[dim] = local_start, global_start + low, high - low
                out.append(Piece(tuple(local), tuple(offset), tuple(extent)))
            local_start += rows
            global_start += part
        return out

    def flat_pieces(self, start: int, stop: int) -> list[tuple[int, Piece]]:
        """Rectangles covered by elements [start, stop) of the flattened local tensor, as ZeRO cuts it.

        Returns:
            (flat, piece) pairs: `piece.shape` elements, contiguous in the flat tensor from `flat` on; no padding.
        """
        out = []
        for flat, offset, extent in _flat_boxes(self.shape, start, stop):
            for piece in self.pieces:
                low = tuple(max(a, b) for a, b in zip(offset, piece.local))
                high = tuple(min(a + n, b + m) for a, n, b, m in zip(offset, extent, piece.local, piece.shape))
                if any(h <= l for l, h in zip(low, high)):
                    continue
                # A box of several rows is whole rows; a piece never cuts columns of the local tensor: contiguous.
                at = flat + _flat_index(extent, tuple(l - o for l, o in zip(low, offset)))
                shape = tuple(h - l for l, h in zip(low, high))
                glob = tuple(l - p + g for l, p, g in zip(low, piece.local, piece.offset))
                out.append((at, Piece(low, glob, shape)))
        return out

    def take(self, full: torch.Tensor) -> torch.Tensor:
        """The local tensor cut out of the global one (padding zero)."""
        out = torch.zeros(self.shape, dtype=full.dtype)
        for piece in self.pieces:
            out[_slices(piece.local, piece.shape)] = full[_slices(piece.offset, piece.shape)]
        return out

    def initial(self, seed: int) -> torch.Tensor:
        """The local initial value, fp32: a function of (seed, global name), cut to this rank's pieces."""
        if self.spec.init != "normal":
            value = 1.0 if self.spec.init == "ones" else 0.0
            return self.take(torch.full(self.spec.shape, value))
        out = torch.zeros(self.shape)
        pieces = self.pieces
        for row, block in _normal_blocks(self.spec, seed, pieces):
            for piece in pieces:
                low = max(piece.offset[0], row)
                high = min(piece.offset[0] + piece.shape[0], row + block.shape[0])
                if high <= low:
                    continue
                at = low - piece.offset[0] + piece.local[0]
                rest = _slices(piece.offset[1:], piece.shape[1:])
                to = _slices(piece.local[1:], piece.shape[1:])
                out[(slice(at, at + high - low),) + to] = block[(slice(low - row, high - row),) + rest]
        return out


def _normal_blocks(spec: ParamSpec, seed: int, pieces: list[Piece]) -> Iterator[tuple[int, torch.Tensor]]:
    """(first row, values) of every block of rows that some piece needs; each block has a generator of its own."""
    rows_per_block = max(1, _INIT_BLOCK // math.prod(spec.shape[1:]))
    name = spec.tied_to or spec.name
    for row in range(0, spec.shape[0], rows_per_block):
        rows = min(rows_per_block, spec.shape[0] - row)
        if any(p.offset[0] < row + rows and p.offset[0] + p.shape[0] > row for p in pieces):
            values = philox(seed, "init", name, row // rows_per_block).standard_normal(
                (rows, *spec.shape[1:]), dtype=np.float32
            )
            yield row, torch.from_numpy(values).mul_(spec.std)


def _slices(offset: tuple[int, ...], shape: tuple[int, ...]) -> tuple[slice, ...]:
    return tuple(slice(o, o + n) for o, n in zip(offset, shape))


def _flat_index(shape: tuple[int, ...], index: tuple[int, ...]) -> int:
    flat = 0
    for n, i in zip(shape, index):
        flat = flat * n + i
    return flat


def _flat_boxes(shape: tuple[int, ...], start: int, stop: int) -> list[tuple[int, tuple[int, ...], tuple[int, ...]]]:
    """Elements [start, stop) of a flattened tensor as rectangles (flat start, offset, extent); at most 3."""
    if len(shape) == 1:
        return [(start, (start,), (stop - start,))] if stop > start else []
    width = math.prod(shape[1:])
    assert len(shape) == 2, "parameters have one or two dimensions"
    out: list[tuple[int, tuple[int, ...], tuple[int, ...]]] = []
    while start < stop:
        row, column = divmod(start, width)
        if column == 0 and stop - start >= width:
            rows = (stop - start) // width
            out.append((start, (row, 0), (rows, width)))
            start += rows * width
        else:
            count = min(width - column, stop - start)
            out.append((start, (row, column), (1, count)))
            start += count
    return out


class ShardedParameter(torch.nn.Parameter):
    """A local parameter that knows what it is a shard of, and where its gradient goes.

    Attributes:
        shard: the declaration and this rank's cut of it.
        main_grad: fp32 gradient of a whole step, a view into a bucket; set by the gradient buffer.
        uses: contributions to the gradient in one micro-batch (2 for an embedding that is also the output layer).
        adds_to_main_grad: the layer adds its gradient to `main_grad` itself and calls `grad_added`; otherwise autograd
            leaves it in `.grad` and the buffer moves it.
        grad_added: called after each contribution; set by the gradient buffer.
    """

    shard: Shard
    main_grad: torch.Tensor
    uses: int
    adds_to_main_grad: bool
    grad_added: Callable[[], None]

    @classmethod
    def empty(
        cls, shard: Shard, dtype: torch.dtype, device: torch.device, adds_to_main_grad: bool = False
    ) -> ShardedParameter:
        """An uninitialised parameter of the shard's local shape."""
        param = cls(torch.empty(shard.shape, dtype=dtype, device=device))
        param.shard, param.uses, param.adds_to_main_grad = shard, 1, adds_to_main_grad
        return param


def count_parameters(specs: Mapping[str, ParamSpec]) -> int:
    """Number of distinct parameters: tied copies count once."""
    return sum(s.numel for s in specs.values() if s.tied_to is None)
