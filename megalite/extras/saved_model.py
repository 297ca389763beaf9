"""The checkpoint that a path given to a tool stands for, and the tokenizer that belongs to it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from megalite.core.base.errors import UserError
from megalite.runtime.checkpoint.load import find_latest
from megalite.runtime.checkpoint.safetensors_io import BadCheckpoint
from megalite.runtime.data.tokenizer_files import exported_from, file_in, file_sha256, read_json
from megalite.runtime.places.names import checkpoints_folder, refuse_megatron


def resolve_checkpoint(path: str | Path) -> Path:
    """Return the checkpoint that a path stands for: itself, or the newest of a run directory or checkpoints folder."""
    path = Path(path)
    if (path / "manifest.json").exists() or (path / "COMMIT").exists():
        return path
    for root in (path, checkpoints_folder(path)):
        latest = find_latest(root)
        if latest is not None:
            return latest
    refuse_megatron(path, f"checkpoint {path}")
    if not path.exists():
        raise BadCheckpoint(f"checkpoint {path}", "does not exist", "pass the folder of a run or a checkpoint")
    raise BadCheckpoint(
        f"checkpoint {path}", "holds no manifest.json and no step_* folders", "pass the folder of a checkpoint"
    )


def recorded_tokenizer(meta: dict[str, Any]) -> str | None:
    """Return the tokenizer that a checkpoint's meta names; None if the run had none or the file no longer exists.

    The name is untrusted and may point to any file of this machine, so the file is not used unless its SHA-256 is the
    recorded one.

    Raises:
        UserError: the file has another SHA-256.
    """
    name = meta.get("config", {}).get("data", {}).get("tokenizer")
    if not name or "\0" in name or (name != "bytes" and not Path(name).exists()):
        return None
    file = Path(name)
    if name == "bytes" and not file.exists():
        return name
    file = file_in(file) if file.is_dir() else file
    sha256, recorded = file_sha256(file), meta.get("tokenizer_sha256")
    if sha256 != recorded:
        # An export counts as the tokenizer that it came from.
        sha256 = exported_from(read_json(file.with_name("tokenizer_config.json")), sha256) or sha256
    if sha256 != recorded:
        rule = f"does not have SHA-256 {recorded}, that of the tokenizer the checkpoint was trained with"
        raise UserError(f"tokenizer {file}", rule, "pass the tokenizer of the training with --tokenizer")
    return name


def holds_tokenizer(folder: Path) -> bool:
    """Whether a folder has a file that `load_tokenizer` would take."""
    return any(folder.glob("tokenizer.json")) or any(folder.glob("*.model")) or any(folder.glob("*.tiktoken"))
