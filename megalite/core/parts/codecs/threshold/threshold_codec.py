"""`--compress threshold:F`: of elements near the largest of their block, only the sign travels; the rest waits."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from megalite.core.mesh.context import Axis
from megalite.core.optim.codec import BucketParam
from megalite.core.parts.codecs.exchange.exchange_codec import ExchangeCodec

THRESHOLD_BLOCK = 256
"""Elements per threshold and magnitude."""


class Threshold(ExchangeCodec):
    """Two bits per element and one fp32 magnitude per block (Strom 2015, section 3).

    An element of at least the fraction F of its block's largest travels as its sign, with the mean magnitude of all
    such elements. A threshold that follows the block (3LC: Lim et al. 2019) lets every block send, whatever its
    gradients' size, and three values per element have one size, however many reach it.
    """

    def __init__(
        self, params: Sequence[BucketParam], numel: int, axis: Axis, device: torch.device, fraction: float
    ) -> None:
        super().__init__(params, numel, axis, device)
        self.residual = torch.zeros(numel, device=device)
        self._fraction = fraction

    def _send(self, x: Tensor) -> None:
        rows = x.view(self.axis.size, -1)
        signs, magnitudes = to_signs(rows, self._fraction)
        message = torch.cat((pack(signs), magnitudes.view(torch.uint8)), 1)
        assert self.residual is not None
        self._next = [(self.residual, (rows - _values(signs, magnitudes)).view(-1))]
        self._send_rows(message)

    def _add(self, total: Tensor, row: Tensor) -> None:
        packed = -(-self._share // 4)
        signs, magnitudes = unpack(row[:packed], self._share), row[packed:].clone().view(torch.float32)
        total += _values(signs[None], magnitudes[None])[0]


def to_signs(rows: Tensor, fraction: float) -> tuple[Tensor, Tensor]:
    """Return int8 signs [d, n] of rows [d, n], 0 below the threshold, and fp32 magnitudes [d, blocks]."""
    n = rows.shape[1]
    blocks = torch.nn.functional.pad(rows, (0, -n % THRESHOLD_BLOCK)).unflatten(1, (-1, THRESHOLD_BLOCK))
    size = blocks.abs()
    sent = (size >= fraction * size.amax(2, keepdim=True)) & (size > 0)
    magnitudes = (size * sent).sum(2) / sent.sum(2).clamp(min=1)
    return (blocks.sign() * sent).to(torch.int8).flatten(1)[:, :n], magnitudes


def pack(signs: Tensor) -> Tensor:
    """Pack signs [d, n] into uint8 [d, n / 4, rounded up]: two bits each, the sign plus 1, the first lowest."""
    quads = torch.nn.functional.pad(signs + 1, (0, -signs.shape[1] % 4)).to(torch.uint8).unflatten(1, (-1, 4))
    return quads[..., 0] | quads[..., 1] << 2 | quads[..., 2] << 4 | quads[..., 3] << 6


def unpack(packed: Tensor, n: int) -> Tensor:
    """Undo `pack` for one row: int8 [n]."""
    shifts = torch.arange(0, 8, 2, dtype=torch.uint8, device=packed.device)
    return ((packed[:, None] >> shifts) & 3).flatten()[:n].to(torch.int8) - 1


def _values(signs: Tensor, magnitudes: Tensor) -> Tensor:
    """Return what signs [d, n] and magnitudes [d, blocks] stand for: fp32 [d, n]."""
    return signs.float().mul_(magnitudes.repeat_interleave(THRESHOLD_BLOCK, 1)[:, : signs.shape[1]])
