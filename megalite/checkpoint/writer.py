"""The process that writes one rank's shard while training continues; the one of rank 0 also commits.

It is a separate interpreter without torch: it starts in a fraction of a second, shares no lock and no CUDA context with
the training process, and a failure in it is a message or an exit, never a lost thread. It receives snapshots as a
descriptor of shared memory. Ranks meet on the disk: each writer leaves a fragment of the manifest beside its shard, and
the writer of rank 0 waits for all fragments.
"""

from __future__ import annotations

import contextlib
import errno
import json
import mmap
import os
import socket
import struct
import time
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

from megalite.base.child import readable
from megalite.base.slices import Slice
from megalite.checkpoint import folder
from megalite.checkpoint.entries import FileEntry, TensorEntry
from megalite.checkpoint.lock import taken_by
from megalite.checkpoint.manifest import Manifest, box_key
from megalite.checkpoint.safetensors_io import make_header, num_bytes, sync_folder, write_file

# The answer of a writer that was asked to abandon its job.
ABANDONED = "another rank's write failed"


class SavedBox(NamedTuple):
    """A box of a logical tensor that one rank writes.

    Attributes:
        kind, name: kind and name of the tensor in the manifest.
        dtype: type in the file, as safetensors spells it.
        shape: shape of the full tensor.
        box: its place in the tensor; in a fragment, `at` is its first byte in the shard.
    """

    kind: str
    name: str
    dtype: str
    shape: tuple[int, ...]
    box: Slice

    @property
    def num_bytes(self) -> int:
        return num_bytes(self.dtype, self.box.shape)

    def to_json(self) -> list[object]:
        """The form it takes in jobs and fragments: [kind, name, dtype, shape, at, offset, shape of the box]."""
        return [*self[:4], *self.box.to_json()]

    @classmethod
    def from_json(cls, entry: list[Any]) -> SavedBox:
        """Read what `to_json` made."""
        kind, name, dtype, shape, at, offset, extent = entry
        return cls(kind, name, dtype, tuple(shape), Slice(tuple(offset), tuple(extent), at))


class _AbandonedSave(Exception):
    """Another rank failed; this save will not be committed."""


def send(channel: socket.socket, message: dict[str, Any], descriptors: tuple[int, ...] = ()) -> None:
    """Send a JSON message and file descriptors."""
    data = json.dumps(message).encode()
    socket.send_fds(channel, [struct.pack("<Q", len(data))], list(descriptors))
    channel.sendall(data)


def receive(channel: socket.socket) -> tuple[dict[str, Any], list[int]] | None:
    """Receive a message and its file descriptors; return None when the other side is gone."""
    try:
        head, descriptors, _, _ = socket.recv_fds(channel, 8, 1)
        while 0 < len(head) < 8:
            more = channel.recv(8 - len(head))
            head = head + more if more else b""
        if not head:
            return None
        (length,) = struct.unpack("<Q", head)
        data = bytearray()
        while len(data) < length:
            chunk = channel.recv(min(1 << 20, length - len(data)))
            if not chunk:
                return None
            data += chunk
    except ConnectionResetError:
        # The other side was killed before it read our message.
        return None
    return json.loads(data), descriptors


def main(descriptor: int) -> None:
    """Serve jobs from the socket `descriptor` until the training process closes it."""
    # Training has priority on the cores; while it waits for a save, the save has them to itself.
    os.nice(15)
    channel = socket.socket(fileno=descriptor)
    buffer: mmap.mmap | None = None
    while (message := receive(channel)) is not None:
        job, descriptors = message
        if "abandon" in job:
            continue
        if descriptors:
            buffer = mmap.mmap(descriptors[0], job["capacity"])
            os.close(descriptors[0])
        answer = _serve(job, buffer, channel)
        with contextlib.suppress(OSError):
            send(channel, answer)


def _serve(job: dict[str, Any], buffer: mmap.mmap | None, channel: socket.socket) -> dict[str, Any]:
    try:
        _write_shard(job, buffer, channel)
        if job["rank"] == 0:
            return _commit(job, channel)
        return {"ok": True}
    except _AbandonedSave:
        return {"error": ABANDONED}
    except OSError as e:
        name = errno.errorcode.get(e.errno or 0, "OSError")
        where = e.filename or job["temporary"]
        return {"error": f"{where}: {name} ({e.strerror}) while writing {job['num_bytes']:,} bytes"}
    except Exception as e:
        return {"error": f"{job['temporary']}: {type(e).__name__}: {e}"}


