"""Documents from `.jsonl`, `.json`, `.parquet` and any other file of UTF-8 text, all but parquet also `.gz` or `.zst`.

A file with another name that holds JSON lines, as WikiExtractor's `wiki_00`, is read as `.jsonl` is.

Reading is in two halves so that many processes can share it: `read_chunks` splits a file into chunks of raw records
(one process, in order), `parse` turns a chunk into texts (any process).
"""

from __future__ import annotations

import codecs
import glob
import gzip
import json
import os
import zlib
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from typing import BinaryIO

from megalite.core.base.errors import UserError
from megalite.core.base.log import logger
from megalite.runtime.data.chats.rows import as_lines, chat_columns
from megalite.runtime.data.json_values import json_values
from megalite.runtime.data.tokenizer import optional_import

_TABLES = (".csv", ".tsv")
_LINES = (".jsonl", ".ndjson")
_SNIFFED_BYTES = 8192
CHUNK_BYTES, CHUNK_RECORDS = 1 << 18, 1024
_BLOCK_BYTES = 1 << 20
# Read from a zstd file at a time: one byte may expand to 32 KiB.
_ZSTD_BYTES = 4 << 10
# Limit of a line or a compressed text: no document is longer, and a few MB may decompress to any length.
_MAX_RECORD = 128 << 20
EXCERPT_CHARS = 80


@dataclass(frozen=True)
class Chunk:
    """Consecutive raw records of one file: JSON lines, one text file, or values of a parquet column or its rows."""

    path: str
    unit: str
    """"line", "record", "file" or "row": what a record is."""
    first: int
    """Number of the first record, from 1; blank JSON lines count too."""
    records: list[bytes | None]
    read: int = 0
    """Bytes of the file on disk that were read for this chunk and those before it."""


@dataclass(frozen=True)
class BadRecord:
    """A record that is not a document: where it is, what is wrong, and its first 80 characters."""

    where: str
    reason: str
    excerpt: str

    def error(self, *, skippable: bool) -> UserError:
        """Return it as an error; `skippable`: the tool has `--skip-bad`."""
        remedy = "correct it, or pass --skip-bad to skip and count such records" if skippable else "correct it"
        given = f"{self.where}: {self.excerpt!r}" if self.excerpt else self.where
        return UserError(given, self.reason, remedy)


def expand_inputs(inputs: Iterable[str], flag: str = "--input") -> list[Path]:
    """List the files of paths, folders and globs, in the order given; what a folder or glob holds is sorted.

    Hidden files of a folder are left out, and so are those that are not UTF-8 text, which are counted in the log.

    Raises:
        UserError: nothing matches, a folder has no text, or a file is of a kind that is not supported.
    """
    paths: list[Path] = []
    for pattern in inputs:
        matches = [pattern] if Path(pattern).exists() else sorted(glob.glob(pattern, recursive=True))
        if not matches:
            raise UserError(f"{flag} {pattern}", "no such file", "check the path, or quote the pattern")
        # A folder and its files may both match a glob.
        files = dict.fromkeys(
            file for f in matches for file in (_files_in(Path(f), flag) if Path(f).is_dir() else [Path(f)])
        )
        for path in files:
            if kind_of(path) in _TABLES:
                remedy = "convert it to .jsonl (one object per line), or rename it to .txt to read it as one document"
                rule = f"{kind_of(path)} files are not supported: where their documents begin is not known"
                raise UserError(f"{flag} {path}", rule, remedy)
        paths += files
    if len(set(paths)) < len(paths):
        twice = next(p for p in paths if paths.count(p) > 1)
        logger.warning(f"{twice} is given more than once: its documents are used each time")
    return paths


def _files_in(folder: Path, flag: str) -> list[Path]:
    """List the text files of a folder and the folders in it."""
    text: list[Path] = []
    others: list[Path] = []
    for root, folders, names in os.walk(folder):
        folders[:] = sorted(name for name in folders if not name.startswith("."))
        for path in (Path(root, name) for name in sorted(names) if not name.startswith(".")):
            (text if is_text(path) else others).append(path)
    if not text:
        raise UserError(f"{flag} {folder}", f"holds no text ({len(others)} other files)", "give another folder")
    if others:
        kinds = f"not UTF-8 text, or .json, {', '.join(_TABLES)}"
        logger.info(f"{folder}: {len(text)} files; {len(others)} skipped ({kinds}), the first {others[0]}")
    return text


def is_text(path: Path) -> bool:
    """Whether a file is text, judged by its name or its first bytes."""
    # A .json file in a folder describes something more often than it holds text.
    if not path.is_file() or kind_of(path) in (".json", *_TABLES):
        return False
    if kind_of(path) in (*_LINES, ".parquet"):
        return True
    with _open(path) as raw:
        start = b""
        for block in _blocks(raw, path):
            start = (start + block)[:_SNIFFED_BYTES]
            if len(start) == _SNIFFED_BYTES:
                break
    try:
        codecs.getincrementaldecoder("utf-8")().decode(start, final=len(start) < _SNIFFED_BYTES)
    except UnicodeDecodeError:
        return False
    return b"\0" not in start


