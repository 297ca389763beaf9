"""Checkpoints of more ranks than a process may open files: what a rank opens and computes does not grow with them."""

from __future__ import annotations

import contextlib
import dataclasses
import gc
import itertools
import json
import os
import resource
import shutil
import socket
import subprocess
import sys
import tracemalloc
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from megalite.core.base.errors import UserError
from megalite.core.base.slices import Slice
from megalite.extras.convert.hf import export_hf
from megalite.extras.view.command import inspect
from megalite.runtime.base.child import readable
from megalite.runtime.checkpoint import reader as reader_module
from megalite.runtime.checkpoint.manifest import (
    FileEntry,
    Manifest,
    Part,
    TensorEntry,
    box_key,
    commit_text,
    read_manifest,
)
from megalite.runtime.checkpoint.reader import ShardReader
from megalite.runtime.checkpoint.safetensors_io import BadCheckpoint, make_header, open_inside
from megalite.runtime.places.disk import write_file
from tests.parity.runs import MODEL
from tests.ranks import ROOT
from tests.workers import WorkerPool

WIDTH = 4


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

    def noted(folder: Path, name: str) -> int:
        opened.append(name)
        return open_inside(folder, name)

    monkeypatch.setattr(reader_module, "open_inside", noted)
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


def scatter(folder: Path, shards: int) -> None:
    """Write a checkpoint again as one of `shards` shards, each row of a tensor in the next of them."""
    manifest, turn = read_manifest(folder), itertools.count()
    reader, pieces = (
        ShardReader(folder, manifest),
        [list[tuple[str, str, tuple[int, ...], torch.Tensor]]() for _ in range(shards)],
    )
    for kind, tensors in manifest.tensors.items():
        for name, entry in tensors.items():
            whole = torch.empty(entry.shape)
            reader.read(entry, Slice((0,) * len(entry.shape), entry.shape), whole)
            for i, row in enumerate(whole.split(1)):
                pieces[next(turn) % shards].append((kind, name, (i, *[0] * (row.dim() - 1)), row))
    reader.close()
    for file in folder.glob("*.safetensors"):
        file.unlink()
    files, boxes = [], defaultdict(list)
    for number, rows in enumerate(pieces):
        header, begins = make_header(
            [(box_key(kind, name, at), "F32", tuple(row.shape)) for kind, name, at, row in rows]
        )
        path = folder / f"rank_{number:05}.safetensors"
        size, crcs = write_file(path, [header, *(memoryview(row.numpy().tobytes()) for *_, row in rows)])
        files.append(FileEntry(path.name, size, len(header), tuple(crcs)))
        for kind, name, offset, row in rows:
            begin = begins[box_key(kind, name, offset)]
            boxes[kind, name].append((number, Slice(offset, tuple(row.shape), begin)))
    in_rows = {
        kind: {name: dataclasses.replace(entry, boxes=tuple(boxes[kind, name])) for name, entry in of_kind.items()}
        for kind, of_kind in manifest.tensors.items()
    }
    content = dataclasses.replace(manifest, files=tuple(files), tensors=in_rows).to_json()
    (folder / "manifest.json").write_bytes(content)
    (folder / "COMMIT").write_bytes(commit_text(content))


