"""ZeRO-3 with `--fp8 blockwise`: a block's weights are gathered as FP8 codes, 1 byte per element instead of bf16's 2.

The codes are those of the gathered weights, bit for bit. A share is flat and may cut a block of 128 x 128, so the
ranks first take the maximum of their blocks' largest magnitudes (4 bytes per 16,384 weights); then each quantizes its
share, once per pass. Blocks are square, so that transposed codes are those of the transposed weight.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from megalite.core.mesh import collectives
from megalite.core.mesh.context import Axis
from megalite.core.optim.shares import ParamShare
from megalite.core.parts.quant.fp8 import Codes, amaxes, scales
from megalite.core.parts.quant.fp8_products import Fp8


class WeightCodes:
    """Gathers the codes of a bucket.

    Args:
        shares: what this rank's share holds of each parameter; rows and columns are multiples of a block's.
        starts: position of each parameter in the bucket.
        numel: number of elements of the bucket.
        axis: ranks that each own a share.
    """

    def __init__(self, shares: Sequence[ParamShare], starts: Sequence[int], numel: int, axis: Axis) -> None:
        self._shares = shares
        self._starts = starts
        self._numel = numel
        self._axis = axis
        self._fp8: Fp8 = shares[0].param.fp8
        self._block = self._fp8.block("OI")
        self._own: torch.Tensor | None = None
        self._all: torch.Tensor | None = None
        self._scales: list[torch.Tensor] = []
        self._work: collectives.Work = collectives.FinishedWork()

    @property
    def gathered(self) -> bool:
        """Whether the codes of all shares have memory."""
        return self._all is not None

    def forget(self) -> None:
        """Free the codes of this rank's share: weights change."""
        self._own = None

    def start(self, share: torch.Tensor) -> None:
        """Start gathering the codes of all shares; this rank's has the weights `share`."""
        if self._own is None:
            self._own = self._quantize(share)
        self._all = self._own.new_empty(self._numel)
        self._work = collectives.all_gather(self._all, self._own, self._axis)

    def wait(self) -> None:
        """Wait for the codes, and give each parameter its own."""
        self._work.wait()
        if self._all is None or self._shares[0].param.codes is not None:
            return
        for own, start, scale in zip(self._shares, self._starts, self._scales):
            param = own.param
            matrices = self._all[start : start + param.numel()].view(torch.float8_e4m3fn).view(-1, *param.shape[-2:])
            param.codes = []
            for w, s in zip(matrices, scale.chunk(len(matrices))):
                param.codes += [Codes(w, s, self._block), Codes(w.t().contiguous(), s.t().contiguous(), self._block)]

    def release(self) -> None:
        """Free the gathered codes."""
        self._all = None

    def _quantize(self, share: torch.Tensor) -> torch.Tensor:
        """Return the codes of this rank's share, uint8, and keep the scales that all ranks have agreed on."""
        rows, columns = self._block
        grids = [(p.numel() // p.shape[-1] // rows, p.shape[-1] // columns) for p, *_ in self._shares]
        amax = torch.zeros(sum(down * right for down, right in grids), device=share.device)
        by_param = [flat.view(grid) for flat, grid in zip(amax.split([d * r for d, r in grids]), grids)]
        tiles = [self._whole_blocks(own, share) for own in self._shares]
        for (tile, first), most in zip(tiles, by_param):
            most[first : first + len(tile) // rows] = amaxes(tile, self._block)
        collectives.all_reduce(amax, self._axis, collectives.MAX).wait()
        recipe, codes = self._fp8.recipe, torch.zeros(len(share), dtype=torch.uint8, device=share.device)
        self._scales = [scales(most, torch.float8_e4m3fn, recipe.power_of_2) for most in by_param]
        for own, (tile, first), most in zip(self._shares, tiles, by_param):
            bits = self._fp8.codes(tile, "OI", most[first : first + len(tile) // rows]).codes.view(torch.uint8)
            at = own.start - first * rows * tile.shape[1]
            codes[own.span] = bits.flatten()[at : at + own.numel]
        return codes

    def _whole_blocks(self, own: ParamShare, share: torch.Tensor) -> tuple[torch.Tensor, int]:
        """Return the rows of blocks that hold a share of a parameter, zeros elsewhere, and the number of the first."""
        width = own.param.shape[-1]
        size = self._block[0] * width
        first, end = own.start // size, -(-own.stop // size) if own.numel else own.start // size
        flat = share.new_zeros((end - first) * size)
        flat[own.start - first * size :][: own.numel] = share[own.span]
        return flat.view(-1, width), first
