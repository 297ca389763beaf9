"""What every store promises: files, fsspec's memory, a server that speaks S3, and an emulator of Google's store."""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import resource
import secrets
import signal
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from megalite.runtime.places.store import MissingObject, Store, StoreError
from tests.stores import BreakingProxy, Fault, secrets_in

KINDS = ("file", "memory", "s3", "gs")
OLD, NEW = b"old", os.urandom(1 << 20)
# Bytes of `NEW` that a file takes before it is full.
HALF = len(NEW) // 2


@dataclass
class Place:
    """A kind of store.

    Attributes:
        url: of a folder that is empty.
        proxy: what stands before the server, if there is one.
    """

    kind: str
    url: str
    proxy: BreakingProxy | None = None
    store: Store = field(init=False)

    def __post_init__(self) -> None:
        self.store = Store(self.url, patience=0.0)

    @property
    def writes(self) -> str:
        """Pattern of the requests that write; Google's name the object in their body."""
        return "PUT .*/half" if self.kind == "s3" else "(PUT|POST) .*upload"

    @contextlib.contextmanager
    def breaking(self) -> Iterator[None]:
        """Have writes fail when half of them is done."""
        if self.proxy is None:
            with full_at(HALF):
                yield
            return
        # gcsfs repeats of itself what a cut connection has lost, with long pauses.
        self.proxy.faults = [Fault(self.writes, "cut-request" if self.kind == "s3" else "403")]
        yield
        self.proxy.faults = []

    def kill_in(self, write: Callable[[], None]) -> None:
        """Write in another process, which is killed when half of it is done."""

        def act() -> None:
            if self.proxy is not None:
                write()
                return
            signal.signal(signal.SIGXFSZ, signal.SIG_DFL)
            with full_at(HALF):
                write()

        child = multiprocessing.get_context("fork").Process(target=act)
        if self.proxy is not None:
            self.proxy.faults = [Fault(self.writes, "call-before", 1, action=lambda _: child.kill())]
        child.start()
        child.join(300)
        assert child.exitcode == -(signal.SIGXFSZ if self.proxy is None else signal.SIGKILL)


@contextlib.contextmanager
def full_at(size: int) -> Iterator[None]:
    """Have this process write no file larger than this."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


@pytest.fixture(params=KINDS)
def place(request: pytest.FixtureRequest, tmp_path: Path) -> Place:
    kind, name = request.param, secrets.token_hex(4)
    proxy = request.getfixturevalue({"s3": "proxy", "gs": "gcs_proxy"}[kind]) if kind in ("s3", "gs") else None
    above = {"file": f"file://{tmp_path}", "memory": "memory://m", "s3": "s3://bucket", "gs": "gs://bucket"}[kind]
    return Place(kind, f"{above}/contract/{name}", proxy)


def test_what_is_written_is_read(place: Place, tmp_path: Path) -> None:
    store, path = place.store, tmp_path / "local"
    path.write_bytes(NEW)
    store.write("a/b", b"12345")
    store.upload("a/large", str(path), len(NEW))
    assert (store.read("a/b"), store.read("a/b", 1, 3), store.read("a/b", 3)) == (b"12345", b"23", b"45")
    assert (store.read("a/large"), store.size("a/large")) == (NEW, len(NEW))
    assert store.read("a/large", HALF, HALF + 9) == NEW[HALF : HALF + 9]
    with pytest.raises(StoreError, match="bytes came instead of 9"):
        store.read("a/b", 1, 10)
    store.download("a/large", tmp_path / "copy", len(NEW))
    assert (tmp_path / "copy").read_bytes() == NEW
    store.write("a/empty", b"")
    assert (store.read("a/empty"), store.size("a/empty")) == (b"", 0)


def test_listings(place: Place) -> None:
    """Of what is in a folder, not below it; what is deleted is gone, and what was never there is no error."""
    store = place.store
    assert store.names() == {}
    for name, data in (("a/b", b"12345"), ("a/c/d", b"1"), ("e", b"12")):
        store.write(name, data)
    assert store.names() == {"a/": 0, "e": 2}
    assert store.names("a") == {"b": 5, "c/": 0}
    assert Store(f"{place.url}/a/c").parent.names() == store.names("a")
    store.delete(["a/b", "a/nothing", "e"])
    assert (store.names("a"), "e" in store.names()) == ({"c/": 0}, False)
    assert store.read("a/c/d") == b"1"


def test_what_is_missing(place: Place, tmp_path: Path) -> None:
    """It is another error than that of a store that fails."""
    store = place.store
    for ask in (
        store.read,
        store.size,
        store.stamp,
        lambda name: store.read(name, 0, 1),
        lambda name: store.download(name, tmp_path / "copy", 1),
    ):
        with pytest.raises(MissingObject, match=f"{place.url}/nothing"):
            ask("nothing")
    assert store.names("nothing") == {}


def test_a_stamp_changes_with_the_object(place: Place) -> None:
    """Also where its size stays."""
    place.store.write("a", b"1")
    before = place.store.stamp("a")
    assert place.store.stamp("a") == before
    place.store.write("a", b"2")
    assert place.store.stamp("a") != before


@pytest.mark.parametrize("there", [False, True], ids=["new", "replaced"])
@pytest.mark.parametrize("killed", [False, True], ids=["fails", "killed"])
@pytest.mark.parametrize("how", ["write", "upload"])
def test_half_a_write_leaves_what_was_there(place: Place, tmp_path: Path, how: str, killed: bool, there: bool) -> None:
    """The old object or none; the next attempt goes through."""
    if place.kind == "memory":
        pytest.skip("nothing ends half way in this process's memory")
    store, path = place.store, tmp_path / "local"
    path.write_bytes(NEW)
    if there:
        store.write("a/half", OLD)

    def write() -> None:
        # A client of its own, as it may be another process that writes.
        writer = Store(place.url, patience=0.0)
        if how == "write":
            writer.write("a/half", NEW)
        else:
            writer.upload("a/half", str(path), len(NEW))

    if killed:
        place.kill_in(write)
    else:
        with place.breaking(), pytest.raises(StoreError, match=f"{place.url}/a/half"):
            write()
        if place.kind == "file":
            assert os.listdir(tmp_path / place.url.removeprefix(f"file://{tmp_path}/") / "a") == ["half"] * there
    assert store.names("a") == ({"half": len(OLD)} if there else {})
    if there:
        assert store.read("a/half") == OLD
    write()
    assert store.names("a") == {"half": len(NEW)}
    assert store.read("a/half") == NEW


def test_what_is_forbidden_is_asked_for_once(place: Place) -> None:
    """But by gcsfs, which repeats of itself. The line that says so holds no credentials, which some servers quote."""
    if place.proxy is None:
        pytest.skip("no server that forbids")
    place.proxy.faults = [Fault("(PUT|POST) ", "403")]
    with pytest.raises(StoreError, match=f"{place.url}/a: ") as e:
        Store(place.url).write("a", b"1")
    assert secrets_in(str(e.value).encode()) == []
    assert place.proxy.faults[0].happened == 1 or place.kind == "gs"
