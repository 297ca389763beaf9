"""Snapshots of weights as differences: the bits of whole ones, in any layout; a base that is not there is named."""

from __future__ import annotations

import json
import mmap
import resource
import shutil
import signal
import socket
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

import megalite
from megalite.core.base.errors import UserError
from megalite.core.mesh.context import ParallelContext
from megalite.extras.command import find_main
from megalite.extras.convert.hf import export_hf
from megalite.extras.view.checkpoint import describe
from megalite.extras.view.flatten import flatten
from megalite.runtime.checkpoint.manifest import commit_text, read_manifest
from megalite.runtime.checkpoint.save import Checkpointer, _Save
from megalite.runtime.checkpoint.snapshot import boxes_of
from megalite.runtime.checkpoint.writer import _serve
from tests.faults import checkpoint_states as cs
from tests.unit.checkpoint.differences import damage, loaded, save, weights
from tests.workers import WorkerPool

CTX = ParallelContext.single()
# The writer has its job, and dies with the process.
KILLED = """
import os, signal, sys
from pathlib import Path
from tests.unit.checkpoint import test_differences as t
checkpointer = t.Checkpointer(Path(sys.argv[1]), t.CTX, "run", delta=5)
checkpointer._whole = "model_00000001"
os.kill(checkpointer._writer.process.pid, signal.SIGSTOP)
checkpointer.save_model(3, t.weights(3), {"step": 3}, background=True)
os.kill(checkpointer._writer.process.pid, signal.SIGKILL)
os.kill(os.getpid(), signal.SIGKILL)
"""


def save_on(rank: int, world: int, root: str, steps: list[int], delta: int) -> None:
    save(Path(root), steps, delta, cs.context(world), rank, world)


def assert_refused(path: Path, *words: str) -> None:
    for read in (loaded, lambda path: describe(path, verify=True)):
        with pytest.raises(UserError) as error:
            read(path)
        assert all(word in str(error.value) for word in words), str(error.value)
        assert "\n" not in str(error.value)


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("saved")
    save(root / "whole", [1, 2, 3, 4], 0)
    save(root / "delta", [1, 2, 3, 4], 3)
    return root


@pytest.fixture
def copy(saved: Path, tmp_path: Path) -> Path:
    return shutil.copytree(saved / "delta", tmp_path / "copy")


def rewrite(folder: Path, **changes: Any) -> None:
    """Change entries of a manifest, and commit it."""
    content = json.loads((folder / "manifest.json").read_bytes()) | changes
    data = json.dumps(content).encode()
    (folder / "manifest.json").write_bytes(data)
    (folder / "COMMIT").write_bytes(commit_text(data))


def named(folder: Path) -> dict[str, str]:
    return {"name": folder.name, "manifest": (folder / "COMMIT").read_text().strip()}


def test_differences_refer_to_the_last_whole_one_and_have_its_bits(saved: Path) -> None:
    names = [f"model_{step:08d}" for step in (1, 2, 3, 4)]
    bases = [read_manifest(saved / "delta" / name).base for name in names]
    assert [base and base[0] for base in bases] == [None, names[0], names[0], None]
    for name in names:
        assert loaded(saved / "delta" / name) == loaded(saved / "whole" / name)
    sizes = [sum(f.stat().st_size for f in (saved / "delta" / name).glob("*.coded")) for name in names]
    assert sizes[1] < sizes[0] / 2
    content = json.loads((saved / "delta" / names[1] / "manifest.json").read_bytes())
    assert content["version"] == 3, "which earlier versions refuse"
    text = "\n".join(describe(saved / "delta" / names[1], verify=True))
    assert f"difference of {names[0]}" in text
    assert "all checksums are correct" in text


