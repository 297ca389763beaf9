"""Damaged and hostile checkpoints: refused by name and place, before anything is loaded, and nothing else is opened."""

from __future__ import annotations

import hashlib
import json
import os
import pickle
import random
import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from megalite.core.base.errors import UserError
from megalite.core.mesh.context import ParallelContext
from megalite.extras.view.checkpoint import describe
from megalite.runtime.checkpoint.load import find_good, find_latest, load_checkpoint
from megalite.runtime.checkpoint.save import Checkpointer
from megalite.runtime.places.disk import BLOCK
from tests.faults import checkpoint_states as cs
from tests.limits import memory_limit
from tests.workers import WorkerPool

SHARD0, SHARD1 = "rank_00000.safetensors", "rank_00001.safetensors"


@pytest.fixture(scope="module")
def saved(pool: WorkerPool, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Steps 5 and 10, of two ranks."""
    root = tmp_path_factory.mktemp("saved")
    pool.run(2, cs.save_all, 2, str(root), [5, 10])
    return root


@pytest.fixture
def root(saved: Path, tmp_path: Path) -> Path:
    """A copy to damage."""
    shutil.copytree(saved, tmp_path / "checkpoints", symlinks=True)
    return tmp_path / "checkpoints"


def assert_refused(path: Path, *words: str) -> str:
    """Refused on loading, with the words; states stay as they were."""
    states = cs.states_at(-1)
    with pytest.raises(UserError) as error:
        load_checkpoint(path, states, ParallelContext.single())
    for word in words:
        assert word in str(error.value)
    assert all(torch.isnan(s.flat).all() for s in states), "nothing was loaded"
    return str(error.value)


def flip(path: Path, at: int, bit: int) -> None:
    data = bytearray(path.read_bytes())
    data[at] ^= 1 << bit
    path.write_bytes(data)


def test_flipped_bits(root: Path) -> None:
    seed = random.SystemRandom().randrange(1 << 30)
    print(f"seed {seed}")
    draw = random.Random(seed)
    path = root / "step_00000010"
    header = json.loads((path / "manifest.json").read_bytes())["files"][0]["header"]
    sizes = {p.name: p.stat().st_size for p in path.iterdir()}
    places = [("manifest.json", draw.randrange(sizes["manifest.json"])) for _ in range(4)]
    places += [(SHARD0, draw.randrange(header)) for _ in range(4)]
    places += [(name, draw.randrange(sizes[name])) for name in (SHARD0, SHARD1) for _ in range(5)]
    places += [("COMMIT", draw.randrange(sizes["COMMIT"])) for _ in range(2)]
    for name, at in places:
        bit = draw.randrange(8)
        flip(path / name, at, bit)
        named = "manifest.json" if name == "COMMIT" else name
        text = assert_refused(path, named)
        if name.startswith("rank"):
            low, high = map(int, re.findall(r"bytes (\d+) to (\d+)", text)[0])
            assert low <= at < high
        flip(path / name, at, bit)
    load_checkpoint(path, cs.states_at(-1), ParallelContext.single())


def test_offset_of_damage_in_a_large_file(tmp_path: Path) -> None:
    specs = [cs.ParamSpec("w", (2500, 1024))]
    checkpointer = Checkpointer(tmp_path, ParallelContext.single())
    path = checkpointer.save(1, cs.states_at(1, specs=specs), {})
    checkpointer.close()
    assert path is not None
    flip(path / SHARD0, 2 * BLOCK + 17, 3)
    with pytest.raises(UserError, match=f"{SHARD0}: bytes {2 * BLOCK} to {3 * BLOCK} differ from what was written"):
        load_checkpoint(path, cs.states_at(1, specs=specs), ParallelContext.single())


def truncate(path: Path) -> None:
    os.truncate(path / SHARD1, (path / SHARD1).stat().st_size - 7)


def zero_4k(path: Path) -> None:
    with (path / SHARD0).open("r+b") as f:
        f.seek(4096)
        f.write(bytes(4096))


def append(path: Path) -> None:
    with (path / SHARD0).open("ab") as f:
        f.write(b"x")


def delete(path: Path) -> None:
    (path / SHARD1).unlink()


def swap(path: Path) -> None:
    (path / SHARD0).rename(path / "x")
    (path / SHARD1).rename(path / SHARD0)
    (path / "x").rename(path / SHARD1)


def double(path: Path) -> None:
    shutil.copy(path / SHARD0, path / SHARD1)


def pickle_shard(path: Path) -> None:
    (path / SHARD0).write_bytes(pickle.dumps(Canary()))


def pickle_manifest(path: Path) -> None:
    commit(path, pickle.dumps(Canary()))


class Canary:
    def __reduce__(self) -> Any:
        return os.mkdir, ("canary",)


def commit(path: Path, manifest: bytes) -> None:
    """A manifest with the right hash: what an attacker would make."""
    (path / "manifest.json").write_bytes(manifest)
    (path / "COMMIT").write_text(hashlib.sha256(manifest).hexdigest() + "\n")


DAMAGE: dict[str, tuple[Callable[[Path], None], str]] = {
    "truncated": (truncate, SHARD1),
    "zeroed": (zero_4k, SHARD0),
    "appended": (append, SHARD0),
    "deleted": (delete, SHARD1),
    "swapped": (swap, "rank_0000"),
    "doubled": (double, SHARD1),
    "pickle_shard": (pickle_shard, SHARD0),
    "pickle_manifest": (pickle_manifest, "manifest.json"),
}


@pytest.mark.parametrize("name", DAMAGE)
def test_damaged_files(root: Path, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(root)
    spoil, file = DAMAGE[name]
    spoil(root / "step_00000010")
    assert_refused(root / "step_00000010", file)
    assert not (root / "canary").exists()


@pytest.mark.parametrize("name", DAMAGE)
def test_the_one_before_only_when_told(
    root: Path, name: str, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    DAMAGE[name][0](root / "step_00000010")
    ctx = ParallelContext.single()
    with pytest.raises(UserError, match="--resume-fallback"):
        find_good(root, ctx)
    monkeypatch.setattr("megalite.core.base.log.logger.propagate", True)
    good = find_good(root, ctx, fallback=True)
    assert good is not None
    assert good.path == root / "step_00000005"
    assert "skipping" in caplog.text
    assert "step_00000010" in caplog.text


def test_every_rank_refuses_what_one_rank_sees(pool: WorkerPool, root: Path) -> None:
    flip(root / "step_00000010" / SHARD1, 5000, 1)
    ranks = pool.run(2, cs.load_step, 2, str(root), False)
    assert [step for step, _ in ranks] == [-1, -1]
    assert ranks[0] == ranks[1]
    assert SHARD1 in ranks[0][1]
    assert pool.run(2, cs.load_step, 2, str(root), True) == [(5, ""), (5, "")]


def test_no_checkpoint_is_whole(root: Path) -> None:
    for step in ("step_00000005", "step_00000010"):
        delete(root / step)
    with pytest.raises(UserError, match="all of its checkpoints are damaged"):
        find_good(root, ParallelContext.single(), fallback=True)


def test_extra_files_are_ignored_and_named(
    root: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = root / "step_00000010"
    shutil.copy(root / "step_00000005" / SHARD0, path / "rank_00002.safetensors")
    monkeypatch.setattr("megalite.core.base.log.logger.propagate", True)
    states = cs.states_at(-1)
    load_checkpoint(path, states, ParallelContext.single())
    cs.assert_states(states, 10)
    assert "rank_00002.safetensors" in caplog.text
    assert "not part of it, ignored: rank_00002.safetensors" in describe(path)


def test_uncommitted_and_misleading_names(root: Path) -> None:
    """The truth is the highest step with a COMMIT: not `latest`, not times, not other names."""
    newer = root / "step_00000015"
    shutil.copytree(root / "step_00000010", newer)
    (newer / "COMMIT").unlink()
    for name in (".tmp_step_00000020", "aside_1_step_00000030", "model_00000040", "step_99"):
        shutil.copytree(root / "step_00000010", root / name)
    (root / "latest").unlink()
    (root / "latest").symlink_to("step_00000005")
    for number, path in enumerate(sorted(root.rglob("*"), reverse=True)):
        os.utime(path, (1e9 - 1e5 * number, 1e9 - 1e5 * number), follow_symlinks=False)
    assert find_latest(root) == root / "step_00000010"
    good = find_good(root, ParallelContext.single())
    assert good is not None
    assert good.path == root / "step_00000010"


Change = Callable[[dict[str, Any]], Any]
Q = "layers.0.qkv_proj.weight"


def box(m: dict[str, Any], index: int = 0, name: str = Q) -> list[Any]:
    return m["tensors"]["master"][name]["boxes"][index]


def set_box(position: int, value: Any) -> Change:
    return lambda m: box(m).__setitem__(position, value)


HOSTILE: dict[str, Change] = {
    "huge_offset": set_box(2, [10**30, 0]),
    "negative_offset": set_box(2, [-1, 0]),
    "float_offset": set_box(2, [0.0, 0]),
    "bool_offset": set_box(2, [False, 0]),
    "outside": set_box(2, [47, 0]),
    "huge_byte": set_box(1, 10**18),
    "negative_byte": set_box(1, -8),
    "inside_header": set_box(1, 8),
    "no_such_file": set_box(0, 2),
    "negative_file": set_box(0, -1),
    "wide": set_box(3, [6, 17]),
    "empty": set_box(3, [0, 16]),
    "three_dimensions": set_box(3, [1, 1, 1]),
    "gap": lambda m: m["tensors"]["master"][Q]["boxes"].pop(),
    "overlap": lambda m: box(m, 1).__setitem__(2, box(m, 0)[2]),
    "twice": lambda m: m["tensors"]["master"][Q]["boxes"].append(box(m)),
    "same_bytes": lambda m: box(m, 1).__setitem__(1, box(m, 0)[1]),
    "tensor_dropped": lambda m: m["tensors"]["master"].pop(Q),
    "huge_shape": lambda m: m["tensors"]["master"][Q].__setitem__("shape", [2**40, 2**40]),
    "unknown_type": lambda m: m["tensors"]["master"][Q].__setitem__("dtype", "OBJ"),
    "other_type": lambda m: m["tensors"]["master"][Q].__setitem__("dtype", "BF16"),
    "size_of_file": lambda m: m["files"][0].__setitem__("size", 10**15),
    "no_checksums": lambda m: m["files"][0].__setitem__("crc32", []),
    "checksum_text": lambda m: m["files"][0].__setitem__("crc32", ["1"]),
    "file_twice": lambda m: m["files"].append(m["files"][0]),
    "name_up": lambda m: m["files"][0].__setitem__("name", "../outside.safetensors"),
    "name_absolute": lambda m: m["files"][0].__setitem__("name", "/tmp/outside.safetensors"),
    "name_is_text": lambda m: m["files"][0].__setitem__("name", ["x"]),
    "tensor_name": lambda m: m["tensors"]["master"].__setitem__("../x", m["tensors"]["master"].pop(Q)),
    "version": lambda m: m.__setitem__("version", 2),
    "format": lambda m: m.__setitem__("format", "torch"),
    "no_files": lambda m: m.pop("files"),
    "files_is_text": lambda m: m.__setitem__("files", "abc"),
    "tensors_is_list": lambda m: m.__setitem__("tensors", []),
}


@pytest.mark.parametrize("name", HOSTILE)
def test_hostile_manifest(root: Path, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    path = root / "step_00000010"
    manifest = json.loads((path / "manifest.json").read_bytes())
    HOSTILE[name](manifest)
    commit(path, json.dumps(manifest).encode())
    shutil.copy(path / SHARD0, root / "outside.safetensors")
    opened: list[str] = []
    real = os.open

    def watched(name: Any, *args: Any, **kwargs: Any) -> int:
        opened.append(str(name))
        return real(name, *args, **kwargs)

    monkeypatch.setattr(os, "open", watched)
    assert_refused(path, "manifest.json")
    assert not [n for n in opened if n.endswith(".safetensors")], "no shard is opened through a bad manifest"


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"\0" * 100,
        b"null",
        b"[]",
        b"{",
        b"[" * 1_000_000,
        b'{"a":' * 700_000,
        b"[" + b"[]," * 1_300_000 + b"[]]",
        b"9" * 4_000_000,
        b'{"format":"megalite-checkpoint","files":' + b"[" * 200_000 + b"]" * 200_000 + b"}",
        b" " * (60 << 20),
    ],
    ids=["empty", "zeros", "null", "list", "cut", "deep", "deep_objects", "wide", "number", "nested", "long"],
)
def test_manifest_bombs(root: Path, data: bytes) -> None:
    path = root / "step_00000010"
    commit(path, data)
    with memory_limit(200 << 20):
        assert_refused(path, "manifest.json")


def test_links_out_of_the_folder(root: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = root / "step_00000010"
    outside = tmp_path / "outside"
    (path / SHARD0).rename(outside)
    (path / SHARD0).symlink_to(outside)
    assert_refused(path, SHARD0, "is a link")
    (path / SHARD0).unlink()
    os.mkfifo(path / SHARD0)
    assert_refused(path, SHARD0, "is not a regular file")
    (path / SHARD0).unlink()
    outside.rename(path / SHARD0)
    for name in ("manifest.json", "COMMIT"):
        (path / name).rename(outside)
        (path / name).symlink_to(outside)
        assert_refused(path, name, "is a link")
        (path / name).unlink()
        outside.rename(path / name)
    load_checkpoint(path, cs.states_at(-1), ParallelContext.single())


def test_headers_must_agree_with_the_manifest(root: Path) -> None:
    """Two tensors of one shape change places in the manifest: every sum holds, and only the names tell."""
    path = root / "step_00000010"
    manifest = json.loads((path / "manifest.json").read_bytes())
    one, other = (manifest["tensors"][kind][Q]["boxes"][0] for kind in ("exp_avg", "exp_avg_sq"))
    one[1], other[1] = other[1], one[1]
    commit(path, json.dumps(manifest).encode())
    assert_refused(path, SHARD0, "header")


def test_of_another_model(root: Path) -> None:
    path = root / "step_00000010"
    ctx = ParallelContext.single()
    larger = [*cs.SPECS, cs.ParamSpec("layers.1.o_proj.weight", (16, 24))]
    with pytest.raises(UserError, match=r"master layers\.1\.o_proj\.weight of shape \[16, 24\] is missing"):
        load_checkpoint(path, cs.states_at(-1, specs=larger), ctx)
    with pytest.raises(UserError, match=r"holds norm\.weight, which this model does not have"):
        load_checkpoint(path, cs.states_at(-1, specs=cs.SPECS[:-1]), ctx)
    wider = [*cs.SPECS[:-1], cs.ParamSpec("norm.weight", (17,))]
    with pytest.raises(UserError, match=r"norm\.weight of shape \[17\] has shape \[16\] there"):
        load_checkpoint(path, cs.states_at(-1, specs=wider), ctx)


def test_no_load_path_can_read_a_pickle() -> None:
    root = Path(__file__).resolve().parents[2]
    sources = [*(root / "megalite").rglob("*.py"), *(root / "tools").glob("*.py")]
    # What a notebook sends to its own processes is a pickle; no file is read that way.
    sources = [path for path in sources if path.parent.name != "notebook"]
    assert len(sources) > 200
    able = re.compile(r"import (c?[pP]ickle|shelve|marshal|dill)|torch\.(load|save)\(|allow_pickle=True")
    found = [(path.name, line) for path in sources for line in path.read_text().splitlines() if able.search(line)]
    # Checkpoints of Megatron-LM are pickles; this reader makes nothing but plain records of them.
    assert found == [("unpickle.py", "import pickle")]
