"""Uploads to a real S3 server, through a proxy that breaks them: nothing is half-visible, and nothing local is lost."""

from __future__ import annotations

import base64
import itertools
import json
import multiprocessing
import os
import queue
import re
import secrets
import signal
import socket
import sys
import threading
import time
import urllib.parse
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from megalite.core.base.errors import UserError, describe
from megalite.core.mesh.context import ParallelContext
from megalite.core.mesh.grid import Grid
from megalite.core.options.train import TrainConfig
from megalite.runtime.base import waits
from megalite.runtime.base.urls import cached_at, check_url
from megalite.runtime.checkpoint import local_copies, upload
from megalite.runtime.checkpoint.claim import Claim
from megalite.runtime.checkpoint.fragments import assemble
from megalite.runtime.checkpoint.manifest import Manifest, commit_text, read_manifest
from megalite.runtime.checkpoint.mirror import Mirror, SaveError, copy_together
from megalite.runtime.checkpoint.pruning import Keep
from megalite.runtime.checkpoint.safetensors_io import BadCheckpoint
from megalite.runtime.checkpoint.save import Checkpointer
from megalite.runtime.checkpoint.upload import Part, Uploader
from megalite.runtime.checkpoint.writer import receive, say
from megalite.runtime.options.run import Config, RunConfig
from megalite.runtime.places import store as store_module
from megalite.runtime.places.downloads import bring_tree
from megalite.runtime.places.names import step_of
from megalite.runtime.places.store import Store, StoreError
from megalite.runtime.places.store_place import OWNER, StorePlace
from tests.faults import checkpoint_states as cs
from tests.stores import KEY_ID, S3, SECRET, TOKEN, BreakingProxy, Fault, secrets_in
from tests.unit.checkpoint.parts import make_part, remote_manifest, upload_parts
from tests.workers import WorkerPool


@pytest.fixture(autouse=True)
def _fast(monkeypatch: pytest.MonkeyPatch) -> None:
    """Pauses a hundredth as long."""
    monkeypatch.setattr(store_module, "_FIRST_PAUSE_S", 0.002)
    monkeypatch.setattr(store_module, "_LONGEST_PAUSE_S", 0.05)


@pytest.fixture
def url(s3: S3) -> str:
    """A place of the test's own."""
    return s3.url(f"runs/{secrets.token_hex(4)}/checkpoints")


def test_a_checkpoint_of_two_ranks_arrives_and_comes_back(url: str, tmp_path: Path) -> None:
    parts = [make_part(tmp_path, url, 3, rank, 2) for rank in (1, 0)]
    sent = {p.fragment["file"]["name"]: os.pread(p.descriptor, 1 << 20, 0) for p in parts}
    assert [r["error"] for r in upload_parts(url, *parts)] == ["", ""]
    store = Store(url)
    assert StorePlace(store).committed() == ["step_00000003-" + "0" * 16]
    copy = local_copies.fetch(store, StorePlace(store).committed()[0], tmp_path / "fetched")
    assert sorted(p.name for p in copy.iterdir()) == ["COMMIT", "SOURCE", "manifest.json"]
    manifest = remote_manifest(copy)
    for entry in manifest.files:
        local_copies.bring(copy, entry.name, entry.size, entry.crc32)
        assert (copy / entry.name).read_bytes() == sent[entry.name]


STRONG = (("rank_00000.safetensors", "cut-request"), ("COMMIT", "403"))
PASSING = {
    "throttled": Fault("PUT .*rank_00000.safetensors", "503", 3),
    "cut in the middle of a part": Fault("PUT .*rank_00000.safetensors", "cut-request", 2),
    "cut in the middle of an answer": Fault("GET .*list-type", "cut", 2),
    "no answer": Fault("PUT .*COMMIT", "hang", 1),
    "a wrong byte": Fault("PUT .*rank_00000.safetensors", "corrupt-request", 2),
}


@pytest.mark.parametrize("fault", PASSING, ids=lambda name: name.replace(" ", "-"))
def test_what_passes_is_tried_again(
    url: str, tmp_path: Path, proxy: BreakingProxy, monkeypatch: pytest.MonkeyPatch, fault: str
) -> None:
    made = PASSING[fault]
    if made.kind == "hang":
        options = store_module._OPTIONS["s3"]["config_kwargs"]
        monkeypatch.setitem(store_module._OPTIONS, "s3", {"config_kwargs": {**options, "read_timeout": 3}})
        store_module._open.cache_clear()
    proxy.faults = [Fault(made.match, made.kind, made.times)]
    assert upload_parts(url, make_part(tmp_path, url, 1))[0]["error"] == ""
    assert proxy.faults[0].happened == made.times
    assert len(StorePlace(Store(url)).committed()) == 1


