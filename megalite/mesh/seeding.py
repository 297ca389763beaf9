"""Random numbers as functions of their purpose.

No generator keeps state during the run: a draw is keyed by (seed, purpose, position), so that it is the same in every
layout and schedule, under recomputation and after a resume, and nothing has to be saved.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    import torch


def derive(*key: int | str) -> int:
    """Derive a 128-bit seed from a key such as (seed, "init", name); different keys give independent streams."""
    text = "\0".join(f"{type(k).__name__}:{k}" for k in key)
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=16).digest(), "little")


def philox(*key: int | str) -> np.random.Generator:
    """Make a NumPy generator (counter-based Philox) for the key."""
    return np.random.Generator(np.random.Philox(key=derive(*key)))


class RngStreams:
    """Named streams of torch random numbers for dropout.

    A stream determines which ranks draw the same numbers: "replicated" is the same on every tensor-parallel rank,
    "tensor_parallel" differs on each (attention heads, and everything on a sequence shard).
    """

    def __init__(self) -> None:
        self._seeds: dict[str, int] = {}

    def add(self, name: str, seed: int) -> None:
        """Register a stream. Raises ValueError when the name or the seed is taken: two streams would be correlated."""
        if name in self._seeds:
            raise ValueError(f"random stream {name!r} exists already; streams need distinct names")
        if seed in self._seeds.values():
            raise ValueError(f"seed {seed} of random stream {name!r} is used by another; streams need distinct seeds")
        self._seeds[name] = seed

    @contextmanager
    def fork(self, name: str, device: torch.device, *position: int | str) -> Iterator[None]:
        """Make torch's default generator of `device` draw the numbers of (stream, position) inside.

        Afterwards the generator is as before. May be nested: each use has its own numbers.
        """
        import torch

        # torch accepts 63 bits.
        seed = derive(self._seeds[name], *position) >> 65
        generator = (
            torch.cuda.default_generators[device.index or 0] if device.type == "cuda" else torch.default_generator
        )
        before = generator.get_state()
        generator.manual_seed(seed)
        try:
            yield
        finally:
            generator.set_state(before)

    @classmethod
    def for_rank(cls, seed: int, tp_rank: int) -> RngStreams:
        """Make the two streams of a training run."""
        streams = cls()
        streams.add("replicated", derive(seed, "dropout", "replicated"))
        streams.add("tensor_parallel", derive(seed, "dropout", "tensor_parallel", tp_rank))
        return streams
