"""A run's place in a store: taken at the start, copied from on a resume, and given every checkpoint that is saved."""

from __future__ import annotations

import contextlib
import time
from pathlib import Path
from typing import Any

from megalite.core.base.log import logger
from megalite.core.mesh.agree import agree, check_equal
from megalite.core.mesh.collectives import gather_texts
from megalite.core.mesh.context import ParallelContext
from megalite.runtime.base.urls import is_url, join
from megalite.runtime.base.waits import tell
from megalite.runtime.checkpoint import local_copies
from megalite.runtime.checkpoint.pruning import Keep
from megalite.runtime.checkpoint.snapshot import WriterProcess
from megalite.runtime.checkpoint.upload import METRICS
from megalite.runtime.checkpoint.waiting import upload_waiting
from megalite.runtime.places.folder_place import FolderPlace
from megalite.runtime.places.names import step_of
from megalite.runtime.places.place import COMMIT
from megalite.runtime.places.store import Store, StoreError
from megalite.runtime.places.store_place import StorePlace

# With --save-errors stop, a run ends when this many uploads in a row have failed.
_MAX_FAILURES = 3
# At the end of a run the ranks meet this often while they wait for uploads.
_ROUND_S = 1.0
_COMMITTED = "committed"


class SaveError(RuntimeError):
    """A checkpoint could not be written or uploaded; earlier checkpoints are unchanged."""


