"""Stores that fail for a while: how long they are waited for, and how much is said of it."""

from __future__ import annotations

import contextlib
import gc
import logging
import os
import secrets
import socket
import struct
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import aiohttp
import pytest

from megalite.runtime.places import store as store_module
from megalite.runtime.places.store import Store, StoreError
from tests.conftest import leading_to
from tests.stores import KEY_ID, S3, SECRET, BreakingProxy, Fault


@pytest.fixture(autouse=True)
def _fast(monkeypatch: pytest.MonkeyPatch) -> None:
    """Pauses a hundredth as long."""
    monkeypatch.setattr(store_module, "_FIRST_PAUSE_S", 0.002)
    monkeypatch.setattr(store_module, "_LONGEST_PAUSE_S", 0.05)


@pytest.mark.parametrize("kind", ["503", "cut-request"])
def test_an_outage_is_one_line(s3: S3, proxy: BreakingProxy, kind: str) -> None:
    """Of as many failures as make the pauses long, in two operations; the next outage is another line."""
    said = list[str]()
    store = Store(s3.url(secrets.token_hex(4)), said.append, patience=60.0)
    for outage in (1, 2):
        proxy.faults = [Fault("PUT .*/a", kind, 20)]
        operations = [threading.Thread(target=store.write, args=("a", b"12")) for _ in range(2)]
        for operation in operations:
            operation.start()
        for operation in operations:
            operation.join()
        assert proxy.faults[0].happened == 20
        assert [line.count("trying again for up to 60 s") for line in said] == [1] * outage
    # What arrives damaged after it is counted by itself.
    proxy.faults = [Fault("GET .*/a", kind.replace("-request", ""), 20), Fault("GET .*/a", "short", 5)]
    assert store.read("a", 0, 2) == b"12"
    assert proxy.faults[1].happened == 5


def test_patience_ends(s3: S3, proxy: BreakingProxy) -> None:
    proxy.faults = [Fault("PUT .*/a", "503")]
    for patience in (0.0, 0.5):
        before = proxy.faults[0].happened
        with pytest.raises(StoreError, match=r"tried \d+ times?"):
            Store(s3.url("p"), patience=patience).write("a", b"1")
        tried = proxy.faults[0].happened - before
        assert (tried == 1) if patience == 0 else (tried > 1)


class Hasty:
    """Begins an upload in parts for whoever asks, and resets the connection a moment later, each time another one."""

    def __init__(self) -> None:
        self.server, self.count = socket.create_server(("127.0.0.1", 0)), 0
        self.port = self.server.getsockname()[1]
        threading.Thread(target=self.serve, daemon=True).start()

    def serve(self) -> None:
        while True:
            try:
                connection, _ = self.server.accept()
            except OSError:
                return
            threading.Thread(target=self.answer, args=(connection,), daemon=True).start()

    def answer(self, connection: socket.socket) -> None:
        with connection, contextlib.suppress(OSError):
            if connection.recv(1 << 16).startswith(b"POST"):
                text = b"<InitiateMultipartUploadResult><UploadId>u</UploadId></InitiateMultipartUploadResult>"
                connection.send(b"HTTP/1.1 200 OK\r\nContent-Length: %d\r\n\r\n" % len(text) + text)
                self.count += 1
                time.sleep(self.count % 20 * 1e-4)
            connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))


@pytest.fixture
def hasty() -> Iterator[Hasty]:
    made = Hasty()
    with leading_to(made.port):
        yield made
    made.server.close()


def settle_tasks() -> None:
    """Have what tasks of the library left behind noticed."""
    gc.collect()
    done = threading.Event()
    store_module._open("s3", os.getpid()).loop.call_soon_threadsafe(done.set)
    assert done.wait(120)


@pytest.mark.full
def test_a_cut_connection_leaves_no_traceback(
    hasty: Hasty, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Of the library's tasks, which end with it at the worst moment in some of 60 uploads; each says what there is."""
    monkeypatch.setattr(store_module, "_CHUNK", 1 << 20)
    (tmp_path / "shard").write_bytes(bytes(3 << 20))

    def upload(number: int) -> str:
        try:
            Store("s3://bucket/cut", patience=0.0).upload("a", str(tmp_path / "shard"), 3 << 20)
        except StoreError as e:
            return str(e)
        return "arrived"

    with ThreadPoolExecutor(20) as threads:
        ends = list(threads.map(upload, range(60)))
    settle_tasks()
    assert all("tried 1 times" in end for end in ends)
    assert hasty.count == 60
    assert [record.getMessage() for record in caplog.records] == []


def test_what_a_task_leaves_behind_is_a_line_at_most(s3: S3, caplog: pytest.LogCaptureFixture) -> None:
    """Errors of connections none: the operation has failed by then. Others have been heard of by nobody."""
    Store(s3.url("tasks"))

    async def fail(e: Exception) -> None:
        raise e

    def begin() -> None:
        for e in (aiohttp.ClientConnectionResetError("cut"), aiohttp.ClientPayloadError("cut"), ValueError(SECRET)):
            loop.create_task(fail(e))

    loop = store_module._open("s3", os.getpid()).loop
    loop.call_soon_threadsafe(begin)
    settle_tasks()
    settle_tasks()
    (record,) = caplog.records
    assert (record.name, record.exc_info) == ("megalite", None)
    assert "ValueError: ..." in record.getMessage()


def test_a_warning_of_a_library_is_a_line(s3: S3, caplog: pytest.LogCaptureFixture) -> None:
    """As when credentials cannot be renewed: a traceback, which may quote them."""
    Store(s3.url("warnings"))
    try:
        raise OSError(f"{KEY_ID} is not known")
    except OSError:
        logging.getLogger("botocore.credentials").warning("Refreshing failed", exc_info=True)
    # pytest looks into loggers that do not propagate, too.
    (record,) = (record for record in caplog.records if not record.name.startswith("botocore"))
    assert (record.name, record.exc_info) == ("megalite", None)
    assert record.getMessage() == "botocore.credentials: Refreshing failed (OSError: ... is not known)"