@pytest.mark.parametrize("kind", ["503", pytest.param("cut-request", marks=pytest.mark.full)])
def test_of_a_large_object_only_the_lost_part_is_repeated(
    s3: S3, tmp_path: Path, proxy: BreakingProxy, monkeypatch: pytest.MonkeyPatch, kind: str
) -> None:
    """Up and down: a shard of 40 GB has 800 parts, of which some are always lost."""
    monkeypatch.setattr(store_module, "_CHUNK", 5 << 20)
    store, name, data = Store(s3.url("large")), secrets.token_hex(4), os.urandom((11 << 20) + 7)
    (tmp_path / "shard").write_bytes(data)
    proxy.faults = [Fault("PUT .*partNumber=2", kind, 3)]
    store.upload(name, str(tmp_path / "shard"), len(data))
    sent = [line for line in proxy.requests if f"/{name}?" in line]
    assert proxy.faults[0].happened == 3
    assert [sum(part in line for line in sent) for part in ("?uploads", "partNumber=1", "partNumber=3")] == [1, 1, 1]
    before = len(proxy.requests)
    proxy.faults = [Fault(f"GET .*{name}", "503" if kind == "503" else "cut", 2)]
    store.download(name, tmp_path / "copy", len(data))
    assert (tmp_path / "copy").read_bytes() == data
    assert len([line for line in proxy.requests[before:] if "GET" in line]) == 3 + 2


@pytest.mark.full
def test_a_kill_in_the_middle_of_a_large_object_leaves_nothing_visible(
    url: str, tmp_path: Path, proxy: BreakingProxy, monkeypatch: pytest.MonkeyPatch
) -> None:
    """At its second part; the same checkpoint is uploaded by the next process."""
    monkeypatch.setattr(store_module, "_CHUNK", 5 << 20)
    first = make_part(tmp_path, url, 1)
    assert upload_parts(url, first)[0]["error"] == ""
    part = make_part(tmp_path, url, 2, save_id="1" * 16, elements=3 << 20, written=[first.name])
    child = multiprocessing.get_context("fork").Process(target=upload_parts, args=(url, part))
    proxy.faults = [Fault("PUT .*partNumber=2", "call-before", 1, action=lambda _: child.kill())]
    child.start()
    child.join(120)
    assert (child.exitcode, proxy.faults[0].happened) == (-signal.SIGKILL, 1)
    store = Store(url)
    assert StorePlace(store).committed() == [first.name]
    assert [name for name in store.names() if name.startswith("step_00000002")] == []
    assert upload_parts(url, part)[0]["error"] == ""
    assert step_of(StorePlace(store).committed()[0]) == 2


def test_a_disk_without_room_for_a_download(folder_url: str, tmp_path: Path) -> None:
    """One line that names the disk, and not the credentials; once there is room it is brought."""
    part = make_part(tmp_path, folder_url, 1)
    assert upload_parts(folder_url, part)[0]["error"] == ""
    copy = local_copies.fetch(Store(folder_url), part.name, tmp_path / "fetched")
    entry = remote_manifest(copy).files[0]
    (copy / f".part_{entry.name}").symlink_to("/dev/full")
    with pytest.raises(UserError, match="the disk of .*fetched.* has no room for"):
        local_copies.bring(copy, entry.name, entry.size, entry.crc32)
    (copy / f".part_{entry.name}").unlink()
    local_copies.bring(copy, entry.name, entry.size, entry.crc32)


