"""Upload checkpoints to a store, in a thread of each rank's writer: shards first, COMMIT last.

A checkpoint lies there as NAME-ID, where ID is the save's: what an interrupted upload or another run left never mixes
with it. Ranks meet in the store: each leaves its fragment of the manifest beside its shard, and rank 0 commits when all
are there and all shards have their sizes. Does not import torch.
"""

from __future__ import annotations

import contextlib
import os
import queue
import threading
import time
import zlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from megalite.core.base.errors import UserError, describe
from megalite.runtime.checkpoint.base import base_folder
from megalite.runtime.checkpoint.fragments import (
    assemble,
    file_of,
    fragment_name,
    fragment_text,
    is_rewritten,
    wait_for_fragments,
)
from megalite.runtime.checkpoint.manifest import FileEntry, Manifest, commit_text, committable
from megalite.runtime.checkpoint.pruning import Keep
from megalite.runtime.checkpoint.safetensors_io import BadCheckpoint
from megalite.runtime.places.disk import BLOCK
from megalite.runtime.places.names import step_of, store_name
from megalite.runtime.places.place import COMMIT, MANIFEST, Save
from megalite.runtime.places.store import Store, StoreError
from megalite.runtime.places.store_place import StorePlace

# How much longer than their patience rank 0 waits for the parts of the other ranks, once its own has arrived; and three
# times as long as its own took.
_PATIENCE_S = 300.0
# How long there is nothing to upload before what failed last is tried again; less for those with less patience.
_IDLE_S = 60.0
# Files of a run besides its checkpoints that are uploaded with them.
METRICS = "metrics.jsonl"
RUN_FILES = ("config.yaml", METRICS)


class TakenError(Exception):
    """Another run writes to this place of the store."""


@dataclass
class Part:
    """One rank's part of a checkpoint, on the local disk.

    Attributes:
        job: the writer's job.
        descriptor: open file of the shard: the local checkpoint may be renamed or pruned meanwhile. Of a whole
            checkpoint, its folder.
        fragment: this rank's fragment of the manifest; {} if all of the checkpoint is to be uploaded.
        failed: whether its last upload failed, and may be repeated.
    """

    job: dict[str, Any]
    descriptor: int
    fragment: dict[str, Any]
    failed: bool = False

    @property
    def name(self) -> str:
        """Folder in the store."""
        return store_name(self.job["name"], self.job["save_id"])

    @property
    def save(self) -> Save:
        """The save that it is a part of."""
        return Save(self.job["name"], self.job["save_id"])

    def close(self) -> None:
        """Close the shard."""
        if self.descriptor >= 0:
            os.close(self.descriptor)
        self.descriptor = -1


