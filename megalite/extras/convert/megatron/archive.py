"""Archives of `torch.save`: zip files of one pickle and uncompressed storages, read in place."""

from __future__ import annotations

import io
import os
import struct
import zipfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from megalite.extras.convert.megatron.unpickle import Record, Storage, unpickle
from megalite.runtime.checkpoint.safetensors_io import BadCheckpoint, open_inside, read_exactly

# Pickles hold no tensors; real ones stay far below.
_MAX_PICKLE = 1 << 30
_TENSOR = "torch._utils._rebuild_tensor_v2"
_LOCAL_HEADER = struct.Struct("<4s22xHH")


@dataclass(frozen=True)
class FileRange:
    """A range of bytes of a file: its folder, its name, first byte and size (None: to its end)."""

    folder: Path
    name: str
    begin: int = 0
    size: int | None = None

    @property
    def where(self) -> str:
        return str(self.folder / self.name)

    @contextmanager
    def open(self) -> Iterator[tuple[int, int]]:
        """Open the file; yield its descriptor and the number of bytes of the range, which lies in it."""
        fd = open_inside(self.folder, self.name)
        try:
            file_size = os.fstat(fd).st_size
            size = file_size - self.begin if self.size is None else self.size
            if self.begin < 0 or size < 0 or self.begin + size > file_size:
                raise BadCheckpoint(self.where, f"has {file_size} bytes, but needs {size} from byte {self.begin}")
            yield fd, size
        finally:
            os.close(fd)

    def read(self, offset: int, size: int) -> bytearray:
        """Read `size` bytes of the range, from `offset`."""
        data = bytearray(size)
        with self.open() as (fd, range_size):
            if offset < 0 or offset + size > range_size:
                raise BadCheckpoint(self.where, f"ends before byte {self.begin + offset + size}")
            read_exactly(fd, memoryview(data), self.begin + offset, self.folder / self.name)
        return data


class _Window(io.RawIOBase):
    """A range of an open file, as a file object."""

    def __init__(self, fd: int, begin: int, size: int) -> None:
        self._fd = fd
        self._begin = begin
        self._size = size
        self._at = 0

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def seek(self, offset: int, whence: int = os.SEEK_SET) -> int:
        self._at = max(0, offset + (0, self._at, self._size)[whence])
        return self._at

    def readinto(self, buffer: Any) -> int:
        view = memoryview(buffer)[: max(0, self._size - self._at)]
        count = os.preadv(self._fd, [view], self._begin + self._at) if len(view) else 0
        self._at += count
        return count


@dataclass(frozen=True)
class Archive:
    """A checked archive: the first byte and the size of each storage, by key."""

    location: FileRange
    storages: dict[str, tuple[int, int]]

    def load(self, pickled: bytes) -> Any:
        """Read the archive's pickle; tensors become `TensorRef`s."""
        return self._resolve(unpickle(pickled, self.location.where))

    def _resolve(self, value: Any) -> Any:
        """Replace the records of tensors, in the containers that hold them."""
        if isinstance(value, dict):
            return {key: self._resolve(v) for key, v in value.items()}
        if isinstance(value, (list, tuple)):
            return type(value)(self._resolve(v) for v in value)
        if isinstance(value, Record):
            return self._resolve_record(value)
        return value

    def _resolve_record(self, record: Record) -> Any:
        name, args = record.name, record.args
        if name == "torch._tensor._rebuild_from_type_v2" and getattr(args[0], "name", "") == _TENSOR:
            return self._tensor(*args[2][:4])
        if name == "torch._utils._rebuild_parameter":
            return self._resolve(args[0])
        return self._tensor(*args[:4]) if name == _TENSOR else record

    def _tensor(self, storage: Any, offset: Any, shape: Any, stride: Any) -> TensorRef:
        """Check that a tensor lies in its storage."""
        ok = isinstance(storage, Storage) and isinstance(shape, tuple) and isinstance(stride, tuple)
        ok = ok and len(shape) == len(stride) and all(type(n) is int and n >= 0 for n in (offset, *shape, *stride))
        if ok:
            ref = TensorRef(self, storage.key, storage.dtype, offset, shape, stride)
            ok = storage.key in self.storages
            ok = ok and (offset + ref.span) * storage.dtype.itemsize <= self.storages[storage.key][1]
        if not ok:
            raise BadCheckpoint(self.location.where, f"a tensor of shape {shape!r:.80} lies outside its storage")
        return ref


