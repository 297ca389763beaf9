"""A checkpoint or model folder written tensor by tensor: memory stays near two tensors.

The folder is written beside its target and renamed at the end: a target is complete or absent.
"""

from __future__ import annotations

import os
import secrets
import shutil
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from megalite.core.base.dtypes import stored_name
from megalite.core.base.errors import UserError
from megalite.core.base.slices import Slice
from megalite.runtime.checkpoint.manifest import FileEntry, Manifest, TensorEntry, box_key, committable
from megalite.runtime.checkpoint.safetensors_io import make_header, num_bytes
from megalite.runtime.places.disk import write_file
from megalite.runtime.places.folder_place import seal

# Largest file of an export or an imported checkpoint; a larger tensor has a file to itself.
SHARD_BYTES = 5_000_000_000


@dataclass(frozen=True)
class TensorGroup:
    """Tensors that are written together, because they are made of one tensor: (name, dtype, shape) of each."""

    tensors: tuple[tuple[str, str, tuple[int, ...]], ...]
    make: Callable[[], list[torch.Tensor]]

    @property
    def num_bytes(self) -> int:
        return sum(num_bytes(dtype, shape) for _, dtype, shape in self.tensors)


@dataclass(frozen=True)
class ImportedTensor:
    """A full fp32 tensor of the new checkpoint, or a box of it.

    Attributes:
        kind: "master", "exp_avg" or "exp_avg_sq".
        name, shape: its global name and shape.
        make: makes the values, of the box's shape.
        box: the box; None: the full tensor.
    """

    kind: str
    name: str
    shape: tuple[int, ...]
    make: Callable[[], torch.Tensor]
    box: Slice | None = None

    @property
    def stored(self) -> Slice:
        """The box that is stored."""
        return self.box or Slice((0,) * len(self.shape), self.shape)


def write_checkpoint(
    out: str | Path, tensors: Sequence[ImportedTensor], meta: dict[str, Any], shard_bytes: int = SHARD_BYTES
) -> Manifest:
    """Write a checkpoint that a run can start from in any layout.

    Args:
        out: folder of the checkpoint; must be absent or empty.
        tensors: its tensors, in order.
        meta: what the run needs to continue; its "step" is also the manifest's.
        shard_bytes: largest size of a file.

    Raises:
        UserError: `out` is not empty or cannot be written. Nothing is left behind.
    """
    keys = {box_key(t.kind, t.name, t.stored.offset): t for t in tensors}
    groups = [TensorGroup(((key, "F32", t.stored.shape),), lambda t=t: [t.make()]) for key, t in keys.items()]  # type: ignore[misc]
    with new_folder(out) as folder:
        files: list[FileEntry] = []
        boxes: dict[tuple[str, str, tuple[int, ...]], list[tuple[int, Slice]]] = {}
        for number, shard in enumerate(split_shards(groups, shard_bytes)):
            stored = [t for g in shard for t in g.tensors]
            header, begins = make_header(stored)
            name = f"rank_{number:05d}.safetensors"
            size, crcs = write_file(folder / name, shard_bytes_of(header, shard))
            files.append(FileEntry(name, size, len(header), tuple(crcs)))
            for key, _, _ in stored:
                tensor = keys[key]
                box = replace(tensor.stored, at=begins[key])
                boxes.setdefault((tensor.kind, tensor.name, tensor.shape), []).append((number, box))
        entries: dict[str, dict[str, TensorEntry]] = {}
        for (kind, name, full), held in boxes.items():
            entries.setdefault(kind, {})[name] = TensorEntry("F32", full, tuple(held))
        run_id = f"import-{secrets.token_hex(4)}"
        manifest = Manifest(run_id, meta["step"], {"world": 1}, meta, tuple(files), entries)
        seal(folder, *committable(manifest))
    return manifest


def split_shards(groups: Sequence[TensorGroup], limit: int) -> list[list[TensorGroup]]:
    """Distribute groups to files, in order; start a new file when the next group does not fit."""
    shards: list[list[TensorGroup]] = [[]]
    size = 0
    for group in groups:
        if shards[-1] and size + group.num_bytes > limit:
            shards.append([])
            size = 0
        shards[-1].append(group)
        size += group.num_bytes
    return shards


def shard_bytes_of(header: bytes, groups: Sequence[TensorGroup]) -> Iterator[bytes | memoryview]:
    """Yield the bytes of a file: its header, then its tensors, made one group at a time."""
    yield header
    for group in groups:
        tensors = group.make()
        for (name, stored, shape), tensor in zip(group.tensors, tensors, strict=True):
            assert tensor.shape == shape, name
            assert stored_name(tensor.dtype) == stored, name
            yield memoryview(tensor.contiguous().view(-1).view(torch.uint8).numpy().data).cast("B")


@contextmanager
def new_folder(out: str | Path) -> Iterator[Path]:
    """Provide a folder to write to, which is renamed to `out` at the end, or deleted after an error.

    Raises:
        UserError: `out` is not empty or cannot be written.
    """
    out = Path(out)
    if out.exists() and (not out.is_dir() or any(out.iterdir())):
        raise UserError(
            f"--out {out}", "must be absent or an empty directory: nothing is overwritten", "choose another"
        )
    temporary = out.parent / f".tmp_{out.name}_{secrets.token_hex(4)}"
    try:
        out.parent.mkdir(parents=True, exist_ok=True)
        temporary.mkdir()
        yield temporary
        # The rename replaces an empty folder.
        os.rename(temporary, out)
    except OSError as e:
        raise UserError(f"--out {out}", f"cannot be written ({e.strerror or e})", "choose another place") from None
    finally:
        shutil.rmtree(temporary, ignore_errors=True)
