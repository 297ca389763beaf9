"""Object stores, and every other place that fsspec knows by a URL: s3://, gs://, memory://, file://.

Credentials are the environment's, as the store's own tools read them: no URL may hold one. What fails for a while is
tried again with growing pauses, as long as the store's patience lasts; what will not get better (forbidden, missing) is
not.
"""

from __future__ import annotations

import contextlib
import copy
import errno
import functools
import itertools
import logging
import math
import os
import random
import secrets
import threading
import time
from collections.abc import Callable, Iterable
from concurrent.futures import Future, ThreadPoolExecutor, wait
from pathlib import Path
from typing import Any, TypeVar

from megalite.core.base.errors import UserError, describe
from megalite.core.base.log import logger
from megalite.core.base.redact import learn, mask
from megalite.runtime.base.urls import join
from megalite.runtime.base.waits import call, pause, tell
from megalite.runtime.places.disk import rename_flushed

T = TypeVar("T")

# How long a store may be away at the start of a run or a tool, where a wrong name is likelier than an outage.
PATIENCE_S = 30.0
_FIRST_PAUSE_S, _LONGEST_PAUSE_S = 0.2, 15.0
# What arrives damaged is asked for this often: an outage is over some time, damage may be in the store.
_ATTEMPTS = 7
# s3fs repeats a lost part with these pauses: the first, their growth, the longest.
_PART_PAUSES = 0.1, 1.7, 15.0
# Bytes of a part of a large object, and of those that are on their way at once.
_CHUNK, _IN_FLIGHT = 50 << 20, 500 << 20
# Errors of botocore that say nothing about the connection.
_FINAL = ("NoCredentialsError", "PartialCredentialsError", "ParamValidationError", "InvalidRegionError")
# Libraries below that log by these names, and others whose tasks fail with a connection.
_LIBRARIES, _OF_TASKS = ("aiobotocore", "botocore", "fsspec", "gcsfs", "s3fs"), ("aiohttp", "asyncio")
# How the names of files begin that are not written to their end.
_PART = ".part_"
# Names that file systems give to an object's version, the surest first.
_STAMPS = ("ETag", "etag", "generation", "LastModified", "updated", "mtime", "created")
_OPTIONS: dict[str, dict[str, Any]] = {
    "file": {"auto_mkdir": True},
    # One policy of repetition: ours, but for the parts of large uploads.
    "s3": {"config_kwargs": {"connect_timeout": 10, "read_timeout": 30, "retries": {"total_max_attempts": 1}}},
}


class StoreError(UserError):
    """A store did not do what it was asked, after the last attempt; the message holds no credential."""

    def __init__(self, where: str, rule: str) -> None:
        super().__init__(where, rule, "check the name, the network and the credentials in the environment")


class MissingObject(StoreError):
    """There is no such object."""


class _DamageError(OSError):
    """What arrived is not what was sent."""


class _Outage:
    """Whether a store is away, as a process knows: of the operations that find out, which may be many, one says so."""

    def __init__(self) -> None:
        self._is_known, self._lock = False, threading.Lock()

    def begin(self) -> bool:
        """Note that an operation has failed; return whether it is the first."""
        with self._lock:
            is_known, self._is_known = self._is_known, True
        return not is_known

    def end(self) -> None:
        """Note that an operation has succeeded."""
        self._is_known = False


