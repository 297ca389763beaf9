"""Names of checkpoints, in a folder and in a store, and what a folder of Megatron-LM looks like."""

from __future__ import annotations

import re
from pathlib import Path

from megalite.core.base.errors import UserError

# What is not a checkpoint yet, or no longer, has a name that begins so.
TEMPORARY = ".tmp_"
MODEL = re.compile(r"model_\d{8,20}")
"""Name of a folder of weights alone, see `model_name`."""
_STEP = re.compile(r"step_(\d{8,})")
_STEP_IN_STORE = re.compile(r"step_(\d{8,})-[0-9a-f]{16}")
# Megatron-LM's folders of one iteration, and of one rank in it.
_MEGATRON = re.compile(r"iter_\d+|mp_rank_\d+(_\d+)*")


def checkpoints_folder(run_dir: str | Path) -> Path:
    """Return the folder in which a run keeps its checkpoints."""
    return Path(run_dir) / "checkpoints"


def step_name(step: int) -> str:
    """Name the folder of a full checkpoint."""
    return f"step_{step:08d}"


def model_name(step: int) -> str:
    """Name the folder of a checkpoint of weights alone."""
    return f"model_{step:08d}"


def step_folders(root: Path) -> list[tuple[int, Path]]:
    """List (step, folder) of all names of full checkpoints, newest step first; file times are not used."""
    if not root.is_dir():
        return []
    matches = [(_STEP.fullmatch(p.name), p) for p in root.iterdir()]
    return sorted(((int(m[1]), p) for m, p in matches if m), reverse=True)


def store_name(name: str, save_id: str) -> str:
    """Name the folder in a store of what a save makes: nothing can be renamed there, so no two saves share one."""
    return f"{name}-{save_id}"


def step_of(name: str) -> int:
    """Return the step of a full checkpoint in a store; -1 for another name."""
    match = _STEP_IN_STORE.fullmatch(name)
    return int(match[1]) if match else -1


def refuse_megatron(path: Path, given: str) -> None:
    """Refuse a folder that holds checkpoints of Megatron-LM, or is one of them.

    Raises:
        UserError: `given` names the folder.
    """
    tracker = path / "latest_checkpointed_iteration.txt"
    signs = [tracker] if tracker.is_file() else []
    if path.is_dir():
        signs += sorted(p for p in path.iterdir() if _MEGATRON.fullmatch(p.name) and p.is_dir())
    if _MEGATRON.fullmatch(path.name) and not (path / "manifest.json").exists():
        signs.append(path)
    if signs:
        raise UserError(
            given, f"holds a Megatron-LM checkpoint ({signs[0].name})", "import it first: see docs/megatron.md"
        )
