"""Tensors of a Hugging Face file to a tensor of megalite and back, as the family's table describes them."""

from __future__ import annotations

from collections.abc import Iterator

import torch

from megalite.families.common import Packed
from megalite.sharding import ParamSpec


def file_shapes(where: Packed, spec: ParamSpec) -> list[tuple[int, ...]]:
    """Return the shapes of the tensors in the file."""
    if len(where.names) > 1:
        return [(rows, *spec.shape[1:]) for rows in spec.parts]
    return [spec.shape[::-1] if where.how == "transposed" else spec.shape]


def row_runs(where: Packed, spec: ParamSpec, heads: int) -> Iterator[tuple[str, list[tuple[int, int, int]]]]:
    """Yield each tensor of the file with its rows: (first there, first in megalite's tensor, count) of every run.

    Rows of a transposed tensor are its columns in the file.
    """
    here = 0
    for name, shape in zip(where.names, file_shapes(where, spec)):
        if where.how == "heads":
            n = shape[0] // (3 * heads)
            yield name, [((3 * head + i) * n, (heads * i + head) * n, n) for i in range(3) for head in range(heads)]
        else:
            count = spec.shape[0] if where.how == "transposed" else shape[0]
            yield name, [(0, here, count)]
            here += count


def split(where: Packed, tensor: torch.Tensor, spec: ParamSpec, heads: int) -> list[torch.Tensor]:
    """Make the tensors of the file of megalite's."""
    if len(where.names) > 1:
        return list(tensor.split(spec.parts))
    if where.how == "transposed":
        return [tensor.t().contiguous()]
    if where.how == "heads":
        return [tensor.view(3, heads, -1, *tensor.shape[1:]).transpose(0, 1).reshape(tensor.shape)]
    return [tensor]
