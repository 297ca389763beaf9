"""A Hugging Face folder, checked as a whole before a tensor is read: names, shapes, types, index."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from megalite.checkpoint.hf.config import family_of, read_config, special_ids
from megalite.checkpoint.hf.packing import file_shapes, join
from megalite.checkpoint.load import DTYPES
from megalite.checkpoint.safetensors_io import BadCheckpoint, Entry, open_inside, read_exactly, read_header
from megalite.config.model import ModelConfig
from megalite.families.common import Family, Packed
from megalite.model.parameters import param_map
from megalite.sharding import ParamSpec

_INDEX, _SINGLE = "model.safetensors.index.json", "model.safetensors"
_MAX_JSON = 64 << 20


@dataclass(frozen=True)
class _Place:
    path: Path
    fd: int
    entry: Entry


class HFSource:
    """A model folder, open for reading.

    Attributes:
        config: the model.
        special: ids of its special tokens.
        dtype: type its weights are stored in, as config.json names them.

    Raises:
        UserError: anything missing, too many, of the wrong shape or type; or weights that are not safetensors.
    """

    def __init__(self, folder: str | Path) -> None:
        self.folder = Path(folder)
        self._descriptors: list[int] = []
        raw = _read_json(self.folder, "config.json")
        where = str(self.folder / "config.json")
        self.family: Family = family_of(raw, where)
        self.config: ModelConfig = read_config(raw, where)
        self.special: dict[str, Any] = special_ids(raw)
        self.specs: Mapping[str, ParamSpec] = param_map(self.config)
        try:
            self._places = self._renamed(self._find_tensors())
            self._check()
        except BaseException:
            self.close()
            raise
        types = {p.entry.dtype for p in self._places.values()}
        names = {"F32": "float32", "BF16": "bfloat16", "F16": "float16"}
        self.dtype: str = names.get(next(iter(types)), "float32") if len(types) == 1 else "float32"

    def tensors(self) -> Iterator[tuple[ParamSpec, Packed]]:
        """Tensors of megalite that the folder holds, tied copies left out."""
        for spec in self.specs.values():
            if spec.tied_to is None:
                yield spec, self.family.place(spec.name)

    def read(self, spec: ParamSpec, where: Packed) -> torch.Tensor:
        """One tensor of megalite, fp32."""
        parts = [self._read(name) for name in where.names]
        joined = join(where, parts, self.config.num_heads)
        parts.clear()
        return joined.to(torch.float32)

    def _read(self, name: str) -> torch.Tensor:
        place = self._places[name]
        out = torch.empty(place.entry.shape, dtype=DTYPES[place.entry.dtype])
        view = memoryview(out.view(-1).view(torch.uint8).numpy().data).cast("B")
        read_exactly(place.fd, view, place.entry.begin, place.path)
        return out

    def close(self) -> None:
        """Close the files."""
        for fd in self._descriptors:
            os.close(fd)
        self._descriptors.clear()

    def _find_tensors(self) -> dict[str, _Place]:
        """Every tensor of the file, or of the files that the index names; the index must tell it exactly."""
        if not (self.folder / _INDEX).exists():
            if not (self.folder / _SINGLE).exists():
                pickles = sorted(p.name for p in self.folder.glob("*.bin"))
                rule = f"{_SINGLE} and {_INDEX} are missing"
                remedy = "complete the download"
                if pickles:
                    rule += f"; {pickles[0]} is a pickle, which could run any code and is never opened"
                    remedy = "save the model with safetensors"
                raise BadCheckpoint(str(self.folder), rule, remedy)
            return self._open(_SINGLE)
        where = str(self.folder / _INDEX)
        weight_map = _read_json(self.folder, _INDEX).get("weight_map")
        if not isinstance(weight_map, dict) or not all(isinstance(f, str) for f in weight_map.values()):
            raise BadCheckpoint(where, "has no weight_map", "complete the download")
        places: dict[str, _Place] = {}
        for file in sorted(set(weight_map.values())):
            found = self._open(file)
            listed = {name for name, f in weight_map.items() if f == file}
            if listed != found.keys():
                name = min(listed ^ found.keys())
                rule = f"{file} and the index do not list the same tensors ({name})"
                raise BadCheckpoint(where, rule, "complete the download")
            places.update(found)
        return places

    def _open(self, name: str) -> dict[str, _Place]:
        fd = _open_hf(self.folder, name)
        self._descriptors.append(fd)
        path = self.folder / name
        return {tensor: _Place(path, fd, entry) for tensor, entry in read_header(fd, path).items()}

    def _renamed(self, places: dict[str, _Place]) -> dict[str, _Place]:
        """Without what is no weight, and with the prefix that hub files of GPT-2 lack."""
        prefix, skip = self.family.prefix, [re.compile(p) for p in self.family.skip]
        out = {}
        for name, place in places.items():
            if prefix and not name.startswith(prefix) and name != "lm_head.weight":
                name = prefix + name
            if any(p.fullmatch(name) for p in skip):
                continue
            if name in out:
                raise BadCheckpoint(str(self.folder), f"holds {name} with and without its prefix", "remove one")
            out[name] = place
        return out

    def _check(self) -> None:
        """The key set is exactly the model's, with its shapes; a tied head that is there is the embedding."""
        where = str(self.folder)
        expected: dict[str, tuple[int, ...]] = {}
        for spec, place in self.tensors():
            expected.update(zip(place.names, file_shapes(place, spec)))
        head = self.family.place("lm_head.weight").names[0]
        tied = self.specs["lm_head.weight"].tied_to is not None
        extra = sorted(self._places.keys() - expected.keys() - ({head} if tied else set()))
        missing = sorted(expected.keys() - self._places.keys())
        remedy = "take config.json and weights of one and the same model"
        if missing:
            raise BadCheckpoint(where, f"{_some(missing)} missing that its config.json asks for", remedy)
        if extra:
            raise BadCheckpoint(where, f"{_some(extra)} there that its config.json does not ask for", remedy)
        for name, shape in expected.items():
            entry = self._places[name].entry
            if entry.shape != shape:
                rule = f"tensor {name} has shape {list(entry.shape)}, its config.json says {list(shape)}"
                raise BadCheckpoint(where, rule, remedy)
            if entry.dtype not in DTYPES:
                raise BadCheckpoint(where, f"tensor {name} has type {entry.dtype}", f"must be {', '.join(DTYPES)}")
        if tied and head in self._places:
            embedding = self.family.place("embed_tokens.weight").names[0]
            if not torch.equal(self._read(head), self._read(embedding)):
                rule = f"tie_word_embeddings is true, and {head} differs from {embedding}"
                raise BadCheckpoint(where, rule, "set tie_word_embeddings to false in config.json, or remove the head")


