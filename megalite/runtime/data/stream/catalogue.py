"""The text files of a folder, and the pieces that they are read in: what can be opened alone, without the rest.

Listing opens files for their first lines, and parquet's for their footers.
"""

from __future__ import annotations

import functools
import hashlib
import os
import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import yaml

from megalite.core.base.errors import UserError
from megalite.core.base.log import logger
from megalite.runtime.data.chats.rows import chat_columns
from megalite.runtime.data.documents import holds_records, is_text, kind_of
from megalite.runtime.data.foreign import missing_index
from megalite.runtime.data.stream.records import Kind, first_record, holds_conversation
from megalite.runtime.data.tokenizer import optional_import

LINES, ROWS = (".jsonl", ".ndjson"), ".parquet"
# Of a source: so many pieces if that gives them a size between these, in bytes of text.
_PIECES, _LEAST, _MOST = 1024, 1 << 16, 1 << 20
# Read of all files together for the hash of their content, and of one.
_SAMPLES, _SAMPLES_OF_ONE, _SAMPLE_BYTES = 4096, 64, 4096
_SPLITS = {
    **dict.fromkeys(("train", "training"), "train"),
    **dict.fromkeys(("validation", "valid", "val", "dev"), "validation"),
    **dict.fromkeys(("test", "testing", "eval", "evaluation"), "test"),
}
"""Words of a file's or folder's name that say which split it is of: the rule of the Hugging Face Hub."""
_LARGE_GROUP = 64 << 20
_MAX_README = 1 << 20

Stamp = tuple[int, int]
"""Size in bytes, and time of the last change in ns."""


def is_text_path(word: str) -> bool:
    """Whether a word of `--data` names text: a folder, or a file with the suffix of one, and no prefix of that name."""
    name = split_of(word)[0]
    path = Path(name)
    named = path.is_dir() or name.endswith("/") or kind_of(path) in (*LINES, ROWS)
    return named and not Path(f"{path}.idx").exists()


def split_of(word: str) -> tuple[str, str]:
    """Return (path, split) of PATH or PATH:SPLIT."""
    path, colon, split = word.rpartition(":")
    return (path, split) if colon and split and "/" not in split and not Path(word).exists() else (word, "train")


@dataclass(frozen=True)
class SourceFile:
    """A text file: its name below the folder, where it is, what it was when it was listed, and how it is read."""

    name: str
    path: str
    stamp: Stamp
    kind: Kind


@dataclass(frozen=True)
class Piece:
    """What is tokenized at once.

    Attributes:
        kind: "lines" that begin in bytes [first, stop) of a file; "packed", all lines of a compressed file; "rows"
            [first, stop) of a row group; "texts", whole files.
        files: the files; all kinds but "texts" have one.
        first, stop, group: see `kind`.
        step: bytes of text in a part of a compressed file.
    """

    kind: Kind
    files: tuple[SourceFile, ...]
    first: int
    stop: int
    group: int
    step: int

    @property
    def name(self) -> str:
        """What tells this piece from others of its folder."""
        return f"{self.files[0].name} {self.group} {self.first} {self.stop} {self.step}"


@dataclass(frozen=True)
class _Unit:
    """Consecutive pieces of one file or row group; or one piece of several small files."""

    files: range
    size: int
    pieces: int
    group: int = 0


