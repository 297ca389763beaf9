"""Runs whose run directory is a URL: checkpoints are uploaded to a real S3 server, and a lost disk loses nothing."""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from megalite.core.mesh.context import ParallelContext
from megalite.extras.prepare.token_writer import IndexedDatasetWriter
from megalite.runtime.checkpoint.load import verify_together
from megalite.runtime.places.names import step_folders, step_of
from megalite.runtime.places.store import Store
from megalite.runtime.places.store_place import OWNER, StorePlace
from tests.faults.store_runs import MODEL
from tests.faults.zygote import Job, Zygote
from tests.parity.runs import losses
from tests.ranks import reserve_port
from tests.stores import S3, BreakingProxy, Fault, environment


@pytest.fixture
def train(s3: S3, zygote: Zygote, tmp_path: Path) -> Callable[..., list[str]]:
    """Trains, and returns what all ranks have said."""

    def run(world: int, *flags: str) -> list[str]:
        left = zygote.start([*MODEL, *flags], world, tmp_path, env=environment(s3.port)).end()
        assert [rank.code for rank in left] == [0] * world, left
        return [rank.err for rank in left]

    return run


def shards(checkpoint: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in checkpoint.glob("*.safetensors")}


@pytest.mark.full
def test_two_hosts_without_a_shared_folder(
    s3: S3, proxy: BreakingProxy, zygote: Zygote, tmp_path: Path, train: Callable[..., list[str]]
) -> None:
    """Each rank has a disk of its own, which is lost after four steps: the same bits as on one disk.

    The last of these steps is saved while the store is away; the same command uploads it when the store is back.
    """
    whole, url = tmp_path / "whole", s3.url("runs/apart")
    train(2, "--run-dir", str(whole), "--train-steps", "6", "--save-every", "2")
    flags = [*MODEL, "--run-dir", url, "--save-every", "2"]
    for steps, host, away in ((4, "a", True), (4, "a", False), (6, "b", False)):
        proxy.faults = [Fault("PUT .*/step_00000004", "403")] if away else []
        launched, jobs = {**environment(proxy.port), "WORLD_SIZE": "2", "MASTER_PORT": str(reserve_port())}, []
        for rank in range(2):
            env = {**launched, "RANK": str(rank), "HOME": str(tmp_path / f"{host}{rank}")}
            jobs.append(zygote.start([*flags, "--train-steps", str(steps)], 1, tmp_path, env=env))
        left = [job.end()[0] for job in jobs]
        assert [rank.code for rank in left] == [int(away)] * 2, left
        assert "the hosts share no folder" in left[0].err
        assert ("which an earlier process had written" in left[0].err) == (host == "a" and not away)
    assert "at step 4" in left[0].err
    store = Store(f"{url}/checkpoints")
    newest = StorePlace(store).committed()[0]
    assert newest.startswith("step_00000006")
    saved = {name: store.read(f"{newest}/{name}") for name in store.names(newest) if name.endswith(".safetensors")}
    assert saved == shards(whole / "checkpoints/step_00000006")
    assert losses(tmp_path / "b0/.cache/megalite/s3" / s3.bucket / "runs/apart") == losses(whole)
    # Of what is uploaded no part stays, and each host brought only what its rank reads.
    assert not list(tmp_path.glob("*/.cache/**/.tmp_*"))
    assert len(list((tmp_path / "b1").glob("**/fetched/*/*.safetensors"))) <= 2


