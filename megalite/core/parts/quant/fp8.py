"""Products of FP8 matrices: codes of 8 bits with a scale for every tensor, row or block (`--fp8`).

quantize(x, block, dtype, power_of_2, amax=None) -> Codes
    x [R, K], of any strides, K being the dimension that the product contracts. block (r, k): rows and columns that
    share a scale, 0 for all of them; a last block may be smaller. codes [R, K] in `dtype`, K contiguous; scale
    [ceil(R / r), ceil(K / k)] fp32, so that x is about codes * scale:

        scale = amax / largest code, rounded up to a power of 2 with `power_of_2`; 1 where amax is 0
        codes = round(clamp(x / scale))

    amax: largest magnitudes of the blocks, if more than x decides them (`amaxes`). An infinity or NaN makes the scale,
    and with it all that the block contributes to, infinite or NaN: the step is skipped as an overflow, instead of going
    on with the largest code.

product(a, b, out_dtype, fast=False) -> y
    y = a b^T, [R, K] and [S, K] -> [R, S] in `out_dtype`. fast: accumulate in fewer bits on Hopper, for forward passes.

Clamping comes before every cast, as a cast beyond the range gives NaN in torch 2.11 and the largest code in 2.13.
Sources: Micikevicius et al. 2022 (formats); DeepSeek-V3, section 3.3 (blocks of 128); OCP MX 1.0 (blocks of 32).
"""

from __future__ import annotations

import importlib
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from megalite.core.base.errors import UserError

# Smaller scales have no reciprocal in fp32.
_SMALLEST = 2.0**-126


class Codes(NamedTuple):
    """A quantized matrix, see the module's contract."""

    codes: Tensor
    scale: Tensor
    block: tuple[int, int]

    def values(self) -> Tensor:
        """Return codes * scale, fp32 [R, K]."""
        out = _blocks(self.codes.float(), self.block) * self.scale[:, None, :, None]
        return out.flatten(2).flatten(0, 1)[: self.codes.shape[0], : self.codes.shape[1]]


def _blocks(x: Tensor, block: tuple[int, int]) -> Tensor:
    """Return x [R, K] as [R / r, r, K / k, k], padded with zeros."""
    rows, columns = block[0] or x.shape[0], block[1] or x.shape[1]
    down, right = -x.shape[0] % rows, -x.shape[1] % columns
    x = F.pad(x, (0, right, 0, down)) if down or right else x
    return x.unflatten(1, (-1, columns)).unflatten(0, (-1, rows))


def amaxes(x: Tensor, block: tuple[int, int]) -> Tensor:
    """Return the largest magnitude of every block, fp32; infinity where there is a NaN."""
    amax = _blocks(x, block).abs().amax((1, 3)).float()
    return torch.where(amax.isnan(), torch.inf, amax)


def scales(amax: Tensor, dtype: torch.dtype, power_of_2: bool) -> Tensor:
    """Return the scale of every block."""
    scale = (amax / torch.finfo(dtype).max).clamp_min(_SMALLEST)
    if power_of_2:
        # A carry out of the mantissa: log2 in fp32 is inexact at powers of 2. Infinity stays.
        scale = ((scale.view(torch.int32) + 0x7FFFFF) & 0x7F800000).view(torch.float32)
    return torch.where(amax == 0, 1.0, scale)


def quantize(
    x: Tensor, block: tuple[int, int], dtype: torch.dtype, power_of_2: bool, amax: Tensor | None = None
) -> Codes:
    """Torch implementation of `quantize`; see the module's contract."""
    scale = scales(amaxes(x, block) if amax is None else amax, dtype, power_of_2)
    largest = torch.finfo(dtype).max
    blocks = (_blocks(x, block).float() * scale.reciprocal()[:, None, :, None]).clamp_(-largest, largest)
    codes = blocks.to(dtype).flatten(2).flatten(0, 1)[: x.shape[0], : x.shape[1]]
    return Codes(codes.contiguous(), scale, block)


def triton_kernels(module: str) -> Any:
    """Return torch's operators of megalite, with those of `megalite.core.parts.kernels.triton.<module>`.

    Raises:
        UserError: Triton is not installed.
    """
    try:
        importlib.import_module(f"megalite.core.parts.kernels.triton.{module}")
    except ModuleNotFoundError as e:
        if e.name != "triton":
            raise
        raise UserError("--fp8", "requires Triton, which is not installed", "pip install triton, or drop it") from None
    return torch.ops.megalite