class Uploader:
    """Upload parts one after the other, in a thread.

    Args:
        url: the run's checkpoints folder in the store.
        report: called with {"upload": name, "seconds", "error", "taken", "problems"} after each, {"note": text} before.
        patience: seconds for which what fails is tried again while the store is away.
    """

    def __init__(self, url: str, report: Callable[[dict[str, Any]], None], patience: float) -> None:
        self._report = report
        self._url = url
        self._patience = patience
        self._parts: queue.Queue[Part] = queue.Queue()
        self._held: Part | None = None
        # What is not known to be committed, oldest first.
        self._left = list[Part]()
        self._place: StorePlace | None = None
        threading.Thread(target=self._serve, name="upload", daemon=True).start()

    def add(self, part: Part) -> None:
        """Upload a part, or hold it until `release` if its job says so; it replaces one that is held."""
        if self._held is not None:
            self._held.close()
            _remove_unshared(self._held)
            self._held = None
        if part.job["remote"]["hold"]:
            self._held = part
        else:
            self._parts.put(part)

    def release(self, name: str) -> bool:
        """Upload the part that is held, or again one that failed, by its name; return whether there is one."""
        held, self._held = self._held, None
        part = next((part for part in (held, *self._failed()) if part is not None and part.name == name), None)
        if part is not None:
            self._parts.put(part)
        return part is not None

    def _failed(self) -> list[Part]:
        """List what failed last, newest first."""
        return [part for part in reversed([*self._left]) if part.failed]

    def _serve(self) -> None:
        while True:
            try:
                part = self._parts.get(timeout=min(_IDLE_S, max(1.0, self._patience)) if self._left else None)
            except queue.Empty:
                self._retry()
                continue
            if part.descriptor < 0:  # uploaded meanwhile, which has been reported
                continue
            if not any(part is other for other in self._left):
                self._left.append(part)
            self._report(self._attempt(part))

    def _retry(self) -> None:
        """While there is nothing else to upload, repeat what failed last, or look whether rank 0 has committed."""
        part = next(iter(self._failed()), None)
        if part is None:
            self._forget_committed()
        # A failure has been counted and reported already.
        elif not (answer := self._attempt(part))["error"] or answer["taken"]:
            self._report(answer)

    def _attempt(self, part: Part) -> dict[str, Any]:
        started = time.monotonic()
        answer: dict[str, Any] = {"upload": part.name, "error": "", "taken": False, "problems": []}
        try:
            if self._place is None:
                store = Store(self._url, lambda text: self._report({"note": text}), self._patience)
                self._place = StorePlace(store)
            answer["problems"] = _upload(self._place, part, self._patience)
            # The parts of other hosts may still fail.
            if part.job["rank"] == 0 or part.job["remote"]["shared"]:
                self._forget(part)
        except TakenError as e:
            answer |= {"error": str(e), "taken": True}
        except Exception as e:
            answer["error"] = str(e) if isinstance(e, StoreError) else describe(e)
        part.failed = bool(answer["error"]) and not answer["taken"]
        self._forget_committed()
        return answer | {"seconds": time.monotonic() - started}

    def _forget_committed(self) -> None:
        """Forget the parts up to the newest that is committed, and the oldest if there are too many of a kind."""
        with contextlib.suppress(StoreError, UserError):  # of a store that cannot be opened, which has been reported
            place = self._place or StorePlace(Store(self._url, patience=self._patience))
            for part in self._left[::-1]:
                if part in self._left and not part.failed and place.exists(f"{part.name}/{COMMIT}"):
                    self._forget(part)
        for is_full in (True, False):
            kind = [part for part in self._left if part.job["full"] == is_full]
            if old := kind[: -Keep.from_job(kind[-1].job["remote"]).last] if kind else []:
                self._forget(old[-1])

    def _forget(self, last: Part) -> None:
        """Forget a part, and older full ones if it is full. Without a shared folder they were all that there was."""
        older = self._left[: self._left.index(last)]
        for part in [*(p for p in older if last.job["full"] and p.job["full"]), last]:
            part.close()
            _remove_unshared(part)
            self._left.remove(part)


def _upload(place: StorePlace, part: Part, patience: float) -> list[str]:
    if not part.fragment:
        return _upload_whole(place, part, Path(f"/dev/fd/{part.descriptor}"))
    started = time.monotonic()
    if part.job["rank"] == 0:
        # Before its part: once all parts are there, other hosts may commit. What fails is tried again at the commit.
        with contextlib.suppress(StoreError):
            send_run_files(place, part.job)
    send_part(place, part)
    patience += _PATIENCE_S + 3 * (time.monotonic() - started)
    return commit_part(place, part, patience) if part.job["rank"] == 0 else []


def send_part(place: StorePlace, part: Part) -> None:
    """Upload a rank's shard, then its fragment of the manifest."""
    file = part.fragment["file"]
    # By its descriptor: the name may be another by now.
    place.store.upload(f"{part.name}/{file['name']}", f"/dev/fd/{part.descriptor}", file["size"])
    place.put(fragment_name(part.name, part.job["rank"]), fragment_text(part.fragment))


def _remove_unshared(part: Part) -> None:
    """Remove a part that other hosts do not see from the local disk: alone, it is no checkpoint."""
    if part.job["remote"]["shared"]:
        return
    folder, rank = Path(part.job["temporary"]), part.job["rank"]
    with contextlib.suppress(OSError):  # other ranks of this host may still be uploading theirs
        for suffix in ("safetensors", "coded", "json"):
            (folder / f"rank_{rank:05d}.{suffix}").unlink(missing_ok=True)
        folder.rmdir()


def commit_part(place: StorePlace, part: Part, patience: float) -> list[str]:
    """Wait for the parts of all ranks, and commit; `part` is rank 0's. Return what of the rest failed.

    Raises:
        StoreError: a part did not come in `patience` seconds, or the store does not take the commit.
        TakenError: the place is another run's.
        BadCheckpoint: a part's fragment is damaged.
    """
    job = part.job
    deadline = time.monotonic() + patience

    def wait(name: str, attempt: int) -> None:
        if time.monotonic() > deadline:
            raise StoreError(f"{place.store.url}/{name}", f"did not arrive in {patience:.0f} s")
        time.sleep(min(0.05 * 2 ** min(attempt, 6), 2.0))

    def foreign(name: str) -> Exception:
        return StoreError(f"{place.store.url}/{name}", "belongs to another save")

    fragments = wait_for_fragments(place, part.save, job["world"], wait, foreign)
    if is_rewritten(fragments.values()):
        # Those differences are in the store now; the whole shards are in the local checkpoint.
        differences = [f"{part.name}/{file_of(f).name}" for f in fragments.values() if f["base"]]
        return _upload_whole(place, part, Path(job["root"]) / job["name"], [*fragments, *differences])
    manifest = assemble(job["manifest"], list(fragments.values()))
    return _publish(place, part, manifest, *committable(manifest), list(fragments))