class Catalogue:
    """The pieces of one folder or file of text.

    Args:
        word: PATH or PATH:SPLIT, as in `--data`.
        key: column of the text in parquet, and key in JSON; or of the messages.
        files: some of its files; all by default.

    Attributes:
        name: the word.
        chats: whether the records are conversations.
        num_pieces: number of pieces.
        text_bytes: bytes of text in them; of compressed files, their size on disk.
        piece_bytes: bytes of text that a piece or a part has at most, but for its last document.

    Raises:
        UserError: there is nothing to train on, a file is of a kind that is not read in pieces, or some hold
            conversations and others text.
    """

    def __init__(self, word: str, key: str, files: Sequence[SourceFile] | None = None) -> None:
        self.name, self.key, (path, split) = word, key, split_of(word)
        self.files = _files(Path(path), split, key) if files is None else [*files]
        self.chats = _are_chats(word, self.files, key)
        sizes = [f.stamp[0] for f in self.files]
        groups = {i: _row_groups(f, key, self.chats) for i, f in enumerate(self.files) if f.kind == "rows"}
        self.text_bytes = sum(sizes[i] for i in range(len(sizes)) if i not in groups)
        self.text_bytes += sum(text for of_file in groups.values() for _, text in of_file)
        self.piece_bytes = min(max(self.text_bytes // _PIECES, _LEAST), _MOST)
        self._units = [*self._make_units(groups)]
        self._ends = np.cumsum([unit.pieces for unit in self._units], dtype=np.int64)
        self.num_pieces = int(self._ends[-1]) if len(self._ends) else 0
        if not self.num_pieces:
            raise UserError(f"--data {word}", "its files are empty", "give files with text")

    def piece(self, number: int) -> Piece:
        """Return a piece by its number."""
        at = int(np.searchsorted(self._ends, number, "right"))
        unit = self._units[at]
        within = number - (int(self._ends[at]) - unit.pieces)
        files = tuple(self.files[unit.files.start : unit.files.stop])
        if files[0].kind == "lines":
            begin = within * self.piece_bytes
            return Piece("lines", files, begin, min(begin + self.piece_bytes, unit.size), 0, self.piece_bytes)
        bounds = (unit.size * within // unit.pieces, unit.size * (within + 1) // unit.pieces)
        return Piece(files[0].kind, files, *bounds, unit.group, self.piece_bytes)

    def between(self, after: str | None, until: str) -> Catalogue:
        """Return the catalogue of the files whose names sort after one and up to another, cut into pieces by itself."""
        first = b"" if after is None else os.fsencode(after)
        files = [f for f in self.files if first < os.fsencode(f.name) <= os.fsencode(until)]
        return Catalogue(self.name, self.key, files)

    def identity(self) -> str:
        """Hash the names, sizes and pieces of all files, without opening them."""
        digest = hashlib.sha256(f"{self.piece_bytes}".encode())
        for file in self.files:
            digest.update(f"\n{file.name}\0{file.stamp[0]}\0{file.kind}".encode())
        digest.update(self._ends.tobytes())
        return digest.hexdigest()

    def content_hash(self) -> str:
        """Hash `identity` and blocks of 4 KiB spread evenly over each file: 64 of each, of many files fewer.

        The time of the last change is left out: a copy of the files on another machine is the same data.
        """
        digest, count = hashlib.sha256(self.identity().encode()), max(2, _SAMPLES // len(self.files))
        for file in self.files:
            last = max(file.stamp[0] - _SAMPLE_BYTES, 0)
            try:
                with open(file.path, "rb", buffering=0) as f:
                    samples = min(count, _SAMPLES_OF_ONE)
                    for at in sorted({last * i // (samples - 1) for i in range(samples)}):
                        digest.update(os.pread(f.fileno(), _SAMPLE_BYTES, at))
            except OSError as e:
                raise UserError(file.path, f"cannot be read ({e.strerror})", "check it and its permissions") from None
        return digest.hexdigest()

    def _make_units(self, groups: dict[int, list[tuple[int, int]]]) -> Iterator[_Unit]:
        texts: list[int] = []
        size = 0
        for i, file in enumerate([*self.files, None]):
            if texts and (file is None or file.kind != "texts" or size + file.stamp[0] > self.piece_bytes):
                if size:
                    yield _Unit(range(texts[0], i), len(texts), 1)
                texts, size = [], 0
            if file is None:
                return
            if file.kind == "texts":
                texts.append(i)
                size += file.stamp[0]
            elif file.kind == "rows":
                for number, (rows, text) in enumerate(groups[i]):
                    yield _Unit(range(i, i + 1), rows, min(rows, -(-text // self.piece_bytes)), number)
            elif file.stamp[0]:
                pieces = -(-file.stamp[0] // self.piece_bytes) if file.kind == "lines" else 1
                yield _Unit(range(i, i + 1), file.stamp[0], pieces)


def _files(root: Path, split: str, key: str) -> list[SourceFile]:
    """List the files to train on, sorted by name."""
    given = f"--data {root}"
    if root.is_file():
        return [_source_file(root.name, root, key)]
    if not root.is_dir():
        raise UserError(given, "does not exist", "check the path")
    _refuse_saved(root, given)
    wanted = _SPLITS.get(split)
    if wanted is None:
        raise UserError(f"{given}:{split}", f"is none of {', '.join(_SPLITS)}", f"give {root} or {root}:validation")
    names = sorted((path.relative_to(root).as_posix() for path in _walk(root)), key=os.fsencode)
    records = [name for name in names if _is_records(name)]
    if not records and (any(root.glob("*.idx")) or (root / "index.json").exists()):
        raise missing_index(str(root))  # token files, or those of another program
    read = records or [name for name in names if is_text(root / name)]
    if not read:
        kinds = "no .jsonl, .parquet or other text"
        raise UserError(given, f"holds {kinds} ({len(names)} files)", "give a folder of text, or PREFIX of token files")
    if len(read) < len(names):
        kinds = "neither JSON lines nor parquet" if records else "not UTF-8 text, or .json, .csv or .tsv"
        others = sorted(set(names) - set(read))
        logger.info(f"{root}: {len(others)} of {len(names)} files are {kinds} and left out, the first {others[0]}")
    splits = {name: split_by_name(name) for name in read}
    chosen = [name for name, of in splits.items() if of == wanted or (of is None and wanted == "train")]
    left = sorted(set(splits) - set(chosen))
    if not chosen:
        found = sorted({of or "train" for of in splits.values()})
        raise UserError(
            f"{given}:{split}",
            f"its files are of other splits ({', '.join(found)}), as their names say",
            f"give {root}:{found[0]}, or rename them",
        )
    if left and wanted == "train":
        logger.info(
            f"{root}: {len(left)} of {len(splits)} files are left out, as their names are those of other splits, the "
            f"first {left[0]}; {root}:{splits[left[0]]} reads it"
        )
    return [_source_file(name, root / name, key) for name in chosen]


def split_by_name(name: str) -> str | None:
    """Return the split that a relative path names, by the Hub's rule: its folders first, then its file; or None."""
    *folders, file = name.split("/")
    for part in (*folders, file):
        for word in re.split(r"[-._ \d]+", part.lower()):
            if word in _SPLITS:
                return _SPLITS[word]
    return None


def _walk(root: Path) -> Iterator[Path]:
    for folder, folders, names in os.walk(root):
        folders[:] = [name for name in folders if not name.startswith(".")]
        yield from (path for name in names if not name.startswith(".") and (path := Path(folder, name)).is_file())


def _is_records(name: str) -> bool:
    return kind_of(Path(name)) in (*LINES, ROWS)


def _source_file(name: str, path: Path, key: str) -> SourceFile:
    status = path.stat()
    compressed, kind = path.suffix in (".gz", ".zst"), kind_of(path)
    how: Kind = "texts"
    if kind == ROWS:
        if compressed:
            raise UserError(str(path), "parquet is compressed by itself", "decompress the file")
        how = "rows"
    elif kind in LINES or holds_records(path, key):
        how = "packed" if compressed else "lines"
    return SourceFile(name, str(path), (status.st_size, status.st_mtime_ns), how)


def _are_chats(word: str, files: Iterable[SourceFile], key: str) -> bool:
    """Whether the first records of files are conversations; refuse files of both kinds."""
    found: dict[bool, str] = {}
    for file in files:
        record = first_record(Path(file.path), file.kind)
        if record is not None:
            found.setdefault(holds_conversation(record, key), file.name)
    if len(found) > 1:
        rule = f"holds chats ({found[True]}) and text ({found[False]}), by the first records of its files"
        raise UserError(f"--data {word}", rule, "put them into two folders, and blend these: --data 0.9 A 0.1 B")
    return True in found


def _refuse_saved(root: Path, given: str) -> None:
    """Refuse folders whose files are not text, though they hold some."""
    saved = any((root / name).exists() for name in ("dataset_info.json", "dataset_dict.json"))
    if saved and any(root.glob("**/*.arrow")):
        remedy = "write parquet: datasets.load_from_disk(FOLDER).to_parquet('train.parquet'), each split alone"
        raise UserError(given, "was written by save_to_disk of Hugging Face datasets, as Arrow", remedy)
    configs = _configs(root / "README.md")
    if len(configs) > 1:
        rule = f"has several configurations, by its README.md: {', '.join(configs)[:300]}"
        raise UserError(given, rule, "give the folder of one of them")


def _configs(readme: Path) -> list[str]:
    """List the configurations that the card of a data set on the Hub names."""
    try:
        with readme.open(encoding="utf-8", errors="replace") as f:
            text = f.read(_MAX_README)
    except OSError:
        return []
    head = re.match(r"---\n(.*?)\n---", text, re.DOTALL)
    try:
        card = yaml.safe_load(head[1]) if head else {}
    except (yaml.YAMLError, ValueError, RecursionError):
        return []
    configs = card.get("configs") if isinstance(card, dict) else None
    return [str(c.get("config_name")) for c in configs if isinstance(c, dict)] if isinstance(configs, list) else []


@functools.lru_cache(maxsize=1)
def _warn_large(path: str, size: int) -> None:
    logger.warning(f"{path} has row groups of {size >> 20} MiB, which are decoded as a whole: write smaller ones")


def _row_groups(file: SourceFile, key: str, chats: bool) -> list[tuple[int, int]]:
    """Return (rows, bytes of the columns that are read) of each row group, by the file's footer."""
    parquet: Any = optional_import("pyarrow.parquet", "pyarrow", "data")
    pyarrow: Any = optional_import("pyarrow", "pyarrow", "data")
    try:
        metadata = parquet.read_metadata(file.path)
        # Of a list or struct its leaves, as messages.list.element.role.
        names = [metadata.schema.column(i).path for i in range(metadata.num_columns)]
        roots = chat_columns([name.split(".")[0] for name in names], key) if chats else [key]
        columns = [i for i, name in enumerate(names) if (name.split(".")[0] if chats else name) in roots]
        if not columns:
            raise UserError(f"--key {key}", f"{file.path} has the columns {names}", "name one of them with --key")
        groups = [metadata.row_group(i) for i in range(metadata.num_row_groups)]
        sizes = [(g.num_rows, max(sum(g.column(c).total_uncompressed_size for c in columns), 1)) for g in groups]
    except (pyarrow.ArrowException, OSError) as e:
        raise UserError(file.path, f"cannot be read as parquet ({e})", "download or write it again") from None
    if sizes and max(size for _, size in sizes) > _LARGE_GROUP:
        _warn_large(file.path, max(size for _, size in sizes))
    return sizes
