"""The random bits of kernels, by hand."""

from __future__ import annotations

import numpy as np

KEY = (-123456789, 987654321)


def mix(x: np.ndarray) -> np.ndarray:
    x = (x ^ (x >> np.uint32(16))) * np.uint32(0x21F0AAAD)
    x = (x ^ (x >> np.uint32(15))) * np.uint32(0xD35A2D97)
    return x ^ (x >> np.uint32(15))


def hashed(key: tuple[int, int], rows: np.ndarray, columns: np.ndarray) -> np.ndarray:
    """The random bits of elements, by row and column of their parameter."""
    first, second = (np.uint32(k % 2**32) for k in key)
    own = mix(mix(rows.astype(np.uint32) ^ first) ^ second)
    return mix(own + columns.astype(np.uint32) * np.uint32(0x9E3779B1)) & np.uint32(0xFFFF)
