"""`--compress int8`: each rank sends its gradients in 8 bits; what rounding loses is not kept."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from megalite.core.options.compression import Compression, Gradients
from megalite.core.parts.codecs.exchange import Exchange

if TYPE_CHECKING:
    from torch import Tensor

INT8_BLOCK = 256
"""Elements per scale of gradients sent in 8 bits."""


@dataclass(frozen=True)
class Int8(Exchange):
    """8 bits per element and one fp32 scale per `INT8_BLOCK` elements, no residual (after Dettmers et al. 2022)."""

    about = "recommended"
    form = "int8"

    @classmethod
    def read(cls, argument: str | None) -> Compression | None:
        return cls() if argument is None else None

    def encode(self, rows: Tensor, rank: int) -> tuple[Tensor, None]:
        return pack(*quantize(rows)), None

    def add(self, total: Tensor, message: Tensor) -> None:
        import torch

        codes, scales = message[: len(total)], message[len(total) :].clone()
        total += dequantize(codes.view(torch.int8), scales.view(torch.float32))

    def memory(self, grads: Gradients) -> tuple[int, int]:
        # While a bucket is quantized there are three copies of it; messages are both sent and received.
        return 0, round(2 * (1 + 4 / INT8_BLOCK) * grads.waiting) + 12 * grads.largest


def pack(codes: Tensor, scales: Tensor) -> Tensor:
    """Return codes [d, n] and scales [d, blocks] as messages, uint8 [d, n + 4 * blocks]."""
    import torch

    return torch.cat((codes.view(torch.uint8), scales.view(torch.uint8)), 1)


def quantize(x: Tensor, noise: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """Quantize rows [d, n] to int8 codes [d, n] and fp32 scales [d, blocks]: absmax / 127.

    Codes are rounded to nearest even, or down after adding `noise`, fp32 [d, n] in [0, 1).
    """
    import torch

    rows, n = x.shape
    blocks = _blocks(x)
    scales = blocks.abs().amax(2) / 127
    # For denormals the scale may round down, even to 0.
    codes = blocks / torch.where(scales > 0, scales, 1.0).unsqueeze(2)
    codes = (codes.round_() if noise is None else codes.add_(_blocks(noise)).floor_()).clamp_(-127, 127)
    return codes.to(torch.int8).view(rows, -1)[:, :n].contiguous(), scales


def _blocks(x: Tensor) -> Tensor:
    import torch

    return torch.nn.functional.pad(x, (0, -x.shape[1] % INT8_BLOCK)).view(len(x), -1, INT8_BLOCK)


def dequantize(codes: Tensor, scales: Tensor) -> Tensor:
    """Undo `quantize` for one row: int8 codes [n], scales [blocks] -> fp32 [n]."""
    return codes.float().mul_(scales.repeat_interleave(INT8_BLOCK)[: len(codes)])


CODEC = Int8
