"""Tokenized pieces on disk: a file each, written once by whoever tokenizes it, and read by all ranks of a host.

A file is the ids of all documents, of chats a byte per id (see `chats.chat.ANSWER`), the length of each document
(int32), a header in JSON, and `_TAIL`: SHA-256 of the header, its length, and a magic number. The header has checksums
of blocks of 32 KiB of what is before it, as `PREFIX.json`. Its name is a hash of all that its content depends on, so
that another tokenizer, template, key or version of the text has another name.
"""

from __future__ import annotations

import base64
import contextlib
import dataclasses
import functools
import hashlib
import importlib.metadata
import json
import os
import struct
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from megalite.core.base.errors import UserError
from megalite.runtime.data.binary import TokenFile
from megalite.runtime.data.chats.rows import as_lines, chat_columns
from megalite.runtime.data.documents import Chunk, read_lines, read_whole
from megalite.runtime.data.encode import EncodedChunk, TextEncoder
from megalite.runtime.data.sidecar import BlockHasher, Checksums
from megalite.runtime.data.stream.catalogue import Piece, SourceFile, Stamp
from megalite.runtime.data.stream.records import TEXT_KEY
from megalite.runtime.data.tokenizer import Tokenizer, optional_import
from megalite.runtime.places.downloads import account, locked

if TYPE_CHECKING:
    from megalite.runtime.data.chats.chat import ChatEncoder
    from megalite.runtime.data.chats.template import ChatTemplate

VERSION, VERSION_OF_CHATS = 1, 1
"""Of the content of these files: what `TextEncoder`, `ChatEncoder` and the readers below make of a text."""
_MAGIC = b"MLPIECE1"
_TAIL = struct.Struct("<32sQ8s")
_MAX_HEADER = 64 << 20
# Of a compressed file so many parts are made at a time: it is read from its start for each time.
_PARTS_AT_ONCE = 16
# So many bad records of a piece are skipped in any case, and then 1 %.
_BAD_ALLOWED = 10
_CHUNK_RECORDS = 256
_ATTEMPTS = 4
_MAX_LINE = 128 << 20
# Errors that another attempt would have again.
_LASTING = (PermissionError, NotADirectoryError, FileExistsError)
_LIMITS = (".pieces_bytes", ".pieces")


@dataclasses.dataclass(frozen=True)
class Recipe:
    """How a text becomes tokens, besides the tokenizer's file.

    Attributes:
        key: JSON key or parquet column of the text, or of the messages.
        tokenizer, tokenizer_kind: its `identity` and `kind`.
        skip_bad: skip records that are not text.
        cache_dir: where the files go.
        limit: most bytes of them; the oldest are deleted.
        template: how conversations are written; None where the records are text.
    """

    key: str
    tokenizer: str
    tokenizer_kind: str
    skip_bad: bool
    cache_dir: str
    limit: int
    template: ChatTemplate | None = None

    def path(self, piece: Piece, part: int) -> Path:
        """Return where the tokens of a part of a piece are, or are to be."""
        inputs = [VERSION, self.key, self.tokenizer, _version_of(self.tokenizer_kind), part]
        if self.template is not None:
            inputs += [VERSION_OF_CHATS, self.template.identity]
        sources = [(os.path.realpath(f.path), *f.stamp) for f in piece.files]
        text = json.dumps([inputs, sources, piece.kind, piece.name])
        name = hashlib.sha256(text.encode()).hexdigest()[:40]
        return Path(self.cache_dir) / "pieces" / name[:2] / f"{name[2:]}.tokens"


@functools.lru_cache
def _version_of(kind: str) -> str:
    """Return the version of a tokenizer's library, which may decide what ids a text has."""
    package = {"huggingface": "tokenizers"}.get(kind, kind)
    with contextlib.suppress(importlib.metadata.PackageNotFoundError):
        return importlib.metadata.version(package)
    return ""


