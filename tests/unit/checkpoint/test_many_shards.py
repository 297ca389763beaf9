"""Checkpoints of more ranks than a process may open files: what a rank opens and computes does not grow with them."""

from __future__ import annotations

import contextlib
import dataclasses
import os
import resource
import socket
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from megalite.base.child import readable
from megalite.base.errors import UserError
from megalite.base.slices import Slice
from megalite.checkpoint import reader as reader_module
from megalite.checkpoint.manifest import FileEntry, Manifest, TensorEntry, box_key, commit_text, read_manifest
from megalite.checkpoint.reader import ShardReader
from megalite.checkpoint.safetensors_io import make_header, open_inside, write_file

WIDTH = 4


@pytest.fixture
def few_files() -> Iterator[None]:
    """Let this process open 256 files."""
    limits = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (256, limits[1]))
    yield
    resource.setrlimit(resource.RLIMIT_NOFILE, limits)


def write_checkpoint(folder: Path, shards: int) -> Path:
    """Write a checkpoint of one matrix, whose rows i * WIDTH to (i + 1) * WIDTH - 1 are in shard i."""
    folder.mkdir()
    files, boxes = [], []
    for i in range(shards):
        rows = torch.arange(i * WIDTH, (i + 1) * WIDTH, dtype=torch.float32).view(WIDTH, 1)
        key = box_key("master", "weight", (i * WIDTH, 0))
        header, begins = make_header([(key, "F32", (WIDTH, 1))])
        path = folder / f"rank_{i:05}.safetensors"
        size, crcs = write_file(path, [header, memoryview(rows.numpy().tobytes())])
        files.append(FileEntry(path.name, size, len(header), tuple(crcs)))
        boxes.append((i, Slice((i * WIDTH, 0), (WIDTH, 1), begins[key])))
    entry = TensorEntry("F32", (shards * WIDTH, 1), tuple(boxes))
    meta = {"config": {}, "consumed_samples": 0, "scalars": {}}
    content = Manifest("run", 0, {}, meta, tuple(files), {"master": {"weight": entry}}).to_json()
    (folder / "manifest.json").write_bytes(content)
    (folder / "COMMIT").write_bytes(commit_text(content))
    return folder


@pytest.mark.usefixtures("few_files")
def test_more_shards_than_files_may_be_open(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder, world = write_checkpoint(tmp_path / "step_00000000", 600), 600
    manifest = read_manifest(folder)
    whole = torch.empty(world * WIDTH, 1)
    reader = ShardReader(folder, manifest)
    reader.verify()
    for _ in range(2):  # the second time after the first shards were closed
        reader.read(manifest.tensors["master"]["weight"], Slice((0, 0), (world * WIDTH, 1)), whole)
        assert torch.equal(whole.flatten(), torch.arange(world * WIDTH, dtype=torch.float32))
    reader.close()

    opened: list[str] = []
    monkeypatch.setattr(reader_module, "open_inside", lambda *a: opened.append(a[1]) or open_inside(*a))
    everywhere = set()
    for rank in range(world):
        opened.clear()
        own = ShardReader(folder, manifest)
        own.verify(rank, world)
        everywhere |= set(opened)
        part = torch.empty(WIDTH, 1)
        own.read(manifest.tensors["master"]["weight"], Slice((rank * WIDTH, 0), (WIDTH, 1)), part)
        own.close()
        assert len(opened) <= 8
    assert len(everywhere) == world


def test_header_checks_look_at_each_box_once(tmp_path: Path) -> None:
    looked = 0

    class Counted(tuple[tuple[int, Slice], ...]):
        def __iter__(self) -> Iterator[tuple[int, Slice]]:
            nonlocal looked
            for box in super().__iter__():
                looked += 1
                yield box

    manifest = read_manifest(folder := write_checkpoint(tmp_path / "step_00000000", 100))
    entry = manifest.tensors["master"]["weight"]
    manifest.tensors["master"]["weight"] = dataclasses.replace(entry, boxes=Counted(entry.boxes))
    reader = ShardReader(folder, manifest)
    reader.verify()
    reader.close()
    assert looked == 100


def test_a_full_table_of_files_is_not_damage(tmp_path: Path) -> None:
    folder = write_checkpoint(tmp_path / "step_00000000", 1)
    limits, taken = resource.getrlimit(resource.RLIMIT_NOFILE), []
    resource.setrlimit(resource.RLIMIT_NOFILE, (64, limits[1]))
    try:
        with contextlib.suppress(OSError):
            while True:
                taken.append(os.open(folder, os.O_RDONLY))
        with pytest.raises(UserError, match="too many open files; raise `ulimit -n`"):
            open_inside(folder, "COMMIT")
    finally:
        for fd in taken:
            os.close(fd)
        resource.setrlimit(resource.RLIMIT_NOFILE, limits)


def test_waiting_on_a_high_descriptor() -> None:
    """`select` takes none of 1,024 and above."""
    limits = resource.getrlimit(resource.RLIMIT_NOFILE)
    if limits[1] < 2000:
        pytest.skip("requires a hard limit of at least 2,000 open files")
    resource.setrlimit(resource.RLIMIT_NOFILE, (max(limits[0], 2000), limits[1]))
    one, other = socket.socketpair()
    high = os.dup2(one.fileno(), 1500)
    try:
        assert not readable(high, 0)
        other.send(b"x")
        assert readable(high, None)
    finally:
        os.close(high)
        one.close()
        other.close()
        resource.setrlimit(resource.RLIMIT_NOFILE, limits)