@pytest.mark.full
def test_an_upload_that_is_not_taken_is_repeated(
    s3: S3, tmp_path: Path, proxy: BreakingProxy, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A server that reads nothing of a body: no time-out of a library ends that."""
    monkeypatch.setattr(waits, "_STALL_S", 5.0)
    monkeypatch.setattr(waits, "_SLOWEST", 1e9)
    (tmp_path / "shard").write_bytes(bytes(16 << 20))
    proxy.faults = [Fault("PUT .*stalled", "hang", 1)]
    said = list[str]()

    def hear(text: str) -> None:
        said.append(text)
        monkeypatch.setattr(waits, "_STALL_S", 300.0)  # the second attempt takes as long as it takes

    Store(s3.url("stalled"), hear).upload("a", str(tmp_path / "shard"), 16 << 20)
    assert "nothing arrived for 5 s; trying again" in said[0]


@pytest.mark.parametrize(
    ("match", "kind"),
    [
        pytest.param(match, kind, marks=[] if (match, kind) in STRONG else pytest.mark.full)
        for match, kind in (
            *(("rank_00000.safetensors", kind) for kind in ("503", "507", "cut-request")),
            *(("manifest.json", kind) for kind in ("403", "507")),
            *(("COMMIT", kind) for kind in ("503", "403", "cut-request")),
        )
    ],
)
def test_a_store_that_takes_nothing_leaves_nothing_visible(
    url: str, tmp_path: Path, proxy: BreakingProxy, kind: str, match: str
) -> None:
    """The attempts are bounded, the local file stays, and what was committed before is whole."""
    assert upload_parts(url, make_part(tmp_path, url, 1))[0]["error"] == ""
    proxy.faults = [Fault(f"PUT .*{match}", kind)]
    part = make_part(tmp_path, url, 2, save_id="1" * 16, written=["step_00000001-" + "0" * 16])
    error = upload_parts(url, part, patience=0.5)[0]["error"]
    assert match in error
    assert secrets_in(error.encode()) == []
    assert proxy.faults[0].happened == 1 if kind == "403" else proxy.faults[0].happened > 1
    assert (tmp_path / "step_2_rank_00000.safetensors").stat().st_size > 10_000
    proxy.faults = []
    assert [name[:13] for name in StorePlace(Store(url)).committed()] == ["step_00000001"]
    # The next one takes away what was left of it.
    part = make_part(tmp_path, url, 3, save_id="2" * 16, written=["step_00000001-" + "0" * 16])
    assert upload_parts(url, part)[0]["error"] == ""
    names = sorted(name for name in Store(url).names() if name.startswith("step"))
    assert names == ["step_00000001-" + "0" * 16 + "/", "step_00000003-" + "2" * 16 + "/"]


def test_a_missing_part_is_not_committed(url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The run's metrics are there with rank 0's part: its disk may be lost before others commit."""
    monkeypatch.setattr(upload, "_PATIENCE_S", 1.0)
    part = make_part(tmp_path, url, 1, 0, 2)
    (tmp_path / "metrics.jsonl").write_text("1\n")
    report = upload_parts(url, part, patience=0.0)[0]
    assert "rank_00001.json" in report["error"]
    assert StorePlace(Store(url)).committed() == []
    assert Store(url).parent.read("metrics.jsonl") == b"1\n"


def test_a_rank_that_is_ahead_keeps_its_part(url: str, tmp_path: Path) -> None:
    """Rank 1 has uploaded its part of step 2 when rank 0 commits step 1, and deletes what is left of older saves."""
    first = [make_part(tmp_path, url, 1, rank, 2) for rank in (1, 0)]
    ahead = make_part(tmp_path, url, 2, 1, 2, save_id="1" * 16)
    last = make_part(tmp_path, url, 2, 0, 2, save_id="1" * 16, written=[first[0].name])
    for part in (ahead, *first, last):
        assert upload_parts(url, part)[0]["error"] == ""
    assert [name[:13] for name in StorePlace(Store(url)).committed()] == ["step_00000002", "step_00000001"]


def test_an_object_that_became_short_is_not_committed(url: str, tmp_path: Path) -> None:
    part = make_part(tmp_path, url, 1, 1, 2)
    assert upload_parts(url, part)[0]["error"] == ""
    store = Store(url)
    name = f"{part.name}/rank_00001.safetensors"
    store.write(name, store.read(name)[:-1])
    report = upload_parts(url, make_part(tmp_path, url, 1, 0, 2))[0]
    assert "rank_00001.safetensors: has" in report["error"]
    assert StorePlace(store).committed() == []


@pytest.mark.parametrize("kind", ["short", "corrupt", "cut"])
def test_a_download_that_was_broken_on_its_way_is_repeated(
    url: str, tmp_path: Path, proxy: BreakingProxy, kind: str
) -> None:
    part = make_part(tmp_path, url, 1)
    sent = os.pread(part.descriptor, 1 << 20, 0)
    assert upload_parts(url, part)[0]["error"] == ""
    store = Store(url)
    copy = local_copies.fetch(store, StorePlace(store).committed()[0], tmp_path / "fetched")
    proxy.faults = [Fault("GET .*safetensors", kind, 2)]
    entry = remote_manifest(copy).files[0]
    local_copies.bring(copy, entry.name, entry.size, entry.crc32)
    assert (copy / entry.name).read_bytes() == sent
    assert proxy.faults[0].happened == 2


def damaged_copy(url: str, tmp_path: Path) -> tuple[Path, Any]:
    """A copy of the store's checkpoint, whose first shard has changed there by a bit, and that shard's entry."""
    store = Store(url)
    name = StorePlace(store).committed()[0]
    data = bytearray(store.read(f"{name}/rank_00000.safetensors"))
    data[-1] ^= 1
    store.write(f"{name}/rank_00000.safetensors", bytes(data))
    copy = local_copies.fetch(store, name, tmp_path / "fetched")
    return copy, remote_manifest(copy).files[0]


def test_damage_in_the_store_is_an_error(url: str, tmp_path: Path) -> None:
    assert upload_parts(url, make_part(tmp_path, url, 1))[0]["error"] == ""
    copy, entry = damaged_copy(url, tmp_path)
    with pytest.raises(StoreError, match="differs from its checksum"):
        local_copies.bring(copy, entry.name, entry.size, entry.crc32)
    assert not (copy / entry.name).exists()


def test_keep_last_and_what_a_run_does_not_continue(url: str, tmp_path: Path) -> None:
    names: list[str] = []
    for step in (1, 2, 3):
        part = make_part(tmp_path, url, step, save_id=str(step) * 16, written=names)
        names.append(part.name)
        assert upload_parts(url, part)[0]["error"] == ""
    store = Store(url)
    assert StorePlace(store).committed() == [names[2], names[1]]
    # Another run continues from step 2: step 3 is set aside, and step 2 never pruned.
    mine: list[str] = []
    for step in (3, 4, 5):
        part = make_part(tmp_path / "b", url, step, save_id="b" * 16, base=2, keep=[names[1]], written=mine)
        mine.append(part.name)
        assert upload_parts(url, part)[0]["error"] == ""
    assert StorePlace(store).committed() == [mine[2], mine[1], names[1]]
    assert "ASIDE" in store.names(names[2])
    assert f"{names[0]}/" not in store.names()
    assert f"{mine[0]}/" not in store.names()


@pytest.mark.parametrize(("match", "newest"), [("latest", "step_00000005"), ("ASIDE", "step_00000008")])
def test_what_is_abandoned_is_set_aside_before_the_commit(
    url: str, tmp_path: Path, proxy: BreakingProxy, match: str, newest: str
) -> None:
    """A host that dies after its commit has not left a later, abandoned checkpoint; if it cannot be set aside, none."""
    assert upload_parts(url, make_part(tmp_path, url, 8, save_id="8" * 16))[0]["error"] == ""
    proxy.faults = [Fault(f"PUT .*/{match}", "403")]
    report = upload_parts(url, make_part(tmp_path, url, 5, save_id="5" * 16, base=4))[0]
    assert bool(report["error"]) == (match == "ASIDE")
    proxy.faults = []
    assert [name[:13] for name in StorePlace(Store(url)).committed()] == [newest]


@pytest.mark.full
def test_a_listing_that_is_old(url: str, tmp_path: Path, proxy: BreakingProxy) -> None:
    """It names what is deleted and lacks what is new: the newest checkpoint is found, and nothing that is gone."""
    names: list[str] = []
    store = Store(url)
    proxy.faults = [Fault("GET .*list-type.*delimiter", "replay", 0)]
    for step in (1, 2, 3, 4):
        part = make_part(tmp_path, url, step, save_id=str(step) * 16, written=names)
        names.append(part.name)
        assert upload_parts(url, part)[0]["error"] == ""
        if step == 2:
            old = store.names()
    assert {n.rstrip("/") for n in old} >= {names[0], names[1]}
    real = Store.names

    def names_of(self: Store, folder: str = "") -> dict[str, int]:
        return old if not folder else real(self, folder)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Store, "names", names_of)
        assert StorePlace(store).committed() == [names[3]]