class Store:
    """Objects under a URL, by name; every method tries again what may pass.

    Args:
        url: SCHEME://BUCKET/PREFIX.
        say: told once when the store is away, until it has answered again.
        patience: seconds since its first failure for which an operation is tried again; None: `PATIENCE_S`.

    Raises:
        UserError: fsspec or the scheme's package is not installed.
    """

    def __init__(self, url: str, say: Callable[[str], None] = logger.warning, patience: float | None = None) -> None:
        self.url, self._say = url.rstrip("/"), say
        self._patience = PATIENCE_S if patience is None else patience
        scheme = url.partition("://")[0]
        self._outage = _outage_of(scheme, os.getpid())
        try:
            self.fs = _open(scheme, os.getpid())
        except (ImportError, ValueError) as e:
            remedy = f'pip install "megalite[cloud]", or the package that gives {scheme}:// to fsspec'
            raise UserError(url, f"cannot be opened ({describe(e)})", remedy) from None

    @property
    def parent(self) -> Store:
        """The folder that this one is in."""
        above = copy.copy(self)
        above.url = self.url.rpartition("/")[0]
        return above

    def read(self, name: str, begin: int | None = None, end: int | None = None) -> bytes:
        """Return an object, or bytes [begin, end) of it.

        Raises:
            StoreError: it cannot be read, or is shorter.
        """

        def get() -> bytes:
            size = _IN_FLIGHT if begin is None or end is None else end - begin
            data = call(self.fs, "cat_file", size, self._path(name), start=begin, end=end)
            if begin is not None and end is not None and len(data) != end - begin:
                raise _DamageError(f"{len(data)} bytes came instead of {end - begin}")
            return data

        return self._try(name, get)

    def write(self, name: str, data: bytes) -> None:
        """Write a small object; it appears as a whole."""
        self._put(name, lambda path: call(self.fs, "pipe_file", len(data), path, data))

    def upload(self, name: str, path: str, size: int) -> None:
        """Write a file, in parts if it is large; it appears as a whole, and is there with its size when this returns.

        A part that is lost is sent again by itself, and an attempt ends when nothing arrives for a while.

        Raises:
            StoreError: it is not.
        """

        scheme, is_large = self.url.partition("://")[0], size >= 2 * _CHUNK
        fs = _open(scheme, os.getpid(), self._patience) if is_large else self.fs
        options = {"chunksize": _CHUNK} if scheme == "s3" else {}

        def put(target: str) -> None:
            call(fs, "put_file", min(size, _IN_FLIGHT), path, target, **options)
            if (there := call(self.fs, "info", 0, target)["size"]) != size:
                raise _DamageError(f"{there} of {size} bytes arrived")

        self._put(name, put)

    def download(self, name: str, path: Path, size: int, check: Callable[[Path], str] = lambda path: "") -> None:
        """Copy an object of a known size to a new file; `check` says what is wrong with it, "" if nothing is."""

        def get() -> None:
            try:
                if size > _CHUNK:
                    self._get_parts(name, path, size)
                else:
                    call(self.fs, "get_file", size, self._path(name), str(path))
            except OSError as e:
                if e.errno not in (errno.ENOSPC, errno.EDQUOT):
                    raise
                rule = f"has no room for {size:,} bytes of {self._path(name)}"
                raise UserError(f"the disk of {path.parent}", rule, "free some, or name another --cache-dir") from None
            if (there := path.stat().st_size) != size:
                raise _DamageError(f"{there} of {size} bytes arrived")
            if wrong := check(path):
                raise _DamageError(wrong)

        self._try(name, get)

    def _get_parts(self, name: str, path: Path, size: int) -> None:
        """Download ranges, each with attempts of its own; none begins after one that has failed."""
        with path.open("wb") as f:

            def get(begin: int) -> None:
                os.pwrite(f.fileno(), self.read(name, begin, min(begin + _CHUNK, size)), begin)

            threads = ThreadPoolExecutor(4)
            ranges = [threads.submit(get, begin) for begin in range(0, size, _CHUNK)]
            try:
                for done in ranges:
                    _await([done])
                    done.result()
            finally:
                threads.shutdown(wait=False, cancel_futures=True)
                # The file is theirs until they end.
                _await([begun for begun in ranges if not begun.cancelled()])

    def names(self, folder: str = "") -> dict[str, int]:
        """List a folder: object -> its size, with "/" at the end -> 0 for a folder in it; empty if there is none.

        What is not written to its end is left out.
        """

        def get() -> dict[str, int]:
            try:
                entries = call(self.fs, "ls", 0, self._path(folder), detail=True, refresh=True)
            except FileNotFoundError:
                return {}
            # An object of the folder's own name and a slash stands for the folder: consoles of stores make it.
            entries = [e for e in entries if e["type"] == "directory" or not e["name"].endswith("/")]
            kinds = {e["name"].rstrip("/").rpartition("/")[2]: e for e in entries}
            kinds = {n: e for n, e in kinds.items() if not n.startswith(_PART)}
            folders = {n for n, e in kinds.items() if e["type"] == "directory"}
            return {f"{n}/" if n in folders else n: 0 if n in folders else e["size"] for n, e in kinds.items()}

        return self._try(folder, get)

    def size(self, name: str) -> int:
        """Return the bytes of an object."""
        return self._try(name, lambda: int(call(self.fs, "info", 0, self._path(name))["size"]))

    def stamp(self, name: str) -> tuple[int, str]:
        """Return the bytes of an object, and what changes when it is written again."""
        entry = self._try(name, lambda: call(self.fs, "info", 0, self._path(name)))
        return int(entry["size"]), str(next((entry[key] for key in _STAMPS if entry.get(key)), ""))

    def delete(self, names: Iterable[str]) -> None:
        """Delete objects; those that are missing are no error."""
        for name in names:

            def remove(path: str = self._path(name)) -> None:
                try:
                    call(self.fs, "rm_file", 0, path)
                except FileNotFoundError:
                    return

            self._try(name, remove)

    def _put(self, name: str, write: Callable[[str], None]) -> None:
        """Write an object by its path, so that it appears as a whole: object stores see to that, a folder does not."""

        def put() -> None:
            path = self._path(name)
            if not getattr(self.fs, "local_file", False):
                write(path)
                return
            folder, _, last = path.rpartition("/")
            part = f"{folder}/{_PART}{secrets.token_hex(4)}_{last}"
            here, there = (Path(self.fs._strip_protocol(url)) for url in (part, path))
            try:
                write(part)
                rename_flushed(here, there)
            finally:
                with contextlib.suppress(OSError):  # it has its name, or there is nothing to delete
                    here.unlink()

        self._try(name, put)

    def _path(self, name: str) -> str:
        return join(self.url, name) if name else self.url

    def _try(self, name: str, call: Callable[[], T]) -> T:
        where = self._path(name)
        pause_s = _FIRST_PAUSE_S
        deadline = 0.0
        num_damaged = 0
        for attempt in itertools.count(1):
            try:
                answer = call()
                self._outage.end()
                return answer
            except FileNotFoundError as e:
                self._outage.end()
                raise MissingObject(where, f"does not exist ({self._describe(e)})") from None
            except UserError:
                raise
            except Exception as e:
                if getattr(e, "errno", 0) in (errno.ENOSPC, errno.EDQUOT):
                    raise UserError(
                        where, "does not fit on this disk", "free space, or name another --cache-dir"
                    ) from None
                what = self._describe(e)
                now = time.monotonic()
                is_damaged = isinstance(e, _DamageError)
                if isinstance(e, PermissionError) or type(e).__name__ in _FINAL:
                    raise StoreError(where, what) from None
                # An attempt may take longer than the patience: it begins with the first failure.
                deadline = deadline or now + self._patience
                left, num_damaged = math.inf if is_damaged else deadline - now, num_damaged + is_damaged
                if left <= 0 or num_damaged >= _ATTEMPTS:
                    raise StoreError(where, f"{what}, tried {attempt} times") from None
                if attempt == 1 and self._outage.begin():
                    self._say(f"{where}: {what}; trying again" + f" for up to {left:g} s" * (not is_damaged))
                pause(min(pause_s * random.uniform(0.5, 1.5), left))
                pause_s = min(2 * pause_s, _LONGEST_PAUSE_S)
        raise AssertionError

    def _describe(self, e: Exception) -> str:
        learn(self.fs)  # which may have got other credentials since
        return describe(e)


