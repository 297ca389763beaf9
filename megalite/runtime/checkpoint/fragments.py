"""What each rank says of its shard, and the manifest that is made of it. Does not import torch."""

from __future__ import annotations

import json
import time
import zlib
from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

from megalite.core.base.slices import Slice
from megalite.runtime.checkpoint.manifest import FileEntry, Manifest, TensorEntry
from megalite.runtime.checkpoint.safetensors_io import BadCheckpoint, num_bytes
from megalite.runtime.places.place import Place, Save

# A damaged answer of a store is asked for again, after a pause.
_READS, _PAUSE_S = 3, 0.5


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


def fragment_text(fragment: dict[str, Any]) -> bytes:
    """Return the content of a fragment: a line of JSON, and one with its CRC-32."""
    data = json.dumps(fragment).encode()
    return b"%s\n%08x\n" % (data, zlib.crc32(data))


def parse_fragment(data: bytes) -> dict[str, Any] | None:
    """Read what `fragment_text` made, or an older version without checksum; None: it is damaged."""
    line, newline, checksum = data.partition(b"\n")
    if newline and checksum != b"%08x\n" % zlib.crc32(line):
        return None
    try:
        fragment = json.loads(line)
    except ValueError:
        return None
    return fragment if isinstance(fragment, dict) else None


def read_fragment(place: Place, name: str) -> dict[str, Any] | None:
    """Read a fragment; None if there is none.

    Raises:
        BadCheckpoint: it is damaged, however often it is read.
    """
    for attempt in range(_READS):
        time.sleep(_PAUSE_S if attempt else 0)
        if (data := place.read(name)) is None:
            return None
        if (fragment := parse_fragment(data)) is not None:
            return fragment
    raise BadCheckpoint(name, "is not what its process has written", "the save is lost: use an earlier checkpoint")


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

    Raises:
        BadCheckpoint: a fragment is damaged.
    """
    fragments: dict[str, dict[str, Any]] = {}
    for rank in range(world):
        name, attempt = fragment_name(place.parts_of(save), rank), 0
        while (fragment := read_fragment(place, name)) is None:
            wait(name, attempt)
            attempt += 1
        if fragment["save_id"] != save.id:
            raise foreign(name)
        fragments[name] = fragment
    return fragments


def file_of(fragment: dict[str, Any]) -> FileEntry:
    """Return the manifest's entry of the shard that a fragment is about."""
    f = fragment["file"]
    return FileEntry(f["name"], f["size"], f["header"], tuple(f["crc32"]), f.get("plain"))


def is_rewritten(fragments: Iterable[dict[str, Any]]) -> bool:
    """Whether rank 0's writer writes the differences of a save again, whole: another rank could not read their base."""
    by_rank = list(fragments)
    return any(f.get("problem") for f in by_rank) and any(f.get("base") for f in by_rank)


def assemble(head: dict[str, Any], fragments: list[dict[str, Any]]) -> Manifest:
    """Make the manifest of a save from its head and the fragments of all ranks."""
    files: list[FileEntry] = []
    boxes: dict[tuple[str, str, str, tuple[int, ...]], list[tuple[int, Slice]]] = {}
    for number, fragment in enumerate(fragments):
        files.append(file_of(fragment))
        for saved in map(SavedBox.from_json, fragment["boxes"]):
            boxes.setdefault(saved[:4], []).append((number, saved.box))
    tensors: dict[str, dict[str, TensorEntry]] = {}
    for (kind, name, dtype, shape), located in boxes.items():
        tensors.setdefault(kind, {})[name] = TensorEntry(dtype, shape, tuple(located))
    bases = {tuple(fragment["base"]) for fragment in fragments if fragment.get("base")}
    if len(bases) > 1:
        raise BadCheckpoint("fragments", f"name {len(bases)} bases", "two jobs are writing here: end one")
    meta, base = head["meta"], next(iter(bases), None)
    return Manifest(head["run_id"], head["step"], head["topology"], meta, tuple(files), tensors, base=base)