@pytest.mark.parametrize(
    ("base_by", "saved_by", "loaded_by"), [(2, 1, 2), (1, 2, 1), pytest.param(4, 2, 4, marks=pytest.mark.full)]
)
def test_base_and_difference_of_other_layouts(
    pool: WorkerPool, tmp_path: Path, base_by: int, saved_by: int, loaded_by: int
) -> None:
    """The base named by a difference has another layout than what the difference is encoded from."""
    pool.run(base_by, save_on, base_by, str(tmp_path / "run"), [1], 3)
    pool.run(saved_by, save_from, saved_by, str(tmp_path / "run"), "model_00000001")
    save(tmp_path / "whole", [2], 0)
    assert read_manifest(tmp_path / "run" / "model_00000002").base is not None
    for rank in range(loaded_by):
        found = [loaded(tmp_path / root / "model_00000002", rank, loaded_by) for root in ("run", "whole")]
        assert found[0] == found[1]


def save_from(rank: int, world: int, root: str, base: str) -> None:
    checkpointer = Checkpointer(root, cs.context(world), "run", delta=3)
    checkpointer._whole = base
    checkpointer.save_model(2, weights(2, rank, world), {"step": 2})
    checkpointer.close()


def test_a_base_that_is_not_there_is_named(saved: Path, copy: Path) -> None:
    difference, base = copy / "model_00000002", copy / "model_00000001"
    alone = shutil.copytree(difference, copy / "alone" / difference.name)
    assert_refused(alone, "model_00000001", "is missing")
    base.rename(copy / "aside_1_model_00000001")
    expected = loaded(saved / "whole" / difference.name)
    assert loaded(difference) == expected, "a base that was set aside is still found"
    shutil.copytree(copy / "model_00000004", base)
    assert loaded(difference) == expected
    shutil.rmtree(copy / "aside_1_model_00000001")
    assert_refused(difference, "model_00000001", "is another than the one saved")


def test_damage_of_base_and_difference(saved: Path, copy: Path) -> None:
    for damaged in ("model_00000001", "model_00000002"):
        for file, words in (("rank_00000.coded", "CRC32"), ("manifest.json", ""), ("COMMIT", "")):
            path = copy / damaged / file
            whole = path.read_bytes()
            at = len(whole) // 2
            path.write_bytes(whole[:at] + bytes([whole[at] ^ 1]) + whole[at + 1 :])
            assert_refused(copy / "model_00000002", damaged, words)
            path.write_bytes(whole)
    assert loaded(copy / "model_00000002") == loaded(saved / "whole" / "model_00000002")


def test_hostile_bases(copy: Path) -> None:
    first, second, third = (copy / f"model_{step:08d}" for step in (1, 2, 3))
    rewrite(third, base=named(second))
    assert_refused(third, "model_00000002", "is a difference itself")
    # Hashes cannot form a cycle; a name alone is refused by the hash.
    rewrite(third, base={**named(third)})
    assert_refused(third, "model_00000003", "is another than the one saved")
    escaping, short = {"name": "../x", "manifest": "0" * 64}, {"name": first.name, "manifest": "x"}
    for base in (escaping, short, {"name": first.name}, 7):
        rewrite(third, base=base)
        assert_refused(third, "manifest.json")
    rewrite(third, base=named(first), version=2)
    assert_refused(third, "names a base")
    rewrite(third, base=named(copy / "model_00000004"), version=3)
    assert_refused(third, "do not decode")


