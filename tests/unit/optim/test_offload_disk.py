"""The scratch file of offloaded state, and how much memory a process may still take."""

from __future__ import annotations

import mmap
import os
import re
from pathlib import Path

import pytest
import torch

from megalite.checkpoint.snapshot import Snapshot
from megalite.host import available_memory
from megalite.optim.offload_disk import DiskStates, ScratchFile

SHARES = [5000, 3, 9000, 1024]


def test_what_is_updated_stays_and_has_no_name(tmp_path: Path) -> None:
    states = DiskStates(tmp_path / "new", SHARES, 3)
    for i, flats in enumerate(states.flats):
        for j, flat in enumerate(flats):
            assert flat.numel() == SHARES[i]
            flat.fill_(10 * i + j)
    for step in range(3):
        for i, flats in enumerate(states.visit()):
            for j, flat in enumerate(flats):
                assert flat.unique().tolist() == [10 * i + j + step]
                flat.add_(1)
        if step == 0:
            # Read through the mapping, as a checkpoint does.
            assert [[f.unique().item() for f in flats] for flats in states.flats] == [
                [10 * i + j + 1 for j in range(3)] for i in range(4)
            ]
    assert list((tmp_path / "new").iterdir()) == []


def test_the_snapshot_of_a_save_is_on_the_same_disk(tmp_path: Path) -> None:
    snapshot, source = Snapshot(torch.device("cpu"), tmp_path / "new"), torch.arange(4.0)
    snapshot.take([{"dtype": "F32", "shape": [4], "source": source}])
    assert os.readlink(f"/proc/self/fd/{snapshot.descriptor}").startswith(f"{tmp_path}/new/")
    assert os.pread(snapshot.descriptor, 16, 0) == source.numpy().tobytes()
    snapshot.free()
    assert list((tmp_path / "new").iterdir()) == []


def test_what_is_cut_short_raises_with_file_and_offset(tmp_path: Path) -> None:
    file = ScratchFile(tmp_path, 3 << 20)
    with mmap.mmap(-1, 1 << 20) as buffer:
        for done in file.write(memoryview(buffer), 2 << 20):
            done.result()
        os.ftruncate(file.descriptor, (2 << 20) + 8192)
        (read,) = file.read(memoryview(buffer), 2 << 20)
        said = f"only 8192 bytes done while reading bytes {2 << 20} to {3 << 20} of the offloaded.*: '{tmp_path}'"
        with pytest.raises(OSError, match=said):
            read.result()
        # A failing device reports an error itself; here, a descriptor that cannot be read.
        other = os.open(tmp_path / "other", os.O_CREAT | os.O_WRONLY)
        os.dup2(other, file.descriptor)
        (read,) = file.read(memoryview(buffer), 4096)
        with pytest.raises(OSError, match=re.escape("Bad file descriptor while reading bytes 4096 to")):
            read.result()
        del read


def tree(root: Path, files: dict[str, str]) -> str:
    for name, text in files.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return str(root)


def test_available_memory_is_the_tightest_limit(tmp_path: Path) -> None:
    info = {"proc/meminfo": "MemTotal:  1000 kB\nMemAvailable:   600 kB\n"}
    assert available_memory(tree(tmp_path / "host", info)) == 600 * 1024
    group = {
        **info,
        "proc/self/cgroup": "0::/job/step\n",
        "sys/fs/cgroup/job/memory.max": "300000\n",
        "sys/fs/cgroup/job/memory.current": "250000\n",
        "sys/fs/cgroup/job/memory.stat": "anon 1\ninactive_file 7000\n",
        "sys/fs/cgroup/job/step/memory.max": "max\n",
        "sys/fs/cgroup/job/step/memory.current": "9\n",
    }
    assert available_memory(tree(tmp_path / "two", group)) == 57_000
    old = {
        **info,
        "proc/self/cgroup": "3:cpu:/a\n2:memory:/b\n",
        "sys/fs/cgroup/memory/b/memory.limit_in_bytes": "5000\n",
        "sys/fs/cgroup/memory/b/memory.usage_in_bytes": "4000\n",
    }
    assert available_memory(tree(tmp_path / "one", old)) == 1000
