"""Where each tensor of a Hugging Face file lies in a tensor of megalite, as the family's table describes it."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import product

import torch

from megalite.core.base.slices import Slice, box_index
from megalite.core.parts.families.common import Packing
from megalite.core.sharding import ParamSpec


@dataclass(frozen=True)
class FileTensor:
    """A tensor of the file.

    Attributes:
        name, shape: those in the file.
        transposed: whether its last two dimensions are exchanged in megalite's tensor.
        runs: its rows (columns), some at a time: (the first one, box of megalite's tensor).
        rows: the dimension of its rows, once they are no columns: 1 where experts are stacked in the file.
        step: from a row of a run to the next.
    """

    name: str
    shape: tuple[int, ...]
    transposed: bool
    runs: tuple[tuple[int, Slice], ...]
    rows: int = 0
    step: int = 1

    def views(self, tensor: torch.Tensor) -> Iterator[tuple[Slice, torch.Tensor]]:
        """Yield each box of megalite's tensor with the view of the file's `tensor` that holds it."""
        tensor = tensor.mT if self.transposed else tensor
        for there, box in self.overlaps(None):
            yield box, tensor[there].view(box.shape)

    def overlaps(self, wanted: Slice | None) -> Iterator[tuple[tuple[slice, ...], Slice]]:
        """Yield what lies in a box of megalite's tensor: (subscript of the file's tensor, rows first; box of ours)."""
        dims = len(self.shape)
        for first, box in self.runs:
            if common := box.intersect(wanted or box):
                offset, shape = common
                there = list(box_index([o - b for o, b in zip(offset, box.offset)], shape)[-dims:])
                begin, end = there[self.rows].start, there[self.rows].stop
                there[self.rows] = slice(first + begin * self.step, first + (end - 1) * self.step + 1, self.step)
                yield tuple(there), Slice(offset, shape)


def file_tensors(packing: Packing, spec: ParamSpec, heads: int) -> Iterator[FileTensor]:
    """Yield the tensors of the file that make up a tensor of megalite, those of its experts one after the other."""
    stack = _stack(spec)
    rows, *inner = spec.shape[len(stack) :]
    sizes, zeros = spec.parts if len(packing.names) > 1 else (rows,), (0,) * len(inner)
    fused = len(stack) if "{}" not in packing.names[0] else 0
    for expert in [(0,) * fused] if fused else product(*map(range, stack)):
        ones, here = stack if fused else (1,) * len(expert), 0
        for part, (name, size) in enumerate(zip(packing.names, sizes, strict=True)):
            n = size
            starts = [(0, here)]
            step = 1
            if packing.how == "heads":
                n = size // (3 * heads)
                starts = [((3 * head + i) * n, (heads * i + head) * n) for i in range(3) for head in range(heads)]
            elif packing.how == "alternating":
                step = len(spec.parts)
                n = size // step
                starts = [(i, i * n) for i in range(step)]
            elif packing.how == "pairs" and part < 2:
                width, step = spec.parts[0] // heads, 2
                n = width // 2
                starts = [(at + i, here + at + i * n) for at in range(0, size, width) for i in range(2)]
            runs = tuple((there, Slice((*expert, row, *zeros), (*ones, n, *inner))) for there, row in starts)
            transposed = packing.transposed and bool(inner)
            shape = (*stack[:fused], *((size, *inner)[::-1] if transposed else (size, *inner)))
            yield FileTensor(name.format(*expert), shape, transposed, runs, fused, step)
            here += size


def pieces(spec: ParamSpec) -> list[Slice]:
    """List the boxes of a tensor that are converted one at a time: its experts, or all of it."""
    stack = _stack(spec)
    inner = spec.shape[len(stack) :]
    ones, zeros = (1,) * len(stack), (0,) * len(inner)
    return [Slice((*expert, *zeros), (*ones, *inner)) for expert in product(*map(range, stack))]


def _stack(spec: ParamSpec) -> tuple[int, ...]:
    """Return the dimensions before those of one expert's tensor."""
    return spec.shape[: sum(axis == "ep" for axis, _ in spec.sharded_dims)]
