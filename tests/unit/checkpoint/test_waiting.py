"""Hosts that share no folder: what was written and could not be uploaded is uploaded at the next start."""

from __future__ import annotations

import shutil
import threading
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist

from megalite.core.base.errors import UserError
from megalite.core.mesh import agree as agree_module
from megalite.runtime.checkpoint import waiting as waiting_module
from megalite.runtime.checkpoint.load import find_good, load_checkpoint
from megalite.runtime.checkpoint.mirror import Mirror
from megalite.runtime.checkpoint.save import Checkpointer
from megalite.runtime.checkpoint.upload import Part, send_part
from megalite.runtime.checkpoint.waiting import upload_waiting
from megalite.runtime.places import store as store_module
from megalite.runtime.places.names import step_of
from megalite.runtime.places.store import Store
from megalite.runtime.places.store_place import StorePlace
from tests.faults import checkpoint_states as cs
from tests.workers import WorkerPool


def checkpointer_of(rank: int, url: str, disks: list[str], code: Any = "none") -> Checkpointer:
    """A run of two ranks, each with a disk of its own."""
    run_dir = Path(disks[rank])
    mirror, ctx = Mirror(url, run_dir), cs.context(2)
    return Checkpointer(run_dir / "checkpoints", ctx, "run", on_error="warn", mirror=mirror, code=code)


def _save_without_an_owner(rank: int, url: str, disks: list[str], weights: bool, code: Any = "none") -> bool:
    """Save step 2, then, when the store takes no commit any more, step 4, or its weights."""
    checkpointer = checkpointer_of(rank, url, disks, code)
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
        checkpointer.take()
        return step
    finally:
        checkpointer.close()


def _save_anew(rank: int, url: str, disks: list[str]) -> bool:
    """A run that continues from no checkpoint saves step 3."""
    checkpointer = checkpointer_of(rank, url, disks)
    checkpointer.take()
    checkpointer.save(3, cs.states_at(3, rank, 2), {"step": 3})
    is_saved = checkpointer.settle()
    checkpointer.close()
    return is_saved


def _sent(rank: int, url: str, disk: str) -> list[tuple[int, bool]]:
    """The parts that this rank of one host uploads, and whether the metrics were there before."""
    sent = list[tuple[int, bool]]()

    def send(place: StorePlace, part: Part) -> None:
        sent.append((part.job["rank"], "metrics.jsonl" in place.store.parent.names()))
        send_part(place, part)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(waiting_module, "send_part", send)
        assert upload_waiting(Path(disk, "checkpoints"), f"{url}/checkpoints", cs.context(2), 30.0) == []
    return sent


def _work_while_others_meet(rank: int) -> tuple[bool, str]:
    """Rank 1 works until the ranks have met three times, then fails."""
    met, meetings, real = threading.Event(), 0, agree_module.gather_texts

    def gather(*args: Any) -> Sequence[str]:
        nonlocal meetings
        meetings += 1
        if meetings == 3:
            met.set()
        return real(*args)

    def work() -> None:
        if rank == 1:
            assert met.wait(120)
            raise UserError("work", "is over", "")

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(agree_module, "gather_texts", gather)
        patch.setattr(agree_module, "_ROUND_S", 0.01)
        try:
            agree_module.agree_in_rounds(cs.context(2), work, lambda: None)
        except UserError as e:
            return met.is_set(), str(e)
    return met.is_set(), ""


def _fail_to_start(rank: int, url: str, disks: list[str]) -> str:
    try:
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(store_module, "PATIENCE_S", 0.5)
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
    store.parent.write("metrics.jsonl", b"1\n")
    assert pool.run(2, _save_without_an_owner, url, disks, False) == [False, False]
    assert waiting(disks) == PARTS
    assert [step_of(name) for name in StorePlace(store).committed()] == [2]
    # Nothing of it is in the store, nor can be written there.
    (name,) = (name.rstrip("/") for name in store.names() if name.startswith("step_00000004"))
    empty(store, name)
    (tmp_path / "store").rename(tmp_path / "away")
    (tmp_path / "store").write_text("a file")
    assert [" times" in said for said in pool.run(2, _fail_to_start, url, disks)] == [True, True]
    assert waiting(disks) == PARTS
    Path(disks[0], "metrics.jsonl").write_text("1\n2\n")
    (tmp_path / "store").unlink()
    (tmp_path / "away").rename(tmp_path / "store")
    assert pool.run(2, _start, url, disks[::-1]) == [4, 4]
    assert waiting(disks) == []
    assert StorePlace(store).committed()[0] == name
    assert store.parent.read("metrics.jsonl") == b"1\n2\n"


def test_a_save_that_failed_waits_after_weights_that_did_not(pool: WorkerPool, url: str, disks: list[str]) -> None:
    assert pool.run(2, _save_weights_after_a_failure, url, disks) == [True, True]
    assert waiting(disks) == PARTS
    assert pool.run(2, _start, url, disks) == [4, 4]


@pytest.mark.parametrize("lost", [0, 1])
def test_a_part_that_was_uploaded_may_be_lost_on_the_disk(
    pool: WorkerPool, url: str, disks: list[str], lost: int
) -> None:
    """Neither does the run file of an old disk replace the store's, which goes on from it or is another."""
    pool.run(2, _save_without_an_owner, url, disks, False)
    shutil.rmtree(disks[lost])
    Path(disks[0]).mkdir(exist_ok=True)
    Path(disks[0], "metrics.jsonl").write_text("1\n")
    Store(url).write("metrics.jsonl", b"1\n2\n" if lost else b"")
    assert pool.run(2, _start, url, disks) == [4, 4]
    assert Store(url).read("metrics.jsonl") == (b"1\n2\n" if lost else b"")


