"""Text files on disk, what their documents are by the rules of the page, and streams over them."""

from __future__ import annotations

import gzip
import json
import random
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from itertools import pairwise
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import zstandard

from megalite.runtime.data.stream.dataset import StreamDataset
from megalite.runtime.data.stream.opening import Streams, TextOptions
from megalite.runtime.data.tokenizer import ByteTokenizer
from megalite.runtime.data.tokens import IndexedDataset
from tests.unit.data.stream.reference import Documents, Pieces

EOS = 256


def document(rng: random.Random, most: int = 400) -> str:
    return "".join(rng.choice("abcde éß\n") for _ in range(rng.randint(0, most)))


def json_lines(texts: Sequence[str], key: str = "text") -> bytes:
    return b"".join(json.dumps({key: text}).encode() + b"\n" for text in texts)


def write_parquet(path: Path, texts: Sequence[str], rows_per_group: int) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    pq.write_table(pa.table({"n": range(len(texts)), "text": texts}), path, row_group_size=rows_per_group)


def write_packed(path: Path, texts: Sequence[str]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    pack = gzip.compress if path.suffix == ".gz" else zstandard.ZstdCompressor().compress
    path.write_bytes(pack(json_lines(texts)))


def ids(texts: Sequence[str]) -> Documents:
    """Documents as the byte tokenizer makes them; empty ones are none."""
    return [[*text.encode(), EOS] for text in texts if text]


def pieces_of_lines(texts: Sequence[str], piece_bytes: int) -> Pieces:
    """A line is of the piece in which it begins."""
    pieces: dict[int, list[str]] = {}
    at = 0
    for text in texts:
        pieces.setdefault(at // piece_bytes, []).append(text)
        at += len(json_lines([text]))
    return [[ids(pieces.get(number, []))] for number in range(-(-at // piece_bytes))]


def write_folder(folder: Path, seed: int = 1) -> Pieces:
    """Lines, parquet and two compressed files; return the pieces in the order of the names."""
    rng = random.Random(seed)
    (folder / "b").mkdir(parents=True)
    lines, rows, gz, zst = ([document(rng) for _ in range(n)] for n in (90, 70, 30, 30))
    (folder / "a.jsonl").write_bytes(json_lines(lines))
    write_packed(folder / "b" / "c.jsonl.gz", gz)
    write_packed(folder / "b" / "d.jsonl.zst", zst)
    write_parquet(folder / "e.parquet", rows, 25)
    packed = [[part[0] for part in pieces_of_lines(texts, 2048)] for texts in (gz, zst)]
    return [*pieces_of_lines(lines, 2048), *packed, *_pieces_of_rows(folder / "e.parquet", rows, 25)]


def _pieces_of_rows(path: Path, texts: list[str], each: int) -> Pieces:
    out = []
    for number, at in enumerate(range(0, len(texts), each)):
        group = pq.read_metadata(path).row_group(number)
        count = -(-group.column(1).total_uncompressed_size // 2048)
        bounds = [group.num_rows * i // count for i in range(count + 1)]
        out += [[ids(texts[at + first : at + stop])] for first, stop in pairwise(bounds)]
    return out


@contextmanager
def opened(words: Sequence[str | float | Path], cache: Path, **options: Any) -> Iterator[StreamDataset]:
    """A stream over WEIGHT and path in pairs, or one path."""
    pairs = list(zip(words[::2], words[1::2])) if len(words) > 1 else [(1.0, words[0])]
    split, part, shuffle = options.pop("split", None), options.pop("part", 0), options.pop("shuffle", True)
    numbers: dict[str, Any] = {"seq_len": 16, "seed": 5, "document_mask": False, "vocab_size": 258}
    numbers |= {"loss_on": None, "loss_per": "token", "long_documents": "cut"}
    settings = {"key": "text", "skip_bad": False, "lanes": None, "shuffle_tokens": None, "workers": 0}
    settings |= {"cache_bytes": 10**9}
    numbers |= {name: options.pop(name) for name in list(options) if name in numbers}
    tokenizer = options.pop("tokenizer", None) or ByteTokenizer()
    text: Any = TextOptions(tokenizer=tokenizer, cache_dir=str(cache), **{**settings, **options})
    streams = Streams(text, IndexedDataset, **numbers)
    try:
        yield streams.open([(float(str(w)), str(p)) for w, p in pairs], split, part, shuffle)
    finally:
        if streams.workers is not None:
            streams.workers.close()
