"""Checkpoints: safetensors shards, a manifest of global boxes and checksums, atomic commits; any layout loads them."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from megalite.checkpoint.load import find_good, find_latest, load_checkpoint, read_meta, verify_together
    from megalite.checkpoint.save import Checkpointer, SaveError

__all__ = ["Checkpointer", "SaveError", "find_good", "find_latest", "load_checkpoint", "read_meta", "verify_together"]


def __getattr__(name: str) -> Any:
    # On demand: the writer process imports this package and must start without torch.
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    room = "save" if name in ("Checkpointer", "SaveError") else "load"
    return getattr(importlib.import_module(f"{__name__}.{room}"), name)
