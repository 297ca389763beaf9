"""A Hugging Face folder, checked as a whole before any tensor is read: names, shapes, types, index."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open

from megalite.core.base.dtypes import DTYPES, STORED, torch_name
from megalite.core.base.log import logger
from megalite.core.base.slices import Slice, box_index
from megalite.core.model.parameters import buffer_map, param_map
from megalite.core.options.model import ModelConfig
from megalite.core.parts.families.common import Family, Packing
from megalite.core.sharding import ParamSpec
from megalite.runtime.base.untrusted import BadFile, read_json
from megalite.runtime.checkpoint.hf.config import family_of, read_config, special_ids
from megalite.runtime.checkpoint.hf.packing import FileTensor, file_tensors
from megalite.runtime.checkpoint.hf.tensors import FolderTensor, PackedTensor, read_box, unpacked
from megalite.runtime.checkpoint.hf.text_part import text_config, text_tensors
from megalite.runtime.checkpoint.safetensors_io import BadCheckpoint, open_inside, parse_header

_INDEX, _SINGLE = "model.safetensors.index.json", "model.safetensors"
# Parsed, JSON takes up to twenty times the memory. The largest real index, of 91,000 tensors, has 9 MB.
_MAX_INDEX, _MAX_CONFIG = 32 << 20, 4 << 20
# Enough for 70,000 tensors in one file. The library takes 20 times the memory, and forever for very many dimensions.
_MAX_HEADER, _MAX_DIMS = 8 << 20, 8


class HFSource:
    """Check a model folder, and read slices of its tensors. No file stays open.

    Attributes:
        config: the model.
        special: ids of its special tokens.
        dtype: type of its weights, in the spelling of config.json.

    Raises:
        UserError: tensors missing, unexpected, or of the wrong shape or type; files that are not safetensors.
    """

    def __init__(self, folder: str | Path) -> None:
        self.folder = Path(folder)
        where = str(self.folder / "config.json")
        content = _read_json(self.folder, "config.json")
        raw = text_config(content, where)
        self.family: Family = family_of(raw, where)
        self.config: ModelConfig = read_config(raw, where)
        self.special: dict[str, Any] = special_ids(raw)
        quantized, found = content.get("quantization_config", raw.get("quantization_config")), self._find_tensors()
        method = quantized.get("quant_method") if isinstance(quantized, dict) else None
        if method not in (None, "mxfp4"):
            rule = "weights in this format are not read"
            raise BadCheckpoint(
                f"{where}: quantization_config {method}", rule, "convert them to bf16, or take a bf16 model"
            )
        found = unpacked(found) if method else found
        self._tensors = self._rename(found if raw is content else text_tensors(found, str(self.folder)))
        self._modules_named = self.config.mtp_num_layers
        self.config = replace(self.config, mtp_num_layers=self._count_modules(raw, where))
        self.specs: Mapping[str, ParamSpec] = {**param_map(self.config), **buffer_map(self.config)}
        self._check()
        apart = {name for buffer in buffer_map(self.config) for name in self._place(buffer).names}
        types = {STORED[t.dtype] for name, t in self._tensors.items() if name not in apart}
        self.dtype = torch_name(next((dtype for dtype in DTYPES.values() if types == {dtype}), torch.float32))

    def tensors(self) -> Iterator[tuple[ParamSpec, Packing]]:
        """Yield the tensors of megalite that the folder holds, without tied copies."""
        for spec in self.specs.values():
            if spec.tied_to is None:
                place = self._place(spec.name)
                # Rows of MXFP4 are those of megalite.
                packed = isinstance(self._tensors.get(place.names[0]), PackedTensor)
                yield spec, replace(place, transposed=False) if packed else place

    def parts(self, spec: ParamSpec, packing: Packing) -> Iterator[FileTensor]:
        """Yield the tensors of the folder that make up a tensor of megalite."""
        return file_tensors(packing, spec, self.config)

    def read(self, spec: ParamSpec, packing: Packing, offset: Sequence[int], out: torch.Tensor) -> None:
        """Fill `out` (any type, any device) with the elements of megalite's tensor from `offset` on.

        No others are read, but for those between alternating rows.
        """
        for part in self.parts(spec, packing):
            for there, box in part.overlaps(Slice(tuple(offset), tuple(out.shape))):
                target = out[box_index([b - o for b, o in zip(box.offset, offset)], box.shape)]
                target = target.view(box.shape[-len(there) :])
                if part.transposed:
                    target, there = target.mT, (*there[:-2], there[-1], there[-2])
                for row, rows in read_box(self._tensors[part.name], there):
                    target[row : row + len(rows)].copy_(rows)

    def full(self, spec: ParamSpec, packing: Packing, box: Slice | None = None) -> torch.Tensor:
        """Read a full tensor of megalite, or a box of it, fp32."""
        box = box or Slice((0,) * len(spec.shape), spec.shape)
        out = torch.empty(box.shape)
        self.read(spec, packing, box.offset, out)
        return out

    def warn_of_modules(self, number: int) -> None:
        """Log what is odd about modules that predict further tokens: config.json names some and there are none, or a
        copy of a shared tensor in the first `number` of them differs. These copies, some GB, are read in full.
        """
        if (named := self._modules_named) > self.config.mtp_num_layers:
            what = f"config.json names {named} modules that predict further tokens, and its files hold none"
            logger.warning(f"{self.folder}: {what}")
        for copy, of in self.family.copies_in(self.config.mtp_layers[:number]).items():
            if copy in self._tensors and not self._is_copy(copy, of):
                logger.warning(f"{self.folder}: {copy} differs from {of}, which it is a copy of and which is kept")

    def log_left_out(self, cfg: ModelConfig) -> None:
        """Log how many modules a run of model `cfg` leaves out."""
        if left_out := (held := self.config.mtp_num_layers) - cfg.mtp_num_layers:
            what = f"modules that predict further tokens left out: {left_out}"
            logger.info(f"{what} (--mtp-num-layers {held} trains all of {self.folder})")

    def _place(self, name: str) -> Packing:
        return self.family.place(name, self.config.num_layers)

    def _count_modules(self, raw: dict[str, Any], where: str) -> int:
        """Count the modules that predict further tokens: transformers writes their number, and not the modules."""
        apart, named = self.family.module.format(0), self.config.mtp_num_layers
        first = apart or f".layers.{self.config.num_layers}."
        if not any(first in name for name in self._tensors):
            return 0
        number = 1 if apart and "num_nextn_predict_layers" not in raw else named
        if number and not self.family.holds(number):
            rule = "megalite reads one module of this family: they would share a projection"
            raise BadCheckpoint(f"{where}: num_nextn_predict_layers {number}", rule, "convert another model")
        return number

    def _find_tensors(self) -> dict[str, FolderTensor]:
        """List the tensors of the file, or of the files of the index, which must list exactly these."""
        if not (self.folder / _INDEX).exists():
            if not (self.folder / _SINGLE).exists():
                pickles = sorted(p.name for p in self.folder.glob("*.bin"))
                rule = f"{_SINGLE} and {_INDEX} are missing"
                remedy = "complete the download"
                if pickles:
                    rule += f"; {pickles[0]} is a pickle, which could run arbitrary code and is never opened"
                    remedy = "save the model with safetensors"
                raise BadCheckpoint(str(self.folder), rule, remedy)
            return self._list(_SINGLE)
        where = str(self.folder / _INDEX)
        weight_map = _read_json(self.folder, _INDEX).get("weight_map")
        if not isinstance(weight_map, dict) or not all(isinstance(f, str) for f in weight_map.values()):
            raise BadCheckpoint(where, "has no weight_map", "complete the download")
        tensors: dict[str, FolderTensor] = {}
        for file in sorted(set(weight_map.values())):
            stored = self._list(file)
            listed = {name for name, f in weight_map.items() if f == file}
            if listed != stored.keys():
                name = min(listed ^ stored.keys())
                rule = f"{file} and the index do not list the same tensors ({name})"
                raise BadCheckpoint(where, rule, "complete the download")
            tensors.update(stored)
        return tensors

    def _list(self, name: str) -> dict[str, FolderTensor]:
        """List the tensors of a file, whose header the library checks."""
        path = resolve_inside(self.folder, name)
        start, header = _check_header(path)
        # The library checks the header, and that it fits the file.
        with _open(path) as file:
            slices = {tensor: file.get_slice(tensor) for tensor in file.keys()}  # noqa: SIM118 (not a dict)
            return {
                t: FolderTensor(s.get_dtype(), tuple(s.get_shape()), start + header[t]["data_offsets"][0], path)
                for t, s in slices.items()
            }

    def _rename(self, tensors: dict[str, FolderTensor]) -> dict[str, FolderTensor]:
        """Drop tensors that the model does not have, and add the prefix that hub files of GPT-2 lack."""
        prefix, skip = self.family.prefix, [re.compile(p) for p in self.family.skip]
        out = {}
        for name, tensor in tensors.items():
            if prefix and not name.startswith((prefix, "lm_head.", "score.")):
                name = prefix + name
            if any(p.fullmatch(name) for p in skip):
                continue
            if name in out:
                raise BadCheckpoint(str(self.folder), f"holds {name} with and without its prefix", "remove one")
            out[name] = tensor
        return out

    def _check(self) -> None:
        """Check names, shapes and types against the model; a head that is present must equal its tied embedding."""
        where = str(self.folder)
        expected: dict[str, tuple[int, ...]] = {}
        for spec, place in self.tensors():
            expected.update({part.name: part.shape for part in self.parts(spec, place)})
        copies = self.family.copies_in(self.config.mtp_layers)
        shapes = expected | {name: expected[self._original(of)] for name, of in copies.items()}
        tied = "lm_head.weight" in self.specs and self.specs["lm_head.weight"].tied_to
        head = {self._place("lm_head.weight").names[0]} if tied else set()
        extra = sorted(self._tensors.keys() - shapes.keys() - head)
        missing = sorted(expected.keys() - self._tensors.keys())
        remedy = "use the config.json and the weights of the same model"
        if missing:
            raise BadCheckpoint(where, f"{_some(missing)} missing, required by its config.json", remedy)
        if extra:
            raise BadCheckpoint(where, f"{_some(extra)} unexpected: its config.json does not have it", remedy)
        for name, tensor in self._tensors.items():
            shape = shapes.get(name, tensor.shape)
            if tensor.shape != shape:
                rule = f"tensor {name} has shape {list(tensor.shape)}, config.json implies {list(shape)}"
                raise BadCheckpoint(where, rule, remedy)
            if tensor.dtype not in STORED:
                raise BadCheckpoint(where, f"tensor {name} has type {tensor.dtype}", f"must be {', '.join(STORED)}")
        for name in head & self._tensors.keys():
            if not self._is_copy(name, "embed_tokens.weight"):
                rule = f"tie_word_embeddings is true, and {name} differs from {self._original('embed_tokens.weight')}"
                remedy = "set tie_word_embeddings to false in config.json, or remove the head"
                raise BadCheckpoint(where, rule, remedy)

    def _original(self, of: str) -> str:
        """Return the folder's name of a tensor, given by its name in megalite, or of what it is tied to."""
        return self._place(self.specs[of].tied_to or of).names[0]

    def _is_copy(self, copy: str, of: str) -> bool:
        """Whether a tensor is a copy of another, given by its name in megalite; both are read."""
        one, other = self._tensors[copy], self._tensors[self._original(of)]
        if (one.shape, one.dtype) != (other.shape, other.dtype):
            return False
        blocks = zip(*(read_box(tensor, [slice(0, n) for n in tensor.shape]) for tensor in (one, other)))
        return all(torch.equal(a, b) for (_, a), (_, b) in blocks)


