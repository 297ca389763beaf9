"""Checkpoints in a folder, `RUN_DIR/checkpoints`. Each change is a rename: it has happened, or it has not."""

from __future__ import annotations

import contextlib
import os
import secrets
import shutil
from collections.abc import Callable, Collection, Sequence
from functools import partial
from pathlib import Path

from megalite.core.base.log import logger
from megalite.runtime.places.disk import sync_folder, write_file
from megalite.runtime.places.lock import LOCK, taken_by
from megalite.runtime.places.names import TEMPORARY, step_folders
from megalite.runtime.places.place import COMMIT, MANIFEST, Save


class FolderPlace:
    """Checkpoints in a folder; see `Place`. A checkpoint has the name of its save.

    Args:
        root: the folder.
    """

    def __init__(self, root: Path) -> None:
        self.root = root

    def committed(self) -> list[str]:
        """List the names of committed full checkpoints, newest first; warn of folders without COMMIT."""
        committed = []
        for _, path in step_folders(self.root):
            if self.exists(f"{path.name}/{COMMIT}"):
                committed.append(path.name)
            else:
                logger.warning(f"skipping uncommitted checkpoint {path}")
        return committed

    def exists(self, name: str) -> bool:
        """Return whether there is such a file."""
        return (self.root / name).exists()

    def read(self, name: str) -> bytes | None:
        """Return the content of a file; None if there is none: a pipe, which could be waited for forever, is none."""
        path = self.root / name
        try:
            return path.read_bytes() if path.is_file() else None
        except FileNotFoundError:
            return None

    def put(self, name: str, data: bytes) -> None:
        """Write a file, and flush it and the new name of its folder before it appears."""
        path = self.root / name
        part = path.with_name(f"{path.name}.part")
        write_file(part, [data])
        sync_folder(path.parent)
        # Last: whoever waits for this file may rename its folder now.
        os.rename(part, path)

    def taken_by(self, owner: str) -> str:
        """Describe the run whose lock file is in the folder; "" if it is the owner's, or there is none."""
        return taken_by(self.root / LOCK, owner) or ""

    def parts_of(self, save: Save) -> str:
        """Return a name for this save alone: a writer that outlived an earlier run may be saving the same step."""
        return f"{TEMPORARY}{save.name}_{save.id}"

    def publish(self, save: Save, manifest: bytes, commit: bytes, aside: Sequence[str]) -> list[str]:
        """Make a checkpoint of the folder of parts; another one of that name is set aside too.

        The checkpoint comes into existence with the rename; by then everything in it has reached the disk.
        """
        parts = self.root / self.parts_of(save)
        seal(parts, manifest, commit)
        others = dict.fromkeys([*aside, save.name])
        moved = [self.set_aside(other) for other in others if os.path.lexists(self.root / other)]
        os.rename(parts, self.root / save.name)
        return moved

    def set_aside(self, name: str) -> str:
        """Rename a checkpoint to a name that is free; return "old -> new"."""
        number = 1
        while (self.root / f"aside_{number}_{name}").exists():
            number += 1
        os.rename(self.root / name, self.root / f"aside_{number}_{name}")
        return f"{name} -> aside_{number}_{name}"

    def tidy(self, newest: str, staying: Callable[[Sequence[str]], Collection[str]]) -> list[str]:
        """Flush the rename to the disk, point `latest` at the newest checkpoint, and prune older ones."""
        root = self.root
        problems = list[str]()

        def attempt(what: str, step: Callable[[], None]) -> None:
            try:
                step()
            except OSError as e:
                problems.append(f"{what} ({e.strerror or e})")

        def prune() -> None:
            names = [path.name for _, path in step_folders(root)]
            kept = staying(names)
            for name in names:
                if name not in kept:
                    attempt(f"{root / name} was not pruned", partial(_prune, root / name))

        attempt(f"{root / newest} may not survive a power failure", lambda: sync_folder(root))
        attempt(f"{root / 'latest'} does not point at {newest}", lambda: self._point_latest(newest))
        attempt("older ones remain", prune)
        return problems

    def _point_latest(self, name: str) -> None:
        """Point the link `latest` at a checkpoint, for people and scripts; resuming reads the folders themselves."""
        link = self.root / f"{TEMPORARY}latest"
        link.unlink(missing_ok=True)
        link.symlink_to(name)
        try:
            os.replace(link, self.root / "latest")
        except OSError:
            link.unlink()
            raise

    def clean_up(self, keep: Callable[[str], bool] = lambda save: False) -> list[str]:
        """Delete the remains of interrupted saves, but those to `keep` (NAME_ID); return their names.

        A writer briefly outlives its killed rank, and may be about to publish or prune: a rename decides which of the
        two is first. If this process is, the writer finds nothing under the names it knows; else nothing is left to
        delete.
        """
        removed = []
        for path in sorted(p for p in self.root.iterdir() if p.name.startswith(TEMPORARY)):
            if keep(path.name.removeprefix(TEMPORARY)):
                continue
            dead = self.root / f"{TEMPORARY}dead_{secrets.token_hex(8)}"
            try:
                os.rename(path, dead)
            except FileNotFoundError:
                continue
            removed.append(path.name)
            try:
                while os.path.lexists(dead):
                    # The writer may be deleting the same files.
                    with contextlib.suppress(FileNotFoundError):
                        _delete(dead)
            except OSError as e:
                logger.warning(f"{dead} cannot be deleted ({e.strerror}): delete it by hand")
        return removed


def seal(folder: Path, manifest: bytes, commit: bytes) -> None:
    """Write manifest and COMMIT beside finished shards."""
    write_file(folder / MANIFEST, [manifest])
    write_file(folder / COMMIT, [commit])
    sync_folder(folder)


def _prune(path: Path) -> None:
    """Delete a checkpoint, or the link to one that was moved elsewhere."""
    # A folder that is partly deleted must not look like a checkpoint.
    doomed = path.with_name(f"{TEMPORARY}prune_{path.name}_{secrets.token_hex(4)}")
    os.rename(path, doomed)
    _delete(doomed)


def _delete(path: Path) -> None:
    if path.is_symlink() or not path.is_dir():
        path.unlink()
    else:
        shutil.rmtree(path)
