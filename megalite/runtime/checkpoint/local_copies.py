"""Local copies of checkpoints in a store: manifest and COMMIT at once, shards when they are needed."""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import zlib
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from megalite.core.base.log import logger
from megalite.runtime.base.untrusted import BadFile, parse_json, read_json
from megalite.runtime.base.urls import cached_at, check_url, is_url, join
from megalite.runtime.places.disk import BLOCK, sync_file
from megalite.runtime.places.downloads import locked
from megalite.runtime.places.names import MODEL
from megalite.runtime.places.place import COMMIT, MANIFEST
from megalite.runtime.places.store import Store, StoreError
from megalite.runtime.places.store_place import StorePlace

# A local copy says in this file where its shards are, and their sizes.
SOURCE = "SOURCE"
_MAX_SOURCE = 64 << 20
# After so many, it is the store that has another manifest than the committed one.
_DOWNLOADS = 3


def local_copy(path: str, cache_dir: str) -> Path:
    """Return a local copy of a checkpoint in a store, or of a run's newest; return other paths as they are.

    Raises:
        StoreError: there is none, or the store cannot be read.
    """
    if not is_url(path):
        return Path(path)
    root, _, name = locate(path).rpartition("/")
    return fetch(Store(root), name, cached_at(root, cache_dir) / "fetched")


def locate(url: str) -> str:
    """Return the URL of a checkpoint: itself, or a run's newest.

    Raises:
        StoreError: there is none, or the store cannot be read.
    """
    check_url("checkpoint", url)
    root, _, name = url.rstrip("/").rpartition("/")
    if not StorePlace(Store(root)).exists(f"{name}/{COMMIT}"):
        root = join(url, "checkpoints")
        name = next(iter(StorePlace(Store(root)).committed()), "")
        if not name:
            raise StoreError(url, "holds no committed checkpoint")
    return join(root, name)


def fetch(store: Store, name: str, into: Path, alone: bool = False) -> Path:
    """Make a local copy of a checkpoint: manifest and COMMIT now, shards when they are read; return its folder.

    The processes of a host may call this at once. With `alone` copies of other checkpoints in the folder are deleted:
    nobody else reads them. Beside a difference comes a copy of its base.

    Raises:
        StoreError: the store cannot be read, or lacks the base.
    """
    folder = _fetch(store, name, into, alone)
    if (base := _base_in(folder)) is not None:
        found = StorePlace(store).snapshot(*base)
        if not found:
            raise StoreError(join(store.url, name), f"is a difference of {base[0]}, which is not there")
        _fetch(store, found, into, alone=False)
    return folder


def _base_in(folder: Path) -> tuple[str, str] | None:
    """Return name and SHA-256 of the base that a manifest names, if it names one; the reader checks the rest."""
    data = (folder / MANIFEST).read_bytes()
    if b'"base"' not in data:
        return None
    try:
        base = parse_json(data)["base"]
        name, sha256 = base["name"], base["manifest"]
    except (BadFile, KeyError, TypeError):
        return None
    sane = isinstance(name, str) and isinstance(sha256, str) and MODEL.fullmatch(name)
    return (name, sha256) if sane else None


def _fetch(store: Store, name: str, into: Path, alone: bool) -> Path:
    into.mkdir(parents=True, exist_ok=True)
    folder, part = into / name, into / f".part_{name}"
    with locked(into / ".lock"):
        if _is_whole(folder):
            return folder
        for other in into.iterdir():
            if other.is_dir() and other != folder and (alone or other.name.startswith(".part_")):
                shutil.rmtree(other)
        part.mkdir()
        sizes = {n: size for n, size in store.names(name).items() if not n.endswith("/")}
        for _ in range(_DOWNLOADS):
            for n in (MANIFEST, COMMIT):
                store.download(f"{name}/{n}", part / n, sizes.get(n, 0))
                sync_file(part / n)
            if _is_whole(part):
                break
        (part / SOURCE).write_text(json.dumps({"url": join(store.url, name), "files": sizes}))
        if folder.exists():
            # What is damaged in the store comes again as it was; others may be reading the copy.
            if all(_sha256(part / n) == _sha256(folder / n) for n in (MANIFEST, COMMIT)):
                shutil.rmtree(part)
                return folder
            shutil.rmtree(folder)
        os.rename(part, folder)
    return folder


def _sha256(path: Path) -> str:
    """Return the SHA-256 of a file; "" if there is none."""
    digest = hashlib.sha256()
    try:
        with path.open("rb") as f:
            while chunk := f.read(BLOCK):
                digest.update(chunk)
    except FileNotFoundError:
        return ""
    return digest.hexdigest()


def _is_whole(folder: Path) -> bool:
    """Whether the manifest is the committed one: of a copy that is not, the reader would say so at every start."""
    try:
        return (folder / COMMIT).read_bytes() == _sha256(folder / MANIFEST).encode() + b"\n"
    except FileNotFoundError:
        return False


def source_of(folder: Path) -> dict[str, Any]:
    """Return where the rest of a local copy is, {"url", "files"}; no files if it is no copy."""
    try:
        return read_json(folder / SOURCE, _MAX_SOURCE)
    except (FileNotFoundError, NotADirectoryError):
        return {"url": "", "files": {}}


def bring(folder: Path, name: str, size: int, crc32: tuple[int, ...]) -> None:
    """Download a shard of a local copy if it is missing, and check it."""
    path = folder / name
    if (path.exists() and path.stat().st_size == size) or name not in (source := source_of(folder))["files"]:
        return
    # A rank that has verified a checkpoint keeps no checksums, and may read more of it.
    sums = crc32 or _sums(folder, name)

    def wrong(path: Path) -> str:
        with path.open("rb") as f:
            for block, crc in enumerate(sums):
                if zlib.crc32(f.read(BLOCK)) != crc:
                    return f"block {block} differs from its checksum (CRC32)"
        return ""

    with locked(folder / f".lock_{name}"):
        if not path.exists() or path.stat().st_size != size:
            part = folder / f".part_{name}"
            Store(source["url"]).download(name, part, size, wrong)
            sync_file(part)
            os.rename(part, path)
            logger.info(f"downloaded {source['url']}/{name} ({size:,} bytes)")


def _sums(folder: Path, name: str) -> Sequence[int]:
    files = parse_json((folder / MANIFEST).read_bytes())["files"]
    return next((entry["crc32"] for entry in files if entry["name"] == name), ())
