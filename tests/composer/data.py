"""Token files and samples that draws train on; every one has something to learn in it."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from megalite.extras.prepare.token_writer import IndexedDatasetWriter
from megalite.runtime.data import Rows

VOCAB = 97


def write_files(folder: Path) -> None:
    """Write the token files of `files`, `blend` and `chats`: short documents, skewed ids."""
    for number, name in enumerate(("books", "web", "chats")):
        rng = np.random.default_rng(number)
        sizes = rng.integers(3, 24, 150)
        total = int(sizes.sum())
        with IndexedDatasetWriter(str(folder / name), np.dtype("<u2")) as writer:
            writer.add_documents((rng.random(total) ** 3 * VOCAB).astype(np.int64), sizes.tolist())
            writer.finalize()
        if name == "chats":
            answers = np.repeat(rng.random(total // 3 + 1) < 0.6, 3)[:total]
            answers.astype(np.uint8).tofile(folder / "chats.mask.bin")


class OwnSamples:
    """Samples of a user.

    Args:
        parts: words of "documents masks padding weights": what the rows have.
        seq_len: tokens of a sample.
        seed: of all samples.
    """

    def __init__(self, parts: str, seq_len: int, seed: int) -> None:
        self.parts, self.seq_len, self.seed = parts.split(), seq_len, seed

    def __len__(self) -> int:
        return 13

    def sample(self, i: int) -> Rows | np.ndarray:
        n, rng = self.seq_len, np.random.default_rng((self.seed, i))
        ids = (rng.random(n + 1) ** 3 * VOCAB).astype(np.int64)
        # Short samples differ in length, so that ranks and micro-batches have targets of other numbers.
        if "padding" in self.parts:
            ids[int(rng.integers(3, n + 2)) :] = -1
        rows = Rows.of(ids)
        if not {"documents", "masks", "weights"} & {*self.parts}:
            return ids
        targets, starts, weights = rows.targets.copy(), None, None
        if "masks" in self.parts:
            targets[rng.random(n) < 0.4] = -1
        if "documents" in self.parts:
            begins = rng.random(n) < 0.2
            begins[0] = True
            starts = np.maximum.accumulate(np.where(begins, np.arange(n), 0))
        if "weights" in self.parts:
            weights = np.where(rng.random(n) < 0.2, 0, rng.random(n) * 2).astype(np.float32)
        return Rows(rows.inputs, targets, starts, weights, rows.padding)

    def content_hash(self) -> str:
        return f"own {self.parts} {self.seed}"
