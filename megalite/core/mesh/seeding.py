"""Random numbers as functions of their purpose.

No generator keeps state during the run: a draw is keyed by (seed, purpose, position), so that it is the same in every
layout and schedule, under recomputation and after a resume, and nothing has to be saved.
"""

from __future__ import annotations

import hashlib

import numpy as np


def derive(*key: int | str) -> int:
    """Derive a 128-bit seed from a key such as (seed, "init", name); different keys give independent streams."""
    text = "\0".join(f"{type(k).__name__}:{k}" for k in key)
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=16).digest(), "little")


def philox(*key: int | str) -> np.random.Generator:
    """Make a NumPy generator (counter-based Philox) for the key."""
    return np.random.Generator(np.random.Philox(key=derive(*key)))