def _await(answers: list[Future[None]]) -> None:
    """Wait for other threads; the signs of life are this one's, as those of others do not count."""
    while wait(answers, 1.0).not_done:
        tell()


@functools.cache
def _outage_of(scheme: str, pid: int) -> _Outage:
    """Return what a process knows of a store."""
    return _Outage()


@functools.cache
def _open(scheme: str, pid: int, patience_with_parts: float = -1.0) -> Any:
    """Open a file system for a process; a client of S3 costs a tenth of a second of processor time.

    With some patience it repeats a request of itself: of a large upload only the part that was lost.
    """
    import fsspec

    in_parts = patience_with_parts >= 0
    # No listing is kept, and no connection is shared with what other code opens.
    options = {"use_listings_cache": False, "skip_instance_cache": scheme != "memory", **_OPTIONS.get(scheme, {})}
    if scheme == "s3" and in_parts:
        # botocore for errors of the server (500), s3fs for throttling and connections.
        options["config_kwargs"] = {**options["config_kwargs"], "retries": {"total_max_attempts": 3}}
    fs = fsspec.filesystem(scheme, **options)
    if hasattr(fs, "retries"):
        fs.retries = _repeats(patience_with_parts)
    for name in _LIBRARIES:
        _shorten_log(logging.getLogger(name))
    if fs.async_impl:
        fs.loop.call_soon_threadsafe(fs.loop.set_exception_handler, _hear)
    learn(fs)
    return fs


def _repeats(patience: float) -> int:
    """Return how often s3fs tries a request within some patience."""
    pause_s, growth, longest = _PART_PAUSES
    for attempts in itertools.count(1):
        if patience <= 0:
            return attempts
        patience -= min(pause_s * growth ** (attempts - 1), longest)
    raise AssertionError


class _Lines(logging.Handler):
    """Log warnings of other libraries, which may come with a traceback, as one line of ours."""

    def emit(self, record: logging.LogRecord) -> None:
        e = record.exc_info[1] if record.exc_info else None
        logger.log(record.levelno, f"{record.name}: {mask(record.getMessage())}{f' ({describe(e)})' if e else ''}")


def _shorten_log(library: logging.Logger) -> None:
    """Have a library's warnings logged as lines of ours, unless somebody has asked for them."""
    if all(isinstance(handler, logging.NullHandler) for handler in library.handlers):
        library.addHandler(_Lines(logging.WARNING))
        library.propagate = False


def _hear(loop: Any, context: dict[str, Any]) -> None:
    """Log what no operation has heard of, as one line.

    When a connection is cut, a library's tasks leave errors behind; the operation has failed by then, and says so.
    """
    e = context.get("exception")
    if e is None or isinstance(e, OSError) or type(e).__module__.partition(".")[0] in (*_LIBRARIES, *_OF_TASKS):
        return
    logger.warning(f"{context.get('message', 'error')}: {describe(e)}")
