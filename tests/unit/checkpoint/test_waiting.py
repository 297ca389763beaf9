"""Hosts that share no folder: what was written and could not be uploaded is uploaded at the next start."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
import torch.distributed as dist

from megalite.base import store as store_module
from megalite.base.errors import UserError
from megalite.base.store import Store
from megalite.checkpoint import remote
from megalite.checkpoint.load import find_good, load_checkpoint
from megalite.checkpoint.mirror import Mirror
from megalite.checkpoint.save import Checkpointer
from tests.faults import checkpoint_states as cs
from tests.workers import WorkerPool


def checkpointer_of(rank: int, url: str, disks: list[str]) -> Checkpointer:
    """A run of two ranks, each with a disk of its own."""
    run_dir = Path(disks[rank])
    return Checkpointer(run_dir / "checkpoints", cs.context(2), "run", on_error="warn", mirror=Mirror(url, run_dir))


def _save_without_an_owner(rank: int, url: str, disks: list[str], weights: bool) -> bool:
    """Save step 2, then, when the store takes no commit any more, step 4, or its weights."""
    checkpointer = checkpointer_of(rank, url, disks)
    checkpointer.take()
    checkpointer.save(2, cs.states_at(2, rank, 2), {"step": 2})
    assert checkpointer.settle()
    if rank == 0:
        Store(f"{url}/checkpoints").delete(["owner"])
    write = checkpointer.save_model if weights else checkpointer.save
    write(4, cs.states_at(4, rank, 2), {"step": 4})
    is_saved = checkpointer.settle()
    # As a run does at its end, after its loop did.
    checkpointer.settle()
    checkpointer.close()
    return is_saved


def _save_weights_after_a_failure(rank: int, url: str, disks: list[str]) -> bool:
    """Save step 4 while the store takes no commit, then weights that it takes."""
    checkpointer, store = checkpointer_of(rank, url, disks), Store(f"{url}/checkpoints")
    checkpointer.take()
    owner = store.read("owner")
    dist.barrier()
    if rank == 0:
        store.delete(["owner"])
    checkpointer.save(4, cs.states_at(4, rank, 2), {"step": 4})
    assert not checkpointer.settle()
    if rank == 0:
        store.write("owner", owner)
    checkpointer.save_model(5, cs.states_at(5, rank, 2), {"step": 5})
    is_saved = checkpointer.settle()
    checkpointer.close()
    return is_saved


def _start(rank: int, url: str, disks: list[str]) -> int:
    """Start again; the step that the run would continue from."""
    checkpointer = checkpointer_of(rank, url, disks)
    try:
        found = find_good(checkpointer.root, checkpointer.ctx, mirror=checkpointer.mirror)
        assert found is not None
        states = cs.states_at(-1, rank, 2)
        load_checkpoint(found, states, checkpointer.ctx)
        step = int(found.manifest.meta["step"])
        cs.assert_states(states, step, rank, 2)
        return step
    finally:
        checkpointer.close()


def _fail_to_start(rank: int, url: str, disks: list[str]) -> str:
    try:
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(store_module, "_FIRST_PAUSE_S", 0.002)
            checkpointer_of(rank, url, disks).close()
    except UserError as e:
        return str(e)
    return ""


def waiting(disks: list[str]) -> list[str]:
    return sorted(path.name for disk in disks for path in Path(disk).glob("checkpoints/.tmp_*/*"))


@pytest.fixture
def disks(tmp_path: Path) -> list[str]:
    return [f"{tmp_path}/host{rank}" for rank in range(2)]


@pytest.fixture
def url(tmp_path: Path) -> str:
    return f"file://{tmp_path}/store"


PARTS = ["rank_00000.json", "rank_00000.safetensors", "rank_00001.json", "rank_00001.safetensors"]


def empty(store: Store, name: str) -> None:
    store.delete(f"{name}/{n}" for n in store.names(name))


def test_parts_that_wait_are_uploaded_at_the_next_start(
    pool: WorkerPool, tmp_path: Path, url: str, disks: list[str]
) -> None:
    """Also if the first start fails, as the store is still away; the ranks may be on other hosts by then."""
    store = Store(f"{url}/checkpoints")
    assert pool.run(2, _save_without_an_owner, url, disks, False) == [False, False]
    assert waiting(disks) == PARTS
    assert [remote.step_of(name) for name in remote.committed(store)] == [2]
    # Nothing of it is in the store, nor can be written there.
    (name,) = (name.rstrip("/") for name in store.names() if name.startswith("step_00000004"))
    empty(store, name)
    (tmp_path / "store").rename(tmp_path / "away")
    (tmp_path / "store").write_text("a file")
    assert ["tried 7 times" in said for said in pool.run(2, _fail_to_start, url, disks)] == [True, True]
    assert waiting(disks) == PARTS
    (tmp_path / "store").unlink()
    (tmp_path / "away").rename(tmp_path / "store")
    assert pool.run(2, _start, url, disks[::-1]) == [4, 4]
    assert waiting(disks) == []
    assert remote.committed(store)[0] == name


def test_a_save_that_failed_waits_after_weights_that_did_not(pool: WorkerPool, url: str, disks: list[str]) -> None:
    assert pool.run(2, _save_weights_after_a_failure, url, disks) == [True, True]
    assert waiting(disks) == PARTS
    assert pool.run(2, _start, url, disks) == [4, 4]


@pytest.mark.parametrize("lost", [0, 1])
def test_a_part_that_was_uploaded_may_be_lost_on_the_disk(
    pool: WorkerPool, url: str, disks: list[str], lost: int
) -> None:
    pool.run(2, _save_without_an_owner, url, disks, False)
    shutil.rmtree(disks[lost])
    assert pool.run(2, _start, url, disks) == [4, 4]


def test_a_part_that_is_nowhere(pool: WorkerPool, url: str, disks: list[str]) -> None:
    """The run continues from the checkpoint before it, and the rest is deleted."""
    store = Store(f"{url}/checkpoints")
    pool.run(2, _save_without_an_owner, url, disks, False)
    (name,) = (name.rstrip("/") for name in store.names() if name.startswith("step_00000004"))
    empty(store, name)
    shutil.rmtree(disks[1])
    assert pool.run(2, _start, url, disks) == [2, 2]
    assert waiting(disks) == []


def test_weights_that_wait(pool: WorkerPool, url: str, disks: list[str]) -> None:
    """They are never pruned, so a later checkpoint does not replace them."""
    store = Store(f"{url}/checkpoints")
    pool.run(2, _save_without_an_owner, url, disks, True)
    assert pool.run(2, _start, url, disks) == [2, 2]
    (name,) = (name.rstrip("/") for name in store.names() if name.startswith("model_00000004"))
    assert remote.exists(store, f"{name}/COMMIT")


def test_another_run_has_the_place(pool: WorkerPool, url: str, disks: list[str]) -> None:
    """What waits is given up: it belongs to a run that has lost the place."""
    store = Store(f"{url}/checkpoints")
    pool.run(2, _save_without_an_owner, url, disks, False)
    store.write(remote.OWNER, b"other")
    assert pool.run(2, _start, url, disks) == [2, 2]
    assert waiting(disks) == []
