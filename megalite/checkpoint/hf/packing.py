"""Where each tensor of a Hugging Face file lies in a tensor of megalite, as the family's table describes it."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import product

import torch

from megalite.base.slices import Slice, box_index
from megalite.families.common import Packing
from megalite.sharding import ParamSpec


@dataclass(frozen=True)
class FileTensor:
    """A tensor of the file.

    Attributes:
        name, shape: those in the file.
        transposed: whether its columns are rows of megalite's tensor.
        runs: its rows (columns), some at a time: (the first one, box of megalite's tensor).
    """

    name: str
    shape: tuple[int, ...]
    transposed: bool
    runs: tuple[tuple[int, Slice], ...]

    def views(self, tensor: torch.Tensor) -> Iterator[tuple[Slice, torch.Tensor]]:
        """Yield each box of megalite's tensor with the view of the file's `tensor` that holds it."""
        for first, box in self.runs:
            rows = tensor.t() if self.transposed else tensor
            yield box, rows[first : first + box.shape[-rows.dim()]].view(box.shape)

    def overlaps(self, wanted: Slice) -> Iterator[tuple[tuple[slice, ...], Slice]]:
        """Yield what lies in a box of megalite's tensor: (subscript of the file's tensor, rows first; box of ours)."""
        dims = len(self.shape)
        for first, box in self.runs:
            if common := box.intersect(wanted):
                offset, shape = common
                row, *inner = [o - b for o, b in zip(offset, box.offset)][-dims:]
                yield box_index((first + row, *inner), shape[-dims:]), Slice(offset, shape)


def file_tensors(packing: Packing, spec: ParamSpec, heads: int) -> Iterator[FileTensor]:
    """Yield the tensors of the file that make up a tensor of megalite, those of its experts one after the other."""
    experts, (rows, *inner) = spec.shape[:-2], spec.shape[-2:]
    sizes = spec.parts if len(packing.names) > 1 else (rows,)
    transposed, zeros = packing.how == "transposed", (0,) * len(inner)
    for expert in product(*map(range, experts)):
        ones, here = (1,) * len(expert), 0
        for name, size in zip(packing.names, sizes, strict=True):
            n, starts = size, [(0, here)]
            if packing.how == "heads":
                n = size // (3 * heads)
                starts = [((3 * head + i) * n, (heads * i + head) * n) for i in range(3) for head in range(heads)]
            runs = tuple((there, Slice((*expert, row, *zeros), (*ones, n, *inner))) for there, row in starts)
            shape = (size, *inner)
            yield FileTensor(name.format(*expert), shape[::-1] if transposed else shape, transposed, runs)
            here += size


def pieces(spec: ParamSpec) -> list[Slice]:
    """List the boxes of a tensor that are converted one at a time: its experts, or all of it."""
    experts, inner = spec.shape[:-2], spec.shape[-2:]
    ones, zeros = (1,) * len(experts), (0,) * len(inner)
    return [Slice((*expert, *zeros), (*ones, *inner)) for expert in product(*map(range, experts))]
