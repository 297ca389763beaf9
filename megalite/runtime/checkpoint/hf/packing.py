"""Where each tensor of a Hugging Face file lies in a tensor of megalite, as the family's table describes it."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import product

import torch

from megalite.core.base.slices import Slice, box_index
from megalite.core.options.model import ModelConfig
from megalite.core.parts.families.common import Packing
from megalite.core.sharding import ParamSpec


@dataclass(frozen=True)
class FileTensor:
    """A tensor of the file.

    Attributes:
        name, shape: those in the file.
        transposed: whether its last two dimensions are exchanged in megalite's tensor.
        runs: its rows (columns), some at a time: (the first one, from one to the next, box of megalite's tensor).
        rows: the dimension of its rows, once they are no columns: 1 where experts are stacked in the file.
    """

    name: str
    shape: tuple[int, ...]
    transposed: bool
    runs: tuple[tuple[int, int, Slice], ...]
    rows: int = 0

    def views(self, tensor: torch.Tensor) -> Iterator[tuple[Slice, torch.Tensor]]:
        """Yield each box of megalite's tensor with the view of the file's `tensor` that holds it."""
        tensor = tensor.mT if self.transposed else tensor
        for there, box in self.overlaps(None):
            yield box, tensor[there].view(box.shape)

    def overlaps(self, wanted: Slice | None) -> Iterator[tuple[tuple[slice, ...], Slice]]:
        """Yield what lies in a box of megalite's tensor: (subscript of the file's tensor, rows first; box of ours)."""
        dims = len(self.shape)
        for first, step, box in self.runs:
            if common := box.intersect(wanted or box):
                offset, shape = common
                there = list(box_index([o - b for o, b in zip(offset, box.offset)], shape)[-dims:])
                begin, end = there[self.rows].start, there[self.rows].stop
                there[self.rows] = slice(first + begin * step, first + (end - 1) * step + 1, step)
                yield tuple(there), Slice(offset, shape)


def file_tensors(packing: Packing, spec: ParamSpec, cfg: ModelConfig) -> Iterator[FileTensor]:
    """Yield the tensors of the file that make up a tensor of megalite, those of its experts one after the other."""
    stack = _stack(spec)
    rows, *inner = spec.shape[len(stack) :]
    sizes, zeros = spec.parts if len(packing.names) > 1 else (rows,), (0,) * len(inner)
    fused = len(stack) if "{}" not in packing.names[0] else 0
    for expert in [(0,) * fused] if fused else product(*map(range, stack)):
        ones, here = stack if fused else (1,) * len(expert), 0
        for part, (name, size) in enumerate(zip(packing.names, sizes, strict=True)):
            runs = tuple(
                (there, step, Slice((*expert, here + row, *zeros), (*ones, n, *inner)))
                for there, step, row, n in _runs(packing, spec, size, part, cfg)
            )
            transposed = packing.transposed and bool(inner)
            shape = (*stack[:fused], *((size, *inner)[::-1] if transposed else (size, *inner)))
            yield FileTensor(name.format(*expert), shape, transposed, runs, fused)
            here += size


def _runs(
    packing: Packing, spec: ParamSpec, size: int, part: int, cfg: ModelConfig
) -> Iterator[tuple[int, int, int, int]]:
    """Yield the runs of a part of `size` rows: (first row in the file, step there, first row here, number of rows)."""
    heads = cfg.num_heads
    if packing.how == "heads":
        n = size // (3 * heads)
        yield from (((3 * head + i) * n, 1, (heads * i + head) * n, n) for i in range(3) for head in range(heads))
    elif packing.how == "alternating":
        step = len(spec.parts)
        yield from ((i, step, i * (size // step), size // step) for i in range(step))
    elif packing.how == "pairs" and part < 2:
        width, turned = spec.parts[0] // heads, cfg.rotary_dim
        for at in range(0, size, width):
            yield from ((at + i, 2, at + i * (turned // 2), turned // 2) for i in range(2))
            if turned < width:
                yield at + turned, 1, at + turned, width - turned
    else:
        yield 0, 1, 0, size


def pieces(spec: ParamSpec) -> list[Slice]:
    """List the boxes of a tensor that are converted one at a time: its experts, or all of it."""
    stack = _stack(spec)
    inner = spec.shape[len(stack) :]
    ones, zeros = (1,) * len(stack), (0,) * len(inner)
    return [Slice((*expert, *zeros), (*ones, *inner)) for expert in product(*map(range, stack))]


def _stack(spec: ParamSpec) -> tuple[int, ...]:
    """Return the dimensions before those of one expert's tensor."""
    return spec.shape[: sum(axis == "ep" for axis, _ in spec.sharded_dims)]
