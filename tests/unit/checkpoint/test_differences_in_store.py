"""Differences in a store: each is committed after its base and comes with it; nothing removes a base."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
import torch.distributed as dist

from megalite.core.mesh.context import ParallelContext
from megalite.extras.command import find_main
from megalite.runtime.checkpoint import local_copies, upload
from megalite.runtime.checkpoint.manifest import read_manifest
from megalite.runtime.checkpoint.mirror import Mirror
from megalite.runtime.checkpoint.pruning import Keep
from megalite.runtime.checkpoint.safetensors_io import BadCheckpoint
from megalite.runtime.checkpoint.save import Checkpointer
from megalite.runtime.places.store import Store, StoreError
from megalite.runtime.places.store_place import StorePlace
from tests.conftest import leading_to
from tests.faults import checkpoint_states as cs
from tests.rows import always_run
from tests.stores import S3
from tests.unit.checkpoint.differences import damage, loaded, save, weights
from tests.workers import WorkerPool

pytest.importorskip("fsspec", reason="fsspec is not installed")

CTX = ParallelContext.single()


class Run:
    """A run with snapshots as differences, whose store is a folder."""

    def __init__(self, folder: Path) -> None:
        self.root, self.far = folder / "run/checkpoints", folder / "far/run/checkpoints"
        self.url = f"file://{self.far}"
        mirror = Mirror(f"file://{self.far.parent}", self.root.parent, 5.0)
        self.checkpointer = Checkpointer(self.root, CTX, "run", Keep(last=2), mirror=mirror, delta=4)
        self.checkpointer.take()

    def save(self, step: int, full: bool = False) -> None:
        make = self.checkpointer.save if full else self.checkpointer.save_model
        make(step, weights(step), {"step": step})
        self.checkpointer.settle()

    def there(self, step: int) -> Path:
        """The folder in the store."""
        (found,) = self.far.glob(f"model_{step:08d}-*")
        return found

    def copy(self, step: int, into: Path) -> Path:
        return local_copies.fetch(Store(self.url), self.there(step).name, into)


@pytest.fixture
def run(tmp_path: Path) -> Run:
    return Run(tmp_path)


def test_a_difference_comes_with_its_base(run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also after full saves that prune others, on a disk that has nothing of the run."""
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    for step in range(1, 9):
        run.save(step, full=step in (2, 3, 4, 6))
    run.checkpointer.close()
    assert len(list(run.far.glob("step_*/COMMIT"))) == 2
    expected = {step: loaded(run.root / f"model_{step:08d}") for step in (1, 5, 7, 8)}
    shutil.rmtree(run.root)
    for step, bits in expected.items():
        into = tmp_path / f"copy{step}"
        assert loaded(run.copy(step, into)) == bits
        assert len(list(into.glob("model_*"))) == (1 if step == 1 else 2)
    find_main("inspect")([f"{run.url}/{run.there(5).name}", "--verify", "--flatten", str(tmp_path / "flat")])
    assert loaded(tmp_path / "flat") == expected[5]
    shutil.rmtree(run.there(1))
    shutil.rmtree(next((tmp_path / "copy5").glob("model_00000001-*")))
    for into in (tmp_path / "none", tmp_path / "copy5"):
        with pytest.raises(StoreError, match="is a difference of model_00000001, which is not there"):
            run.copy(5, into)


def test_a_base_that_has_not_arrived_is_sent_before_its_difference(run: Run, tmp_path: Path) -> None:
    """As when a later save has replaced it during a slow upload."""
    run.save(1)
    shutil.rmtree(run.there(1))
    run.save(2)
    commits = [(run.there(step) / "COMMIT").stat().st_mtime_ns for step in (1, 2)]
    assert commits[0] < commits[1]
    assert loaded(run.copy(2, tmp_path / "copy")) == loaded(run.root / "model_00000002")
    run.checkpointer.close()


@pytest.mark.parametrize(
    ("how", "said"),
    [
        ("missing", "model_00000001: is the base of model_00000002, and is missing"),
        ("damaged", "model_00000001/rank_00000.coded: block 0 differs from its checksum"),
    ],
)
def test_a_difference_without_its_base_is_not_committed(run: Run, how: str, said: str) -> None:
    for step in (1, 2):
        run.save(step)
    run.checkpointer.close()
    base = run.root / "model_00000001"
    for folder in (run.there(1), run.there(2)):
        shutil.rmtree(folder)
    if how == "missing":
        shutil.rmtree(base)
    else:
        shard = base / "rank_00000.coded"
        shard.write_bytes(shard.read_bytes()[:-1] + b"\0")
    job = {"root": str(run.root), "name": "model_00000002", "save_id": "0" * 16, "full": False, "remote": {}}
    part = upload.Part(job, -1, {})
    with pytest.raises(BadCheckpoint, match=said):
        upload._upload_whole(StorePlace(Store(run.url)), part, run.root / "model_00000002")
    assert not list(run.far.glob("model_*/COMMIT"))


def save_beside_damage(rank: int, port: int, root: str, url: str, damaged: int, arrived: bool) -> None:
    """Save steps 1 to 3 on two ranks; before step 2 a rank's part of the base is damaged on the disk.

    Args:
        port: of the server of S3.
        damaged: the rank.
        arrived: whether the base is in the store by then.
    """
    with leading_to(port):
        checkpointer = Checkpointer(root, cs.context(2), "run", mirror=Mirror(url, Path(root).parent, 60.0), delta=5)
        checkpointer.take()
        for step in (1, 2, 3):
            checkpointer.save_model(step, weights(step, rank, 2), {"step": step})
            assert checkpointer.settle()
            dist.barrier()
            if step == 1 and rank == damaged:
                damage(Path(root) / f"model_00000001/rank_{rank:05d}.coded")
                if not arrived:
                    store = Store(f"{url}/checkpoints")
                    (name,) = (n.rstrip("/") for n in store.names() if n.startswith("model_00000001-"))
                    store.delete(f"{name}/{file}" for file in store.names(name))
            dist.barrier()
        checkpointer.close()


@pytest.mark.parametrize("case", always_run([(0, True), (0, False), (1, True), (1, False)], (1, False)), ids=str)
def test_a_base_that_one_rank_finds_damaged(s3: S3, pool: WorkerPool, tmp_path: Path, case: tuple[int, bool]) -> None:
    """What is written whole on the disk for that reason is so in the store, which needs nothing that is damaged."""
    damaged, arrived = case
    root, url = tmp_path / "run/checkpoints", s3.url(f"runs/{tmp_path.name}")
    pool.run(2, save_beside_damage, s3.port, str(root), url, damaged, arrived)
    save(tmp_path / "whole", [2, 3], 0)
    store = Store(f"{url}/checkpoints")
    there = sorted(name.rstrip("/") for name in store.names() if name.startswith("model_"))
    assert [name[:14] for name in there] == [f"model_0000000{step}" for step in ((1, 2, 3) if arrived else (2, 3))]
    for name, base in zip(there[-2:], (None, "model_00000002")):
        path, here = local_copies.fetch(store, name, tmp_path / "copies"), root / name[:14]
        assert (read_manifest(path).base or [None])[0] == base
        assert (path / "COMMIT").read_bytes() == (here / "COMMIT").read_bytes()
        assert loaded(path) == loaded(here) == loaded(tmp_path / "whole" / here.name)
        # No part that the manifest does not name.
        files = [file.name for file in read_manifest(path).files]
        assert sorted(store.names(name)) == sorted([*files, "manifest.json", "COMMIT"])