class Tokens:
    """The tokens of a part of a piece, read from its file with checks.

    Attributes:
        starts: position of each document's first token, then the total; unsigned, of as few bytes as it takes.
        last: whether the piece ends here.
        skipped: bad records that were left out.
        notes: what of how many conversations is not as given.

    Raises:
        ValueError: the file is damaged; made again, it will be as it was.
        OSError: it is not there, or cannot be read.
    """

    def __init__(self, path: Path) -> None:
        header, size = _read_header(path)
        sums = Checksums(header["root"], base64.b64decode(header["blocks"]))
        self._dtype, marked = np.dtype(header["dtype"]), bool(header.get("marked"))
        self.last = bool(header["last"])
        self.skipped = int(header["bad"])
        self.notes: dict[str, int] = header.get("notes", {})
        try:
            self._file = TokenFile(path, size, sums)
            lengths = self._file.read(size - 4 * header["documents"], 4 * header["documents"])
        except UserError as e:
            raise ValueError(str(e)) from None
        ends = np.append(0, np.cumsum(np.frombuffer(lengths, "<i4"), dtype=np.int64))
        # A rank keeps thousands of these, and a piece of short documents has tens of thousands of them.
        self.starts = ends.astype(np.min_scalar_type(ends[-1]))
        self._ids_bytes = int(self.starts[-1]) * self._dtype.itemsize
        if self._ids_bytes + marked * int(self.starts[-1]) + len(lengths) != size:
            raise ValueError("its lengths do not sum to its size")

    @property
    def sizes(self) -> npt.NDArray[np.int64]:
        """Tokens of each document."""
        starts = self.starts.astype(np.int64)
        return starts[1:] - starts[:-1]

    def read(self, start: int, stop: int) -> npt.NDArray[np.int64]:
        """Return ids [start, stop) of the documents end to end; raises as the constructor."""
        item = self._dtype.itemsize
        return np.frombuffer(self._bytes(start * item, (stop - start) * item), self._dtype).astype(np.int64)

    def marks(self, document: int) -> npt.NDArray[np.uint8]:
        """Return the bytes of a conversation's ids, see `chats.chat.ANSWER`; raises as the constructor."""
        start, stop = self.starts[document : document + 2].tolist()
        return np.frombuffer(self._bytes(self._ids_bytes + start, stop - start), np.uint8)

    def _bytes(self, begin: int, size: int) -> bytes:
        try:
            return self._file.read(begin, size)
        except UserError as e:
            raise ValueError(str(e)) from None


def _read_header(path: Path) -> tuple[dict[str, Any], int]:
    with path.open("rb") as f:
        size = os.fstat(f.fileno()).st_size
        if size < _TAIL.size:
            raise ValueError("is too short")
        f.seek(size - _TAIL.size)
        digest, length, magic = _TAIL.unpack(f.read(_TAIL.size))
        if magic != _MAGIC or length > min(_MAX_HEADER, size - _TAIL.size):
            raise ValueError("does not end as it should")
        f.seek(size - _TAIL.size - length)
        header = f.read(length)
    if hashlib.sha256(header).digest() != digest:
        raise ValueError("its header differs from its checksum")
    return json.loads(header), size - _TAIL.size - length


def make(recipe: Recipe, tokenizer: Tokenizer, piece: Piece, part: int, wait: bool = True) -> int | None:
    """Tokenize a part of a piece, and parts after it that cost little more, unless somebody has done so.

    Returns:
        The number of tokens made; None where another process makes them and this one is not to `wait`.

    Raises:
        UserError: a record is not text, or a file or the tokenizer was changed, is damaged or cannot be read.
    """
    if tokenizer.identity != recipe.tokenizer:
        rule = "was changed after the run had started"
        raise UserError(f"tokenizer {tokenizer.path}", rule, "leave the files of a running job alone")
    path = recipe.path(piece, part)
    for attempt in range(_ATTEMPTS):
        try:
            # Processes that want the same piece meet here: of a compressed file, any of its parts.
            lock = recipe.path(piece, 0)
            lock.parent.mkdir(parents=True, exist_ok=True)
            with locked(lock.with_name(f".lock_{lock.name[:2]}"), wait) as owned:
                if not owned:
                    return None
                return 0 if is_whole(path) else _make(recipe, tokenizer, piece, part)
        except OSError as e:
            if attempt == _ATTEMPTS - 1 or isinstance(e, _LASTING):
                rule = f"cannot be read, or {path.parent} not be written ({e.strerror or e})"
                remedy = "check both disks and their permissions, or name another --cache-dir"
                raise UserError(piece.files[0].path, rule, remedy) from None
            time.sleep(2**attempt)
    raise AssertionError("the last attempt returns or raises")


def is_whole(path: Path) -> bool:
    """Whether there is a file of tokens under a name, as far as its header and its lengths show."""
    try:
        Tokens(path)
    except (OSError, ValueError):
        return False
    return True


def _make(recipe: Recipe, tokenizer: Tokenizer, piece: Piece, part: int) -> int:
    check_unchanged(piece)
    tokens = 0
    encoder = _encoder(recipe, tokenizer)
    for number, chunks, last in _parts(recipe, piece, part):
        writer = _Writer(recipe.path(piece, number), encoder.dtype)
        with writer:
            records = 0
            for chunk in chunks:
                encoded = encoder(chunk)
                records += len(chunk.records)
                _check_bad(recipe, piece, encoded, writer.bad + len(encoded.bad), records)
                writer.add(encoded)
                tokens += len(encoded.tokens)
            check_unchanged(piece)
            written = writer.finish(last())
        folder = Path(recipe.cache_dir)
        total, lock = (folder / name for name in _LIMITS)
        account(lock, total, written, recipe.limit, (folder / "pieces").glob("??/[!.]*.tokens"))
    return tokens


