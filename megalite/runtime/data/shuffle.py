"""The order of an epoch, as a function of (number of samples, seed, epoch, number of the source in a blend, position).

New runs permute by position, in constant memory: a Feistel network of keyed hashes. Runs whose checkpoints have data of
an older version keep the order in which they began. Version 1 is the sort of random words, which takes 8 bytes a
sample; until version 2 all sources of a blend had one key, so that those of one length were walked in one order. Until
version 3 conversations as data were not packed.
"""

from __future__ import annotations

import hashlib
import math
import struct

import numpy as np
import numpy.typing as npt

VERSION_OF_DATA = 4
"""Version of the order of samples, and of the hash of data files, in new runs."""

_ROUNDS = 8


def epoch_order(num_samples: int, seed: int, epoch: int) -> npt.NDArray[np.int64]:
    """Permute range(num_samples) as a function of (seed, epoch) alone, int64 [num_samples].

    Sorts raw Philox words: NumPy keeps the stream of a bit generator stable over its versions, but not the algorithm of
    `Generator.permutation`, and an upgrade must not change the data order of a run.
    """
    words = np.random.Philox(key=np.array([seed, epoch], np.uint64)).random_raw(num_samples)
    return np.argsort(words, kind="stable")


def permuted(position: int, num_samples: int, seed: int, epoch: int, source: int = 0) -> int:
    """Return the image of a position under a permutation of range(num_samples), in constant time and memory.

    A Feistel network over pairs of numbers below ceil(sqrt(num_samples)), whose rounds add a keyed BLAKE2b, is a
    permutation of slightly more numbers; those beyond `num_samples` are permuted again until they are not (cycle
    walking: Black and Rogaway, Ciphers with Arbitrary Finite Domains, 2002).
    """
    side = math.isqrt(num_samples - 1) + 1
    key = struct.pack("<3Q", seed, epoch, source) if source else struct.pack("<2Q", seed, epoch)
    image = position
    while True:
        left, right = divmod(image, side)
        for i in range(_ROUNDS):
            word = hashlib.blake2b(struct.pack("<QB", right, i), digest_size=8, key=key).digest()
            left, right = right, (left + int.from_bytes(word, "little")) % side
        image = left * side + right
        if image < num_samples:
            return image


class EpochOrder:
    """Shuffle samples within each epoch.

    Args:
        num_samples: samples of an epoch.
        seed: seed of the run.
        source: number of the source in a blend.
    """

    def __init__(self, num_samples: int, seed: int, source: int = 0) -> None:
        self.num_samples = num_samples
        self.seed = seed
        self.source = source
        self._epoch, self._order = -1, np.zeros(0, np.int64)

    def sample(self, epoch: int, within: int, version: int) -> int:
        """Return the sample at position `within` of an epoch, in the order of a version of the data."""
        if version > 1:
            return permuted(within, self.num_samples, self.seed, epoch, self.source if version > 2 else 0)
        if epoch != self._epoch:
            self._order, self._epoch = epoch_order(self.num_samples, self.seed, epoch), epoch
        return int(self._order[within])
