"""Token files made by hand."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from megalite.extras.prepare.token_writer import IndexedDatasetWriter
from megalite.runtime.data.tokens import IndexedDataset, token_dtype


@pytest.fixture
def make_dataset(tmp_path: Path):
    """make_dataset(sizes) -> IndexedDataset whose ids are 0, 1, 2, ... over all documents."""

    def make(sizes: list[int], name: str = "numbers", vocab_size: int = 100_000) -> IndexedDataset:
        with IndexedDatasetWriter(tmp_path / name, token_dtype(vocab_size)) as writer:
            writer.add_documents(np.arange(sum(sizes)), sizes)
            writer.finalize()
        return IndexedDataset(tmp_path / name)

    return make
