"""FP8 codes in fp64, without torch's casts."""

from __future__ import annotations

import itertools

import numpy as np

SPACING = {"e4m3": 2.0**-3, "e5m2": 2.0**-2}  # of codes, relative to the power of 2 below them
SMALLEST = {"e4m3": 2.0**-9, "e5m2": 2.0**-16}


def nearest(x: np.ndarray, name: str) -> np.ndarray:
    """Round to the nearest code, ties to even, in fp64 and without torch's casts."""
    exponent = np.floor(np.log2(np.maximum(np.abs(x), 1e-300)))
    step = np.maximum(2.0**exponent * SPACING[name], SMALLEST[name])
    limit = 448.0 if name == "e4m3" else 57344.0
    return np.clip(np.round(x / step) * step, -limit, limit)


def by_hand(x: np.ndarray, block: tuple[int, int], name: str, power_of_2: bool) -> np.ndarray:
    """Quantize and dequantize block by block, without torch."""
    out, limit = np.zeros_like(x), 448.0 if name == "e4m3" else 57344.0
    rows, columns = block[0] or x.shape[0], block[1] or x.shape[1]
    for i, j in itertools.product(range(0, x.shape[0], rows), range(0, x.shape[1], columns)):
        part = x[i : i + rows, j : j + columns]
        scale = np.float32(np.abs(part).max()) / np.float32(limit) or np.float32(1)
        if power_of_2:
            mantissa, exponent = np.frexp(scale)
            scale = np.float32(2.0 ** (exponent - (mantissa == 0.5)))
        # Exact for powers of 2; else in fp32, as a tie would fall to the other side.
        ratio = part.astype(np.float32) * (np.float32(1) / scale)
        out[i : i + rows, j : j + columns] = nearest(ratio.astype(float), name) * scale
    return out
