"""Local copies of files in a store, which the processes of a host share."""

from __future__ import annotations

import contextlib
import fcntl
import os
from collections.abc import Collection, Iterable, Iterator
from pathlib import Path

from megalite.runtime.base.urls import cached_at, is_url, join
from megalite.runtime.places.disk import sync_file
from megalite.runtime.places.store import Store


def bring_tree(url: str, cache_dir: str, deep: bool = False) -> Path:
    """Download a file or a folder to where `cached_at` says; other paths stay as they are.

    What was downloaded of a folder before and is gone from the store is deleted here too.

    Args:
        url: a file or a folder.
        cache_dir: where all copies are.
        deep: bring the folders in it too, and leave out what is hidden.

    Raises:
        StoreError: there is no such thing, or it cannot be read.
    """
    if not is_url(url):
        return Path(url)
    target = cached_at(url, cache_dir)
    parent, _, name = url.rstrip("/").rpartition("/")
    names = [n for n in Store(url).names() if not (deep and n.startswith("."))]
    files = {n for n in names if not n.endswith("/")}
    is_folder = bool(names if deep else files) and files != {name}
    folder, store = (target, Store(url)) if is_folder else (target.parent, Store(parent))
    folder.mkdir(parents=True, exist_ok=True)
    with locked(folder / f".lock_{name}"):
        for n in files if is_folder else (name,):
            size, stamp = store.stamp(n)
            mark = folder / f".stamp_{n}"
            here = (folder / n).stat().st_size if (folder / n).exists() else -1
            if here == size and mark.exists() and mark.read_text() == stamp:
                continue
            store.download(n, folder / f".part_{n}", size)
            sync_file(folder / f".part_{n}")
            os.replace(folder / f".part_{n}", folder / n)
            mark.write_text(stamp)
        if is_folder:
            _delete_others(folder, files)
    if deep and is_folder:
        folders = {n.rstrip("/") for n in names if n.endswith("/")}
        for n in sorted(folders):
            bring_tree(join(url, n) + "/", cache_dir, deep)
        for path in folder.iterdir():
            if path.is_dir() and path.name not in folders:
                for gone in (path, *(below for below in path.rglob("*") if below.is_dir())):
                    _delete_others(gone, ())
    return target


def _delete_others(folder: Path, files: Collection[str]) -> None:
    """Delete what was downloaded into a folder, but for some files; other things may lie beside it."""
    for mark in folder.glob(".stamp_*"):
        if (n := mark.name.removeprefix(".stamp_")) not in files:
            (folder / n).unlink(missing_ok=True)
            mark.unlink(missing_ok=True)


def account(lock: Path, total: Path, added: int, limit: int, kept: Iterable[Path]) -> None:
    """Add to the bytes of what a host keeps in a cache; above the limit delete the oldest, down to nine tenths of it.

    Args:
        lock: lock file of the cache.
        total: file that holds the bytes.
        added: bytes of what was added.
        limit: most bytes.
        kept: all files of the cache, listed above the limit alone.
    """
    with locked(lock):
        try:
            used = added + int(total.read_text())
        except (FileNotFoundError, ValueError):  # none yet, or cut off by a full disk: count anew
            used = limit + 1
        if used > limit:
            files = [(path.lstat(), path) for path in kept]
            used = sum(status.st_size for status, _ in files)
            for status, path in sorted(files, key=lambda file: file[0].st_mtime_ns):
                if used <= limit * 0.9:
                    break
                used -= status.st_size
                path.unlink(missing_ok=True)
        total.write_text(str(used))


@contextlib.contextmanager
def locked(path: Path, wait: bool = True) -> Iterator[bool]:
    """Own a lock file among the processes and threads of a host; where another has it and one is not to wait: False."""
    with path.open("a") as f:
        try:
            fcntl.flock(f, fcntl.LOCK_EX | (0 if wait else fcntl.LOCK_NB))
        except BlockingIOError:
            yield False
        else:
            yield True