def test_two_runs_on_one_place(url: str, tmp_path: Path) -> None:
    """The one that started last has it; the other ends without a trace in what can be resumed from."""
    first, second = make_part(tmp_path, url, 1), make_part(tmp_path / "b", url, 2, save_id="1" * 16, owner="other")
    owner = json.dumps({"run_id": "abc", "host": "elsewhere"})
    second.job["remote"]["owner"] = owner
    assert upload_parts(url, second, owner=owner)[0]["error"] == ""
    report = upload_parts(url, first, owner=owner)[0]
    assert report["taken"]
    assert "has been taken by run abc on elsewhere" in report["error"]
    assert StorePlace(Store(url)).committed() == [second.name]


def test_a_held_part_is_uploaded_when_released(url: str, tmp_path: Path) -> None:
    Store(url).write(OWNER, b"me")
    reports: queue.Queue[dict[str, Any]] = queue.Queue()
    uploader = Uploader(url, reports.put, 30.0)
    assert not uploader.release("step_00000002-" + "0" * 16)
    for step in (1, 2):
        uploader.add(make_part(tmp_path, url, step, hold=True))
        (tmp_path / f"step_{step}_rank_00000.safetensors").unlink()
    assert uploader.release("step_00000002-" + "0" * 16)
    assert reports.get(timeout=300)["error"] == ""
    assert [name[:13] for name in StorePlace(Store(url)).committed()] == ["step_00000002"]


