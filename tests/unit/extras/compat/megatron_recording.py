"""The file of models that megatron-core trained: `tests/data/megatron_models.npz`, of `record_megatron_models.py`.

Weights are whole numbers of 1/32. Gradients are whole numbers of 2^-18 of their tensor's largest, three bytes each, one
byte of all after the other: half as large as fp32, and wrong by at most 2e-6 of the largest.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import numpy as np

FILE = Path(__file__).parents[3] / "data" / "megatron_models.npz"
STEP = 32
"""Weights are multiples of 1 / STEP."""
_LEVELS, _PLANES = 2**18, 3


@dataclass(frozen=True)
class Recording:
    """What a command line of Megatron-LM trains, in megatron-core's names and layouts.

    Attributes:
        flags: the command line.
        tokens: the batch, [B, S + 1], int64.
        loss: mean cross-entropy over the batch, without the losses of routers.
        weights: every parameter, and the biases of routers, fp32.
        gradients: of every parameter, those of routers' losses included, fp32.
    """

    flags: list[str]
    tokens: np.ndarray
    loss: float
    weights: dict[str, np.ndarray]
    gradients: dict[str, np.ndarray]


def write(recordings: Mapping[str, Recording], file: Path = FILE) -> None:
    """Write all recordings, by name."""
    arrays: dict[str, np.ndarray] = {}
    for title, one in recordings.items():
        largest = {name: float(np.abs(grad).max()) for name, grad in one.gradients.items()}
        tensors = {name: [list(weight.shape), largest.get(name)] for name, weight in one.weights.items()}
        about = {"flags": " ".join(one.flags), "loss": one.loss, "tensors": tensors}
        order = [name for name in one.weights if name in largest]
        codes = [np.rint(one.gradients[name] / largest[name] * _LEVELS).astype("<i4").ravel() for name in order]
        arrays[f"{title}.about"] = np.array(json.dumps(about))
        arrays[f"{title}.tokens"] = one.tokens.astype(np.int16)
        arrays[f"{title}.weights"] = np.concatenate([(w * STEP).astype(np.int8).ravel() for w in one.weights.values()])
        arrays[f"{title}.gradients"] = np.concatenate(codes).view(np.uint8).reshape(-1, 4).T[:_PLANES].copy()
    np.savez_compressed(file, allow_pickle=False, **arrays)


def read(file: Path = FILE) -> dict[str, Recording]:
    """Read all recordings, by name."""
    with np.load(file, allow_pickle=False) as arrays:
        titles = [name.removesuffix(".about") for name in arrays if name.endswith(".about")]
        return {title: _read(arrays, title) for title in titles}


def _read(arrays: Mapping[str, np.ndarray], title: str) -> Recording:
    about = json.loads(str(arrays[f"{title}.about"]))
    steps = arrays[f"{title}.weights"].astype(np.float32) / STEP
    planes = arrays[f"{title}.gradients"].astype(np.int32)
    # The sign is that of the last byte.
    codes = sum(plane << (8 * i) for i, plane in enumerate(planes)) - (planes[-1] >= 128) * (1 << 8 * _PLANES)
    weights, gradients = {}, {}
    for name, (shape, largest) in about["tensors"].items():
        count = int(np.prod(shape))
        weights[name], steps = steps[:count].reshape(shape), steps[count:]
        if largest is not None:
            gradients[name] = (codes[:count] * (largest / _LEVELS)).astype(np.float32).reshape(shape)
            codes = codes[count:]
    assert not len(steps)
    assert not len(codes)
    tokens = arrays[f"{title}.tokens"].astype(np.int64)
    return Recording(about["flags"].split(), tokens, about["loss"], weights, gradients)