@dataclass(frozen=True)
class TensorRef:
    """A tensor in an archive, not read yet; `offset` and `stride` count elements of its storage."""

    archive: Archive
    key: str
    dtype: torch.dtype
    offset: int
    shape: tuple[int, ...]
    stride: tuple[int, ...]

    @property
    def span(self) -> int:
        """Number of elements of the storage from its first to its last."""
        return 0 if 0 in self.shape else 1 + sum((n - 1) * s for n, s in zip(self.shape, self.stride))

    def read(self) -> torch.Tensor:
        """Read the tensor, in its own type."""
        begin, item = self.archive.storages[self.key][0], self.dtype.itemsize
        data = self.archive.location.read(begin + self.offset * item, self.span * item)
        flat = torch.frombuffer(data, dtype=self.dtype) if data else torch.empty(0, dtype=self.dtype)
        return flat.as_strided(self.shape, self.stride)

    def view(self, start: int, shape: tuple[int, ...]) -> TensorRef:
        """Return elements of a one-dimensional tensor, from `start`, in another shape."""
        stride = torch.empty(shape, device="meta").stride()
        view = replace(self, offset=self.offset + start, shape=shape, stride=stride)
        if self.stride != (1,) or start + view.span > self.shape[0]:
            raise BadCheckpoint(self.archive.location.where, f"holds {self.shape} elements, too few for the model")
        return view


def load_archive(location: FileRange) -> Any:
    """Read what `torch.save` wrote, without executing it.

    Returns:
        Containers, numbers and texts as they are; `TensorRef`s; `Record`s for everything else.

    Raises:
        BadCheckpoint: not an archive of PyTorch 1.6 or later, damaged, or its pickle names what is not allowed.
    """
    try:
        with location.open() as (fd, size):
            file = io.BufferedReader(_Window(fd, location.begin, size))
            with zipfile.ZipFile(file) as archive:
                return _load(location, archive, size)
    except (zipfile.BadZipFile, LookupError, RuntimeError, TypeError, ValueError, struct.error) as e:
        rule = f"is not a file of torch.save ({e!s:.100})"
        raise BadCheckpoint(location.where, rule, "complete the copy; save it with PyTorch 1.6 or later") from None


def _load(location: FileRange, archive: zipfile.ZipFile, size: int) -> Any:
    infos = {info.filename: info for info in archive.infolist()}
    pickles = [name for name in infos if name.endswith("/data.pkl")]
    if len(pickles) != 1 or infos[pickles[0]].file_size > min(size, _MAX_PICKLE):
        raise ValueError("no data.pkl")
    top = pickles[0].removesuffix("data.pkl")
    if f"{top}byteorder" in infos and archive.read(f"{top}byteorder") != b"little":
        raise ValueError("big-endian")
    storages = {}
    for name, info in infos.items():
        if name.startswith(f"{top}data/"):
            if info.compress_type != zipfile.ZIP_STORED:
                raise ValueError("compressed storages")
            header = _LOCAL_HEADER.unpack(location.read(info.header_offset, _LOCAL_HEADER.size))
            begin = info.header_offset + _LOCAL_HEADER.size + header[1] + header[2]
            storages[name.removeprefix(f"{top}data/")] = (begin, info.file_size)
    return Archive(location, storages).load(archive.read(pickles[0]))