def test_manifest_of_fragments_is_the_one_of_a_local_save() -> None:
    with pytest.raises(BadCheckpoint):
        Manifest.from_json(assemble({"run_id": "", "step": 0, "topology": {}, "meta": {}}, []).to_json(), "m")


def test_urls() -> None:
    assert cached_at("s3://b/x/y", "/c") == Path("/c/s3/b/x/y")
    assert cached_at("runs/x", "/c") == Path("runs/x")
    for bad in (
        "s3://me:secret@b/x",
        "s3://b/x?token=secret",
        "s3://",
        "s3://b/../c",
        "S3://secret/x",
        "simplecache::s3://secret/x",
    ):
        with pytest.raises(Exception, match="--run-dir") as e:
            check_url("--run-dir", bad)
        assert "secret" not in str(e.value)

    check_url("--run-dir", "abfs://container@account/x")
    wrong: tuple[dict[str, Any], ...] = (
        {"init_from_hf": "s3://me:secret@b/x"},
        {"calibration": "s3://secret/x"},
        {"run_dir": "memory://m/x"},
    )
    for options in wrong:
        with pytest.raises(UserError) as e:
            RunConfig(**options)
        assert "secret" not in str(e.value)
    with pytest.raises(UserError, match="--offload-dir: must be a path on this machine"):
        Config(train=TrainConfig(offload="optimizer", offload_dir="s3://b/x"))
    with pytest.raises(UserError, match="--recover process with --run-dir s3://b/x"):
        RunConfig(recover="process", run_dir="s3://b/x")


@pytest.mark.parametrize(
    "text",
    [
        "http://user:hidden@minio:9000/x refused",
        "Authorization: Bearer hidden",
        "{'Authorization': 'Bearer hidden'}",
        "https://a/b?sv=1&sig=hidden&x=1",
        "AccountName=a;AccountKey=hidden==;x",
        "password=hidden",
    ],
)
def test_no_error_shows_a_credential(text: str) -> None:
    assert "hidden" not in describe(OSError(text))


@pytest.mark.parametrize("secret", [KEY_ID, SECRET, TOKEN])
def test_what_is_looked_for_would_be_found(tmp_path: Path, secret: str) -> None:
    """In what the tests of stores leave: after each of them its files and its log are searched."""
    for left in (secret, urllib.parse.quote(secret, ""), base64.b64encode(f"user:{secret}@".encode()).decode()):
        (tmp_path / "log").write_text(f"x{left}y")
        assert secrets_in(tmp_path / "log") == [secret]
    assert secrets_in(b"s3://bucket/runs") == []


@pytest.mark.parametrize("fails", [True, False], ids=["fails", "arrives"])
def test_a_large_download_ends_with_the_first_range_that_failed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, fails: bool
) -> None:
    """And the waiting thread shows that it is alive: here no range arrives before it has done so."""
    monkeypatch.setattr(store_module, "_CHUNK", 1)
    begun, alive, waiting = list[int](), threading.Event(), threading.get_ident()
    monkeypatch.setattr(waits, "on_wait", [lambda: alive.set() if begun and threading.get_ident() == waiting else None])

    def read(_: Store, name: str, begin: int, end: int) -> bytes:
        begun.append(begin)
        if fails and begin == 0:
            raise StoreError(name, "tried 7 times")
        if not alive.wait(120):
            raise StoreError(name, "nobody has seen a sign of life")
        return b"x"

    monkeypatch.setattr(Store, "read", read)
    store = Store(f"file://{tmp_path}")
    if fails:
        with pytest.raises(StoreError, match="tried 7 times"):
            store.download("a", tmp_path / "copy", 40)
        assert len(begun) <= 5
    else:
        store.download("a", tmp_path / "copy", 40)
        assert (tmp_path / "copy").read_bytes() == b"x" * 40


def test_a_large_object_has_all_attempts_where_nothing_else_repeats(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(store_module, "_CHUNK", 1)
    # By a clock of its own: how many attempts fit into a second depends on the machine.
    monkeypatch.setattr(store_module, "time", SimpleNamespace(monotonic=itertools.count(0, 0.04).__next__))
    said = list[str]()
    store = Store(f"file://{tmp_path}/store", said.append, patience=0.5)
    (tmp_path / "shard").write_bytes(b"1234")
    (tmp_path / "store").write_text("no folder")
    with pytest.raises(StoreError, match=r"tried \d\d+ times"):
        store.upload("a", str(tmp_path / "shard"), 4)
    assert len(said) == 1


def test_notes_that_nobody_reads_hold_up_no_upload() -> None:
    """As in a notebook: what would block fails here."""
    reader, writer = socket.socketpair()
    writer.setblocking(False)
    for _ in range(5000):
        say(writer, {"note": ""})
    say(writer, {"upload": "a"})
    writer.close()
    heard = list[dict[str, Any]]()
    while (message := receive(reader)) is not None:
        heard.append(message[0])
    reader.close()
    assert heard[0] == {"note": ""}
    assert heard[-1] == {"upload": "a"}


def test_a_missing_package_is_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "gcsfs", None)
    with pytest.raises(Exception, match=r"megalite\[cloud\]"):
        Store("gs://bucket/x")