@pytest.mark.full
def test_data_in_the_store_are_the_data_on_the_disk(s3: S3, tmp_path: Path, zygote: Zygote) -> None:
    """The same losses and gradient norms."""
    disk = tmp_path / "disk"
    disk.mkdir()
    with IndexedDatasetWriter(disk / "text", np.dtype("<u2")) as writer:
        ids = np.random.default_rng(0).integers(0, 90, 300_000)
        writer.add_documents(ids, [1000] * 300)
        writer.finalize({"tokenizer_sha256": "0" * 64, "vocab_size": 90})
    for path in disk.iterdir():
        Store(s3.url("data")).write(path.name, path.read_bytes())
    model = [word for word in MODEL if word != "--mock-data"]
    runs = {"disk": str(disk / "text"), "store": s3.url("data/text")}
    for name, data in runs.items():
        flags = ["--data", data, "--run-dir", str(tmp_path / name), "--cache-dir", str(tmp_path / "cache")]
        (left,) = zygote.start([*model, *flags, "--train-steps", "4"], 1, tmp_path, env=environment(s3.port)).end()
        assert left.code == 0, left
    assert losses(tmp_path / "disk") == losses(tmp_path / "store")
    assert s3.url("data/text") in (tmp_path / "store" / "config.yaml").read_text()


@pytest.mark.full
def test_a_run_continues_from_the_store_after_its_disk_is_lost(
    s3: S3, tmp_path: Path, train: Callable[..., list[str]]
) -> None:
    """Six steps without a break on a local disk, and with the disk lost after three: the same bits."""
    whole = tmp_path / "whole"
    train(2, "--run-dir", str(whole), "--train-steps", "6", "--save-every", "2")
    url, cache = s3.url("runs/lost"), tmp_path / "cache"
    flags = ["--run-dir", url, "--cache-dir", str(cache), "--save-every", "2"]
    train(2, *flags, "--train-steps", "4")
    store = Store(f"{url}/checkpoints")
    names = [name for name in store.names() if name.startswith("step_")]
    assert [name[:13] for name in sorted(names)] == ["step_00000002", "step_00000004"]
    assert sorted(store.names(max(names))) == [
        "COMMIT",
        "manifest.json",
        *(f"rank_{rank:05d}.safetensors" for rank in range(2)),
    ]
    shutil.rmtree(cache)
    said = train(2, *flags, "--train-steps", "6")
    assert f"resumed from {cache}" in said[0]
    local = cache / "s3" / s3.bucket / "runs/lost"
    assert shards(local / "checkpoints/step_00000006") == shards(whole / "checkpoints/step_00000006")
    assert losses(local) == losses(whole)
    kept = sorted(name[:13] for name in store.names() if name.startswith("step_"))
    # The one it resumed from is never pruned, as on a disk.
    assert kept == ["step_00000004", "step_00000006"]


@pytest.mark.full
def test_uploads_that_fail_in_a_row_end_a_run(s3: S3, proxy: BreakingProxy, zygote: Zygote, tmp_path: Path) -> None:
    """With `--save-errors stop`, after three; every local checkpoint is whole, and nothing shows in the store."""
    url, cache = s3.url("runs/forbidden"), tmp_path / "cache"
    proxy.faults = [Fault(r"PUT .*\.safetensors", "403")]
    flags = ["--run-dir", url, "--cache-dir", str(cache), "--save-every", "1", "--train-steps", "5000"]
    (left,) = zygote.start([*MODEL, *flags], 1, tmp_path, env=environment(proxy.port)).end()
    assert left.code == 1
    assert re.search(r"checkpoints are not uploaded: 3 uploads in a row failed; those on the local disk are", left.err)
    assert StorePlace(Store(f"{url}/checkpoints")).committed() == []
    local = cache / "s3" / s3.bucket / "runs/forbidden/checkpoints"
    names = [path.name for _, path in step_folders(local)]
    assert len(names) >= 2
    for name in names:
        verify_together(local / name, ParallelContext.single())


def test_a_bucket_that_is_forbidden_ends_a_run_at_its_start(
    s3: S3, proxy: BreakingProxy, zygote: Zygote, tmp_path: Path
) -> None:
    """With one line, and the lock is free again."""
    proxy.faults = [Fault("/bucket/runs/closed", "403")]
    flags = ["--run-dir", s3.url("runs/closed"), "--cache-dir", str(tmp_path / "cache"), "--train-steps", "1"]
    (left,) = zygote.start([*MODEL, *flags], 1, tmp_path, env=environment(proxy.port)).end()
    assert left.code == 2
    assert left.err.count("error:") == 1
    assert "s3://bucket/runs/closed/checkpoints" in left.err
    assert not list((tmp_path / "cache").glob("**/lock"))