def test_a_base_that_vanishes_makes_the_next_snapshot_whole(
    saved: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    checkpointer = Checkpointer(tmp_path, CTX, "run", delta=5)
    checkpointer.save_model(1, weights(1), {"step": 1})
    shutil.rmtree(tmp_path / "model_00000001")
    path = checkpointer.save_model(2, weights(2), {"step": 2})
    checkpointer.close()
    assert path is not None
    assert read_manifest(path).base is None
    assert loaded(path) == loaded(saved / "whole" / path.name)
    assert caplog.text.count("model_00000001") == 1, "one line tells of it"


def test_a_save_after_one_that_failed_is_whole(saved: Path, tmp_path: Path) -> None:
    checkpointer = Checkpointer(tmp_path, CTX, "run", on_error="warn", delta=5)
    checkpointer.save_model(1, weights(1), {"step": 1})
    writer = checkpointer._writer.process
    resource.prlimit(writer.pid, resource.RLIMIT_FSIZE, (1000, resource.RLIM_INFINITY))
    assert checkpointer.save_model(2, weights(2), {"step": 2}) is None
    resource.prlimit(writer.pid, resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
    path = checkpointer.save_model(3, weights(3), {"step": 3})
    checkpointer.close()
    assert path is not None
    assert read_manifest(path).base is None
    assert loaded(path) == loaded(saved / "whole" / path.name)


@pytest.mark.parametrize("how", ["flipped", "cut"])
def test_a_base_that_turns_out_damaged_makes_the_snapshot_whole(
    saved: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture, how: str
) -> None:
    """The one that is being written; the next ones refer to that."""
    checkpointer = Checkpointer(tmp_path, CTX, "run", delta=5)
    checkpointer.save_model(1, weights(1), {"step": 1})
    damage(tmp_path / "model_00000001" / "rank_00000.coded", how)
    for step in (2, 3):
        checkpointer.save_model(step, weights(step), {"step": step})
    checkpointer.close()
    shutil.rmtree(tmp_path / "model_00000001")
    bases = [read_manifest(tmp_path / f"model_0000000{step}").base for step in (2, 3)]
    assert [base and base[0] for base in bases] == [None, "model_00000002"]
    for name in ("model_00000002", "model_00000003"):
        assert loaded(tmp_path / name) == loaded(saved / "whole" / name)
    assert caplog.text.count("rank_00000.coded") == 1, "one line tells of it"


def save_beside_damage(rank: int, world: int, root: str) -> None:
    checkpointer = Checkpointer(root, cs.context(world), "run", delta=5)
    checkpointer.save_model(1, weights(1, rank, world), {"step": 1})
    if rank == 1:
        damage(Path(root) / "model_00000001" / "rank_00001.coded", "flipped")
    for step in (2, 3):
        checkpointer.save_model(step, weights(step, rank, world), {"step": step})
    checkpointer.close()


def test_a_base_that_one_rank_finds_damaged_makes_all_shards_whole(
    saved: Path, pool: WorkerPool, tmp_path: Path
) -> None:
    """Its own, and those of ranks that read other parts of the base."""
    root = tmp_path / "run"
    pool.run(2, save_beside_damage, 2, str(root))
    shutil.rmtree(root / "model_00000001")
    for step, base in ((2, None), (3, "model_00000002")):
        path = root / f"model_0000000{step}"
        assert (read_manifest(path).base or [None])[0] == base
        assert "all checksums are correct" in "\n".join(describe(path, verify=True))
        assert loaded(path) == loaded(saved / "whole" / path.name)
    assert not list(root.glob(".tmp_*"))


def test_a_base_that_is_gone_at_the_commit_fails_the_save(tmp_path: Path) -> None:
    """A shard that nothing could decode is written by then."""
    save(tmp_path, [1], 5)
    checkpointer = Checkpointer(tmp_path, CTX, "run", delta=5)
    boxes = [box for box, _ in boxes_of(weights(2), "model")]
    size = sum(box.num_bytes for box in boxes)
    named = checkpointer._make_job(
        _Save("model_00000002", 2, tmp_path / ".tmp_model_00000002_a", 0.0, ""), "a", 2, {}, False
    )
    checkpointer.close()
    Path(named["temporary"]).mkdir()
    common = {**named, "world": 2, "capacity": size}
    parts = [
        {**common, "base": "model_00000001", "num_bytes": size, "boxes": [box.to_json() for box in boxes]},
        {**common, "rank": 1, "num_bytes": 0, "boxes": []},
    ]
    ours, theirs = socket.socketpair()
    with ours, theirs, mmap.mmap(-1, size) as buffer, ThreadPoolExecutor(1) as threads:
        committed = threads.submit(_serve, parts[0], buffer, theirs)
        deadline = time.monotonic() + 240
        while not (Path(named["temporary"]) / "rank_00000.json").exists():
            assert time.monotonic() < deadline, committed
            time.sleep(0.01)
        shutil.rmtree(tmp_path / "model_00000001")
        assert _serve(parts[1], None, theirs) == {"ok": True}
        assert "model_00000001: is the base of model_00000002, and is missing" in committed.result()["error"]
    assert not list(tmp_path.glob("model_*"))


def test_a_run_killed_while_it_writes_a_difference_leaves_the_earlier_ones(saved: Path, tmp_path: Path) -> None:
    save(tmp_path, [1, 2], 5)
    child = subprocess.Popen([sys.executable, "-c", KILLED, str(tmp_path)])
    assert child.wait(300) == -signal.SIGKILL
    assert sorted(p.name for p in tmp_path.glob("model_*")) == ["model_00000001", "model_00000002"]
    save(tmp_path, [3, 4], 5)
    base = read_manifest(tmp_path / "model_00000004").base
    assert base is not None
    assert base[0] == "model_00000003", "a new process begins with a whole one"
    assert not list(tmp_path.glob(".tmp_*"))
    for name in (f"model_{step:08d}" for step in (1, 2, 3, 4)):
        assert loaded(tmp_path / name) == loaded(saved / "whole" / name)


def test_a_difference_is_exported_as_a_whole_one(tmp_path: Path) -> None:
    for delta in (0, 3):
        given = {**cs.RUN, "train_steps": 3, "run_dir": str(tmp_path / f"run{delta}"), "save_model_every": 1}
        given["save_model_delta"] = delta
        with megalite.start(megalite.configure(**given)) as run:
            for _ in megalite.steps(run):
                pass
        path = tmp_path / f"run{delta}" / "checkpoints" / "model_00000002"
        assert (read_manifest(path).base is not None) == bool(delta)
        export_hf(path, tmp_path / f"hf{delta}")
    exports = [(tmp_path / f"hf{delta}" / "model.safetensors").read_bytes() for delta in (0, 3)]
    assert exports[0] == exports[1]


@pytest.mark.parametrize("name", ["model_00000001", "model_00000002"])
def test_a_flattened_snapshot_needs_no_other(
    saved: Path, copy: Path, capsys: pytest.CaptureFixture[str], name: str
) -> None:
    out = copy / "far" / name
    find_main("inspect")([str(copy / name), "--flatten", str(out)])
    assert f"wrote {out}" in capsys.readouterr().out
    shutil.rmtree(copy / "model_00000001")
    plain = saved / "whole" / name
    assert (out / "rank_00000.safetensors").read_bytes() == (plain / "rank_00000.safetensors").read_bytes()
    contents = [json.loads((path / "manifest.json").read_bytes()) | {"run_id": ""} for path in (out, plain)]
    assert contents[0] == contents[1]
    assert loaded(out) == loaded(plain)
    with pytest.raises(UserError, match="exists"):
        flatten(out, out)


def test_what_cannot_be_read_is_not_flattened(copy: Path) -> None:
    shard = copy / "model_00000001" / "rank_00000.coded"
    shard.write_bytes(shard.read_bytes()[:-1] + b"\0")
    with pytest.raises(UserError, match="CRC32"):
        flatten(copy / "model_00000002", copy / "far" / "x")
    assert list((copy / "far").iterdir()) == []


def test_it_needs_the_saves_that_it_applies_to() -> None:
    with pytest.raises(UserError, match="--save-model-delta 3"):
        megalite.configure(**{**cs.RUN, "run_dir": "runs/x", "save_model_delta": 3})