def _encoder(recipe: Recipe, tokenizer: Tokenizer) -> TextEncoder | ChatEncoder:
    if recipe.template is None:
        return TextEncoder(tokenizer, recipe.key)
    from megalite.runtime.data.chats.chat import ChatEncoder  # which imports jinja2: not where there is text alone

    return ChatEncoder(tokenizer, recipe.template, None if recipe.key == TEXT_KEY else recipe.key)


def _check_bad(recipe: Recipe, piece: Piece, encoded: EncodedChunk, bad: int, records: int) -> None:
    """Refuse a bad record, or too many of them: then the key is wrong."""
    if not encoded.bad:
        return
    first = encoded.bad[0]
    if piece.kind == "lines" and piece.first:
        # Its number is that among the lines of the piece.
        where, _, number = first.where.rpartition(" ")
        first = dataclasses.replace(first, where=f"{where} {int(number) + _lines_before(piece)}")
    if not recipe.skip_bad:
        raise first.error(skippable=True)
    if bad > max(_BAD_ALLOWED, records // 100):
        given = f"{first.where}: {first.excerpt!r}"
        rule = f"{first.reason}, and so {bad} of {records} records: more than the 1 % that --skip-bad skips"
        raise UserError(given, rule, "check --key, or correct the file")


def _lines_before(piece: Piece) -> int:
    """Count the lines that begin before the first one of a piece."""
    count, at = 0, 0
    with open(piece.files[0].path, "rb") as f:
        while at < piece.first - 1 and (data := f.read(min(1 << 20, piece.first - 1 - at))):
            count, at = count + data.count(b"\n"), at + len(data)
        # The line that reaches over the piece's first byte ends there, or further on.
        return count + bool(f.readline())


def check_unchanged(piece: Piece) -> None:
    """Refuse a file that is not the one that was listed.

    Raises:
        UserError: its size or time is another.
        OSError: it cannot be read.
    """
    for file in piece.files:
        try:
            status = os.stat(file.path)
        except FileNotFoundError:
            raise _changed(file, None) from None
        if (status.st_size, status.st_mtime_ns) != file.stamp:
            raise _changed(file, (status.st_size, status.st_mtime_ns))


def _changed(file: SourceFile, now: Stamp | None) -> UserError:
    rule = "was removed" if now is None else f"was changed: {now[0]} bytes, {file.stamp[0]} when the run started"
    return UserError(file.path, f"{rule}, while training was reading it", "leave the files of a running job alone")


def _parts(recipe: Recipe, piece: Piece, part: int) -> Iterator[tuple[int, Iterator[Chunk], Any]]:
    """Yield (number of a part, its chunks, a function that says, after them, whether the piece ends there)."""
    if piece.kind != "packed":
        yield 0, _chunks(recipe, piece), lambda: True
        return
    path = Path(piece.files[0].path)
    lines = _Lines(read_lines(path), str(path), piece.step)
    lines.skip_to(part)
    if part and lines.ended:
        return  # made ahead of a reader that will not come here
    for number in range(part, part + _PARTS_AT_ONCE):
        yield number, lines.chunks(number), lambda: lines.ended
        if lines.ended:
            return


class _Lines:
    """The lines of a compressed file in parts: part b are those that begin in bytes [b * step, (b + 1) * step)."""

    def __init__(self, lines: Iterator[bytes], path: str, step: int) -> None:
        self._lines, self._path, self._step = lines, path, step
        self._next, self._at, self._number = next(lines, None), 0, 1

    @property
    def ended(self) -> bool:
        return self._next is None

    def _take(self) -> bytes:
        line = self._next
        assert line is not None
        self._at, self._number, self._next = self._at + len(line) + 1, self._number + 1, next(self._lines, None)
        return line

    def skip_to(self, part: int) -> None:
        while not self.ended and self._at < part * self._step:
            self._take()

    def chunks(self, part: int) -> Iterator[Chunk]:
        while not self.ended and self._at < (part + 1) * self._step:
            first, records = self._number, list[bytes | None]()
            while not self.ended and self._at < (part + 1) * self._step and len(records) < _CHUNK_RECORDS:
                records.append(self._take())
            yield Chunk(self._path, "line", first, records)


def _chunks(recipe: Recipe, piece: Piece) -> Iterator[Chunk]:
    path = Path(piece.files[0].path)
    records: list[bytes | None]
    if piece.kind == "texts":
        for file in piece.files:
            yield Chunk(file.path, "file", 1, [read_whole(Path(file.path))])
        return
    if piece.kind == "rows":
        unit, records = "row", _rows(piece, recipe)
        first = piece.first + _rows_before(str(path), piece.files[0].stamp, piece.group)
    else:
        unit, first, records = "line", 0, [*_lines_in(path, piece.first, piece.stop)]
    for at in range(0, len(records), _CHUNK_RECORDS):
        yield Chunk(str(path), unit, first + at + 1, records[at : at + _CHUNK_RECORDS])


def _lines_in(path: Path, begin: int, stop: int) -> Iterator[bytes]:
    """Yield the lines that begin in bytes [begin, stop) of a file."""
    with path.open("rb") as f:
        if begin:
            # Whatever line the byte before is of, the next one begins here or later.
            f.seek(begin - 1)
            while (rest := f.readline(_MAX_LINE)) and not rest.endswith(b"\n"):
                pass
        while f.tell() < stop and (line := f.readline(_MAX_LINE)):
            if len(line) == _MAX_LINE:
                rule = f"has a line of more than {_MAX_LINE >> 20} MiB"
                raise UserError(str(path), rule, "split it into documents, one per line")
            yield line.removesuffix(b"\n")


@functools.lru_cache(maxsize=2)
def _group(path: str, stamp: Stamp, group: int, key: str, chats: bool) -> Any:
    """Decode the text of a row group, or its conversations; its pieces are often made one after the other."""
    parquet: Any = optional_import("pyarrow.parquet", "pyarrow", "data")
    pyarrow: Any = optional_import("pyarrow", "pyarrow", "data")
    try:
        with parquet.ParquetFile(path, page_checksum_verification=True) as file:
            columns = chat_columns(file.schema_arrow.names, key) if chats else [key]
            table = file.read_row_group(group, columns=columns, use_threads=False)
            # As bytes: text that is not UTF-8 is then one bad record.
            return table if chats else table.column(0).cast(pyarrow.large_binary())
    except pyarrow.ArrowException as e:
        raise UserError(path, f"cannot be read as parquet ({e})", "download or write it again") from None


def _rows(piece: Piece, recipe: Recipe) -> list[bytes | None]:
    chats = recipe.template is not None
    group = _group(piece.files[0].path, piece.files[0].stamp, piece.group, recipe.key, chats)
    rows = group.slice(piece.first, piece.stop - piece.first)
    values: list[bytes | None] = as_lines(rows) if chats else rows.to_pylist()
    return values


@functools.lru_cache(maxsize=8)
def _rows_before(path: str, stamp: Stamp, group: int) -> int:
    """Count the rows of a file before a group, for messages."""
    parquet: Any = optional_import("pyarrow.parquet", "pyarrow", "data")
    metadata = parquet.read_metadata(path)
    return sum(metadata.row_group(i).num_rows for i in range(group))


class _Writer:
    """Writes one file of tokens, under a temporary name until `finish`."""

    def __init__(self, path: Path, dtype: np.dtype) -> None:
        self._path, self._part = path, path.with_name(f".part_{os.getpid()}_{path.name}")
        self._dtype, self._hasher = dtype.newbyteorder("<"), BlockHasher()
        self._sizes: list[int] = []
        self._marks: list[bytes] = []
        self._notes: Counter[str] = Counter()
        self._file: Any = None
        self.bad = self.size = 0

    def __enter__(self) -> _Writer:
        self._part.parent.mkdir(parents=True, exist_ok=True)
        for left in self._part.parent.glob(f".part_*_{self._path.name}"):
            left.unlink(missing_ok=True)  # by a process that was killed
        self._file = self._part.open("wb")
        return self

    def __exit__(self, *exception: object) -> None:
        self._file.close()
        self._part.unlink(missing_ok=True)

    def add(self, encoded: EncodedChunk) -> None:
        self._write(np.ascontiguousarray(encoded.tokens, self._dtype).tobytes())
        self._sizes += encoded.sizes
        if encoded.learned is not None:
            self._marks.append(encoded.learned.tobytes())
        self._notes += encoded.notes
        self.bad += len(encoded.bad)

    def _write(self, data: bytes) -> None:
        self._file.write(data)
        self._hasher.update(data)
        self.size += len(data)

    def finish(self, last: bool) -> int:
        """Commit the file; return its size in bytes."""
        marked = {"marked": True, "notes": self._notes} if self._marks else {}
        self._write(b"".join(self._marks))
        self._write(np.array(self._sizes, "<i4").tobytes())
        entries = {"dtype": self._dtype.str, "documents": len(self._sizes), "last": last, "bad": self.bad, **marked}
        header = json.dumps({**entries, **self._hasher.to_json()}).encode()
        self._file.write(header + _TAIL.pack(hashlib.sha256(header).digest(), len(header), _MAGIC))
        self._file.flush()
        # Not synced: what a power failure makes of it does not match its checksums, and is made again.
        os.replace(self._part, self._path)
        return self.size + len(header) + _TAIL.size