def _check_parent(channel: socket.socket) -> None:
    """Stop when the training process is gone or has abandoned this save."""
    if readable(channel.fileno(), 0):
        message = receive(channel)
        if message is None:
            os._exit(1)
        raise _AbandonedSave


def _write_shard(job: dict[str, Any], buffer: mmap.mmap | None, channel: socket.socket) -> None:
    """Write `rank_NNNNN.safetensors` from the snapshot, then `rank_NNNNN.json`, which marks it as complete."""
    temporary = Path(job["temporary"])
    stem = f"rank_{job['rank']:05d}"
    boxes = [SavedBox.from_json(entry) for entry in job["boxes"]]
    keys = [box_key(b.kind, b.name, b.box.offset) for b in boxes]
    header, begins = make_header((key, b.dtype, b.box.shape) for key, b in zip(keys, boxes))
    data = memoryview(buffer)[: job["num_bytes"]] if buffer is not None else memoryview(b"")
    path = temporary / f"{stem}.safetensors"
    try:
        size, crcs = write_file(path, [header, data], lambda: _check_parent(channel))
    except OSError as e:
        e.filename = e.filename or str(path)
        raise
    finally:
        data.release()
    fragment = {
        "save_id": job["save_id"],
        "file": {"name": path.name, "size": size, "header": len(header), "crc32": crcs},
        "boxes": [b._replace(box=replace(b.box, at=begins[key])).to_json() for key, b in zip(keys, boxes)],
    }
    write_file(temporary / f"{stem}.json.part", [json.dumps(fragment).encode()])
    sync_folder(temporary)
    # Last: from here on rank 0 may commit, and the folder has another name.
    os.rename(temporary / f"{stem}.json.part", temporary / f"{stem}.json")


def _commit(job: dict[str, Any], channel: socket.socket) -> dict[str, Any]:
    """Wait for the fragments of all ranks, commit, then update `latest` and prune."""
    root, temporary = Path(job["root"]), Path(job["temporary"])
    fragments: list[dict[str, Any]] = []
    while len(fragments) < job["world"]:
        path = temporary / f"rank_{len(fragments):05d}.json"
        fragment = folder.read_fragment(path)
        if fragment is None:
            _check_parent(channel)
            time.sleep(0.01)
            continue
        if fragment["save_id"] != job["save_id"]:
            raise RuntimeError(f"{path} belongs to another save: two jobs are writing here")
        fragments.append(fragment)
    manifest = _assemble(job["manifest"], fragments)
    for rank in range(job["world"]):
        (temporary / f"rank_{rank:05d}.json").unlink()
    if other := taken_by(Path(job["lock"]["path"]), job["lock"]["text"]):
        raise RuntimeError(f"the folder has been taken by {other}")
    moved = folder.commit(root, temporary, job["name"], manifest, job["aside"])
    problems = folder.tidy(root, job["name"], job["keep_last"], job["keep"]) if job["full"] else []
    return {"ok": True, "moved": moved, "problems": problems}


def _assemble(head: dict[str, Any], fragments: list[dict[str, Any]]) -> Manifest:
    files: list[FileEntry] = []
    boxes: dict[tuple[str, str, str, tuple[int, ...]], list[tuple[int, Slice]]] = {}
    for number, fragment in enumerate(fragments):
        f = fragment["file"]
        files.append(FileEntry(f["name"], f["size"], f["header"], tuple(f["crc32"])))
        for saved in map(SavedBox.from_json, fragment["boxes"]):
            boxes.setdefault(saved[:4], []).append((number, saved.box))
    tensors: dict[str, dict[str, TensorEntry]] = {}
    for (kind, name, dtype, shape), located in boxes.items():
        tensors.setdefault(kind, {})[name] = TensorEntry(dtype, shape, tuple(located))
    return Manifest(head["run_id"], head["step"], head["topology"], head["meta"], tuple(files), tensors)