@pytest.fixture
def folder_url(tmp_path: Path) -> str:
    """A place in a folder that stands for a store."""
    return f"file://{tmp_path}/store/checkpoints"


def test_a_copy_knows_the_checksums(folder_url: str, tmp_path: Path) -> None:
    """Also for a rank that has dropped them after it had verified its share."""
    assert upload_parts(folder_url, make_part(tmp_path, folder_url, 1))[0]["error"] == ""
    copy, entry = damaged_copy(folder_url, tmp_path)
    with pytest.raises(StoreError, match="differs from its checksum"):
        local_copies.bring(copy, entry.name, entry.size, ())


def test_a_copy_that_lost_its_end_is_downloaded_again(folder_url: str, tmp_path: Path) -> None:
    """As a power failure leaves it: an existing name is not enough."""
    part = make_part(tmp_path, folder_url, 1)
    sent = os.pread(part.descriptor, 1 << 20, 0)
    assert upload_parts(folder_url, part)[0]["error"] == ""
    copy = local_copies.fetch(Store(folder_url), part.name, tmp_path / "fetched")
    entry = remote_manifest(copy).files[0]
    (copy / entry.name).write_bytes(sent[:-1])
    local_copies.bring(copy, entry.name, entry.size, entry.crc32)
    assert (copy / entry.name).read_bytes() == sent
    tree = tmp_path / "tree"
    tree.mkdir()
    (tree / "a").write_bytes(b"123")
    path = bring_tree(f"file://{tree}", str(tmp_path / "cache")) / "a"
    path.write_bytes(b"12")
    bring_tree(f"file://{tree}", str(tmp_path / "cache"))
    assert path.read_bytes() == b"123"


def test_a_manifest_that_is_damaged_on_its_way_is_downloaded_again(
    s3: S3, url: str, proxy: BreakingProxy, tmp_path: Path
) -> None:
    """The same command read the damaged copy at every start, and advised to restore a checkpoint that was whole."""
    part = make_part(tmp_path, url, 1)
    assert upload_parts(url, part)[0]["error"] == ""
    proxy.faults = [Fault("GET .*/manifest.json", "corrupt", 2)]
    copy = local_copies.fetch(Store(url), part.name, tmp_path / "fetched")
    assert proxy.faults[0].happened == 2
    assert remote_manifest(copy).files
    # A copy on this disk that has become damaged.
    (copy / "manifest.json").write_bytes((copy / "manifest.json").read_bytes()[:-1])
    assert remote_manifest(local_copies.fetch(Store(url), part.name, tmp_path / "fetched")).files
    # What is damaged in the store is said to be, and read again at the next start.
    proxy.faults = [Fault("GET .*/manifest.json", "corrupt")]
    with pytest.raises(BadCheckpoint, match="differs from the one in COMMIT"):
        read_manifest(local_copies.fetch(Store(url), part.name, tmp_path / "elsewhere"))
    here = (tmp_path / "elsewhere" / part.name).stat().st_ino
    assert local_copies.fetch(Store(url), part.name, tmp_path / "elsewhere").stat().st_ino == here
    proxy.faults = []
    assert remote_manifest(local_copies.fetch(Store(url), part.name, tmp_path / "elsewhere")).files


def test_copies_of_others_stay(folder_url: str, tmp_path: Path) -> None:
    """Two tools read two checkpoints; the run itself keeps one copy."""
    for step in (1, 2):
        part = make_part(tmp_path, folder_url, step, save_id=str(step) * 16, written=["step_00000001-" + "1" * 16])
        assert upload_parts(folder_url, part)[0]["error"] == ""
    store, into = Store(folder_url), tmp_path / "fetched"
    new, old = (local_copies.fetch(store, name, into) for name in StorePlace(store).committed())
    assert new.exists()
    new.rename(into / "other")
    local_copies.fetch(store, new.name, into, alone=True)
    assert not old.exists()


