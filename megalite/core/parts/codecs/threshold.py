"""`--compress threshold:F`: of elements near the largest of their block, only the sign travels; the rest waits."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from megalite.core.options.compression import Gradients
from megalite.core.parts.codecs.exchange import FractionExchange

if TYPE_CHECKING:
    from torch import Tensor

THRESHOLD_BLOCK = 256
"""Elements per threshold and magnitude."""


@dataclass(frozen=True)
class Threshold(FractionExchange):
    """Two bits per element and one fp32 magnitude per block (Strom 2015, section 3).

    An element of at least the fraction F of its block's largest travels as its sign, with the mean magnitude of all
    such elements. A threshold that follows the block (3LC: Lim et al. 2019) lets every block send, whatever its
    gradients' size, and three values per element have one size, however many reach it.
    """

    about = "signs from F of the largest on"
    form = "threshold:F with 0 < F <= 1"
    keeps_rest = True

    def encode(self, rows: Tensor, rank: int) -> tuple[Tensor, Tensor]:
        import torch

        signs, magnitudes = to_signs(rows, self.fraction)
        return torch.cat((pack(signs), magnitudes.view(torch.uint8)), 1), rows - _values(signs, magnitudes)

    def add(self, total: Tensor, message: Tensor) -> None:
        import torch

        n = len(total)
        packed = -(-n // 4)
        signs, magnitudes = unpack(message[:packed], n), message[packed:].clone().view(torch.float32)
        total += _values(signs[None], magnitudes[None])[0]

    @property
    def element_bytes(self) -> float:
        return 1 / 4 + 4 / THRESHOLD_BLOCK

    def memory(self, grads: Gradients) -> tuple[int, int]:
        # The residual, and the next one until the update; a bucket's sizes, signs and values, and its messages.
        within = 4 * grads.total + round(2 * self.element_bytes * grads.waiting) + 20 * grads.largest
        return 4 * grads.total, within


def to_signs(rows: Tensor, fraction: float) -> tuple[Tensor, Tensor]:
    """Return int8 signs [d, n] of rows [d, n], 0 below the threshold, and fp32 magnitudes [d, blocks]."""
    import torch

    n = rows.shape[1]
    blocks = torch.nn.functional.pad(rows, (0, -n % THRESHOLD_BLOCK)).unflatten(1, (-1, THRESHOLD_BLOCK))
    size = blocks.abs()
    sent = (size >= fraction * size.amax(2, keepdim=True)) & (size > 0)
    magnitudes = (size * sent).sum(2) / sent.sum(2).clamp(min=1)
    return (blocks.sign() * sent).to(torch.int8).flatten(1)[:, :n], magnitudes


def pack(signs: Tensor) -> Tensor:
    """Pack signs [d, n] into uint8 [d, n / 4, rounded up]: two bits each, the sign plus 1, the first lowest."""
    import torch

    quads = torch.nn.functional.pad(signs + 1, (0, -signs.shape[1] % 4)).to(torch.uint8).unflatten(1, (-1, 4))
    return quads[..., 0] | quads[..., 1] << 2 | quads[..., 2] << 4 | quads[..., 3] << 6


def unpack(packed: Tensor, n: int) -> Tensor:
    """Undo `pack` for one row: int8 [n]."""
    import torch

    shifts = torch.arange(0, 8, 2, dtype=torch.uint8, device=packed.device)
    return ((packed[:, None] >> shifts) & 3).flatten()[:n].to(torch.int8) - 1


def _values(signs: Tensor, magnitudes: Tensor) -> Tensor:
    """Return what signs [d, n] and magnitudes [d, blocks] stand for: fp32 [d, n]."""
    return signs.float().mul_(magnitudes.repeat_interleave(THRESHOLD_BLOCK, 1)[:, : signs.shape[1]])


CODEC = Threshold
