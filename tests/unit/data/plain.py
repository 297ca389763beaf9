"""Samples of data without documents, weights or padding."""

from __future__ import annotations

import numpy as np

from megalite.core.rows import Tokens
from megalite.runtime.data.samples import Dataset


def ids_of(data: Dataset, position: int) -> Tokens:
    """A sample that is plain ids, and no `Rows`."""
    sample = data.sample(position)
    assert isinstance(sample, np.ndarray)
    return sample