@pytest.mark.full
@pytest.mark.usefixtures("few_files")
def test_a_run_and_its_tools_take_600_shards(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Where 256 files may be opened: the run goes on, bit for bit, and the tools read and export it."""

    def run(*words: str) -> None:
        command = ["bash", "-c", 'ulimit -n 256 && exec "$@"', "-", sys.executable, *words]
        done = subprocess.run(
            command, cwd=ROOT, capture_output=True, text=True, env={**os.environ, "OMP_NUM_THREADS": "1"}
        )
        assert done.returncode == 0, done.stderr

    flags = ["pretrain_gpt.py", *MODEL, "--lr-decay-steps", "2", "--run-dir"]
    run(*flags, str(tmp_path / "whole"), "--train-steps", "1")
    shutil.copytree(tmp_path / "whole", tmp_path / "cut")
    scatter(tmp_path / "cut" / "checkpoints" / "step_00000001", 600)
    masters = []
    for name in ("whole", "cut"):
        run(*flags, str(tmp_path / name), "--train-steps", "2")
        last = tmp_path / name / "checkpoints" / "step_00000002"
        masters.append({file.name: file.read_bytes() for file in last.glob("*.safetensors")})
    assert masters[0] == masters[1]
    first = tmp_path / "cut" / "checkpoints" / "step_00000001"
    inspect([str(first), "--verify"])
    assert "600" in capsys.readouterr().out
    export_hf(first, tmp_path / "hf")
    assert (tmp_path / "hf" / "model.safetensors").exists()


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


def train_counted(rank: int, arguments: list[str], world: int) -> dict[str, int]:
    """Train to the end, and count how often the manifest is parsed and the size of a shard is asked for."""
    from megalite.runtime.checkpoint import manifest as module
    from tests.parity.runs import train

    counts, parse, allowance = {"parsed": 0, "asked": 0}, Manifest.from_json, module._allowance

    def count(key: str, call: Any) -> Any:
        def counted(*args: Any) -> Any:
            counts[key] += 1
            return call(*args)

        return counted

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Manifest, "from_json", count("parsed", parse))
        patch.setattr(module, "_allowance", count("asked", allowance))
        train(rank, arguments, world)
    return counts


@pytest.mark.full
def test_a_resume_parses_the_manifest_once_on_each_rank(pool: WorkerPool, tmp_path: Path) -> None:
    arguments = [*MODEL, "--tp", "2", "--run-dir", str(tmp_path), "--lr-decay-steps", "2"]
    first = pool.run(2, train_counted, [*arguments, "--train-steps", "1"], 2)
    assert first == [{"parsed": 0, "asked": 0}] * 2
    shards = len([*(tmp_path / "checkpoints" / "step_00000001").iterdir()])
    resumed = pool.run(2, train_counted, [*arguments, "--train-steps", "2"], 2)
    assert resumed == [{"parsed": 1, "asked": shards}, {"parsed": 1, "asked": 0}]


def simulated(ranks: int) -> tuple[bytes, list[tuple[str, Slice]]]:
    """A manifest of equal state on each of `ranks` ranks, 8 of them side by side in every tensor; rank 0's boxes."""
    files = [FileEntry(f"rank_{rank:05}.safetensors", 100 + 20 * 4 * 64 * 9, 100, (0,)) for rank in range(ranks)]
    tensors: dict[str, dict[str, TensorEntry]] = {}
    own: list[tuple[str, Slice]] = []
    for kind in ("master", "exp_avg", "exp_avg_sq"):
        tensors[kind] = {}
        for layer in range(ranks // 8 * 20):
            boxes = []
            for part in range(8):
                at = 100 + ((layer % 20) + 20 * len(tensors) - 20) * 4 * 64 * 3
                boxes.append((layer // 20 * 8 + part, Slice((part * 64, 0), (64, 3), at)))
            name = f"layers.{layer}.self_attn.qkv_proj.weight"
            tensors[kind][name] = TensorEntry("F32", (512, 3), tuple(boxes))
            own += [(name, Slice((0, 0), (64, 3)))] if layer < 20 else []
    return Manifest("run", 0, {}, {}, tuple(files), tensors).to_json(), own


def test_a_rank_keeps_its_own_part_of_a_manifest() -> None:
    """Equal state on each rank: twice the ranks, nearly the same memory."""
    kept = []
    for ranks in (128, 256):
        text, own = simulated(ranks)
        wanted: dict[tuple[str, str], list[Slice]] = {}
        for name, box in own:
            for role in ("master", "exp_avg", "exp_avg_sq"):
                wanted[role, name] = [box]
        tracemalloc.start()
        manifest = Manifest.from_json(text, "here", Part(5, ranks, wanted)).verified()
        gc.collect()
        kept.append(tracemalloc.get_traced_memory()[0])
        tracemalloc.stop()
        assert [f.name for f in manifest.files] == ["rank_00000.safetensors"]
        assert {len(tensors) for tensors in manifest.tensors.values()} == {20}
        assert len(manifest.names("master")) == ranks // 8 * 20
    assert kept[1] <= 1.2 * kept[0], kept


@pytest.mark.parametrize("fault", ["overlap", "gap", "file", "type", "crc"])
def test_some_rank_finds_what_is_wrong(fault: str) -> None:
    """Ranks that check parts find together what one that checks all finds, and each fault is found by some rank."""
    content = json.loads(simulated(16)[0])
    boxes = content["tensors"]["exp_avg"]["layers.7.self_attn.qkv_proj.weight"]["boxes"]
    match fault:
        case "overlap":
            boxes[3][2] = boxes[4][2]
        case "gap":
            boxes[3][1] += 4
        case "file":
            boxes[3][0] = 99
        case "type":
            boxes[3][2] = [0.5, 0]
        case "crc":
            content["files"][3]["crc32"] = [-1]
    with pytest.raises(BadCheckpoint):
        Manifest.from_json(json.dumps(content).encode(), "here")
    found = 0
    for rank in range(16):
        try:
            Manifest.from_json(json.dumps(content).encode(), "here", Part(rank, 16, {}))
        except BadCheckpoint:
            found += 1
    assert 1 <= found <= 3


def test_an_export_reads_a_third_twice(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Masters are verified and read, moments are not. Blocks are small here, as shards are."""
    from megalite.extras.convert import hf
    from megalite.extras.convert.hf import export_hf
    from megalite.runtime.checkpoint import manifest as manifest_module
    from megalite.runtime.checkpoint import reader
    from megalite.runtime.checkpoint.snapshot import boxes_of
    from megalite.runtime.places import disk
    from tests.parity.jobs import llama, make_config, start

    for module in (hf, reader, disk, manifest_module):
        monkeypatch.setattr(module, "BLOCK", 4096)
    engine = start(0, cfg := make_config(llama()), 1)
    states, folder = engine.optimizer.states(), tmp_path / "step_00000001"
    boxes = boxes_of(states, None)
    tensors = [(box_key(b.kind, b.name, b.box.offset), b.dtype, b.box.shape) for b, _ in boxes]
    header, begins = make_header(tensors)
    folder.mkdir()
    data = b"".join(values.contiguous().numpy().tobytes() for _, values in boxes)
    size, crcs = write_file(folder / "rank_00000.safetensors", [header, memoryview(data)])
    placed: dict[str, dict[str, TensorEntry]] = {}
    for (saved, _), (key, _, _) in zip(boxes, tensors):
        old = placed.setdefault(saved.kind, {}).get(saved.name)
        box = (0, dataclasses.replace(saved.box, at=begins[key]))
        placed[saved.kind][saved.name] = TensorEntry(saved.dtype, saved.shape, (*(old.boxes if old else ()), box))
    entry = FileEntry("rank_00000.safetensors", size, len(header), tuple(crcs))
    meta = {"step": 1, "config": {"model": dataclasses.asdict(cfg.model)}}
    content = Manifest("run", 1, {}, meta, (entry,), placed).to_json()
    (folder / "manifest.json").write_bytes(content)
    (folder / "COMMIT").write_bytes(commit_text(content))
    read, exactly = [0], reader.read_exactly

    def counted(fd: int, buffer: memoryview, offset: int, path: Path) -> None:
        read[0] += len(buffer)
        exactly(fd, buffer, offset, path)

    monkeypatch.setattr(reader, "read_exactly", counted)
    export_hf(folder, tmp_path / "hf", dtype="fp32")
    assert read[0] <= 0.7 * size + 2 * len(header), (read[0], size, len(header))
    with (folder / entry.name).open("r+b") as f:
        f.seek(len(header) + 100)
        f.write(b"\xff\xff")
    with pytest.raises(BadCheckpoint, match="differ from what was written"):
        export_hf(folder, tmp_path / "again", dtype="fp32")
