"""Tensors of a Hugging Face file to a tensor of megalite and back, as the family's table describes them."""

from __future__ import annotations

import torch

from megalite.families.common import Packed
from megalite.sharding import ParamSpec


def file_shapes(where: Packed, spec: ParamSpec) -> list[tuple[int, ...]]:
    """Return the shapes of the tensors in the file."""
    if len(where.names) > 1:
        return [(rows, *spec.shape[1:]) for rows in spec.parts]
    return [spec.shape[::-1] if where.how == "transposed" else spec.shape]


def join(where: Packed, tensors: list[torch.Tensor], heads: int) -> torch.Tensor:
    """Make megalite's tensor of those of the file (shapes: `file_shapes`)."""
    if len(tensors) > 1:
        return torch.cat(tensors)
    (tensor,) = tensors
    if where.how == "transposed":
        return tensor.t().contiguous()
    if where.how == "heads":
        return tensor.view(heads, 3, -1, *tensor.shape[1:]).transpose(0, 1).reshape(tensor.shape)
    return tensor


def split(where: Packed, tensor: torch.Tensor, spec: ParamSpec, heads: int) -> list[torch.Tensor]:
    """Make the tensors of the file of megalite's; the inverse of `join`."""
    if len(where.names) > 1:
        return list(tensor.split(spec.parts))
    if where.how == "transposed":
        return [tensor.t().contiguous()]
    if where.how == "heads":
        return [tensor.view(3, heads, -1, *tensor.shape[1:]).transpose(0, 1).reshape(tensor.shape)]
    return [tensor]