@pytest.mark.full
def test_a_run_that_does_not_start_takes_no_place(s3: S3, zygote: Zygote, tmp_path: Path) -> None:
    """Another model on the same URL: the run that has the place goes on there."""
    flags = ["--run-dir", s3.url("runs/kept"), "--cache-dir", str(tmp_path / "cache"), "--train-steps", "1"]
    env, store = environment(s3.port), Store(s3.url("runs/kept/checkpoints"))
    (left,) = zygote.start([*MODEL, *flags], 1, tmp_path, env=env).end()
    assert left.code == 0, left
    owner = store.read(OWNER)
    (left,) = zygote.start([*MODEL, *flags, "--hidden-size", "64"], 1, tmp_path, env=env).end()
    assert left.code == 2, left
    assert store.read(OWNER) == owner


@pytest.mark.full
def test_a_slow_store_is_no_hang(s3: S3, proxy: BreakingProxy, zygote: Zygote, tmp_path: Path) -> None:
    """Reads and the last upload take longer than the watchdog waits for a rank: bounded, so it lets them."""
    with IndexedDatasetWriter(tmp_path / "text", np.dtype("<u2")) as writer:
        writer.add_documents(np.random.default_rng(0).integers(0, 90, 300_000), [1000] * 300)
        writer.finalize({"tokenizer_sha256": "0" * 64, "vocab_size": 90})
    for path in tmp_path.glob("text.*"):
        Store(s3.url("slow")).write(path.name, path.read_bytes())
    proxy.faults = [
        Fault(f"GET .*{name}", "slow", 1, seconds=14) for name in (r"slow/text\.idx", r"slow/text\.bin")
    ] + [Fault("PUT .*COMMIT", "slow", 1, seconds=14)]
    flags = ["--data", s3.url("slow/text"), "--run-dir", s3.url("runs/slow"), "--cache-dir", str(tmp_path / "cache")]
    model = [word for word in MODEL if word != "--mock-data"]
    arguments = [*model, *flags, "--train-steps", "2", "--watchdog-timeout", "8"]
    (left,) = zygote.start(arguments, 1, tmp_path, env=environment(proxy.port)).end()
    assert (left.code, "watchdog" in left.err) == (0, False), left
    assert [fault.happened for fault in proxy.faults] == [1, 1, 1]


@pytest.mark.full
def test_two_runs_of_one_place(s3: S3, zygote: Zygote, tmp_path: Path) -> None:
    """The second, on another disk, goes on from what the first has uploaded; the first ends at its next upload."""
    url, env = s3.url("runs/both"), environment(s3.port)
    store = Store(f"{url}/checkpoints")

    def start(name: str, steps: str) -> Job:
        (tmp_path / name).mkdir()
        flags = ["--run-dir", url, "--cache-dir", str(tmp_path / name), "--save-every", "1", "--train-steps", steps]
        return zygote.start([*MODEL, *flags], 1, tmp_path / name, env=env)

    first = start("first", "50000")
    zygote.until(lambda: bool(StorePlace(store).committed()))
    second = start("second", "1000000")
    owner = store.read(OWNER)
    zygote.until(lambda: store.read(OWNER) != owner)
    (left,) = first.end()
    assert (left.code, "has been taken by run" in left.err, "the local disk are whole" in left.err) == (1, True, True)
    own = json.loads(store.read(OWNER))["run_id"]
    os.kill(second.pid(0), signal.SIGTERM)
    (left,) = second.end()
    assert (left.code, "resumed from" in left.err) == (0, True), left
    newest = StorePlace(store).committed()[0]
    assert json.loads(store.read(f"{newest}/manifest.json"))["run_id"] == own
    assert f"stopped after step {step_of(newest)} of" in left.err
