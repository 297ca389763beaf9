"""A copy of a checkpoint that needs nothing besides itself: no base, and no package to decode it."""

from __future__ import annotations

import os
import secrets
import shutil
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

from megalite.core.base.errors import UserError
from megalite.runtime.checkpoint.manifest import FileEntry, committable, read_manifest
from megalite.runtime.checkpoint.reader import ShardReader
from megalite.runtime.checkpoint.safetensors_io import read_exactly
from megalite.runtime.places.disk import sync_folder, write_file
from megalite.runtime.places.folder_place import seal
from megalite.runtime.places.names import TEMPORARY

_STAGE = 8 << 20


def flatten(folder: Path, out: Path) -> int:
    """Write a checkpoint again as plain safetensors shards, one for each of its own; verify all of it first.

    Args:
        folder: a committed checkpoint: whole, coded, or a difference beside its base.
        out: the new folder, which appears when it is complete.

    Returns:
        Bytes of the new shards.

    Raises:
        UserError: `out` exists, or the checkpoint or its base is damaged or missing.
    """
    if os.path.lexists(out):
        raise UserError(f"--flatten {out}", "exists", "choose another name")
    reader = ShardReader(folder, read_manifest(folder))
    out.parent.mkdir(parents=True, exist_ok=True)
    parts = out.with_name(f"{TEMPORARY}{out.name}_{secrets.token_hex(8)}")
    try:
        reader.verify()
        parts.mkdir()
        files = tuple(_plain_copy(reader, number, parts) for number in range(len(reader.manifest.files)))
        seal(parts, *committable(replace(reader.manifest, files=files, base=None)))
        # It exists with this name.
        os.rename(parts, out)
        sync_folder(out.parent)
    finally:
        reader.close()
        shutil.rmtree(parts, ignore_errors=True)
    return sum(file.size for file in files)


def _plain_copy(reader: ShardReader, number: int, parts: Path) -> FileEntry:
    """Write the safetensors file that a shard stands for, and return its entry."""
    entry = reader.manifest.files[number]
    name = f"rank_{number:05d}.safetensors"
    size, sums = write_file(parts / name, _plain_bytes(reader, number))
    return FileEntry(name, size, entry.header, tuple(sums))


def _plain_bytes(reader: ShardReader, number: int) -> Iterator[memoryview]:
    entry, coded = reader.manifest.files[number], reader.coded(number)
    path, fd = reader.path / entry.name, reader.descriptor(number)
    for begin, end in ((0, entry.header), (entry.header, entry.plain_size)):
        for at in range(begin, end, _STAGE):
            view = memoryview(bytearray(min(_STAGE, end - at)))
            if coded is None or at < entry.header:
                read_exactly(fd, view, at, path)
            else:
                coded.read(view, at)
            yield view
