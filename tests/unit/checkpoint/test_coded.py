"""Coded shards: the bits of plain ones, from any range and in any layout; damage and lies are refused."""

from __future__ import annotations

import hashlib
import json
import os
import random
import resource
import shutil
import struct
import sys
import tracemalloc
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import zstandard

import megalite
from megalite.core.base.errors import UserError
from megalite.core.mesh.context import ParallelContext
from megalite.core.sharding import ParamSpec, StateTensor
from megalite.extras.convert.hf import export_hf
from megalite.extras.view.checkpoint import describe
from megalite.runtime.checkpoint import coded
from megalite.runtime.checkpoint.load import find_good, load_checkpoint
from megalite.runtime.checkpoint.manifest import FileEntry, read_manifest
from megalite.runtime.checkpoint.mirror import Mirror
from megalite.runtime.checkpoint.save import Checkpointer, SaveError
from tests.faults import checkpoint_states as cs
from tests.rows import always_run
from tests.workers import WorkerPool

CTX = ParallelContext.single()
# More than two pieces; the odd one moves what follows off the borders of its elements.
SPECS = [*cs.SPECS, ParamSpec("layers.1.weight", (700, 500)), ParamSpec("odd.weight", (101, 7)), ParamSpec("z", (9, 9))]


def noisy(tp_rank: int = 0, tp: int = 1) -> list[StateTensor]:
    """States as training makes them, with denormals, both zeros, and the largest number."""
    states = cs.states_at(0, tp_rank, tp, SPECS)
    for state in states:
        seed = zlib.crc32(f"{state.name} {state.role}".encode())
        state.flat.normal_(0, 0.02, generator=torch.Generator().manual_seed(seed))
        state.flat[:5] = torch.tensor([-0.0, 0.0, 1e-42, -3e-45, 3.4e38])
    return states


def save(root: Path, code: Any, *, weights: bool = False) -> Path:
    checkpointer = Checkpointer(root, CTX, "run", code=code)
    path = (checkpointer.save_model if weights else checkpointer.save)(5, noisy(), {"step": 5})
    checkpointer.close()
    assert path is not None
    return path