def _some(names: list[str]) -> str:
    return f"tensor {names[0]} is" if len(names) == 1 else f"{len(names)} tensors ({', '.join(names[:3])} ...) are"


def _check_header(path: Path) -> tuple[int, dict[str, Any]]:
    """Refuse a header that would cost the library too much memory or time; it finds other mistakes itself.

    Returns:
        Where the tensors' bytes begin, and the entries of the header.
    """
    with path.open("rb") as f:
        size = f.read(8)
        length = int.from_bytes(size, "little")
        if _MAX_HEADER < length <= path.stat().st_size:
            rule = f"has a header of {length} bytes, more than the limit of {_MAX_HEADER}"
            raise BadCheckpoint(str(path), rule, "save the model as several files")
        header = parse_header(size + f.read(min(length, _MAX_HEADER))) or {}
    for name, entry in header.items():
        shape = entry.get("shape") if isinstance(entry, dict) else None
        if isinstance(shape, list) and len(shape) > _MAX_DIMS:
            rule = f"tensor {name:.100} has {len(shape)} dimensions, more than {_MAX_DIMS}"
            raise BadCheckpoint(str(path), rule, "use the weights of a language model")
    return 8 + length, header


@contextmanager
def _open(path: Path) -> Iterator[Any]:
    try:
        with safe_open(path, "pt") as file:
            yield file
    except (SafetensorError, OSError) as e:
        what = str(e).removeprefix("Error while deserializing header: ")
        raise BadCheckpoint(
            str(path), f"is not a complete safetensors file ({what:.200})", "complete the download"
        ) from None


def resolve_inside(folder: Path, name: str) -> Path:
    """Resolve a file of a folder; a link may lead to another file of it, or into the `blobs` of the hub cache."""
    path = folder / name
    if re.fullmatch(r"[A-Za-z0-9_.-]{1,250}", name) and path.is_symlink():
        real, here = path.resolve(), folder.resolve()
        if real.parent in (here, here.parent.parent / "blobs"):
            folder, name = real.parent, real.name
    # Refuses other links, other folders, and anything but a regular file.
    os.close(open_inside(folder, name))
    return folder / name


def _read_json(folder: Path, name: str) -> dict[str, Any]:
    where = str(folder / name)
    if not folder.is_dir():
        raise BadCheckpoint(str(folder), "is not a directory", "get a model with: hf download NAME --local-dir DIR")
    path = resolve_inside(folder, name)
    try:
        content = read_json(path, _MAX_INDEX if name == _INDEX else _MAX_CONFIG)
    except (OSError, BadFile) as e:
        rule = f"cannot be read ({e.strerror})" if isinstance(e, OSError) else str(e)
        raise BadCheckpoint(where, rule, "complete the download") from None
    if not isinstance(content, dict):
        raise BadCheckpoint(where, "must hold a JSON object", "complete the download")
    return content