def test_a_part_that_is_short_in_the_store_is_sent_again(pool: WorkerPool, url: str, disks: list[str]) -> None:
    store = Store(f"{url}/checkpoints")
    pool.run(2, _save_without_an_owner, url, disks, False)
    (name,) = (name.rstrip("/") for name in store.names() if name.startswith("step_00000004"))
    whole = store.read(f"{name}/{PARTS[3]}")
    store.write(f"{name}/{PARTS[3]}", whole[:-1])
    assert pool.run(2, _start, url, disks) == [4, 4]
    assert store.read(f"{name}/{PARTS[3]}") == whole


@pytest.mark.parametrize("has_it", [True, False])
def test_a_fragment_that_is_damaged_in_the_store(pool: WorkerPool, url: str, disks: list[str], has_it: bool) -> None:
    """Who has the part sends it again; while its host is away, the parts of the others stay."""
    store = Store(f"{url}/checkpoints")
    pool.run(2, _save_without_an_owner, url, disks, False)
    (name,) = (name.rstrip("/") for name in store.names() if name.startswith("step_00000004"))
    whole = store.read(f"{name}/{PARTS[2]}")
    store.write(f"{name}/{PARTS[2]}", whole.replace(b'"size"', b'"sizf"'))
    away = Path(f"{disks[1]}_away")
    if not has_it:
        Path(disks[1]).rename(away)
        assert pool.run(2, _start, url, disks) == [2, 2]
        assert waiting(disks) == PARTS[:2]
        shutil.rmtree(disks[1])
        away.rename(disks[1])
    assert pool.run(2, _start, url, disks) == [4, 4]
    assert waiting(disks) == []


@pytest.mark.parametrize("saves", [False, True])
def test_a_part_that_is_nowhere(pool: WorkerPool, url: str, disks: list[str], saves: bool) -> None:
    """Started on the wrong hosts, the run continues from the checkpoint before; the rest waits until it saves one."""
    store = Store(f"{url}/checkpoints")
    pool.run(2, _save_without_an_owner, url, disks, False)
    (name,) = (name.rstrip("/") for name in store.names() if name.startswith("step_00000004"))
    empty(store, name)
    away = Path(disks[1]).rename(f"{disks[1]}_away")
    if saves:
        assert pool.run(2, _save_anew, url, disks) == [True, True]
        assert waiting(disks) == []
    else:
        assert pool.run(2, _start, url, disks) == [2, 2]
        assert waiting(disks) == PARTS[:2]
    shutil.rmtree(disks[1])
    away.rename(disks[1])
    assert pool.run(2, _start, url, disks) == ([3, 3] if saves else [4, 4])
    # Of a host that was away at the commit, it goes with the next one.
    assert waiting(disks) == (PARTS[2:] if saves else [])


def test_coded_parts_wait_too(pool: WorkerPool, url: str, disks: list[str]) -> None:
    """What they leave on the disks is uploaded at the next start, loaded, and deleted."""
    assert pool.run(2, _save_without_an_owner, url, disks, False, "planes-zstd") == [False, False]
    assert waiting(disks) == sorted(name.replace("safetensors", "coded") for name in PARTS)
    (name,) = (n.rstrip("/") for n in Store(f"{url}/checkpoints").names() if n.startswith("step_00000004"))
    empty(Store(f"{url}/checkpoints"), name)
    assert pool.run(2, _start, url, disks) == [4, 4]
    assert waiting(disks) == []


def test_the_ranks_of_a_host_share_its_parts(pool: WorkerPool, url: str, disks: list[str]) -> None:
    """And send none again that has arrived: here rank 1's alone has not. The metrics come before rank 0's."""
    store = Store(f"{url}/checkpoints")
    pool.run(2, _save_without_an_owner, url, disks, False)
    (name,) = (name.rstrip("/") for name in store.names() if name.startswith("step_00000004"))
    store.delete([f"{name}/{PARTS[2]}"])
    shutil.copytree(f"{disks[1]}/checkpoints", f"{disks[0]}/checkpoints", dirs_exist_ok=True)
    assert pool.run(2, _sent, url, disks[0]) == [[], [(1, False)]]
    assert StorePlace(store).committed()[0] == name
    store.delete([f"{name}/COMMIT"])
    Path(disks[0], "metrics.jsonl").write_text("1\n")
    assert (0, True) in pool.run(2, _sent, url, disks[0])[0]


def test_a_long_upload_holds_up_no_collective(pool: WorkerPool) -> None:
    for met, error in pool.run(2, _work_while_others_meet):
        assert met
        assert error.startswith("rank 1: work: is over")


def test_weights_that_wait(pool: WorkerPool, url: str, disks: list[str]) -> None:
    """They are never pruned, so a later checkpoint does not replace them."""
    store = Store(f"{url}/checkpoints")
    pool.run(2, _save_without_an_owner, url, disks, True)
    assert pool.run(2, _start, url, disks) == [2, 2]
    (name,) = (name.rstrip("/") for name in store.names() if name.startswith("model_00000004"))
    assert StorePlace(store).exists(f"{name}/COMMIT")


def test_another_run_has_the_place(pool: WorkerPool, tmp_path: Path, url: str, disks: list[str]) -> None:
    """What waits is given up once that has saved a checkpoint: the place is its own."""
    pool.run(2, _save_without_an_owner, url, disks, False)
    assert pool.run(2, _save_anew, url, [f"{tmp_path}/other{rank}" for rank in range(2)]) == [True, True]
    assert pool.run(2, _start, url, disks) == [3, 3]
    assert waiting(disks) == []
