"""Checkpoints in a store: which are committed, whose place it is, and local copies that bring shards when needed.

`CHECKPOINTS/step_NNNNNNNN-ID/` holds what a local checkpoint holds. `owner` names the run that writes here, the
last one that started. `latest` names the last commit, for listings that lag behind.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import shutil
import zlib
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from megalite.core.base.log import logger
from megalite.runtime.base.untrusted import BadFile, parse_json, read_json
from megalite.runtime.places.downloads import flush, locked
from megalite.runtime.places.store import MissingObject, Store, StoreError, cached_at, check_url, is_url, join

OWNER, LATEST = "owner", "latest"
_NAME = re.compile(r"step_(\d{8,})-[0-9a-f]{16}")
# A local copy says in this file where its shards are, and their sizes.
SOURCE = "SOURCE"
_MAX_SOURCE = 64 << 20
_BLOCK = 8 << 20


def step_of(name: str) -> int:
    """Return the step of a full checkpoint in a store; -1 for another name."""
    match = _NAME.fullmatch(name)
    return int(match[1]) if match else -1


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
    if not exists(Store(root), f"{name}/COMMIT"):
        root = join(url, "checkpoints")
        name = next(iter(committed(Store(root))), "")
        if not name:
            raise StoreError(url, "holds no committed checkpoint")
    return join(root, name)


def describe(owner: str) -> str:
    """Describe the owner of a place in a store."""
    try:
        content = parse_json(owner.encode())
        return f"{content['run_id']} on {content['host']}"
    except (BadFile, KeyError, TypeError):
        return "of an unknown owner"


def committed(store: Store) -> list[str]:
    """List the names of committed full checkpoints, newest first."""
    found = {name.rstrip("/") for name in store.names() if name.endswith("/")}
    with contextlib.suppress(MissingObject):
        found.add(store.read(LATEST).decode(errors="replace"))
    steps = sorted((name for name in found if step_of(name) >= 0), key=lambda name: (step_of(name), name), reverse=True)
    # Listings may be old: the object itself decides.
    return [name for name in steps if exists(store, f"{name}/COMMIT")]


def exists(store: Store, name: str) -> bool:
    """Whether there is such an object."""
    try:
        store.size(name)
    except MissingObject:
        return False
    return True


def set_aside(store: Store, name: str, claim: dict[str, Any]) -> None:
    """Before the commit of `name`: take what the run does not continue out of what a run resumes from."""
    mine = {*claim["written"], name}
    for other in (n for n in committed(store) if step_of(n) > claim["base"] and n not in mine):
        # Nothing can be renamed in a store: without COMMIT no run resumes from it, with this file none deletes it.
        store.write(f"{other}/ASIDE", store.read(f"{other}/COMMIT"))
        store.delete([f"{other}/COMMIT"])


def tidy(store: Store, name: str, claim: dict[str, Any]) -> None:
    """After the commit of `name`: point `latest` at it, and prune older ones."""
    store.write(LATEST, name.encode())
    keep = {*committed(store)[: claim["keep_last"]], *claim["keep"], name}
    for other in {n.rstrip("/") for n in store.names() if n.endswith("/")} - keep:
        # Of a later one other ranks may be uploading their parts already.
        if 0 <= step_of(other) < step_of(name) and "ASIDE" not in (files := store.names(other)):
            store.delete(f"{other}/{n}" for n in sorted(files, key=lambda n: n != "COMMIT"))


def fetch(store: Store, name: str, into: Path, alone: bool = False) -> Path:
    """Make a local copy of a checkpoint: manifest and COMMIT now, shards when they are read; return its folder.

    The processes of a host may call this at once. With `alone` copies of other checkpoints in the folder are deleted:
    nobody else reads them.
    """
    into.mkdir(parents=True, exist_ok=True)
    folder, part = into / name, into / f".part_{name}"
    with locked(into / ".lock"):
        if folder.exists():
            return folder
        for other in into.iterdir():
            if other.is_dir() and (alone or other.name.startswith(".part_")):
                shutil.rmtree(other)
        part.mkdir()
        sizes = {n: size for n, size in store.names(name).items() if not n.endswith("/")}
        for n in ("manifest.json", "COMMIT"):
            store.download(f"{name}/{n}", part / n, sizes.get(n, 0))
            flush(part / n)
        (part / SOURCE).write_text(json.dumps({"url": join(store.url, name), "files": sizes}))
        os.rename(part, folder)
    return folder


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
                if zlib.crc32(f.read(_BLOCK)) != crc:
                    return f"block {block} differs from its checksum (CRC32)"
        return ""

    with locked(folder / f".lock_{name}"):
        if not path.exists() or path.stat().st_size != size:
            part = folder / f".part_{name}"
            Store(source["url"]).download(name, part, size, wrong)
            flush(part)
            os.rename(part, path)
            logger.info(f"downloaded {source['url']}/{name} ({size:,} bytes)")


def _sums(folder: Path, name: str) -> Sequence[int]:
    files = parse_json((folder / "manifest.json").read_bytes())["files"]
    return next((entry["crc32"] for entry in files if entry["name"] == name), ())
