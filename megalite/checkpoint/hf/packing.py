"""Convert tensors of a Hugging Face file to a tensor of megalite and back, as the family's table describes them."""

from __future__ import annotations

from collections.abc import Iterator

import torch

from megalite.families.common import Packing
from megalite.sharding import ParamSpec


def file_shapes(packing: Packing, spec: ParamSpec) -> list[tuple[int, ...]]:
    """Return the shapes of the tensors in the file."""
    if len(packing.names) > 1:
        return [(rows, *spec.shape[1:]) for rows in spec.parts]
    return [spec.shape[::-1] if packing.how == "transposed" else spec.shape]


def row_runs(packing: Packing, spec: ParamSpec, heads: int) -> Iterator[tuple[str, list[tuple[int, int, int]]]]:
    """Yield each tensor of the file with its runs of rows: (first row there, first row in megalite's tensor, count).

    The rows of a transposed tensor are columns in the file.
    """
    here = 0
    for name, shape in zip(packing.names, file_shapes(packing, spec)):
        if packing.how == "heads":
            n = shape[0] // (3 * heads)
            yield name, [((3 * head + i) * n, (heads * i + head) * n, n) for i in range(3) for head in range(heads)]
        else:
            count = spec.shape[0] if packing.how == "transposed" else shape[0]
            yield name, [(0, here, count)]
            here += count


def split(packing: Packing, tensor: torch.Tensor, spec: ParamSpec, heads: int) -> list[torch.Tensor]:
    """Convert a tensor of megalite to those of the file."""
    if len(packing.names) > 1:
        return list(tensor.split(spec.parts))
    if packing.how == "transposed":
        return [tensor.t().contiguous()]
    if packing.how == "heads":
        return [tensor.view(3, heads, -1, *tensor.shape[1:]).transpose(0, 1).reshape(tensor.shape)]
    return [tensor]