def read_chunks(path: Path, key: str, rows: bool = False) -> Iterator[Chunk]:
    """Split a file into chunks of about 256 KiB (a larger record is a chunk of its own).

    Args:
        key: the JSON key or parquet column that holds the text, or messages.
        rows: of parquet, records are whole rows as JSON, those columns that conversations are made of.

    Raises:
        UserError: the file cannot be read, is damaged or truncated, has no such column, or needs a missing library.
    """
    records: Iterable[bytes | None]
    kind = kind_of(path)
    with _open(path) as raw:
        if kind == ".parquet":
            unit, records = "row", _parquet_values(raw, path, key, rows)
        elif kind == ".json":
            unit, records = "record", json_values(_blocks(raw, path), path, _MAX_RECORD)
        else:
            head, blocks = _with_head(_blocks(raw, path))
            if kind in _LINES or _begins_lines(head, key):
                unit, records = "line", _lines(blocks, path)
            else:
                unit, records = "file", iter([_read_all(blocks, path)])
        first = 1
        batch = []
        size = 0
        for record in records:
            batch.append(record)
            size += len(record or b"")
            if size >= CHUNK_BYTES or len(batch) >= CHUNK_RECORDS:
                yield Chunk(str(path), unit, first, batch, _position(raw))
                first = first + len(batch)
                batch = []
                size = 0
        if batch:
            yield Chunk(str(path), unit, first, batch, _position(raw))


def read_lines(path: Path) -> Iterator[bytes]:
    """Yield the lines of a file, decompressed, without their newline; raises as `read_chunks`."""
    with _open(path) as raw:
        yield from _lines(_blocks(raw, path), path)


def read_whole(path: Path) -> bytes:
    """Return a text, decompressed; raises as `read_chunks`."""
    with _open(path) as raw:
        return _read_all(_blocks(raw, path), path)


def holds_records(path: Path, key: str) -> bool:
    """Whether a file holds records of JSON, by its name or its first lines."""
    if kind_of(path) in (".json", *_LINES):
        return True
    with _open(path) as raw:
        return kind_of(path) != ".parquet" and _begins_lines(_with_head(_blocks(raw, path))[0], key)


def _with_head(blocks: Iterator[bytes]) -> tuple[bytes, Iterator[bytes]]:
    """Return the start of a text, of something that may be JSON its whole first line, and all blocks."""
    read = [next(blocks, b"")]
    size = len(read[0])
    while _may_be_object(read[0]) and b"\n" not in read[-1] and size <= _MAX_RECORD and (block := next(blocks, b"")):
        read.append(block)
        size += len(block)
    return b"".join(read), chain(read, blocks)


def _may_be_object(head: bytes) -> bool:
    return head.removeprefix(codecs.BOM_UTF8).lstrip().startswith(b"{")


def _begins_lines(head: bytes, key: str) -> bool:
    """Whether a text begins with a line that is a JSON object, and has the key or a line like it below."""
    line, _, below = head.removeprefix(codecs.BOM_UTF8).lstrip().partition(b"\n")
    if not line.startswith(b"{"):
        return False
    try:
        value = json.loads(line)
    except (ValueError, RecursionError):
        return False
    return isinstance(value, dict) and (key in value or below.lstrip().startswith(b"{"))


def parse(chunk: Chunk, key: str) -> Iterator[str | BadRecord]:
    """Yield the texts of a chunk in order, a `BadRecord` for what is not one; blank JSON lines are skipped."""
    for number, record in enumerate(chunk.records, chunk.first):
        if chunk.unit == "line" and record is not None and not record.strip():
            continue
        if chunk.unit == "file" and b"\0" in (record or b""):
            text: str | BadRecord = BadRecord("", "holds a zero byte, so it is not text", "")
        else:
            text = _text_of(record, key if chunk.unit in ("line", "record") else None)
        if isinstance(text, BadRecord):
            where = chunk.path if chunk.unit == "file" else f"{chunk.path} {chunk.unit} {number}"
            text = BadRecord(where, text.reason, text.excerpt)
        yield text


