"""What a checkpoint holds, in lines of text."""

from __future__ import annotations

import contextlib
import math
from pathlib import Path
from typing import Any

from megalite.extras.saved_model import resolve_checkpoint
from megalite.runtime.checkpoint.manifest import CODE, Manifest, read_manifest
from megalite.runtime.checkpoint.pruning import ranked
from megalite.runtime.checkpoint.reader import ShardReader
from megalite.runtime.checkpoint.safetensors_io import num_bytes
from megalite.runtime.places.folder_place import FolderPlace
from megalite.runtime.places.names import step_folders


def describe(path: str | Path, tensors: bool = False, verify: bool = False) -> list[str]:
    """Describe a checkpoint in lines of text.

    Args:
        path: a checkpoint's folder, or a run directory or checkpoints folder (its newest).
        tensors: list all tensors and their boxes.
        verify: read everything and verify all checksums.

    Raises:
        UserError: not a checkpoint, or a damaged one.
    """
    folder = resolve_checkpoint(path)
    manifest = read_manifest(folder)
    reader = ShardReader(folder, manifest)
    try:
        # Sizes are always compared, contents on demand.
        for number in range(len(manifest.files)):
            reader.descriptor(number)
        lines = _summary(folder, manifest)
        lines += _judged(folder)
        lines += [f"not part of it, ignored: {name}" for name in reader.extra_files()]
        if tensors:
            lines += _tensors(manifest)
        if verify:
            reader.verify()
            reader.decode()
            lines.append(f"verified: {reader.stats.verified:,} bytes, all checksums are correct")
        else:
            lines.append("checksums not verified (use --verify)")
    finally:
        reader.close()
    return lines


def _summary(folder: Path, manifest: Manifest) -> list[str]:
    meta = manifest.meta
    lines = [
        f"{folder}: step {manifest.step}, run {manifest.run_id}",
        "saved by " + ", ".join(f"{key} {value}" for key, value in manifest.topology.items()),
    ]
    if "consumed_samples" in meta:
        lines.append(f"consumed samples: {meta['consumed_samples']:,}")
    if "valid_loss" in meta:
        lines.append(f"validation loss: {meta['valid_loss']:.4f}")
    model: dict[str, Any] = meta.get("config", {}).get("model", {})
    if model:
        shown = ("arch", "num_layers", "hidden_size", "num_heads", "num_kv_heads", "vocab_size", "seq_len")
        lines.append("model: " + ", ".join(f"{key} {model[key]}" for key in shown if key in model))
    for kind, entries in manifest.tensors.items():
        count = sum(math.prod(t.shape) for t in entries.values())
        size = sum(num_bytes(t.dtype, t.shape) for t in entries.values())
        boxes = sum(len(t.boxes) for t in entries.values())
        types = ", ".join(sorted({t.dtype for t in entries.values()}))
        lines.append(f"{kind}: {len(entries)} tensors ({types}), {count:,} elements, {size:,} bytes, {boxes} boxes")
    total = sum(f.size for f in manifest.files)
    plain = sum(f.plain_size for f in manifest.files)
    coded = f", coded from {plain:,} ({CODE}, {total / plain:.3f})" if total != plain else ""
    lines.append(f"{len(manifest.files)} shards, {total:,} bytes{coded}")
    if manifest.base is not None:
        name, sha256 = manifest.base
        lines.append(f"difference of {name} (manifest {sha256[:16]}...)")
    return lines


def _judged(folder: Path) -> list[str]:
    """List the checkpoints beside this one that record a validation loss, the lowest first."""
    root = folder.parent
    with contextlib.suppress(OSError):
        judged = ranked(FolderPlace(root), [path.name for _, path in step_folders(root)])
        best = judged[0][1] if judged else ""
        return [f"{root / name}: validation loss {loss:.4f}{' (best)' * (name == best)}" for loss, name in judged]
    return []


def _tensors(manifest: Manifest) -> list[str]:
    lines = []
    for kind, entries in manifest.tensors.items():
        for name, tensor in entries.items():
            lines.append(f"{kind} {name} {list(tensor.shape)} {tensor.dtype}")
            for number, box in tensor.boxes:
                file = manifest.files[number].name
                lines.append(f"    {list(box.shape)} at {list(box.offset)}: {file} byte {box.at}")
    return lines
