"""What a checkpoint holds, read without the library: every logical tensor, whatever its layout."""

from __future__ import annotations

import hashlib
import json
import math
from pathlib import Path
from typing import Any

import numpy as np

_TYPES = {"F32": np.uint32, "BF16": np.uint16, "F16": np.uint16, "I64": np.uint64, "U8": np.uint8}


def newest(run_dir: Path) -> Path:
    """Return the newest checkpoint of a run."""
    return max((run_dir / "checkpoints").glob("step_*"))


def digests(checkpoint: Path) -> dict[str, str]:
    """Return a digest of every tensor, by "role name"."""
    manifest = json.loads((checkpoint / "manifest.json").read_text())
    files = [(checkpoint / entry["name"]).read_bytes() for entry in manifest["files"]]
    return {
        f"{role} {name}": hashlib.sha256(_whole(tensor, files).tobytes()).hexdigest()[:16]
        for role, tensors in manifest["tensors"].items()
        for name, tensor in tensors.items()
    }


def _whole(tensor: dict[str, Any], files: list[bytes]) -> np.ndarray:
    """Put a tensor together from its boxes, as unsigned integers of its bits."""
    kind = np.dtype(_TYPES[tensor["dtype"]])
    whole = np.zeros(tensor["shape"], kind)
    for file, at, offset, shape in tensor["boxes"]:
        part = np.frombuffer(files[file], kind, math.prod(shape), at).reshape(shape)
        whole[tuple(slice(o, o + n) for o, n in zip(offset, shape, strict=True))] = part
    return whole
