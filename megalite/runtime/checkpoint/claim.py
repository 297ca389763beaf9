"""The checkpoints folder of a run: its lock, and which of its checkpoints belong to the run's history."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

from megalite.core.base.errors import UserError
from megalite.core.base.log import logger
from megalite.runtime.checkpoint.mirror import Mirror
from megalite.runtime.checkpoint.pruning import Keep
from megalite.runtime.places.folder_place import FolderPlace
from megalite.runtime.places.lock import RunLock
from megalite.runtime.places.names import step_folders, step_of, store_name


class Claim:
    """Own the folder of a run's checkpoints, and know which of them the run has written or continues.

    Args:
        root: the folder.
        run_id: shown to a second job that finds the folder in use.
        keep: which checkpoints stay; what the run continues is added.
        mirror: the run's place in a store, if it has one.
    """

    def __init__(self, root: Path, run_id: str, keep: Keep, mirror: Mirror | None = None) -> None:
        self.root = root
        self._keep = keep
        self._mirror = mirror
        self._lock = RunLock(root, run_id)
        self._resumed_from, self._base = "", -1
        self._written: set[str] = set()

    def acquire(self) -> None:
        """Make the folder if missing, lock it, and delete what an interrupted save left.

        Raises:
            UserError: the folder is in use or cannot be written.
        """
        if self._keep.last < 2:
            raise UserError(
                f"--keep-last {self._keep.last}",
                "must be at least 2, so that one checkpoint is left if the newest is damaged",
                "use --keep-last 2 or more",
            )
        try:
            self.root.mkdir(parents=True, exist_ok=True)
            self._lock.acquire()
            # With a place in a store, what is left may be all that there is of a checkpoint: `Mirror.meet` knows.
            remains = FolderPlace(self.root).clean_up() if self._mirror is None else []
            if self._mirror is not None:
                self._mirror.introduce(self._lock.text)
        except UserError:
            self._lock.release()
            raise
        except OSError as e:
            self._lock.release()
            rule = f"must be a directory that this user can write to ({e.strerror or e})"
            raise UserError(f"checkpoints folder {self.root}", rule, "choose another --run-dir") from None
        if remains:
            logger.info(f"deleted the remains of an interrupted save: {', '.join(remains)}")

    def taken_by(self) -> str:
        """Describe the job that has taken the folder meanwhile; "" if it is still this run's."""
        return self._lock.confirm()

    def release(self) -> None:
        """Leave the folder to others."""
        self._lock.release()

    def continues(self, path: Path) -> None:
        """Note the checkpoint that the run continues, if it is in this folder or from the run's place in the store."""
        # A copy that `--resume URL` of this place has made lies beside its checkpoints.
        if self._mirror is not None and path.parent in (self._mirror.copies, self.root / self._mirror.copies.name):
            self._base, self._keep = step_of(path.name), replace(self._keep, names=(path.name,))
            self._mirror.continues(self._base)
            return
        # The checkpoint may lie elsewhere and be linked here; `latest` is a link to one that lies here.
        for candidate in (path.parent.resolve() / path.name, path.resolve()):
            steps = {p.name: step for step, p in step_folders(self.root)}
            if candidate.parent == self.root.resolve() and candidate.name in steps:
                self._resumed_from, self._base = candidate.name, steps[candidate.name]
                self._keep = replace(self._keep, names=(candidate.name,))
                if self._mirror is not None:
                    self._mirror.continues(self._base)
                return

    def catch_up(self) -> dict[str, Any] | None:
        """Describe the upload of the checkpoint that the run continues; None if its place in a store has that already.

        Without a shared folder it is no local one.
        """
        here = self.root / self._resumed_from
        if self._mirror is None or not self._resumed_from or not self._mirror.lacks(here):
            return None
        # The same ID in every attempt: what an earlier one left is written over.
        save_id = (here / "COMMIT").read_text()[:16]
        orders = self._mirror.describe_save(store_name(self._resumed_from, save_id), self._keep, hold=False)
        job = {"name": self._resumed_from, "save_id": save_id, "full": True, "rank": 0, "root": str(self.root)}
        return {**job, "whole": str(here), "remote": orders}

    def add(self, name: str) -> None:
        """Note a checkpoint that the run has written."""
        self._written.add(name)

    def __contains__(self, name: str) -> bool:
        """Whether the run has written this checkpoint."""
        return name in self._written

    def failed(self) -> None:
        """Note that the last save failed."""
        if self._mirror is not None:
            self._mirror.failed_save()

    def at_upload(self, name: str, hold: bool) -> dict[str, Any] | None:
        """Note a save that begins, and describe what its upload does; None without a place in a store."""
        return self._mirror.describe_save(name, self._keep, hold) if self._mirror is not None else None

    def at_commit(self) -> dict[str, Any]:
        """Describe what a commit does with the other checkpoints, as entries of the writer's job."""
        # Checkpoints that this run does not continue: all later ones, or, in a new run, all.
        others = [p.name for s, p in step_folders(self.root) if s > self._base and p.name not in self._written]
        return {"aside": others, "owner": self._lock.text, **self._keep.to_job()}
