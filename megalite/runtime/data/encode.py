"""Documents of a chunk of raw records as token ids."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt

from megalite.runtime.data.documents import BadRecord, Chunk, parse
from megalite.runtime.data.tokenizer import Tokenizer
from megalite.runtime.data.tokens import token_dtype


@dataclass(frozen=True)
class EncodedChunk:
    """The documents of a chunk: ids end to end, the length of each, and what was skipped.

    For chat data `learned` is a byte per id, see `chat.ANSWER`, `texts` the number of documents of plain text, and
    `notes` what of how many conversations is not as given.
    """

    tokens: npt.NDArray[Any]
    sizes: list[int]
    text_bytes: int
    empty: int
    bad: list[BadRecord]
    learned: npt.NDArray[np.uint8] | None = None
    texts: int = 0
    notes: Counter[str] = field(default_factory=Counter)


class TextEncoder:
    """Encode the documents of a chunk, each with an end-of-text id after it."""

    def __init__(self, tokenizer: Tokenizer, key: str) -> None:
        self.tokenizer = tokenizer
        self.key = key
        self.dtype = token_dtype(tokenizer.vocab_size)

    def __call__(self, chunk: Chunk) -> EncodedChunk:
        ids: list[npt.NDArray[Any]] = []
        bad: list[BadRecord] = []
        text_bytes = empty = 0
        for text in parse(chunk, self.key):
            if isinstance(text, BadRecord):
                bad.append(text)
                continue
            document = self.tokenizer.encode(text)
            if not document:
                empty += 1
                continue
            text_bytes += len(text.encode())
            ids.append(np.array([*document, self.tokenizer.eos_id], self.dtype))
        tokens = np.concatenate(ids) if ids else np.zeros(0, self.dtype)
        return EncodedChunk(tokens, [len(d) for d in ids], text_bytes, empty, bad)
