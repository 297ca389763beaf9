"""What the codecs share that exchange codes of shares; `--help` reads them, so they import torch where they use it."""

from __future__ import annotations

import re
from abc import abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

from megalite.core.options.compression import Compression

if TYPE_CHECKING:
    import torch
    from torch import Tensor

    from megalite.core.mesh.context import Axis
    from megalite.core.optim.codec import BucketParam
    from megalite.core.parts.codecs.exchange.exchange_codec import ExchangeCodec


class Exchange(Compression):
    """A codec in which each rank receives everyone's code of its share, and sums them in fp32 in rank order.

    Attributes:
        keeps_rest: what the codes leave out is added to the next step's gradient.
    """

    keeps_rest: ClassVar[bool] = False

    def codec(self, params: Sequence[BucketParam], numel: int, axis: Axis, device: torch.device) -> ExchangeCodec:
        from megalite.core.parts.codecs.exchange.exchange_codec import ExchangeCodec

        return ExchangeCodec(params, numel, axis, device, self.encode, self.add, keeps_rest=self.keeps_rest)

    @abstractmethod
    def encode(self, rows: Tensor, rank: int) -> tuple[Tensor, Tensor | None]:
        """Encode the gradients that a rank sends.

        Args:
            rows: share of each rank, fp32 [d, n], which may be overwritten.
            rank: the sender's place among the d.

        Returns:
            Messages [d, m], of a size that no value changes, and what they leave out, fp32 [d, n]: None unless
            `keeps_rest`.
        """

    @abstractmethod
    def add(self, total: Tensor, message: Tensor) -> None:
        """Add a message [m] to the sum of a share, fp32 [n]."""


@dataclass(frozen=True)
class FractionExchange(Exchange):
    """`--compress NAME:F` with 0 < F <= 1."""

    fraction: float

    @classmethod
    def read(cls, argument: str | None) -> Compression | None:
        match = re.fullmatch(r"\d*\.?\d+(?:e-?\d+)?", argument or "")
        return cls(float(match[0])) if match and 0 < float(match[0]) <= 1 else None
