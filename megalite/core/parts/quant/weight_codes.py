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
from megalite.core.optim.weight_store import ShardedWeights
from megalite.core.parts.quant.fp8 import Codes, amaxes, scales
from megalite.core.parts.quant.fp8_products import Fp8


class WeightCodes(ShardedWeights):
    """Sharded weights whose codes are gathered in their place; rows and columns are multiples of a block's."""

    def __init__(self, full: torch.Tensor, owned: slice, axis: Axis, shares: Sequence[ParamShare]) -> None:
        super().__init__(full, owned, axis, shares)
        self._fp8: Fp8 = shares[0].param.fp8
        self._block = self._fp8.block("OI")
        self._own: torch.Tensor | None = None
        self._all: torch.Tensor | None = None
        self._scales: list[torch.Tensor] = []

    @property
    def gathered(self) -> bool:
        return super().gathered or self._all is not None

    def forget_codes(self) -> None:
        self._own = None

    def gather(self) -> None:
        """Start gathering the codes of all shares."""
        self.drop_codes()
        if self._own is None:
            self._own = self._quantize(self.share)
        self._all = self._own.new_empty(len(self.full))
        self._gathering = collectives.all_gather(self._all, self._own, self.axis)

    def wait(self) -> None:
        """Wait for the codes, and give each parameter its own."""
        super().wait()
        if self._all is None or self.shares[0].param.codes is not None:
            return
        for own, scale in zip(self.shares, self._scales):
            param, start = own.param, self.owned.start + own.at - own.start
            matrices = self._all[start : start + param.numel()].view(torch.float8_e4m3fn).view(-1, *param.shape[-2:])
            param.codes = []
            for w, s in zip(matrices, scale.chunk(len(matrices))):
                param.codes += [Codes(w, s, self._block), Codes(w.t().contiguous(), s.t().contiguous(), self._block)]

    def release(self) -> None:
        super().release()
        self._all = None

    def _quantize(self, share: torch.Tensor) -> torch.Tensor:
        """Return the codes of this rank's share, uint8, and keep the scales that all ranks have agreed on."""
        rows, columns = self._block
        grids = [(p.numel() // p.shape[-1] // rows, p.shape[-1] // columns) for p, *_ in self.shares]
        amax = torch.zeros(sum(down * right for down, right in grids), device=share.device)
        by_param = [flat.view(grid) for flat, grid in zip(amax.split([d * r for d, r in grids]), grids)]
        tiles = [self._whole_blocks(own, share) for own in self.shares]
        for (tile, first), most in zip(tiles, by_param):
            most[first : first + len(tile) // rows] = amaxes(tile, self._block)
        collectives.all_reduce(amax, self.axis, collectives.MAX).wait()
        recipe, codes = self._fp8.recipe, torch.zeros(len(share), dtype=torch.uint8, device=share.device)
        self._scales = [scales(most, torch.float8_e4m3fn, recipe.power_of_2) for most in by_param]
        for own, (tile, first), most in zip(self.shares, tiles, by_param):
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
