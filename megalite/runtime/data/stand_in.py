"""Local stand-ins for token files in a store: blocks are downloaded when they are first read, for all ranks of a host.

`PREFIX.idx` and `PREFIX.json` are downloaded as a whole. Of `PREFIX.bin` and `PREFIX.mask.bin` there is an empty file
of the same size, and beside it `NAME.units/` with the units (whole hashed blocks) that a process of this host has read.
The oldest are deleted when the units of all files together take more than a limit.
"""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

from megalite.core.base.errors import UserError
from megalite.core.base.log import logger
from megalite.runtime.base.untrusted import BadFile, read_json
from megalite.runtime.base.urls import cached_at, is_url
from megalite.runtime.places.downloads import account, locked
from megalite.runtime.places.store import PATIENCE_S, MissingObject, Store

# Whole blocks of the checksums, of 32 KiB and of the older 256 KiB.
UNIT = 256 << 10
_SOURCE, _MAX_SOURCE = "SOURCE", 1 << 16
_LOCKS = 64


def bring_prefix(prefix: str, cache_dir: str, limit: int, patience: float = PATIENCE_S) -> None:
    """Make the stand-in of token files at a URL, where `cached_at` says; the processes of a host may call this at once.

    Args:
        prefix: URL without `.bin` / `.idx`; for other words, which are paths or weights, nothing is made.
        cache_dir: where all stand-ins are.
        limit: most bytes of units of all files.
        patience: seconds for which a later read of a unit is tried again while the store is away.

    Raises:
        StoreError: a file is missing or cannot be read.
    """
    if not is_url(prefix):
        return
    url, _, name = prefix.rpartition("/")
    store, folder = Store(url), cached_at(url, cache_dir)
    folder.mkdir(parents=True, exist_ok=True)
    with locked(folder / f".lock_{name}"):
        for suffix, must in ((".idx", True), (".bin", True), (".mask.bin", False), (".json", False)):
            path, units = folder / (name + suffix), folder / f"{name}{suffix}.units"
            try:
                size, stamp = store.stamp(path.name)
            except MissingObject:
                if must:
                    raise
                path.unlink(missing_ok=True)
                continue
            cache = str(Path(cache_dir).expanduser())
            source = {"url": url, "size": size, "stamp": stamp, "cache": cache, "limit": limit, "patience": patience}
            known = _read_source(units)
            if path.exists() and {**known, "limit": limit, "patience": patience} == source:
                if known != source:
                    _write_source(units, source)
                continue
            # New, or another object than the one that the units are of. The folder stays: a run may be reading from it.
            units.mkdir(exist_ok=True)
            for old in units.glob("[!.]*"):
                old.unlink(missing_ok=True)
            part = folder / f".part_{path.name}"
            if suffix.endswith(".bin"):
                with part.open("wb") as f:
                    f.truncate(size)
            else:
                store.download(path.name, part, size)
            os.replace(part, path)
            _write_source(units, source)


class Units:
    """What a stand-in for a file holds of it, and the store that has the rest.

    Attributes:
        size: bytes of the file.
    """

    def __init__(self, path: Path) -> None:
        self._folder, self._name = _folder_of(path), path.name
        source = _read_source(self._folder)
        self.size = source["size"]
        self._stamp = source["stamp"]
        self._limit = source["limit"]
        self._cache, self._store = Path(source["cache"]), Store(source["url"], patience=source["patience"])

    @classmethod
    def of(cls, path: Path) -> Units | None:
        """Return the units of a stand-in that has them; None for any other file."""
        return cls(path) if path.name.endswith(".bin") and (_folder_of(path) / _SOURCE).exists() else None

    def read(self, begin: int, size: int) -> bytes:
        """Return bytes [begin, begin + size), downloaded if no process of this host has read them yet.

        Raises:
            StoreError: they cannot be downloaded.
            UserError: the object is not the one that was there at the start.
        """
        pieces = []
        for unit in range(begin // UNIT, (begin + size - 1) // UNIT + 1):
            first, last = max(begin - unit * UNIT, 0), min(begin + size - unit * UNIT, UNIT)
            pieces.append(self._read_unit(unit, first, last))
        return b"".join(pieces)

    def forget(self, begin: int, size: int) -> None:
        """Delete the units of some bytes, which are not what they should be: the next read downloads them."""
        for unit in range(begin // UNIT, (begin + size - 1) // UNIT + 1):
            self._path(unit).unlink(missing_ok=True)

    def _path(self, unit: int) -> Path:
        return self._folder / f"{unit:010d}"

    def _read_unit(self, unit: int, first: int, last: int) -> bytes:
        """Return bytes [first, last) of a unit."""
        path, end = self._path(unit), min((unit + 1) * UNIT, self.size)
        if (piece := _read_if_there(path, end - unit * UNIT, first, last)) is not None:
            return piece
        with locked(self._folder / f".lock_{unit % _LOCKS}"):
            if (piece := _read_if_there(path, end - unit * UNIT, first, last)) is not None:
                return piece
            data = self._store.read(self._name, unit * UNIT, end)
            if self._store.stamp(self._name) != (self.size, self._stamp):
                rule = "was changed while training was reading it"
                raise UserError(f"{self._store.url}/{self._name}", rule, "start again with the data you want")
            part = self._folder / f".part_{unit}"
            try:
                part.write_bytes(data)
                os.replace(part, path)
                self._account(len(data))
            except OSError as e:  # the data are here all the same
                part.unlink(missing_ok=True)
                logger.warning(f"{path} is not kept, and is downloaded again when it is needed: {e.strerror or e}")
        return data[first:last]

    def _account(self, added: int) -> None:
        units = self._cache.glob("**/*.units/[0-9]*")
        account(self._cache / ".units", self._cache / ".units_bytes", added, self._limit, units)


def _folder_of(path: Path) -> Path:
    return path.with_name(f"{path.name}.units")


def _read_if_there(path: Path, size: int, first: int, last: int) -> bytes | None:
    """Return bytes [first, last) of a file of a known size; None if there is none, or one of another size."""
    try:
        with path.open("rb", buffering=0) as f:
            return os.pread(f.fileno(), last - first, first) if os.fstat(f.fileno()).st_size == size else None
    except FileNotFoundError:
        return None


def _write_source(units: Path, source: dict[str, Any]) -> None:
    part = units / f".part_{_SOURCE}"
    part.write_text(json.dumps(source))
    os.replace(part, units / _SOURCE)


def _read_source(units: Path) -> dict[str, Any]:
    try:
        return read_json(units / _SOURCE, _MAX_SOURCE)
    except (OSError, BadFile):
        return {}
