"""What changes `RUN_DIR/checkpoints`: commit, set aside, prune, clean up. Each step is a rename."""

from __future__ import annotations

import contextlib
import json
import os
import secrets
import shutil
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from megalite.core.base.log import logger
from megalite.runtime.checkpoint.manifest import Manifest, commit_text
from megalite.runtime.checkpoint.names import step_folders
from megalite.runtime.checkpoint.safetensors_io import sync_folder, write_file

TEMPORARY = ".tmp_"


def commit(root: Path, temporary: Path, name: str, manifest: Manifest, aside: Sequence[str]) -> list[str]:
    """Turn a folder of finished shards into checkpoint `name`.

    The checkpoint comes into existence with the rename; by then everything in it has reached the disk.

    Args:
        root: the run's checkpoints folder.
        temporary: the folder that holds the shards.
        name: final name; an existing folder of that name is set aside.
        aside: other folders to set aside, because this run does not continue them.

    Returns:
        The folders that were set aside, each as "old -> new".
    """
    commit_in_place(temporary, manifest)
    moved = [set_aside(root, other) for other in dict.fromkeys([*aside, name]) if os.path.lexists(root / other)]
    os.rename(temporary, root / name)
    return moved


def tidy(root: Path, name: str, keep_last: int, keep: Sequence[str]) -> list[str]:
    """Finish after a commit: flush the rename to the disk, point `latest` at the checkpoint, prune older ones.

    The checkpoint exists by now, so nothing that fails here undoes it.

    Returns:
        What failed, one line each.
    """
    problems = []
    steps: list[tuple[str, Callable[[], None]]] = [
        (f"{root / name} may not survive a power failure", lambda: sync_folder(root)),
        (f"{root / 'latest'} does not point at {name}", lambda: point_latest(root, name)),
    ]
    old = [path for _, path in step_folders(root)[keep_last:] if path.name not in keep]
    steps += [(f"{path} was not pruned", partial(prune, path)) for path in old]
    for what, step in steps:
        try:
            step()
        except OSError as e:
            problems.append(f"{what} ({e.strerror or e})")
    return problems


def commit_in_place(folder: Path, manifest: Manifest) -> None:
    """Write manifest and COMMIT beside finished shards."""
    data = manifest.to_json()
    # Never commit a manifest that cannot be loaded.
    Manifest.from_json(data, "manifest of this save")
    write_file(folder / "manifest.json", [data])
    write_file(folder / "COMMIT", [commit_text(data)])
    sync_folder(folder)


def set_aside(root: Path, name: str) -> str:
    """Rename a folder so that no run resumes from it or prunes it."""
    number = 1
    while (root / f"aside_{number}_{name}").exists():
        number += 1
    os.rename(root / name, root / f"aside_{number}_{name}")
    return f"{name} -> aside_{number}_{name}"


def point_latest(root: Path, name: str) -> None:
    """Point the link `latest` at a checkpoint, for people and scripts; resuming reads the folders themselves."""
    link = root / f"{TEMPORARY}latest"
    link.unlink(missing_ok=True)
    link.symlink_to(name)
    try:
        os.replace(link, root / "latest")
    except OSError:
        link.unlink()
        raise


def prune(path: Path) -> None:
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


def clean_up(root: Path, keep: Callable[[str], bool] = lambda save: False) -> list[str]:
    """Delete the remains of interrupted saves, but those to `keep` (NAME_ID); return their names.

    A writer briefly outlives its killed rank, and may be about to commit or prune: a rename decides which of the two is
    first. If this process is, the writer finds nothing under the names it knows; else nothing is left to delete.
    """
    removed = []
    for path in sorted(p for p in root.iterdir() if p.name.startswith(TEMPORARY)):
        if keep(path.name.removeprefix(TEMPORARY)):
            continue
        dead = root / f"{TEMPORARY}dead_{secrets.token_hex(8)}"
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


def read_fragment(path: Path) -> dict[str, Any] | None:
    """Read a rank's fragment of the manifest; return None until it exists."""
    try:
        return json.loads(path.read_bytes())
    except FileNotFoundError:
        return None
