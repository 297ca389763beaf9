"""Tiling is exact for whatever rectangles, and shards are plain safetensors files."""

from __future__ import annotations

from pathlib import Path
from random import Random

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from safetensors.numpy import load_file, save_file

from megalite.core.base.slices import Slice
from megalite.runtime.checkpoint.manifest import FileEntry, Manifest, TensorEntry, commit_text, read_manifest
from megalite.runtime.checkpoint.safetensors_io import BadCheckpoint, make_header, parse_header
from megalite.runtime.places.disk import BLOCK, write_file

Rectangle = tuple[int, int, int, int]


def cut(shape: tuple[int, int], choices: list[int]) -> list[Rectangle]:
    """Cut a matrix again and again; (row, column, rows, columns) of the parts."""
    parts = [(0, 0, *shape)]
    for choice in choices:
        r, c, n, m = parts.pop(choice % len(parts))
        if choice % 2 and n > 1:
            k = 1 + choice % (n - 1)
            parts += [(r, c, k, m), (r + k, c, n - k, m)]
        elif m > 1:
            k = 1 + choice % (m - 1)
            parts += [(r, c, n, k), (r, c + k, n, m - k)]
        else:
            parts.append((r, c, n, m))
    return parts


def manifest_of(shape: tuple[int, int], parts: list[Rectangle]) -> Manifest:
    boxes, at = [], 100
    for r, c, n, m in parts:
        boxes.append((0, Slice((r, c), (n, m), at)))
        at += 4 * n * m
    file = FileEntry("rank_00000.safetensors", at, 100, (0,) * -(-at // BLOCK))
    return Manifest("run", 1, {"world": 1}, {}, (file,), {"master": {"w": TensorEntry("F32", shape, tuple(boxes))}})


shapes = st.tuples(st.integers(1, 12), st.integers(1, 12))
cuts = st.lists(st.integers(0, 1000), max_size=12)


@given(shapes, cuts, st.randoms())
def test_any_tiling_is_accepted_and_comes_back(shape: tuple[int, int], choices: list[int], shuffle: Random) -> None:
    parts = cut(shape, choices)
    shuffle.shuffle(parts)
    manifest = manifest_of(shape, parts)
    assert Manifest.from_json(manifest.to_json(), "here") == manifest


@given(shapes, cuts, st.integers(0, 100), st.integers(0, 3), st.sampled_from([-1, 1]))
def test_anything_else_is_refused(shape: tuple[int, int], choices: list[int], which: int, side: int, by: int) -> None:
    """Move or resize one rectangle; an oracle of booleans says whether it is still a tiling."""
    parts = cut(shape, choices)
    changed = list(parts[which % len(parts)])
    changed[side] += by
    r, c, n, m = changed
    parts[which % len(parts)] = (r, c, n, m)
    count = np.zeros(shape, int)
    inside = all(
        r >= 0 and c >= 0 and n > 0 and m > 0 and r + n <= shape[0] and c + m <= shape[1] for r, c, n, m in parts
    )
    for r, c, n, m in parts if inside else ():
        count[r : r + n, c : c + m] += 1
    manifest = manifest_of(shape, parts)
    if inside and (count == 1).all():
        Manifest.from_json(manifest.to_json(), "here")
    else:
        with pytest.raises(BadCheckpoint):
            Manifest.from_json(manifest.to_json(), "here")


def test_files_are_safetensors(tmp_path: Path) -> None:
    """The library reads ours; ours and the library's headers list the same; several blocks have a checksum each."""
    big = np.random.default_rng(0).standard_normal((3, 1 << 20)).astype(np.float32)
    small = np.arange(5, dtype=np.float32)
    header, begins = make_header([("big", "F32", big.shape), ("small", "F32", small.shape)])
    size, crcs = write_file(tmp_path / "a.safetensors", [header, big.data.cast("B"), small.tobytes()])
    assert size == (tmp_path / "a.safetensors").stat().st_size
    assert len(crcs) == 2 == -(-size // BLOCK)
    loaded = load_file(tmp_path / "a.safetensors")
    np.testing.assert_array_equal(loaded["big"], big)
    np.testing.assert_array_equal(loaded["small"], small)
    save_file({"big": big, "small": small}, tmp_path / "b.safetensors")
    for file in ("a.safetensors", "b.safetensors"):
        data = (tmp_path / file).read_bytes()
        length = 8 + int.from_bytes(data[:8], "little")
        found = parse_header(data[:length])
        assert found is not None
        assert found == parse_header(header)
        assert parse_header(data[: length - 1]) is None
        for name, array in (("big", big), ("small", small)):
            begin, end = found[name]["data_offsets"]
            assert data[length + begin : length + end] == array.tobytes()
            assert found[name]["shape"] == list(array.shape)
    assert begins == {"big": len(header), "small": len(header) + big.nbytes}


@pytest.mark.parametrize("text", [b"[1]", b"{", b"\xff", b"[" * 100_000, b"null"])
def test_what_is_not_a_header(text: bytes) -> None:
    assert parse_header(len(text).to_bytes(8, "little") + text) is None


def test_a_file_is_never_overwritten(tmp_path: Path) -> None:
    write_file(tmp_path / "x", [b"first"])
    with pytest.raises(FileExistsError):
        write_file(tmp_path / "x", [b"second"])
    assert (tmp_path / "x").read_bytes() == b"first"


def test_files_that_no_manifest_names_do_not_raise_its_limit(tmp_path: Path) -> None:
    """4 MiB, and as much for each shard that it names and that holds anything: refused before it is parsed."""
    text = b'{"files": [{"name": "named.safetensors"}, {"name": "empty.safetensors"}]}' + b" " * (9 << 20)
    (tmp_path / "manifest.json").write_bytes(text)
    (tmp_path / "COMMIT").write_bytes(commit_text(text))
    for i in range(30):
        (tmp_path / f"empty_{i}.safetensors").touch()
    (tmp_path / "empty.safetensors").touch()
    (tmp_path / "link.safetensors").symlink_to("/dev/zero")
    limit = 4 << 20
    words = f"manifest.json: has {len(text)} bytes, more than the limit of {{}}"
    with pytest.raises(BadCheckpoint, match=words.format(limit)):
        read_manifest(tmp_path)
    for name in ("unnamed", "other", "named"):
        with (tmp_path / f"{name}.safetensors").open("wb") as f:
            f.truncate(5 << 20)
    with pytest.raises(BadCheckpoint, match=words.format(2 * limit)):
        read_manifest(tmp_path)


def test_a_manifest_nested_too_deeply() -> None:
    for depth, words in ((100_000, "is not JSON"), (70, "is nested in more than 64 levels")):
        with pytest.raises(BadCheckpoint, match=words):
            Manifest.from_json(b'{"step": ' + b"[" * depth + b"]" * depth + b"}", "here")