def fused_quantize(
    x: Tensor, block: tuple[int, int], dtype: torch.dtype, power_of_2: bool, amax: Tensor | None = None
) -> Codes:
    """Triton implementation of `quantize`: blocks in one pass, rows and tensors in one after their maxima.

    Blocks whose maxima are given are shares of weights, once per step: torch's.
    """
    if all(block) and amax is not None:
        return quantize(x, block, dtype, power_of_2, amax)
    kernels = triton_kernels("fp8")
    if all(block):
        codes, scale = kernels.triton_quantize(x, *block)
        return Codes(codes, scale, block)
    scale = scales(amaxes(x, block) if amax is None else amax, dtype, power_of_2)
    return Codes(kernels.triton_cast_fp8(x, scale, dtype), scale, block)


def emulated_product(a: Codes, b: Codes, out_dtype: torch.dtype, fast: bool = False) -> Tensor:
    """Torch implementation of `product`, in fp32 on any device; see the module's contract."""
    return (a.values() @ b.values().t()).to(out_dtype)


def scaled_product(a: Codes, b: Codes, out_dtype: torch.dtype, fast: bool = False) -> Tensor:
    """Compute `product` on a GPU's tensor cores; see the module's contract."""
    rows = len(a.codes)
    if a.block == (1, 128) and a.scale.shape[1] == 1:
        # One scale a row: torch would take them for those of whole rows, for which it has no product in fp32.
        a, b = (_padded(x, 0, 128) for x in (a, b))
    if rows % 16:
        a = _padded(a, -rows % 16, 0)  # cuBLAS takes no odd number of rows, and an expert has any
    a, b = _readable(a), _readable(b)
    left, right = _cuda_scale(a), _cuda_scale(b)
    if a.block[0] == 0:
        left, right = left.view(()), right.view(())
    # Blocks lose more to short sums than they gain: Transformer Engine never takes them there.
    fast = fast and a.block[1] == 0
    y = torch._scaled_mm(a.codes, b.codes.t(), left, right.t(), out_dtype=out_dtype, use_fast_accum=fast)
    return y[:rows] if len(y) > rows else y


def block_product(a: Codes, b: Codes, out_dtype: torch.dtype, fast: bool = False) -> Tensor:
    """Triton implementation of `product` for blocks of 128, of which those of `a` are rows; see the contract."""
    return triton_kernels("fp8_product").triton_block_product(a.codes, a.scale, b.codes, b.scale, b.block[0], out_dtype)


def _readable(x: Codes) -> Codes:
    """Return codes whose scales cuBLAS reads as torch passes them on: of squares, it takes 4 columns at a time."""
    if x.block != (128, 128) or x.scale.shape[1] % 4 == 0:
        return x
    return Codes(x.codes, x.scale.repeat_interleave(128, 0)[: len(x.codes)], (1, 128))


def _padded(x: Codes, rows: int, columns: int) -> Codes:
    """Add rows and columns of zeros."""
    codes = F.pad(x.codes.view(torch.uint8), (0, columns, 0, rows)).view(x.codes.dtype)
    more = [-(-n // size) - have if size else 0 for n, size, have in zip(codes.shape, x.block, x.scale.shape)]
    return Codes(codes, F.pad(x.scale, (0, more[1], 0, more[0]), value=1.0), x.block)


def _cuda_scale(x: Codes) -> Tensor:
    """Return the scale in the order that torch's kernels read."""
    if x.block == (1, 128):
        return x.scale.t().contiguous().t()
    if x.block != (1, 32):
        return x.scale
    # Tiles of 128 rows and 4 columns, of which row 32 i + j is part i of row j (cuBLAS, section 3.1.5.2).
    rows, columns = -x.scale.shape[0] % 128, -x.scale.shape[1] % 4
    tiles = F.pad(x.scale, (0, columns, 0, rows)).unflatten(1, (-1, 4)).unflatten(0, (-1, 4, 32))
    return tiles.permute(0, 3, 2, 1, 4).to(torch.float8_e8m0fnu).flatten()


def noted(x: Tensor, block: tuple[int, int]) -> Codes | None:
    """Return the codes that are noted with a tensor, and forget them; None if there are none."""
    held = vars(x).pop("fp8_codes", None)
    return None if held is None else Codes(held[0], held[1], block)
