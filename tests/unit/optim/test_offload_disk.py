"""The scratch file of offloaded state, and how much memory a process may still take."""

from __future__ import annotations

import mmap
import os
import re
from pathlib import Path

import pytest
import torch

from megalite.core.base.slices import Slice
from megalite.core.parts.memory.offload_disk import DiskStates, ScratchFile
from megalite.runtime.checkpoint.fragments import SavedBox
from megalite.runtime.checkpoint.snapshot import Snapshot

SHARES = [5000, 3, 9000, 1024]


def test_what_is_updated_stays_and_has_no_name(tmp_path: Path) -> None:
    dtypes = torch.bfloat16, torch.float32, torch.bfloat16
    states = DiskStates(tmp_path / "new", SHARES, [dtypes] * len(SHARES))
    for i, flats in enumerate(states.flats):
        for j, flat in enumerate(flats):
            assert (flat.numel(), flat.dtype) == (SHARES[i], dtypes[j])
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
    snapshot.take([(SavedBox("master", "w", "F32", (4,), Slice((0,), (4,))), source)])
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
        said = f"stopped after 8192 bytes while reading bytes {2 << 20} to {3 << 20} of the offloaded.*: '{tmp_path}'"
        with pytest.raises(OSError, match=said):
            read.result()
        # A failing device reports an error itself; here, a descriptor that cannot be read.
        other = os.open(tmp_path / "other", os.O_CREAT | os.O_WRONLY)
        os.dup2(other, file.descriptor)
        (read,) = file.read(memoryview(buffer), 4096)
        with pytest.raises(OSError, match=re.escape("Bad file descriptor while reading bytes 4096 to")):
            read.result()
        del read