def _upload_whole(place: StorePlace, part: Part, here: Path, remains: Sequence[str] = ()) -> list[str]:
    """Upload a checkpoint that is committed on the local disk, and delete what parts of it the store need not keep.

    Raises:
        BadCheckpoint: it is damaged by now.
    """
    data = (here / MANIFEST).read_bytes()
    manifest = Manifest.from_json(data, str(here))
    for entry in manifest.files:
        _check_shard(here, entry)
        place.store.upload(f"{part.name}/{entry.name}", str(here / entry.name), entry.size)
    return _publish(place, part, manifest, data, commit_text(data), remains)


def _check_shard(folder: Path, entry: FileEntry) -> None:
    """Refuse a shard that has been damaged since it was committed: the store must not get it as a whole one."""
    with (folder / entry.name).open("rb") as file:
        for block, crc in enumerate(entry.crc32):
            if zlib.crc32(file.read(BLOCK)) != crc:
                rule = f"block {block} differs from its checksum (CRC32)"
                raise BadCheckpoint(str(folder.resolve() / entry.name), rule)


def _publish(
    place: StorePlace, part: Part, manifest: Manifest, data: bytes, commit: bytes, remains: Sequence[str]
) -> list[str]:
    """Commit what has arrived, and do what can only be done afterwards; return what of that failed."""
    job, store = part.job, place.store
    sizes = store.names(part.name)
    for entry in manifest.files:
        if sizes.get(entry.name) != entry.size:
            raise StoreError(f"{store.url}/{part.name}/{entry.name}", f"has {sizes.get(entry.name)} bytes there")
    if manifest.base is not None:
        _send_base(place, job, manifest.base)
    # Before COMMIT: who resumes from it on another disk has the metrics up to there.
    problems = send_run_files(place, job)
    place.publish(part.save, data, commit, _abandoned(place, part) if job["full"] else [])
    # From here on it exists; nothing that fails undoes it.
    problems += _try("parts remain", lambda: store.delete(remains))
    return problems + (_tidy(place, part) if job["full"] else [])


def _send_base(place: StorePlace, job: dict[str, Any], base: tuple[str, str]) -> None:
    """Commit a difference's base first if the store has none: a later save may have replaced it, or its upload failed.

    Raises:
        BadCheckpoint: it is not on the local disk either, or damaged there.
    """
    name, sha256 = base
    if place.snapshot(name, sha256):
        return
    folder = base_folder(Path(job["root"]) / job["name"], base)
    part = Part({**job, "name": name, "save_id": sha256[:16], "full": False}, -1, {})
    _upload_whole(place, part, folder)


def _abandoned(place: StorePlace, part: Part) -> list[str]:
    """List the checkpoints that the run does not continue: later ones that it has not written."""
    claim = part.job["remote"]
    mine = {*claim["written"], part.name}
    return [name for name in place.committed() if step_of(name) > claim["base"] and name not in mine]


def _tidy(place: StorePlace, part: Part) -> list[str]:
    # What another run has saved since it took the place is not this run's to prune.
    if problems := _try("older ones remain", lambda: _check_owner(place, part.job)):
        return problems
    return place.tidy(part.name, partial(Keep.from_job(part.job["remote"]).staying, place))


def _try(problem: str, step: Callable[[], None]) -> list[str]:
    """Do what a checkpoint can do without; return the problem if that failed."""
    try:
        step()
    except (OSError, StoreError) as e:
        return [f"{problem} ({e})"]
    return []


def send_run_files(place: StorePlace, job: dict[str, Any]) -> list[str]:
    """Upload config and metrics, if the job knows where they are; return the problem if that failed.

    Raises:
        StoreError: the store cannot tell whose the place is.
        TakenError: the place is another run's.
    """
    _check_owner(place, job)
    if not job["root"]:
        return []
    run, run_dir = place.store.parent, Path(job["root"]).parent
    return _try("config and metrics are not uploaded", lambda: _upload_run_files(run, run_dir))


def _check_owner(place: StorePlace, job: dict[str, Any]) -> None:
    if other := place.taken_by(job["remote"]["owner"]):
        raise TakenError(f"{place.store.url} has been taken by {other}")


def _upload_run_files(run: Store, run_dir: Path) -> None:
    for name in RUN_FILES:
        path = run_dir / name
        if path.exists():
            # Read at once: the run is still writing to it.
            run.write(name, path.read_bytes())
