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
import threading
import time
from collections.abc import Callable, Iterable
from dataclasses import replace
from functools import partial
from itertools import chain
from pathlib import Path
from typing import Any, TypeVar

from megalite.runtime.base.child import readable, writable
from megalite.runtime.base.collector import without_collector
from megalite.runtime.base.waits import on_wait
from megalite.runtime.checkpoint.base import Base, base_folder, write_whole
from megalite.runtime.checkpoint.coded import encode
from megalite.runtime.checkpoint.fragments import (
    SavedBox,
    assemble,
    file_of,
    fragment_name,
    fragment_text,
    is_rewritten,
    wait_for_fragments,
)
from megalite.runtime.checkpoint.manifest import FileEntry, box_key, committable
from megalite.runtime.checkpoint.pruning import Keep
from megalite.runtime.checkpoint.safetensors_io import ITEM_SIZE, BadCheckpoint, make_header
from megalite.runtime.checkpoint.upload import Part, Uploader
from megalite.runtime.places.disk import write_file
from megalite.runtime.places.folder_place import FolderPlace
from megalite.runtime.places.place import Save

# Who waits for uploads hears this often that they go on: attempts are bounded, but may outlast a watchdog's patience.
_SIGN_S = 5.0
# The answer of a writer that was asked to abandon its job.
ABANDONED = "another rank's write failed"

_T = TypeVar("_T")


class _AbandonedSave(Exception):
    """Another rank failed; this save will not be committed."""


def send(channel: socket.socket, message: dict[str, Any], descriptors: tuple[int, ...] = ()) -> None:
    """Send a JSON message and file descriptors."""
    data = json.dumps(message).encode()
    socket.send_fds(channel, [struct.pack("<Q", len(data))], list(descriptors))
    channel.sendall(data)


def say(channel: socket.socket, message: dict[str, Any]) -> None:
    """Send to the training process, if it is there. A note is dropped while many are unread: no upload waits for that.

    A notebook may read nothing for hours.
    """
    if "note" not in message or writable(channel.fileno()):
        with contextlib.suppress(OSError):
            send(channel, message)


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
    uploader: Uploader | None = None
    talking, signed = threading.Lock(), 0.0

    def answer(message: dict[str, Any]) -> None:
        with talking:
            say(channel, message)

    def sign() -> None:
        nonlocal signed
        if time.monotonic() > signed + _SIGN_S:
            signed = time.monotonic()
            answer({"note": ""})

    on_wait.append(sign)
    while (message := receive(channel)) is not None:
        job, descriptors = message
        if "abandon" in job:
            continue
        if "release" in job:
            if uploader is None or not uploader.release(job["release"]):
                answer({"upload": job["release"], "error": "the process that held it died", "taken": False})
            continue
        if descriptors:
            buffer = mmap.mmap(descriptors[0], job["capacity"])
            os.close(descriptors[0])
        if job.get("remote") and uploader is None:
            uploader = Uploader(job["remote"]["url"], answer, job["remote"]["patience"])
        if "whole" in job and uploader is not None:
            uploader.add(Part(job, os.open(job["whole"], os.O_RDONLY), {}))
            continue
        answer(_serve(job, buffer, channel, uploader))


def _serve(
    job: dict[str, Any], buffer: mmap.mmap | None, channel: socket.socket, uploader: Uploader | None = None
) -> dict[str, Any]:
    try:
        part = _write_shard(job, buffer, channel)
        try:
            commits = job["rank"] == 0 and _has_all_parts(job)
            outcome = _commit(job, channel) if commits else {"ok": True}
        except BaseException:
            part.close()
            raise
        if uploader is not None:
            uploader.add(part)
        else:
            part.close()
        return outcome
    except _AbandonedSave:
        return {"error": ABANDONED}
    except OSError as e:
        name = errno.errorcode.get(e.errno or 0, "OSError")
        where = e.filename or job["temporary"]
        return {"error": f"{where}: {name} ({e.strerror}) while writing {job['num_bytes']:,} bytes"}
    except Exception as e:
        return {"error": f"{job['temporary']}: {type(e).__name__}: {e}"}


def _has_all_parts(job: dict[str, Any]) -> bool:
    """Whether the parts of all ranks are on this host's disk, or else meet in the store."""
    return not job.get("remote") or job["remote"]["shared"]


def _check_parent(channel: socket.socket) -> None:
    """Stop when the training process is gone or has abandoned this save."""
    if readable(channel.fileno(), 0):
        message = receive(channel)
        if message is None:
            os._exit(1)
        raise _AbandonedSave


