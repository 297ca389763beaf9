"""Local copies of files in a store, which the processes of a host share."""

from __future__ import annotations

import contextlib
import fcntl
import os
from collections.abc import Iterator
from pathlib import Path

from megalite.runtime.base.urls import cached_at, is_url
from megalite.runtime.places.store import Store


def bring_tree(url: str, cache_dir: str) -> Path:
    """Download a file, or a folder without those in it, to where `cached_at` says; other paths stay as they are.

    What was downloaded of a folder before and is gone from the store is deleted here too.

    Raises:
        StoreError: there is no such thing, or it cannot be read.
    """
    if not is_url(url):
        return Path(url)
    target = cached_at(url, cache_dir)
    parent, _, name = url.rstrip("/").rpartition("/")
    files = {n: size for n, size in Store(url).names().items() if not n.endswith("/")}
    folder, store = (target, Store(url)) if files and set(files) != {name} else (target.parent, Store(parent))
    folder.mkdir(parents=True, exist_ok=True)
    with locked(folder / f".lock_{name}"):
        for n in files or {name: 0}:
            size, stamp = store.stamp(n)
            mark = folder / f".stamp_{n}"
            here = (folder / n).stat().st_size if (folder / n).exists() else -1
            if here == size and mark.exists() and mark.read_text() == stamp:
                continue
            store.download(n, folder / f".part_{n}", size)
            flush(folder / f".part_{n}")
            os.replace(folder / f".part_{n}", folder / n)
            mark.write_text(stamp)
        for mark in folder.glob(".stamp_*") if folder == target else ():
            if (n := mark.name.removeprefix(".stamp_")) not in files:
                (folder / n).unlink(missing_ok=True)
                mark.unlink(missing_ok=True)
    return target


def flush(path: Path) -> None:
    """Have a file's content reach the disk: after a power failure a name must not lead to zeros."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


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
