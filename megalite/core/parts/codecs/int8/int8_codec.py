"""`--compress int8`: each rank sends its gradients in 8 bits; what rounding loses is not kept."""

from __future__ import annotations

import torch
from torch import Tensor

from megalite.core.parts.codecs.exchange.exchange_codec import ExchangeCodec

INT8_BLOCK = 256
"""Elements per scale of gradients sent in 8 bits."""


class Int8(ExchangeCodec):
    """8 bits per element and one fp32 scale per `INT8_BLOCK` elements, no residual (after Dettmers et al. 2022)."""

    def _send(self, x: Tensor) -> None:
        codes, scales = quantize(x.view(self.axis.size, -1))
        self._send_rows(torch.cat((codes.view(torch.uint8), scales.view(torch.uint8)), 1))

    def _add(self, total: Tensor, row: Tensor) -> None:
        codes, scales = row[: self._share], row[self._share :].clone()
        total += dequantize(codes.view(torch.int8), scales.view(torch.float32))


def quantize(x: Tensor, noise: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """Quantize rows [d, n] to int8 codes [d, n] and fp32 scales [d, blocks]: absmax / 127.

    Codes are rounded to nearest even, or down after adding `noise`, fp32 [d, n] in [0, 1).
    """
    rows, n = x.shape
    blocks = _blocks(x)
    scales = blocks.abs().amax(2) / 127
    # For denormals the scale may round down, even to 0.
    codes = blocks / torch.where(scales > 0, scales, 1.0).unsqueeze(2)
    codes = (codes.round_() if noise is None else codes.add_(_blocks(noise)).floor_()).clamp_(-127, 127)
    return codes.to(torch.int8).view(rows, -1)[:, :n].contiguous(), scales


def _blocks(x: Tensor) -> Tensor:
    return torch.nn.functional.pad(x, (0, -x.shape[1] % INT8_BLOCK)).view(len(x), -1, INT8_BLOCK)


def dequantize(codes: Tensor, scales: Tensor) -> Tensor:
    """Undo `quantize` for one row: int8 codes [n], scales [blocks] -> fp32 [n]."""
    return codes.float().mul_(scales.repeat_interleave(INT8_BLOCK)[: len(codes)])