class Mirror:
    """Where the checkpoints of a run are uploaded, as one rank sees it. Nothing here waits for the store but `take`.

    Args:
        url: the run's URL.
        run_dir: the local folder that stands for it.
        patience: seconds for which an upload is tried again while the store is away.

    Attributes:
        url: its checkpoints folder.
        copies: local folder of what was downloaded from there.
        held: name of the last save if it was not uploaded because an earlier upload was in progress; "" otherwise.
        taken: who has taken the place; "" as long as it is this run's.
        failures: uploads that failed, in a row.
        shared: whether all ranks see the same local folder; otherwise a checkpoint exists when it is uploaded.
    """

    def __init__(self, url: str, run_dir: Path, patience: float = 600.0) -> None:
        self._patience = patience
        self.url = join(url, "checkpoints")
        self._run_dir = run_dir
        self.copies = run_dir / "fetched"
        self.held = self.taken = ""
        self.failures, self.shared = 0, True
        self._owner = ""
        self._in_progress = ""
        self._base = -1
        self._written = list[str]()

    @classmethod
    def of(cls, url: str, run_dir: Path, patience: float) -> Mirror | None:
        """Return a run's place in a store, None if its directory is not a URL."""
        if not is_url(url):
            return None
        logger.info(f"{url}: checkpoints are uploaded from {run_dir}")
        return cls(url, run_dir, patience)

    @property
    def place(self) -> StorePlace:
        """The checkpoints in the store."""
        return StorePlace(Store(self.url))

    def introduce(self, owner: str) -> None:
        """Note by what this run will be known there.

        Raises:
            UserError: the store's package is missing.
        """
        Store(self.url)
        self._owner = owner

    def take(self) -> None:
        """Become the one that writes here, and bring the run's metrics if this host has less of them.

        Raises:
            StoreError: the place cannot be written, or does not keep what is written.
        """
        place = self.place
        place.take(self._owner)
        run, path = place.store.parent, self._run_dir / METRICS
        if METRICS not in run.names():
            return
        content, here = run.read(METRICS), path.read_bytes() if path.exists() else b""
        # They only grow: else an old disk has come back.
        if not here.startswith(content):
            if here:
                path.replace(path.with_name(f"older_{METRICS}"))
            path.write_bytes(content)

    def committed(self) -> list[str]:
        """List the names of committed full checkpoints, newest first."""
        return self.place.committed()

    def fetch(self, name: str) -> Path:
        """Return a local copy of a checkpoint, whose shards come when they are read."""
        return local_copies.fetch(self.place.store, name, self.copies, alone=True)

    def meet(self, lock: Path, ctx: ParallelContext) -> None:
        """Find out whether all ranks see the same local folder, and upload or delete what an interrupted save left.

        What is newer than the store's and not whole waits: another start, on other hosts, may find the rest. Every rank
        calls this.

        Raises:
            StoreError: the store is away, and parts wait for it.
        """
        lock.parent.mkdir(parents=True, exist_ok=True)
        owner = gather_texts(self._owner, ctx.world, ctx.device)[0]
        sees = lock.exists() and lock.read_text(errors="replace") == owner
        self.shared = all(gather_texts("yes" if sees else "", ctx.world, ctx.device))
        if not self.shared:
            logger.info("the hosts share no folder: a checkpoint exists once all its parts are uploaded")
        incomplete = upload_waiting(lock.parent, self.url, ctx, self._patience)
        if ctx.rank != 0 and self.shared:
            return
        if remains := FolderPlace(lock.parent).clean_up(keep=lambda save: _name_of(save) in incomplete):
            logger.info(f"deleted the remains of an interrupted save: {', '.join(remains)}")

    def tidy(self, root: Path) -> None:
        """Delete this host's parts that nothing needs any more; the store decides which.

        A full save waits until it is committed there, or a later one of this run is; weights until they are committed.
        What an earlier process left incomplete goes with the first commit of this run.
        """
        place = self.place
        with contextlib.suppress(StoreError):
            newest = max((step_of(n) for n in place.committed() if n in self._written), default=-1)

            def waits(save: str) -> bool:
                name = _name_of(save)
                if newest >= 0 and (name not in self._written or 0 <= step_of(name) <= newest):
                    return False
                return not place.exists(f"{name}/{COMMIT}")

            FolderPlace(root).clean_up(keep=waits)

    def continues(self, step: int) -> None:
        """Note the step that the run continues from."""
        self._base = step

    def lacks(self, checkpoint: Path) -> bool:
        """Whether the store has no committed equal of a local checkpoint, as far as it answers."""
        text, place = (checkpoint / COMMIT).read_bytes(), self.place
        try:
            same = (name for name in place.committed() if step_of(name) == self._base)
            return all(place.store.read(f"{name}/{COMMIT}") != text for name in same)
        except StoreError:
            return True

    @property
    def is_busy(self) -> bool:
        """Whether an upload is in progress."""
        return bool(self._in_progress)

    def describe_save(self, name: str, keep: Keep, hold: bool) -> dict[str, Any]:
        """Note a save that begins, and return the writer's orders for its upload."""
        orders = {
            "url": self.url,
            "patience": self._patience,
            "shared": self.shared,
            "owner": self._owner,
            "hold": hold,
            "base": self._base,
            "written": list(self._written),
            **keep.to_job(),
        }
        self._written.append(name)
        self.held = name if hold else ""
        if hold:
            logger.warning(f"{name} is not uploaded yet: the upload of {self._in_progress} is still in progress")
        else:
            self._in_progress = name
        return orders

    def failed_save(self) -> None:
        """Note that the last save failed: nothing of it will be committed in the store."""
        last = self._written.pop()
        self.held = ""
        if self._in_progress == last:
            self._in_progress = ""

    def note(self, reports: list[dict[str, Any]]) -> None:
        """Log what the writer reports of uploads, and count failures."""
        for report in reports:
            if "note" in report:
                if report["note"]:
                    logger.warning(report["note"])
                continue
            if report["upload"] in ("", self._in_progress):
                self._in_progress = ""
            if error := report["error"]:
                self.failures += 1
                self.taken = error if report["taken"] else ""
                what = f"upload of {report['upload']} failed ({self.failures} in a row)"
                logger.warning(f"{what}{', the local checkpoint is whole' * self.shared}: {error}")
                continue
            self.failures = 0
            logger.info(f"uploaded {join(self.url, report['upload'])} in {report['seconds']:.2f} s")
            for problem in report["problems"]:
                logger.warning(f"{report['upload']} is uploaded, but {problem}")

    def check(self, writer: WriterProcess, stop: bool) -> None:
        """Log what the writer reports of uploads.

        Raises:
            SaveError: another run has taken the place, or, with `stop`, several uploads in a row failed.
        """
        self.note(writer.uploads())
        self._release(writer)
        problem = f"{self.failures} uploads in a row failed" if stop and self.failures >= _MAX_FAILURES else self.taken
        if problem:
            whole = "; those on the local disk are whole" * self.shared
            raise SaveError(f"checkpoints are not uploaded: {problem}{whole}")

    def _release(self, writer: WriterProcess) -> None:
        """Have what is held uploaded once nothing else is. A message during a write would abandon that."""
        if self.held and not self._in_progress and writer.wait(0):
            self._in_progress, self.held = self.held, ""
            writer.release(self._in_progress)

    def settle(self, writer: WriterProcess, ctx: ParallelContext) -> str:
        """Wait until rank 0, which commits, has uploaded the last checkpoint or given up; every rank calls this.

        Until then the other ranks repeat what fails. What failed before is tried once more.

        Returns:
            Why the last checkpoint is not in the store, the same on every rank; "" if it is.
        """
        started = time.monotonic()
        self.note(writer.uploads())
        if self.failures and not (self.taken or self._in_progress or self.held) and self._written:
            self.held = self._written[-1]
        outcome = ""
        while not outcome:
            self._release(writer)
            self.note(writer.uploads(_ROUND_S if self._in_progress or self.held else 0))
            tell()
            is_over = ctx.rank == 0 and not (self._in_progress or self.held)
            outcome = gather_texts(self._outcome() if is_over else "", ctx.world, ctx.device)[0]
        if (seconds := time.monotonic() - started) > 1:
            logger.info(f"waited {seconds:.1f} s for the last uploads")
        self.failures = 0
        return "" if outcome == _COMMITTED else outcome

    def _outcome(self) -> str:
        """Return why the last checkpoint is not in the store, or `_COMMITTED`."""
        if self.taken or not self.failures:
            return self.taken or _COMMITTED
        # The answer to its commit may have been lost.
        with contextlib.suppress(StoreError):
            if self._written and self.place.exists(f"{self._written[-1]}/{COMMIT}"):
                logger.info(f"{join(self.url, self._written[-1])} is in the store all the same")
                return _COMMITTED
        return "its upload failed"


def _name_of(save: str) -> str:
    """Name in the store what has NAME_ID on the disk."""
    return "-".join(save.rsplit("_", 1))


def path_of(name: str, root: Path, mirror: Mirror | None) -> Path:
    """Return the folder of a local checkpoint, or of a local copy of one in the store, by its name."""
    return mirror.fetch(name) if mirror is not None and step_of(name) >= 0 else root / name


def copy_together(url: str, cache_dir: str, ctx: ParallelContext) -> Path:
    """Return this host's copy of the checkpoint that rank 0 finds at a URL; return other paths as they are.

    The other ranks do not look for it themselves: a run there may go on meanwhile.
    """
    if not is_url(url):
        return Path(url)
    located = agree(ctx, lambda: local_copies.locate(url) if ctx.rank == 0 else "")
    found = gather_texts(located, ctx.world, ctx.device)[0]
    path = agree(ctx, lambda: local_copies.local_copy(found, cache_dir))
    commit = agree(ctx, lambda: (path / COMMIT).read_text().strip())
    check_equal(ctx, f"COMMIT of {found}", commit, f"delete the copies in {cache_dir} on all hosts")
    return path
