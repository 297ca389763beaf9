"""Text files to token files: every document encoded, one end-of-text id after it, in the order of the inputs.

The bytes written do not depend on the number of workers.
"""

from __future__ import annotations

import contextlib
import dataclasses
import multiprocessing
import os
import signal
import time
from collections.abc import Generator, Iterable, Iterator
from contextlib import closing, contextmanager
from dataclasses import dataclass
from multiprocessing import connection
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from megalite import __version__
from megalite.data.prepare.documents import BadRecord, Chunk, expand_inputs, parse, read_chunks
from megalite.data.prepare.progress import Progress
from megalite.data.tokenizer import Tokenizer, load_tokenizer
from megalite.data.tokens import IndexedDatasetWriter, token_dtype
from megalite.errors import UserError
from megalite.log import logger

_MAX_LOGGED = 10  # bad records logged one by one; all are counted


@dataclass
class PreprocessStats:
    """What `preprocess` wrote and skipped; sizes in bytes of UTF-8 text, time in seconds."""

    documents: int = 0
    tokens: int = 0
    text_bytes: int = 0
    empty: int = 0
    bad: int = 0
    seconds: float = 0.0

    def add(self, encoded: _Encoded) -> None:
        """Count one chunk, and log its bad records while few have been logged."""
        for record in encoded.bad[: max(_MAX_LOGGED - self.bad, 0)]:
            logger.warning(f"skipped: {record.where}: {record.reason}")
        self.documents += len(encoded.sizes)
        self.tokens += len(encoded.tokens)
        self.text_bytes += encoded.text_bytes
        self.empty += encoded.empty
        self.bad += len(encoded.bad)

    def __str__(self) -> str:
        line = (
            f"{self.documents} documents, {self.tokens} tokens (one end of text each), "
            f"{self.text_bytes / max(self.tokens, 1):.2f} bytes per token, "
            f"{self.text_bytes / 1e6 / max(self.seconds, 1e-9):.2f} MB/s"
        )
        return line + f"; skipped: {self.empty} empty, {self.bad} bad"


@dataclass(frozen=True)
class _Encoded:
    """One chunk's documents: ids end to end, the length of each, and what was skipped."""

    tokens: npt.NDArray[Any]
    sizes: list[int]
    text_bytes: int
    empty: int
    bad: list[BadRecord]


class _Encoder:
    """Encode the documents of a chunk, each with an end-of-text id after it."""

    def __init__(self, tokenizer: Tokenizer, key: str) -> None:
        self.tokenizer, self.key, self.dtype = tokenizer, key, token_dtype(tokenizer.vocab_size)

    def __call__(self, chunk: Chunk) -> _Encoded:
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
        return _Encoded(tokens, [len(d) for d in ids], text_bytes, empty, bad)


def _work(ours: Connection, tokenizer_path: str, key: str) -> None:
    """Encode chunks from a pipe until its other end is closed or that process is gone."""
    # The parent handles Ctrl-C.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    encoder = _Encoder(load_tokenizer(tokenizer_path), key)
    with contextlib.suppress(EOFError, OSError):
        while True:
            ours.send(encoder(ours.recv()))


class Workers:
    """Run encoding processes with one pipe each: killing one, at any moment, breaks no other pipe.

    (A `ProcessPoolExecutor` has one pipe for all results, and hangs if a worker dies while it writes.)
    """

    def __init__(self, number: int, tokenizer_path: str, key: str) -> None:
        context = multiprocessing.get_context("spawn")
        self.processes = []
        self.idle: list[Connection] = []
        for _ in range(number):
            ours, theirs = context.Pipe()
            process = context.Process(target=_work, args=(theirs, tokenizer_path, key), daemon=True)
            process.start()
            theirs.close()
            self.processes.append(process)
            self.idle.append(ours)
        self._busy: dict[Connection, int] = {}

    @property
    def busy(self) -> bool:
        return bool(self._busy)

    def give(self, number: int, chunk: Chunk) -> None:
        """Hand a chunk to an idle worker."""
        worker = self.idle.pop()
        with _ended_unexpectedly():
            worker.send(chunk)
        self._busy[worker] = number

    def take(self) -> Iterator[tuple[int, _Encoded]]:
        """Wait until at least one is done; yield (number of the chunk, its ids) of those that are."""
        for worker in connection.wait(list(self._busy)):
            assert isinstance(worker, Connection)
            with _ended_unexpectedly():
                encoded = worker.recv()
            self.idle.append(worker)
            yield self._busy.pop(worker), encoded

    def close(self) -> None:
        for process in self.processes:
            process.kill()
            process.join()


