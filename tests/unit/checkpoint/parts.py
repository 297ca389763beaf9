"""Parts of a checkpoint as writers leave them, their upload, and the manifest that comes back."""

from __future__ import annotations

import os
import queue
from pathlib import Path
from typing import Any

from megalite.core.base.slices import Slice
from megalite.runtime.checkpoint.fragments import SavedBox
from megalite.runtime.checkpoint.manifest import Manifest, box_key, commit_text
from megalite.runtime.checkpoint.safetensors_io import make_header
from megalite.runtime.checkpoint.upload import Part, Uploader
from megalite.runtime.places.disk import write_file
from megalite.runtime.places.store import Store
from megalite.runtime.places.store_place import OWNER

META = {
    "step": 0,
    "consumed_samples": 0,
    "config": {"model": {}, "data": {}, "train": {}},
    "scalars": {"num_steps": 0, "loss_scale": 1.0, "loss_scale_good_steps": 0},
}


def make_part(
    folder: Path,
    url: str,
    step: int,
    rank: int = 0,
    world: int = 1,
    save_id: str = "0" * 16,
    elements: int = 2500,
    **orders: Any,
) -> Part:
    """A rank's part of a checkpoint as its writer leaves it: so many elements for each rank."""
    folder.mkdir(parents=True, exist_ok=True)
    box = SavedBox("master", "w", "F32", (world * elements,), Slice((rank * elements,), (elements,), 0))
    key = box_key(box.kind, box.name, box.box.offset)
    header, begins = make_header([(key, box.dtype, box.box.shape)])
    path = folder / f"step_{step}_rank_{rank:05d}.safetensors"
    size, crcs = write_file(path, [header, os.urandom(4 * elements)])
    name = f"rank_{rank:05d}.safetensors"
    fragment = {
        "save_id": save_id,
        "file": {"name": name, "size": size, "header": len(header), "crc32": crcs},
        "boxes": [box._replace(box=Slice(box.box.offset, box.box.shape, begins[key])).to_json()],
    }
    job = {
        "name": f"step_{step:08d}",
        "full": True,
        "save_id": save_id,
        "rank": rank,
        "world": world,
        "root": str(folder / "checkpoints"),
        "manifest": {"run_id": "r", "step": step, "topology": {}, "meta": {**META, "step": step}},
        "remote": {
            "hold": False,
            "shared": True,
            "base": -1,
            "written": [],
            "keep": [],
            "keep_last": 2,
            "owner": "me",
            **orders,
        },
    }
    return Part(job, os.open(path, os.O_RDONLY), fragment)


def upload_parts(url: str, *parts: Part, owner: str = "me", patience: float = 30.0) -> list[dict[str, Any]]:
    """Upload parts, each by a writer of its own, which ends then; their reports, without notes."""
    Store(url).write(OWNER, owner.encode())
    reports: queue.Queue[dict[str, Any]] = queue.Queue()
    for part in parts:
        _start_writer(url, reports, patience).add(part)
    return [reports.get(timeout=300) for _ in parts]


def _start_writer(url: str, reports: queue.Queue[dict[str, Any]], patience: float) -> Uploader:
    """An uploader that is over with its first report: it repeats nothing, and asks for nothing any more."""

    def hear(report: dict[str, Any]) -> None:
        if "note" not in report:
            uploader._left.clear()
            reports.put(report)

    uploader = Uploader(url, hear, patience)
    return uploader


def remote_manifest(copy: Path) -> Manifest:
    data = (copy / "manifest.json").read_bytes()
    assert (copy / "COMMIT").read_bytes() == commit_text(data)
    return Manifest.from_json(data, "manifest")
