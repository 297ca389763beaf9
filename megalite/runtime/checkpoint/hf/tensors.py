"""Tensors of a Hugging Face folder, read a box at a time; those in MXFP4 as the numbers that they stand for.

MXFP4 is the format of gpt-oss' experts (OCP Microscaling Formats, version 1.0): 32 numbers of 4 bits share a scale. A
tensor NAME [E, in, out] is stored as NAME_blocks, uint8 [E, out, in / 32, 16], two numbers a byte, the lower bits
first, and NAME_scales, uint8 [E, out, in / 32], exponents of 2 with a bias of 127.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import torch

from megalite.runtime.checkpoint.reader import StagingBuffer, StoredTensor, read_rows
from megalite.runtime.checkpoint.safetensors_io import open_inside, read_exactly

GROUP = 32
BLOCKS, SCALES = "_blocks", "_scales"
_E2M1 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)


@dataclass(frozen=True)
class FolderTensor(StoredTensor):
    """A tensor of the folder, and its file."""

    path: Path


@dataclass(frozen=True)
class PackedTensor(FolderTensor):
    """A tensor whose numbers are in two others."""

    blocks: FolderTensor
    scales: FolderTensor


def read_box(source: FolderTensor, box: Sequence[slice]) -> Iterator[tuple[int, torch.Tensor]]:
    """Read a box of a tensor, some rows at a time; its slices may have steps."""
    first, *inner = [s.step or 1 for s in box]
    for row, rows in _neighbors(source, [slice(s.start, s.stop) for s in box]):
        skipped = -row % first
        picked = (slice(skipped, None, first), *(slice(None, None, n) for n in inner))
        yield (row + skipped) // first, rows[picked]


def _neighbors(source: FolderTensor, box: Sequence[slice]) -> Iterator[tuple[int, torch.Tensor]]:
    """Read a box of a tensor, some rows at a time."""
    if isinstance(source, PackedTensor):
        *rows, columns = box
        groups = [slice(0, n) for n in source.blocks.shape[-2:]]
        scales = torch.cat([part.clone() for _, part in _neighbors(source.scales, [*rows, groups[0]])])
        for row, blocks in _neighbors(source.blocks, [*rows, *groups]):
            yield row, dequantize(blocks, scales[row : row + len(blocks)])[..., columns]
        return
    offset, shape = tuple(s.start for s in box), tuple(s.stop - s.start for s in box)
    fd = open_inside(source.path.parent, source.path.name)
    try:
        read = partial(read_exactly, fd, path=source.path)
        yield from read_rows(read, source, offset, shape, StagingBuffer())
    finally:
        os.close(fd)


def unpacked(tensors: dict[str, FolderTensor]) -> dict[str, FolderTensor]:
    """Join what MXFP4 keeps of a tensor in two; its numbers are bf16."""
    out = dict(tensors)
    for name, blocks in tensors.items():
        whole = name.removesuffix(BLOCKS)
        scales = tensors.get(whole + SCALES)
        if whole == name or scales is None or blocks.shape != (*scales.shape, GROUP // 2):
            continue
        if (blocks.dtype, scales.dtype) != ("U8", "U8"):
            continue
        del out[name], out[whole + SCALES]
        shape = (*scales.shape[:-1], scales.shape[-1] * GROUP)
        out[whole] = PackedTensor("BF16", shape, blocks.at, blocks.path, blocks, scales)
    return out


def dequantize(blocks: torch.Tensor, scales: torch.Tensor) -> torch.Tensor:
    """Return the numbers, exact in bf16 [..., 32 G], of blocks, uint8 [..., G, 16], and scales, uint8 [..., G]."""
    table = torch.tensor([*_E2M1, *(-x for x in _E2M1)], dtype=torch.bfloat16)
    numbers = table[torch.stack((blocks & 15, blocks >> 4), -1).flatten(-2).int()]
    return torch.ldexp(numbers, scales.int().unsqueeze(-1) - 127).flatten(-2)
