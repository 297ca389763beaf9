"""What the codecs share that exchange codes of shares."""

from __future__ import annotations

import re
from dataclasses import dataclass

from megalite.core.options.compression import Compression


@dataclass(frozen=True)
class FractionCompression(Compression):
    """`--compress NAME:F` with 0 < F <= 1."""

    fraction: float

    @classmethod
    def read(cls, argument: str | None) -> Compression | None:
        match = re.fullmatch(r"\d*\.?\d+(?:e-?\d+)?", argument or "")
        return cls(float(match[0])) if match and 0 < float(match[0]) <= 1 else None