def _text_of(record: bytes | None, json_key: str | None) -> str | BadRecord:
    """Return the text of one record, or a `BadRecord` without its place."""
    if record is None:
        return BadRecord("", "the text must be a string, it is null", "")
    excerpt = record[: 4 * EXCERPT_CHARS].decode(errors="replace")[:EXCERPT_CHARS]
    try:
        if json_key is None:
            return record.decode()
        value = json.loads(record)
        if not isinstance(value, dict) or json_key not in value:
            return BadRecord("", f"the record must be a JSON object with the key {json_key!r} (--key)", excerpt)
        text = value[json_key]
        if not isinstance(text, str):
            return BadRecord("", f"the text must be a string, it is {type(text).__name__}", excerpt)
        text.encode()  # half of a surrogate pair, as JSON escapes allow, has no UTF-8 form
    except (ValueError, RecursionError) as e:
        return BadRecord("", f"does not parse as {'JSON' if json_key is not None else 'UTF-8'} ({e})", excerpt)
    return text


def kind_of(path: Path) -> str:
    """Return the suffix of a file, before that of its compression."""
    return Path(path.stem).suffix if path.suffix in (".gz", ".zst") else path.suffix


@contextmanager
def _open(path: Path) -> Iterator[BinaryIO]:
    try:
        with path.open("rb") as raw:
            yield raw
    except (EOFError, zlib.error, gzip.BadGzipFile) as e:
        raise UserError(str(path), f"is damaged or truncated ({e})", "download or compress it again") from e
    except OSError as e:
        raise UserError(str(path), f"cannot be read ({e.strerror})", "check the file and its permissions") from e


def _position(raw: BinaryIO) -> int:
    return raw.tell() if raw.seekable() else 0


def _blocks(raw: BinaryIO, path: Path) -> Iterator[bytes]:
    """Yield the file's bytes, decompressed, in blocks."""
    if path.suffix == ".zst":
        yield from _zstd_blocks(raw, path)
        return
    with gzip.open(raw) if path.suffix == ".gz" else nullcontext(raw) as f:
        while block := f.read(_BLOCK_BYTES):
            yield block


def _zstd_blocks(raw: BinaryIO, path: Path) -> Iterator[bytes]:
    # Frame by frame: the library's own stream reader ends silently where a frame is truncated.
    zstandard = optional_import("zstandard", "zstandard", "data")
    inside_frame = False
    try:
        while data := raw.read(_ZSTD_BYTES):
            while data:
                if not inside_frame:
                    frame, inside_frame = zstandard.ZstdDecompressor().decompressobj(), True
                yield frame.decompress(data)
                data = frame.unused_data
                inside_frame = not frame.eof
    except zstandard.ZstdError as e:
        raise UserError(str(path), f"is damaged ({e})", "download or compress it again") from e
    if inside_frame:
        raise UserError(str(path), "is truncated (its last zstd frame does not end)", "download or compress it again")


def _lines(blocks: Iterable[bytes], path: Path) -> Iterator[bytes]:
    """Yield lines without their newline, including a last one that has none."""
    open_line: list[bytes] = []
    size, number = 0, 1
    for block in blocks:
        first, *following = block.split(b"\n")
        open_line.append(first)
        size += len(first)
        for line in following:
            yield b"".join(open_line)
            open_line = [line]
            size = len(line)
            number = number + 1
        if size > _MAX_RECORD:
            rule = f"has more than {_MAX_RECORD >> 20} MiB"
            raise UserError(f"{path} line {number}", rule, "split it into documents, one per line")
    if last := b"".join(open_line):
        yield last


def _read_all(blocks: Iterable[bytes], path: Path) -> bytes:
    """Return a text, up to a limit: decompressed, it may be a thousand times as large as its file."""
    chunks = []
    size = 0
    limit = max(_MAX_RECORD, path.stat().st_size)
    for block in blocks:
        chunks.append(block)
        size += len(block)
        if size > limit:
            rule = f"holds a text of more than {limit >> 20} MiB"
            raise UserError(str(path), rule, "decompress it, or split it into documents as lines of a .jsonl")
    return b"".join(chunks)


def _parquet_values(raw: BinaryIO, path: Path, key: str, rows: bool) -> Iterator[bytes | None]:
    parquet = optional_import("pyarrow.parquet", "pyarrow", "data")
    pyarrow = optional_import("pyarrow", "pyarrow", "data")
    try:
        with parquet.ParquetFile(raw, page_checksum_verification=True) as file:
            names = file.schema_arrow.names
            columns = chat_columns(names, key) if rows else [name for name in names if name == key]
            if not columns:
                raise UserError(f"--key {key}", f"{path} has the columns {names}", "name one of them with --key")
            for batch in file.iter_batches(batch_size=CHUNK_RECORDS, columns=columns):
                # As bytes: text that is not UTF-8 is then one bad record, not an exception of the library's.
                yield from as_lines(batch) if rows else batch.column(0).cast(pyarrow.large_binary()).to_pylist()
    except (pyarrow.ArrowException, OSError) as e:
        raise UserError(str(path), f"cannot be read as parquet ({e})", "download or write it again") from e
