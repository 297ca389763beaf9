"""Token files of other programs, by their content: what they are, for the error that names them."""

from __future__ import annotations

import contextlib
import json
from pathlib import Path

from megalite.core.base.errors import UserError

_LLM_C = {20240520: "GPT-2", 20240801: "Llama 3"}
"""First number of llm.c's (and modded-nanogpt's) files -> whose ids they hold."""

_FOLDERS = {
    "shards": "a MosaicML Streaming dataset",
    "chunks": "a LitData dataset",
}
"""Key of `index.json` -> what the folder is."""

_MOST_BYTES = 1 << 20
_REMEDY = "write its texts as .jsonl, and make PREFIX.bin and PREFIX.idx of them with megalite preprocess"


def missing_index(prefix: str) -> UserError:
    """Return the error for a prefix without `.idx`: what is there instead, if that is known."""
    given, rule = f"data prefix {prefix}", f"{prefix}.idx does not exist"
    if Path(prefix).is_dir():
        what = _folder(Path(prefix))
        return UserError(given, f"is {what}, and token files are PREFIX.bin and PREFIX.idx", _of_folder(Path(prefix)))
    file = next((file for file in (Path(prefix), Path(f"{prefix}.bin")) if file.is_file()), None)
    remedy = "give the path without .bin/.idx, and check that both files are on this machine"
    if file is None:
        return UserError(given, f"{rule}, nor a folder of that name", remedy)
    if file.with_suffix(".idx").exists():
        return UserError(given, rule, remedy)
    with contextlib.suppress(OSError):
        whose = _LLM_C.get(int.from_bytes(_start(file)[:4], "little"))
        if whose is not None:
            return UserError(given, f"{file} is a file of llm.c, with ids of {whose}, and has no .idx", _REMEDY)
    return UserError(given, rule, f"{remedy}; if {file} is nanoGPT's, {_REMEDY}")


def _folder(path: Path) -> str:
    try:
        index = json.loads(_start(path / "index.json"))
    except (OSError, ValueError, RecursionError):
        index = {}
    known = [what for key, what in _FOLDERS.items() if isinstance(index, dict) and key in index]
    if (path / "dataset_info.json").exists() or (path / "dataset_dict.json").exists():
        known.append("a folder of Hugging Face datasets")
    return next(iter(known), "a folder")


def _of_folder(path: Path) -> str:
    first = min(path.glob("*.idx"), default=None)
    return f"give {first.with_suffix('')}" if first is not None else _REMEDY


def _start(path: Path) -> bytes:
    with path.open("rb") as f:
        return f.read(_MOST_BYTES)