@contextmanager
def _ended_unexpectedly() -> Iterator[None]:
    try:
        yield
    except (EOFError, OSError) as e:
        raise RuntimeError("a preprocessing worker ended unexpectedly (perhaps killed because memory ran out)") from e


def _encode_all(
    chunks: Iterable[Chunk], tokenizer: Tokenizer, key: str, workers: int
) -> Generator[tuple[Chunk, _Encoded], None, None]:
    """Yield chunks with their ids, in order; at most a few chunks per worker are in memory."""
    if workers == 1:
        encoder = _Encoder(tokenizer, key)
        for chunk in chunks:
            yield chunk, encoder(chunk)
        return
    pool = Workers(workers, tokenizer.path, key)
    waiting: dict[int, Chunk] = {}
    done: dict[int, _Encoded] = {}
    given = yielded = 0
    source = iter(chunks)
    try:
        while True:
            while pool.idle and len(waiting) < 4 * workers and (unread := next(source, None)) is not None:
                waiting[given] = unread
                pool.give(given, unread)
                given += 1
            if not pool.busy:
                return
            done.update(pool.take())
            while yielded in done:
                yield waiting.pop(yielded), done.pop(yielded)
                yielded += 1
    finally:
        pool.close()


def preprocess(
    inputs: list[str],
    tokenizer_path: str,
    out_prefix: str,
    *,
    workers: int = 1,
    key: str = "text",
    skip_bad: bool = False,
    overwrite: bool = False,
) -> PreprocessStats:
    """Write `out_prefix.bin`, `.idx` and `.json` from text files; nothing appears under these names until all is done.

    Args:
        inputs: files, folders and globs of `.jsonl` (a line is a document), `.parquet` (a row is one) and any other
            UTF-8 text (a file is one), all but parquet also `.gz` / `.zst`.
        tokenizer_path: see `load_tokenizer`.
        workers: encoding processes; 1 encodes in this one.
        key: JSON key or parquet column of the text.
        skip_bad: skip and count records that do not parse; otherwise the first one ends the run.
        overwrite: replace data that exist under `out_prefix`.

    Raises:
        UserError: inputs, tokenizer or output that cannot be used, a bad record, no document at all.
    """
    old = next((f for f in (f"{out_prefix}.{end}" for end in ("bin", "idx", "json")) if os.path.exists(f)), None)
    if old is not None and not overwrite:
        raise UserError(f"--out {out_prefix}", f"{old} exists", "choose another prefix, or give --overwrite")
    if workers < 1:
        raise UserError(f"--workers {workers}", "must be at least 1", "omit it for one per core")
    paths = expand_inputs(inputs)
    tokenizer = load_tokenizer(tokenizer_path)
    if tokenizer.eos_id is None:
        rule = "has no known end-of-text token, and every document must end with one"
        raise UserError(f"tokenizer {tokenizer.path}", rule, "set eos_token in tokenizer_config.json beside it")
    stats, start = PreprocessStats(), time.perf_counter()
    with (
        IndexedDatasetWriter(out_prefix, token_dtype(tokenizer.vocab_size)) as writer,
        Progress(sum(path.stat().st_size for path in paths)) as progress,
        closing(_encode_all(_chunks(paths, key), tokenizer, key, workers)) as all_encoded,
    ):
        for chunk, encoded in all_encoded:
            if encoded.bad and not skip_bad:
                raise encoded.bad[0].error(skippable=True)
            writer.add_documents(encoded.tokens, encoded.sizes)
            stats.add(encoded)
            progress.update(chunk.read, stats.documents, stats.tokens)
        if stats.documents == 0:
            rule = f"contain no document ({stats.empty} empty, {stats.bad} bad)"
            raise UserError(f"--input {' '.join(inputs)}", rule, "check the files and --key")
        writer.finalize(_sidecar(tokenizer, stats))
    stats.seconds = time.perf_counter() - start
    return stats


def _chunks(paths: Iterable[Path], key: str) -> Iterator[Chunk]:
    """Yield the chunks of all files; `read` counts from the start of the first."""
    before = 0
    for path in paths:
        for chunk in read_chunks(path, key):
            yield dataclasses.replace(chunk, read=before + chunk.read)
        before += path.stat().st_size


def _sidecar(tokenizer: Tokenizer, stats: PreprocessStats) -> dict[str, Any]:
    """Return the contents of `PREFIX.json`, see `build.read_sidecar`."""
    return {
        "tokenizer_kind": tokenizer.kind,
        "vocab_size": tokenizer.vocab_size,
        "tokenizer_sha256": tokenizer.sha256,
        "eos_id": tokenizer.eos_id,
        "documents": stats.documents,
        "tokens": stats.tokens,
        "megalite_version": __version__,
    }


def default_workers() -> int:
    """Count the cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
