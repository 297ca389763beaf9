"""What each rank says of its shard, and the manifest that is made of it. Does not import torch."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any, NamedTuple

from megalite.core.base.slices import Slice
from megalite.runtime.checkpoint.manifest import FileEntry, Manifest, TensorEntry
from megalite.runtime.checkpoint.safetensors_io import num_bytes
from megalite.runtime.places.place import Place, Save


class SavedBox(NamedTuple):
    """A box of a logical tensor that one rank writes.

    Attributes:
        kind, name: kind and name of the tensor in the manifest.
        dtype: type in the file, as safetensors spells it.
        shape: shape of the full tensor.
        box: its place in the tensor; in a fragment, `at` is its first byte in the shard.
    """

    kind: str
    name: str
    dtype: str
    shape: tuple[int, ...]
    box: Slice

    @property
    def num_bytes(self) -> int:
        return num_bytes(self.dtype, self.box.shape)

    def to_json(self) -> list[object]:
        """The form it takes in jobs and fragments: [kind, name, dtype, shape, at, offset, shape of the box]."""
        return [*self[:4], *self.box.to_json()]

    @classmethod
    def from_json(cls, entry: list[Any]) -> SavedBox:
        """Read what `to_json` made."""
        kind, name, dtype, shape, at, offset, extent = entry
        return cls(kind, name, dtype, tuple(shape), Slice(tuple(offset), tuple(extent), at))


def fragment_name(folder: str, rank: int) -> str:
    """Name a rank's fragment of the manifest in a folder of parts."""
    return f"{folder}/rank_{rank:05d}.json"


def wait_for_fragments(
    place: Place, save: Save, world: int, wait: Callable[[str, int], None], foreign: Callable[[str], Exception]
) -> dict[str, dict[str, Any]]:
    """Read the fragments of all ranks of a save, each once it is in the place.

    Args:
        place, save: where, and of which save.
        world: number of ranks.
        wait: called with the name of a fragment that is missing, and how often it has been called for that one before;
            raises to give up.
        foreign: makes the error for a fragment, given its name, that belongs to another save.

    Returns:
        Name -> content, by rank.
    """
    fragments: dict[str, dict[str, Any]] = {}
    for rank in range(world):
        name, attempt = fragment_name(place.parts_of(save), rank), 0
        while (data := place.read(name)) is None:
            wait(name, attempt)
            attempt += 1
        fragments[name] = json.loads(data)
        if fragments[name]["save_id"] != save.id:
            raise foreign(name)
    return fragments


def assemble(head: dict[str, Any], fragments: list[dict[str, Any]]) -> Manifest:
    """Make the manifest of a save from its head and the fragments of all ranks."""
    files: list[FileEntry] = []
    boxes: dict[tuple[str, str, str, tuple[int, ...]], list[tuple[int, Slice]]] = {}
    for number, fragment in enumerate(fragments):
        f = fragment["file"]
        files.append(FileEntry(f["name"], f["size"], f["header"], tuple(f["crc32"])))
        for saved in map(SavedBox.from_json, fragment["boxes"]):
            boxes.setdefault(saved[:4], []).append((number, saved.box))
    tensors: dict[str, dict[str, TensorEntry]] = {}
    for (kind, name, dtype, shape), located in boxes.items():
        tensors.setdefault(kind, {})[name] = TensorEntry(dtype, shape, tuple(located))
    return Manifest(head["run_id"], head["step"], head["topology"], head["meta"], tuple(files), tensors)