def test_parts_that_no_other_host_sees_go(folder_url: str, tmp_path: Path) -> None:
    """Held and replaced, failed, and uploaded: nothing of them stays on the disk once a later one is uploaded."""
    reports: queue.Queue[dict[str, Any]] = queue.Queue()
    uploader = Uploader(folder_url, reports.put, 30.0)

    def add(step: int, hold: bool = False) -> Path:
        part = make_part(tmp_path, folder_url, step, hold=hold, shared=False)
        here = tmp_path / f".tmp_{step}"
        here.mkdir()
        (tmp_path / f"step_{step}_rank_00000.safetensors").rename(here / "rank_00000.safetensors")
        part.job["temporary"] = str(here)
        uploader.add(part)
        return here

    failed = add(1)  # nobody owns the place yet
    assert reports.get(timeout=300)["error"]
    assert failed.exists()
    Store(folder_url).write(OWNER, b"me")
    held = add(2, hold=True)
    done = add(3)
    assert reports.get(timeout=300)["error"] == ""
    assert not [path for path in (failed, held, done) if path.exists()]


def test_a_part_stays_until_its_checkpoint_is_committed(
    folder_url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Rank 1 has uploaded its own; what failed is repeated while there is nothing else to upload, without a word."""
    monkeypatch.setattr(upload, "_IDLE_S", 0.05)
    monkeypatch.setattr(upload, "_PATIENCE_S", 0.5)
    reports: queue.Queue[dict[str, Any]] = queue.Queue()
    parts, local = dict[int, Part](), dict[int, Path]()
    for rank in (0, 1):
        parts[rank] = make_part(tmp_path, folder_url, 1, rank, 2, shared=False)
        here = tmp_path / f"host{rank}/.tmp_1"
        here.mkdir(parents=True)
        local[rank] = here / f"rank_{rank:05d}.safetensors"
        (tmp_path / f"step_1_{local[rank].name}").rename(local[rank])
        parts[rank].job["temporary"] = str(here)
    Uploader(folder_url, reports.put, 0.0).add(parts[1])
    assert reports.get(timeout=300)["error"] == ""
    # Nobody owns the place yet.
    Uploader(folder_url, reports.put, 0.0).add(parts[0])
    assert "owner" in reports.get(timeout=300)["error"]
    assert local[0].exists()
    assert local[1].exists()
    # At once: a file that is still empty names another owner.
    (tmp_path / "owner").write_bytes(b"me")
    (tmp_path / "owner").rename(tmp_path / "store/checkpoints" / OWNER)
    report = reports.get(timeout=300)
    assert (report["upload"], report["error"]) == (parts[0].name, "")
    while local[0].exists() or local[1].exists():
        time.sleep(0.01)


def test_a_place_that_is_taken_after_the_commit(
    folder_url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nothing of the other run is set aside."""

    def taken(store: Store, _: list[str]) -> None:
        store.write(OWNER, b"other")

    monkeypatch.setattr(Store, "delete", taken)  # of the fragments
    monkeypatch.setattr(StorePlace, "tidy", lambda *_: pytest.fail("tidied another run's place"))
    assert upload_parts(folder_url, make_part(tmp_path, folder_url, 1))[0]["taken"]


def test_a_missing_package_leaves_no_lock(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "gcsfs", None)
    claim = Claim(tmp_path / "checkpoints", "r", Keep(), Mirror("gs://bucket/x", tmp_path))
    with pytest.raises(UserError, match=r"megalite\[cloud\]"):
        claim.acquire()
    assert not (tmp_path / "checkpoints/lock").exists()


@pytest.mark.parametrize("old", ["1\n2\n", "1\n2\n3 of another host\n4\n"], ids=["shorter", "longer"])
def test_a_place_is_taken_when_the_run_starts(tmp_path: Path, old: str) -> None:
    """Not when it is opened: a run that fails to start ends no other. Metrics of an old disk do not replace newer."""
    store = Store(f"file://{tmp_path}/store")
    store.write("checkpoints/owner", b"other")
    store.write("metrics.jsonl", b"1\n2\n3\n")
    run_dir = tmp_path / "run"
    run_dir.mkdir()
    (run_dir / "metrics.jsonl").write_text(old)
    checkpointer = Checkpointer(run_dir / "checkpoints", ParallelContext.single(), mirror=Mirror(store.url, run_dir))
    assert store.read("checkpoints/owner") == b"other"
    checkpointer.take()
    assert json.loads(store.read("checkpoints/owner"))["run_id"] == checkpointer.run_id
    assert (run_dir / "metrics.jsonl").read_text() == "1\n2\n3\n"
    assert (run_dir / "older_metrics.jsonl").read_text() == old
    checkpointer.close()


@pytest.mark.parametrize("copies", ["fetched", "checkpoints/fetched"])
def test_a_run_continues_its_own_checkpoint(tmp_path: Path, copies: str) -> None:
    """A copy that the run or `--resume URL` has made: it is kept, and only later ones are set aside."""
    mirror, name = Mirror("s3://bucket/x", tmp_path), "step_00000004-" + "0" * 16
    claim = Claim(tmp_path / "checkpoints", "r", Keep(), mirror)
    claim.continues(tmp_path / copies / name)
    orders = claim.at_upload("step_00000005-" + "1" * 16, False)
    assert orders is not None
    assert (orders["base"], orders["keep"]) == (4, [name])


class Reports:
    """A writer whose uploads end as a test says."""

    def __init__(self, *errors: str) -> None:
        self.left = [{"upload": "", "error": e, "taken": False, "seconds": 0.0, "problems": []} for e in errors]

    def uploads(self, seconds: float | None = 0) -> list[dict[str, Any]]:
        left, self.left = self.left, []
        return left


def writer_of(*errors: str) -> Any:
    """A `Reports` in the place of a `WriterProcess`."""
    return Reports(*errors)


def test_what_is_held_is_uploaded_when_the_store_is_free(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Not only at the end of the run; and not while the writer writes it, who would take that for an order to stop."""
    mirror, released, is_written = Mirror("s3://bucket/x", tmp_path), list[str](), False
    monkeypatch.setattr(Reports, "release", lambda _, name: released.append(name), raising=False)
    monkeypatch.setattr(Reports, "wait", lambda *_: is_written, raising=False)
    first, second = (f"step_0000000{i}-" + "0" * 16 for i in (1, 2))
    mirror.describe_save(first, Keep(), False)
    mirror.describe_save(second, Keep(), True)
    mirror.check(writer_of(""), stop=True)
    assert not released
    is_written = True
    mirror.check(writer_of(), stop=True)
    assert released == [second]
    assert mirror.is_busy


def test_failed_uploads_end_a_run(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Three in a row with --save-errors stop; the last one always counts."""
    mirror, ctx = Mirror("s3://bucket/x", tmp_path), ParallelContext.single()
    mirror.check(writer_of("away", "away"), stop=True)
    with pytest.raises(SaveError, match="3 uploads in a row failed; those on the local disk are whole"):
        mirror.check(writer_of("away"), stop=True)
    mirror.check(writer_of(), stop=False)
    mirror.check(writer_of(""), stop=True)
    assert mirror.settle(writer_of(), ctx) == ""
    mirror.shared = False
    caplog.clear()
    assert mirror.settle(writer_of("away"), ctx) == "its upload failed"
    assert "whole" not in caplog.text


def test_a_checkpoint_whose_upload_failed_is_uploaded_at_the_next_start(folder_url: str, tmp_path: Path) -> None:
    """The last one of a run, which says that it has not been uploaded: the same command, with nothing else to do."""
    root, store = tmp_path / "checkpoints", Store(folder_url)

    def start() -> Checkpointer:
        mirror = Mirror(folder_url.rpartition("/")[0], tmp_path)
        return Checkpointer(root, ParallelContext.single(), on_error="warn", mirror=mirror)

    first = start()
    path = first.save(1, cs.states_at(1), {"step": 1})
    assert path is not None
    assert not first.settle()
    first.close()
    assert StorePlace(store).committed() == []
    for is_missing in (True, False):
        again = start()
        again.take()
        again.continues(path)
        assert again.mirror is not None
        assert again.mirror.is_busy == is_missing
        assert again.settle()
        again.close()
        (name,) = StorePlace(store).committed()
        assert {n: store.read(f"{name}/{n}") for n in store.names(name)} == {
            p.name: p.read_bytes() for p in path.iterdir()
        }


def _copy(rank: int, urls: list[str], cache_dirs: list[str]) -> str:
    ctx = ParallelContext.create(Grid.of(2), torch.device("cpu"))
    try:
        return str(copy_together(urls[rank], cache_dirs[rank], ctx))
    except UserError as e:
        return str(e)


def test_all_hosts_take_the_checkpoint_that_rank_0_finds(pool: WorkerPool, tmp_path: Path) -> None:
    """Rank 1 would find another one in `--resume URL`, as of a run that goes on."""
    urls, caches = [f"file://{tmp_path}/run{i}" for i in range(2)], [str(tmp_path / f"host{i}") for i in range(2)]
    for i, url in enumerate(urls):
        part = make_part(tmp_path, url, 1 + i, save_id=str(i) * 16)
        assert upload_parts(f"{url}/checkpoints", part)[0]["error"] == ""
    paths = pool.run(2, _copy, urls, caches)
    assert [Path(path).name for path in paths] == ["step_00000001-" + "0" * 16] * 2
    assert [path.startswith(cache) for path, cache in zip(paths, caches)] == [True, True]
    # A copy of what had that name before.
    (Path(paths[1]) / "manifest.json").write_bytes(b"other")
    (Path(paths[1]) / "COMMIT").write_bytes(commit_text(b"other"))
    for said in pool.run(2, _copy, urls, caches):
        assert re.search("COMMIT of .* of rank 1 .*must equal rank 0's", said)
