"""Checkpoints and tokens of experts for the page."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from megalite.runtime.base.untrusted import BadFile, parse_json, read_json, require_regular
from megalite.runtime.checkpoint.base import sha256_of
from megalite.runtime.checkpoint.pruning import ranked
from megalite.runtime.places.folder_place import FolderPlace
from megalite.runtime.places.names import step_folders
from megalite.runtime.places.place import COMMIT
from megalite.runtime.record.expert_tokens import EXPERTS_FILE

_LARGEST_MANIFEST = 64 << 20
_LARGEST_EXPERTS = 1 << 30
# Of a model with many experts a page holds fewer steps.
_MOST_COUNTS = 200_000


def collect_checkpoints(run_dir: Path) -> dict[str, Any]:
    """Return the checkpoints in a run's folder, oldest first.

    Returns:
        best: name of the one with the lowest validation loss, or None. folders: name, step, bytes, plain_bytes (before
        coding), files, tensors by kind, valid_loss, ranks that wrote it, and of a difference `base`, what its manifest
        names, and `base_folder`, the folder that this is, or None; of a broken one `problem` alone.
    """
    root = run_dir / "checkpoints"
    if not root.is_dir():
        return {"missing": "checkpoints", "remedy": "--save-every N"}
    names = [path.name for _, path in step_folders(root)]
    judged = ranked(FolderPlace(root), names)
    losses = {name: loss for loss, name in judged}
    shown = sorted(p.name for p in root.iterdir() if not p.is_symlink() and (p / "manifest.json").exists())
    by_sha256 = {sha256_of(root / name): name for name in shown if (root / name / COMMIT).is_file()}
    folders = [{"name": name, "valid_loss": losses.get(name), **_described(root / name, by_sha256)} for name in shown]
    return {"best": judged[0][1] if judged else None, "folders": folders}


def _described(folder: Path, by_sha256: dict[str, str]) -> dict[str, Any]:
    try:
        manifest = read_json(folder / "manifest.json", _LARGEST_MANIFEST)
        files, base = manifest["files"], manifest.get("base")
        chain = {}
        if base is not None:
            chain = {"base": str(base["name"]), "base_folder": by_sha256.get(str(base["manifest"]))}
        return {
            "step": int(manifest["step"]),
            "run_id": str(manifest["run_id"]),
            "bytes": sum(int(file["size"]) for file in files),
            "plain_bytes": sum(int(file.get("plain", file["size"])) for file in files),
            "files": len(files),
            "ranks": int(manifest["topology"].get("world", 0)),
            "kinds": {str(kind): len(tensors) for kind, tensors in manifest["tensors"].items()},
            "whole": (folder / COMMIT).is_file(),
            **chain,
        }
    except (OSError, BadFile, KeyError, TypeError, ValueError, AttributeError) as e:
        return {"problem": f"{type(e).__name__}: {e}"[:300]}


def collect_experts(run_dir: Path, last_step: int | None) -> dict[str, Any]:
    """Return the tokens of every expert by step; of many steps some, evenly spaced.

    Args:
        last_step: the run's newest step: lines after it are of an earlier attempt. None: unknown.

    Returns:
        layers; steps; tokens: [step][layer][expert].
    """
    path = run_dir / EXPERTS_FILE
    if not path.exists():
        return {"missing": EXPERTS_FILE, "remedy": "--num-experts N"}
    require_regular(path, _LARGEST_EXPERTS)
    by_step: dict[int, Any] = {}
    broken = 0
    with path.open("rb") as file:
        for line in file:
            try:
                content = parse_json(line)
                layers, tokens = [int(i) for i in content["layers"]], content["tokens"]
                rows = [[int(count) for count in layer] for layer in tokens]
                by_step[int(content["step"])] = layers, rows
            except (BadFile, KeyError, TypeError, ValueError):
                broken += 1
    steps = sorted(step for step in by_step if last_step is None or step <= last_step)
    if not steps:
        return {"missing": EXPERTS_FILE, "remedy": "--num-experts N", "broken": broken}
    layers, rows = by_step[steps[-1]]
    size = sum(map(len, rows))
    steps = [step for step in steps if by_step[step][0] == layers and sum(map(len, by_step[step][1])) == size]
    stride = max(1, -(-len(steps) * size // _MOST_COUNTS))
    kept = steps[::-1][::stride][::-1]
    return {"layers": layers, "steps": kept, "tokens": [by_step[s][1] for s in kept], "broken": broken}
