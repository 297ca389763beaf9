"""Real text (this Python's standard library) and a tokenizer trained on it, made once."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from examples.corpus import python_corpus
from megalite.data.prepare.train_tokenizer import train_tokenizer
from megalite.data.tokens import IndexedDataset, IndexedDatasetWriter, token_dtype


@pytest.fixture(scope="session")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """JSON lines of about 1 MB of real source and prose."""
    out = tmp_path_factory.mktemp("corpus") / "stdlib.jsonl"
    python_corpus(out, max_mb=1.0)
    return out


@pytest.fixture(scope="session")
def corpus_texts(corpus: Path) -> list[str]:
    return [json.loads(line)["text"] for line in corpus.read_text(encoding="utf-8").split("\n") if line]


@pytest.fixture(scope="session")
def tokenizer_dir(corpus: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("tokenizer")
    train_tokenizer([str(corpus)], 1200, out)
    return out


@pytest.fixture
def make_dataset(tmp_path: Path):
    """make_dataset(sizes) -> IndexedDataset whose ids are 0, 1, 2, ... over all documents."""

    def make(sizes: list[int], name: str = "numbers", vocab_size: int = 100_000) -> IndexedDataset:
        with IndexedDatasetWriter(tmp_path / name, token_dtype(vocab_size)) as writer:
            writer.add_documents(np.arange(sum(sizes)), sizes)
            writer.finalize()
        return IndexedDataset(tmp_path / name)

    return make