def plain_bytes(path: Path) -> bytes:
    """The safetensors file of a coded shard, by nothing of the library."""
    data = path.read_bytes()
    header = 8 + int.from_bytes(data[:8], "little")
    body = max(end for entry in json.loads(data[8:header]).values() for end in entry.get("data_offsets", [0]))
    count = -(-body // 2**20)
    out, at = data[:header], header
    for i in range(count):
        length, crc = struct.unpack_from("<II", data, len(data) - 8 * (count - i))
        width, piece = data[at], data[at + 1 : at + length]
        if width:
            planes = np.frombuffer(zstandard.ZstdDecompressor().decompress(piece), np.uint8)
            rows = len(planes) // width
            piece = planes[: rows * width].reshape(width, rows).T.tobytes() + planes[rows * width :].tobytes()
        assert zlib.crc32(piece) == crc
        out, at = out + piece, at + length
    assert at == len(data) - 8 * count
    return out


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """The same state, plain and coded."""
    root = tmp_path_factory.mktemp("pair")
    return save(root / "plain", "none"), save(root / "coded", "planes-zstd")


@pytest.mark.parametrize("weights", [False, True])
def test_a_coded_shard_is_the_plain_one_made_smaller(tmp_path: Path, weights: bool) -> None:
    plain, other = (save(tmp_path / code, code, weights=weights) for code in ("none", "planes-zstd"))
    shard = (plain / "rank_00000.safetensors").read_bytes()
    assert plain_bytes(other / "rank_00000.coded") == shard
    assert (other / "rank_00000.coded").stat().st_size / len(shard) < (0.75 if weights else 0.87)
    contents = [json.loads((path / "manifest.json").read_bytes()) for path in (plain, other)]
    assert [c["version"] for c in contents] == [1, 2]
    assert contents[0]["tensors"] == contents[1]["tensors"], "boxes stand where they stand in the safetensors file"
    assert contents[1]["files"][0]["plain"] == len(shard)
    text = "\n".join(describe(other, verify=True))
    assert f"coded from {len(shard):,} (planes-zstd, 0." in text
    assert "all checksums are correct" in text


def test_any_range_is_read_from_few_bytes(pair: tuple[Path, Path], monkeypatch: pytest.MonkeyPatch) -> None:
    shard = (pair[0] / "rank_00000.safetensors").read_bytes()
    entry, path = read_manifest(pair[1]).files[0], pair[1] / "rank_00000.coded"
    fd, read, preadv = os.open(path, os.O_RDONLY), list[range](), os.preadv

    def noting(fd: int, buffers: Any, offset: int) -> int:
        count = preadv(fd, buffers, offset)
        read.append(range(offset, offset + count))
        return count

    monkeypatch.setattr(os, "preadv", noting)
    draw = random.Random(3)
    ends = [entry.header, entry.header + coded.PIECE - 1, entry.header + coded.PIECE, len(shard) - 1]
    for begin in [*ends, *(draw.randrange(entry.header, len(shard)) for _ in range(20))]:
        size = min(draw.choice([1, 1000, coded.PIECE + 5]), len(shard) - begin)
        reader = coded.CodedShard(path, entry, fd)
        read.clear()
        reader.read(memoryview(out := bytearray(size)), begin)
        assert out == shard[begin : begin + size]
        pieces = (begin + size - 1 - entry.header) // coded.PIECE - (begin - entry.header) // coded.PIECE + 1
        assert len(read) == pieces
        # What an export verifies is what it reads.
        assert reader.stored(begin, begin + size) == range(read[0].start, read[-1].stop)
    os.close(fd)


def save_noisy(rank: int, world: int, root: str, code: Any) -> None:
    checkpointer = Checkpointer(root, cs.context(world), "run", code=code)
    checkpointer.save(5, noisy(rank, world), {"step": 5})
    checkpointer.close()


@pytest.mark.parametrize(("saved_by", "loaded_by"), [(2, 1), pytest.param(1, 2, marks=pytest.mark.full)])
def test_any_layout(pool: WorkerPool, tmp_path: Path, saved_by: int, loaded_by: int) -> None:
    for code in ("none", "planes-zstd"):
        pool.run(saved_by, save_noisy, saved_by, str(tmp_path / code), code)
    for rank in range(loaded_by):
        found = []
        for code in ("none", "planes-zstd"):
            states = cs.states_at(-1, rank, loaded_by, SPECS)
            load_checkpoint(tmp_path / code / "step_00000005", states, CTX)
            found.append(b"".join(state.flat.numpy().tobytes() for state in states))
        assert found[0] == found[1]


def assert_refused(path: Path, *words: str) -> None:
    states = cs.states_at(-1, specs=SPECS)
    with pytest.raises(UserError) as error:
        load_checkpoint(path, states, CTX)
    assert all(word in str(error.value) for word in words), str(error.value)
    assert "\n" not in str(error.value)


def test_a_flipped_bit_of_every_kind_of_byte(pair: tuple[Path, Path], tmp_path: Path) -> None:
    path = shutil.copytree(pair[1], tmp_path / "step_00000005")
    shard = path / "rank_00000.coded"
    header, size = read_manifest(path).files[0].header, shard.stat().st_size
    draw = random.Random(7)
    # Length and text of the header, flag and frame of the first piece, somewhere, and lengths and sums of the table.
    places = [0, 9, header - 1, header, header + 1, header + 9, *(draw.randrange(size) for _ in range(10))]
    for at in [*places, size - 8, size - 4, size - 1]:
        data = bytearray(shard.read_bytes())
        data[at] ^= 1 << draw.randrange(8)
        shard.write_bytes(data)
        assert_refused(path, "rank_00000.coded", "differ from what was written (CRC32)")
        with pytest.raises(UserError):
            describe(path, verify=True)
        shutil.copy(pair[1] / "rank_00000.coded", shard)
    load_checkpoint(path, cs.states_at(-1, specs=SPECS), CTX)
    os.truncate(shard, size - 8)
    assert_refused(path, "rank_00000.coded", f"has {size - 8} bytes, but {size} in the manifest")


def commit(path: Path, change: Callable[[dict[str, Any], bytearray], None]) -> None:
    """What an attacker would make: a shard and a manifest with the right checksums."""
    content = json.loads((path / "manifest.json").read_bytes())
    data = bytearray((path / "rank_00000.coded").read_bytes())
    change(content, data)
    (path / "rank_00000.coded").write_bytes(data)
    sums = [zlib.crc32(data[i : i + 2**23]) for i in range(0, len(data), 2**23)]
    content["files"][0] |= {"size": len(data), "crc32": sums}
    text = json.dumps(content).encode()
    (path / "manifest.json").write_bytes(text)
    (path / "COMMIT").write_text(hashlib.sha256(text).hexdigest() + "\n")


def replace_piece(piece: bytes, content: dict[str, Any], data: bytearray) -> None:
    """Put another first piece into a shard, and its length into the table."""
    header, plain = (content["files"][0][key] for key in ("header", "plain"))
    table = len(data) - 8 * -(-(plain - header) // 2**20)
    (length,) = struct.unpack_from("<I", data, table)
    struct.pack_into("<I", data, table, len(piece))
    data[header : header + length] = piece


BOMB = b"\x04" + zstandard.ZstdCompressor().compress(bytes(1 << 30))
LIES: dict[str, tuple[Callable[[dict[str, Any], bytearray], None], str]] = {
    "bomb": (lambda c, d: replace_piece(BOMB, c, d), "do not decode to the 1048576 bytes that were saved"),
    "no frame": (lambda c, d: replace_piece(b"\x04" + bytes(99), c, d), "do not decode to the 1048576 bytes"),
    "plain and short": (lambda c, d: replace_piece(b"\0" + bytes(99), c, d), "do not decode to the 1048576 bytes"),
    "other bytes": (lambda c, d: replace_piece(bytes(1 + 2**20), c, d), "do not decode to the 1048576 bytes"),
    "table": (lambda c, d: d.__setitem__(slice(-8, -4), b"\xff" * 4), "its table of pieces does not fill it"),
    "size": (lambda c, d: c["files"][0].update(plain=2**49), "boxes end at byte"),
    "code": (lambda c, d: c["files"][0].update(code="lz4"), "code 'lz4' is not planes-zstd"),
    "no code": (lambda c, d: c["files"][0].pop("code"), "an entry is missing"),
    "old version": (lambda c, d: c.update(version=1), "has format version 1, and coded shards: True"),
    "version": (lambda c, d: c.update(version=4), "has format version 4, not 1, 2 or 3: a newer megalite reads it"),
}


@pytest.mark.parametrize("name", LIES)
def test_lies_with_right_checksums(pair: tuple[Path, Path], tmp_path: Path, name: str) -> None:
    path = shutil.copytree(pair[1], tmp_path / "step_00000005")
    commit(path, LIES[name][0])
    tracemalloc.start()
    assert_refused(path, str(path), LIES[name][1])
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 64 << 20, "no memory is taken for what a frame only claims"
    with pytest.raises(UserError):
        describe(path, verify=True)


def test_a_table_of_more_pieces_than_the_file_could_hold(tmp_path: Path) -> None:
    (tmp_path / "x.coded").write_bytes(bytes(100))
    fd = os.open(tmp_path / "x.coded", os.O_RDONLY)
    with pytest.raises(UserError, match="has 100 bytes, too few for 536870912 pieces"):
        coded.CodedShard(tmp_path / "x.coded", FileEntry("x.coded", 100, 16, (), 16 + 2**49), fd)
    os.close(fd)


def test_noise_is_stored_as_it_is() -> None:
    for size in (0, 1, 7, coded.PIECE, 3 * coded.PIECE + 3):
        body = os.urandom(size)
        *pieces, table = coded.encode(memoryview(body), [(0, 4)])
        assert b"".join(piece[1:] for piece in pieces) == body
        assert sum(map(len, pieces)) + len(table) == size + 9 * -(-size // coded.PIECE)


def test_every_bit_pattern_comes_back() -> None:
    """NaN payloads, of items of 2 and 4 bytes, behind borders at any byte."""
    draw = np.random.default_rng(5)
    body = (draw.integers(0, 2**32, 300_001, np.uint32) & 0xFFF80FFF).tobytes() + bytes(7)
    for width in (1, 2, 4):
        *pieces, _ = coded.encode(memoryview(body), [(0, width)])
        sizes = [min(coded.PIECE, len(body) - at) for at in range(0, len(body), coded.PIECE)]
        assert b"".join(coded._decode(bytearray(p), n) for p, n in zip(pieces, sizes, strict=True)) == body
        assert sum(map(len, pieces)) < len(body)


def test_a_piece_has_the_planes_of_the_tensor_that_it_begins_in() -> None:
    """Those of another item size would hold a mixture of bytes, and be no smaller than noise."""
    body = np.arange(coded.PIECE * 5 // 8, dtype=np.uint32).tobytes()
    begins = [(0, 4), (coded.PIECE, 2), (coded.PIECE + 1000, 8), (2 * coded.PIECE, 8)]
    *pieces, _ = coded.encode(memoryview(body), begins)
    assert [piece[0] for piece in pieces] == [4, 2, 8]


def test_a_store_takes_and_gives_coded_shards(tmp_path: Path) -> None:
    """Uploaded, pruned there, and loaded on another disk."""
    url = f"file://{tmp_path}/store"
    here = tmp_path / "here"
    checkpointer = Checkpointer(here / "checkpoints", CTX, "run", mirror=Mirror(url, here), code="planes-zstd")
    checkpointer.take()
    for step in (1, 2, 3):
        checkpointer.save(step, noisy(), {"step": step})
        assert checkpointer.settle()
    checkpointer.close()
    folders = sorted(p for p in (tmp_path / "store" / "checkpoints").glob("step_*") if any(p.iterdir()))
    assert [p.name[:13] for p in folders] == ["step_00000002", "step_00000003"]
    local = here / "checkpoints" / "step_00000003" / "rank_00000.coded"
    assert (folders[1] / local.name).read_bytes() == local.read_bytes()
    found = find_good(tmp_path / "there", CTX, mirror=Mirror(url, tmp_path / "there"))
    assert found is not None
    states = cs.states_at(-1, specs=SPECS)
    load_checkpoint(found, states, CTX)
    assert all(torch.equal(a.flat, b.flat) for a, b in zip(states, noisy(), strict=True))


def test_a_disk_that_becomes_full(tmp_path: Path) -> None:
    """In the middle of a coded shard: nothing is left, and the next save has room."""
    checkpointer = Checkpointer(tmp_path, CTX, code="planes-zstd")
    pid = checkpointer._writer.process.pid
    _, hard = resource.prlimit(pid, resource.RLIMIT_FSIZE, (1 << 20, resource.RLIM_INFINITY))
    with pytest.raises(SaveError, match=r"rank_00000\.coded: EFBIG"):
        checkpointer.save(1, noisy(), {"step": 1})
    assert [p.name for p in tmp_path.iterdir()] == ["lock"]
    resource.prlimit(pid, resource.RLIMIT_FSIZE, (hard, hard))
    path = checkpointer.save(2, noisy(), {"step": 2})
    checkpointer.close()
    assert path is not None
    load_checkpoint(path, cs.states_at(-1, specs=SPECS), CTX)


def test_a_run_that_codes_its_saves_is_the_same_run(tmp_path: Path) -> None:
    """Interrupted, with and without: the same bits, and the same export."""
    losses = {}
    for code in ("none", "planes-zstd"):
        steps = []
        for end in (2, 4):
            given = {**cs.RUN, "run_dir": str(tmp_path / code), "train_steps": end, "save_code": code}
            with megalite.start(megalite.configure(**given)) as run:
                steps += [step["loss"] for step in megalite.steps(run)]
        losses[code] = steps
    assert losses["none"] == losses["planes-zstd"]
    assert len(losses["none"]) == 4
    paths = [tmp_path / code / "checkpoints" / "step_00000004" for code in losses]
    assert plain_bytes(paths[1] / "rank_00000.coded") == (paths[0] / "rank_00000.safetensors").read_bytes()
    for path, name in zip(paths, ("a", "b"), strict=True):
        export_hf(path, tmp_path / name)
    # Damage of weights' pieces is found before anything is written; their checksums are read, not those of moments.
    shard, entry = paths[1] / "rank_00000.coded", read_manifest(paths[1]).files[0]
    data = bytearray(shard.read_bytes())
    data[entry.header + 100] ^= 4
    shard.write_bytes(data)
    with pytest.raises(UserError, match=r"differ from what was written \(CRC32\)"):
        export_hf(paths[1], tmp_path / "c")
    assert (tmp_path / "a" / "model.safetensors").read_bytes() == (tmp_path / "b" / "model.safetensors").read_bytes()


@pytest.mark.parametrize(
    "options",
    always_run(
        [{"optimizer": name} for name in ("adamw", "muon", "lion", "lamb")] + [{"moments_dtype": "bf16"}],
        {"moments_dtype": "bf16"},
    ),
    ids=str,
)
def test_the_bits_of_what_an_optimizer_keeps(tmp_path: Path, options: dict[str, Any]) -> None:
    shards = []
    for code, decoded in (("none", Path.read_bytes), ("planes-zstd", plain_bytes)):
        given = {**cs.RUN, **options, "run_dir": str(tmp_path / code), "train_steps": 2, "save_code": code}
        with megalite.start(megalite.configure(**given)) as run:
            assert len(list(megalite.steps(run))) == 2
        (shard,) = (tmp_path / code / "checkpoints/step_00000002").glob("rank_*")
        shards.append(decoded(shard))
    assert shards[0] == shards[1]


def test_where_the_newest_is_damaged_the_one_before_it_is_taken(pair: tuple[Path, Path], tmp_path: Path) -> None:
    for step in (5, 6):
        shutil.copytree(pair[1], tmp_path / f"step_0000000{step}")
    newest = tmp_path / "step_00000006"
    commit(newest, lambda content, data: content.update(step=6, meta={**content["meta"], "step": 6}))
    found = find_good(tmp_path, CTX)
    assert found is not None
    assert found.path == newest
    shard = newest / "rank_00000.coded"
    shard.write_bytes(shard.read_bytes()[:-1] + b"\0")
    with pytest.raises(UserError, match="step_00000006"):
        find_good(tmp_path, CTX)
    found = find_good(tmp_path, CTX, fallback=True)
    assert found is not None
    assert found.path == tmp_path / "step_00000005"


def test_without_the_package(tmp_path: Path, pair: tuple[Path, Path], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "zstandard", None)
    with pytest.raises(UserError, match="--save-code planes-zstd: needs the Python package zstandard .*pip install"):
        Checkpointer(tmp_path, CTX, code="planes-zstd")
    assert not list(tmp_path.glob("lock")), "nothing was begun"
    assert_refused(pair[1], "needs the Python package zstandard")