def _write_shard(job: dict[str, Any], buffer: mmap.mmap | None, channel: socket.socket) -> Part:
    """Write the shard from the snapshot, then `rank_NNNNN.json`, which marks it as complete."""
    temporary = Path(job["temporary"])
    stem = f"rank_{job['rank']:05d}"
    boxes = [SavedBox.from_json(entry) for entry in job["boxes"]]
    keys = [box_key(b.kind, b.name, b.box.offset) for b in boxes]
    header, begins = make_header((key, b.dtype, b.box.shape) for key, b in zip(keys, boxes))
    data = memoryview(buffer)[: job["num_bytes"]] if buffer is not None else memoryview(b"")
    items = [(begins[key] - len(header), ITEM_SIZE[b.dtype]) for key, b in zip(keys, boxes)]
    placed = [(at, box) for (at, _), box in zip(items, boxes)]
    coded = job["code"] != "none"
    plain = len(header) + len(data) if coded else None
    path = temporary / f"{stem}.{'coded' if coded else 'safetensors'}"
    if not _has_all_parts(job):
        temporary.mkdir(exist_ok=True)

    def write(base: Base | None) -> tuple[int, list[int]]:
        of_base = partial(base.bytes_at, placed) if base is not None else None
        body: Iterable[bytes | memoryview] = encode(data, items, of_base) if coded else [data]
        return write_file(path, chain([header], body), lambda: _check_parent(channel))

    try:
        (size, crcs), base, problem = _write_with_base(job, path, write)
    except OSError as e:
        e.filename = e.filename or str(path)
        raise
    finally:
        data.release()
    fragment = {
        "save_id": job["save_id"],
        "file": FileEntry(path.name, size, len(header), tuple(crcs), plain).to_json(),
        "boxes": [b._replace(box=replace(b.box, at=begins[key])).to_json() for key, b in zip(keys, boxes)],
        "base": base,
        "problem": problem,
    }
    if not _has_all_parts(job):
        # All that a later process needs to upload it, if this one cannot.
        keys_of_job = ("name", "full", "save_id", "rank", "world", "manifest", "remote")
        fragment["job"] = {key: job[key] for key in keys_of_job if key in job}
    part = Part(job, os.open(path, os.O_RDONLY), fragment)
    try:
        # Last: from here on rank 0 may commit, and the folder has another name.
        FolderPlace(temporary.parent).put(fragment_name(temporary.name, job["rank"]), fragment_text(fragment))
    except BaseException:
        part.close()
        raise
    return part


def _write_with_base(
    job: dict[str, Any], path: Path, write: Callable[[Base | None], _T]
) -> tuple[_T, list[str] | None, str]:
    """Write a shard as a difference of the job's base; whole, if the job has none or its base cannot be read.

    Returns:
        What `write` has returned, [name, SHA-256] of the base if it is a difference, and the problem with the base.
    """
    if not job.get("base"):
        return write(None), None, ""
    try:
        base = Base.at(Path(job["root"]) / job["base"])
        with contextlib.closing(base):
            return write(base), [base.path.name, base.sha256], ""
    except BadCheckpoint as e:
        path.unlink(missing_ok=True)
        return write(None), None, f"it is whole, because rank {job['rank']} cannot read its base: {e}"


def _drop_base(job: dict[str, Any], fragments: Iterable[dict[str, Any]], channel: socket.socket) -> None:
    """Write the shards again that are differences, if another rank could not read their base: it is damaged.

    Raises:
        BadCheckpoint: nor can it be read for these shards.
    """
    parts = Path(job["temporary"])
    with contextlib.closing(Base.at(Path(job["root"]) / job["base"])) as base:
        for fragment in fragments:
            if fragment["base"]:
                file = file_of(fragment)
                whole = write_whole(parts / file.name, file, base, lambda: _check_parent(channel))
                fragment |= {"base": None, "file": whole.to_json()}


def _commit(job: dict[str, Any], channel: socket.socket) -> dict[str, Any]:
    """Wait for the fragments of all ranks, publish, then update `latest` and prune."""
    place, save = FolderPlace(Path(job["root"])), Save(job["name"], job["save_id"])

    def wait(name: str, attempt: int) -> None:
        _check_parent(channel)
        time.sleep(0.01)

    def foreign(name: str) -> Exception:
        return RuntimeError(f"{place.root / name} belongs to another save: two jobs are writing here")

    fragments = wait_for_fragments(place, save, job["world"], wait, foreign)
    # A base that cannot be read concerns all ranks: one line tells of it.
    problems = [text for fragment in fragments.values() if (text := fragment["problem"])][:1]
    if is_rewritten(fragments.values()):
        _drop_base(job, fragments.values(), channel)
    with without_collector():
        manifest = assemble(job["manifest"], list(fragments.values()))
    if manifest.base is not None:
        base_folder(place.root / save.name, manifest.base)
    for name in fragments:
        (place.root / name).unlink()
    if other := place.taken_by(job["owner"]):
        raise RuntimeError(f"the folder has been taken by {other}")
    texts = committable(manifest)
    moved = place.publish(save, *texts, job["aside"])
    if job["full"]:
        problems += place.tidy(save.name, partial(Keep.from_job(job).staying, place))
    size = sum(file.size for file in manifest.files) + sum(map(len, texts))
    return {"ok": True, "moved": moved, "problems": problems, "bytes": size, "base": manifest.base or []}
