"""Waits for a store: who wants to know hears each second that one goes on, and none is without a bound.

That is for file systems of fsspec that are asynchronous, as those of s3://, gs://, abfs:// and https:// are. Others
(file://, sftp://) wait as long as their library does, and nobody hears of it.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

# An attempt fails that takes longer than this and what its bytes take at this many per second.
_STALL_S, _SLOWEST = 60.0, 1e6
# Called at least once a second while this process waits for a store, which is bounded.
on_wait: list[Callable[[], None]] = []


def tell() -> None:
    """Call those who want to know that a store is at work."""
    for listener in on_wait:
        listener()


def pause(seconds: float) -> None:
    """Sleep."""
    end = time.monotonic() + seconds
    while (left := end - time.monotonic()) > 0:
        tell()
        time.sleep(min(left, 1.0))


def call(fs: Any, method: str, size: int, *args: object, **options: object) -> Any:
    """Call a method of a file system, and give up if nothing of `size` bytes arrives for too long.

    Libraries have no time-out for a body that is not taken, or that comes in drops. A file system that is not
    asynchronous is called as it is.
    """
    # Here: the writer of checkpoints imports this file, and most have no store.
    import asyncio
    from concurrent.futures import wait

    from fsspec.callbacks import Callback

    try:
        if not fs.async_impl:
            return getattr(fs, method)(*args, **options)
        progress, patience = Callback(), _STALL_S + size / _SLOWEST
        if method == "put_file":
            options["callback"] = progress
        answer = asyncio.run_coroutine_threadsafe(getattr(fs, f"_{method}")(*args, **options), fs.loop)
        arrived, since = progress.value, time.monotonic()
        while not wait([answer], 1.0).done:
            tell()
            if progress.value != arrived:
                arrived, since = progress.value, time.monotonic()
            elif time.monotonic() - since > patience:
                answer.cancel()
                raise OSError(f"nothing arrived for {patience:.0f} s")
        return answer.result()
    finally:
        tell()