def _some(names: list[str]) -> str:
    return f"tensor {names[0]} is" if len(names) == 1 else f"{len(names)} tensors ({', '.join(names[:3])} ...) are"


def _open_hf(folder: Path, name: str) -> int:
    """As `open_inside`, but a link may lead to another file of the folder or into the hub cache's own `blobs`."""
    path = folder / name
    if path.is_symlink() and re.fullmatch(r"[A-Za-z0-9_.-]+", name):
        real, here = path.resolve(), folder.resolve()
        if real.parent in (here, here.parent.parent / "blobs"):
            return open_inside(real.parent, real.name)
    return open_inside(folder, name)


def _read_json(folder: Path, name: str) -> dict[str, Any]:
    where = str(folder / name)
    if not folder.is_dir():
        raise BadCheckpoint(str(folder), "is no folder", "give the folder of a model")
    fd = _open_hf(folder, name)
    try:
        size = os.fstat(fd).st_size
        if size > _MAX_JSON:
            raise BadCheckpoint(where, f"has {size} bytes, too many for what it is", "complete the download")
        data = bytearray(size)
        read_exactly(fd, memoryview(data), 0, folder / name)
    finally:
        os.close(fd)
    try:
        content = json.loads(bytes(data))
    except (ValueError, RecursionError) as e:
        raise BadCheckpoint(where, f"is not JSON ({type(e).__name__})", "complete the download") from None
    if not isinstance(content, dict):
        raise BadCheckpoint(where, "must hold a JSON object", "complete the download")
    return content
