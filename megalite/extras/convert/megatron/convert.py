"""Megatron-LM checkpoint to megalite checkpoint, tensor by tensor."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from megalite.core.base.dtypes import torch_name
from megalite.core.base.errors import UserError
from megalite.core.base.log import logger
from megalite.core.model.parameters import param_map
from megalite.core.options.model import ModelConfig
from megalite.core.sharding import ParamSpec
from megalite.extras.convert.megatron.archive import TensorRef
from megalite.extras.convert.megatron.config import arguments, model_of
from megalite.extras.convert.megatron.legacy import LegacySource
from megalite.extras.convert.megatron.names import place, unpack
from megalite.extras.convert.megatron.torch_dist import TorchDistSource
from megalite.extras.convert.stream import SHARD_BYTES, ImportedTensor, write_checkpoint
from megalite.runtime.checkpoint.manifest import Manifest
from megalite.runtime.checkpoint.safetensors_io import BadCheckpoint, open_inside

TRACKER = "latest_checkpointed_iteration.txt"
_EMBEDDING, _HEAD = "embedding.word_embeddings.weight", "output_layer.weight"
_MOMENTS = ("exp_avg", "exp_avg_sq")
Source = TorchDistSource | LegacySource


def import_megatron(
    folder: str | Path,
    out: str | Path,
    iteration: int | None = None,
    vocab_size: int | None = None,
    weights_only: bool = False,
    shard_bytes: int = SHARD_BYTES,
) -> Manifest:
    """Convert a checkpoint of Megatron-LM to one of megalite: fp32 weights, and the moments of Adam where they map.

    Args:
        folder: what `--save` named, or a folder `iter_*` or `release` in it.
        out: the checkpoint's folder; must be absent or empty.
        iteration: which one; default: the one that the tracker file names.
        vocab_size: keep this many rows of the embedding and the output layer; default: all, padding included.
        weights_only: leave out the optimizer's state, with its fp32 weights.
        shard_bytes: largest size of a file.

    Raises:
        UserError: the checkpoint is damaged, a pickle names what is not allowed, megalite does not support the model,
            or `out` is not empty or cannot be written. Nothing is left behind.
    """
    source = open_source(find_iteration(Path(folder), iteration))
    args = arguments(source.common, source.where)
    cfg = _with_vocab(model_of(args, source.where), vocab_size)
    places = {place(spec): spec for spec in param_map(cfg).values() if spec.tied_to is None}
    _check(source, places, cfg)
    states = () if weights_only else ("master", *_MOMENTS)
    roles = {role for role in states if source.shapes.get(role, {}).keys() >= places.keys()}
    for role in roles:
        _check_shapes(source, role, places)
    has_moments = roles.issuperset(_MOMENTS)
    if not has_moments:
        why = "--weights-only" if weights_only else "it has none that belong to single parameters"
        logger.warning(f"no moments imported from {source.where} ({why}): the optimizer will start at zero")

    def make(role: str, spec: ParamSpec) -> ImportedTensor:
        return ImportedTensor(role, spec.name, spec.shape, lambda: _read(source, role, spec, cfg, "master" in roles))

    imported = ("master", *_MOMENTS) if has_moments else ("master",)
    tensors = [make(role, spec) for role in imported for spec in places.values()]
    meta = {
        "step": _number(source.common, "iteration"),
        "consumed_samples": _number(args, "consumed_train_samples"),
        "scalars": _scalars(source) if has_moments else {},
        "config": {"model": dataclasses.asdict(cfg)},
        "hf": {"dtype": torch_name(source.read("weight", "decoder.final_layernorm.weight").dtype)},
    }
    return write_checkpoint(out, tensors, meta, shard_bytes)


def _with_vocab(cfg: ModelConfig, vocab_size: int | None) -> ModelConfig:
    if vocab_size is None:
        return cfg
    if not 2 <= vocab_size <= cfg.vocab:
        rule = f"must be from 2 to {cfg.vocab}, the rows of the checkpoint's embedding"
        raise UserError(f"--vocab-size {vocab_size}", rule, "use the size of the tokenizer")
    return dataclasses.replace(cfg, vocab_size=vocab_size)


def find_iteration(folder: Path, iteration: int | None) -> Path:
    """Return the folder of a checkpoint: `folder` itself, or the one of an iteration in it."""
    if not folder.is_dir():
        raise BadCheckpoint(str(folder), "is not a folder", "pass the folder of a Megatron-LM checkpoint")
    if _is_checkpoint(folder):
        return folder
    if iteration is None:
        try:
            fd = open_inside(folder, TRACKER)
        except BadCheckpoint:
            rule = f"holds no {TRACKER}, no .metadata and no mp_rank_* folders"
            raise BadCheckpoint(str(folder), rule, "pass the folder of a Megatron-LM checkpoint") from None
        with open(fd, "rb") as file:
            iteration_name = file.read(32).decode(errors="replace").strip()
        if not re.fullmatch(r"\d{1,12}|release", iteration_name):
            rule = f"holds {iteration_name!r}, neither a number nor release"
            raise BadCheckpoint(str(folder / TRACKER), rule, "pass --iteration N")
    else:
        iteration_name = str(iteration)
    path = folder / (iteration_name if iteration_name == "release" else f"iter_{int(iteration_name):07d}")
    if not _is_checkpoint(path):
        rule = "holds neither .metadata nor mp_rank_* folders"
        if (path / ".zmetadata").exists() or any(path.glob("*/.zarray")):
            rule = "is a zarr checkpoint, which is not supported"
        raise BadCheckpoint(str(path), rule, "pass another --iteration, or save it as torch_dist")
    return path


def _is_checkpoint(path: Path) -> bool:
    return (path / ".metadata").exists() or any(path.glob("mp_rank_*"))


def open_source(path: Path) -> Source:
    """Open a checkpoint of either format."""
    return TorchDistSource(path) if (path / ".metadata").exists() else LegacySource(path)


def _check(source: Source, places: Mapping[str, ParamSpec], cfg: ModelConfig) -> None:
    """Check that the checkpoint holds the tensors of the model, and no others."""
    shapes = source.shapes.get("weight", {})
    tied = {_HEAD} if cfg.tie_embeddings else set()
    if missing := [name for name in places if name not in shapes]:
        raise BadCheckpoint(source.where, f"has no {missing[0]}, which its arguments require")
    if extra := sorted(shapes.keys() - places.keys() - tied):
        rule = f"holds {extra[0]}, which the model of its arguments does not have"
        raise BadCheckpoint(source.where, rule, "megalite cannot train this model")
    _check_shapes(source, "weight", places)
    if tied & shapes.keys() and not torch.equal(source.read("weight", _HEAD), source.read("weight", _EMBEDDING)):
        logger.warning(f"{source.where}: {_HEAD} differs from {_EMBEDDING}, which it is tied to and which is kept")


def _check_shapes(source: Source, role: str, places: Mapping[str, ParamSpec]) -> None:
    """Check the shapes; the vocabulary may have more rows than the model keeps."""
    for name, spec in places.items():
        shape = source.shapes[role][name]
        rows = max(spec.shape[0], shape[0]) if spec.padded and shape else spec.shape[0]
        if shape != (rows, *spec.shape[1:]):
            rule = f"{role} {name} has shape {list(shape)}, its arguments imply {list(spec.shape)}"
            raise BadCheckpoint(source.where, rule)


def _read(source: Source, role: str, spec: ParamSpec, cfg: ModelConfig, has_master: bool) -> torch.Tensor:
    """Read a tensor of the new checkpoint, fp32."""
    name = place(spec)
    if role != "master" or not has_master:
        return unpack(name, source.read("weight" if role == "master" else role, name), spec, cfg).float()
    weight, master = source.read("weight", name), source.read("master", name)
    if not torch.equal(master.to(weight.dtype), weight):
        rule = f"the fp32 weights of its optimizer differ from its weights ({name})"
        raise BadCheckpoint(source.where, rule, "import with --weights-only")
    return unpack(name, master, spec, cfg).float()


def _number(values: dict[str, Any], name: str) -> int:
    """Return a count of the checkpoint; 0 if it has none."""
    value = values.get(name)
    return value if type(value) is int and value >= 0 else 0


def _scalars(source: Source) -> dict[str, float]:
    """Return the optimizer's scalars: the number of its updates and the loss scale."""
    states = _mapping(source.common.get("optimizer"))
    inner, scaler = _mapping(states.get("optimizer", states)), _mapping(states.get("grad_scaler"))
    state, groups = _mapping(inner.get("state")), inner.get("param_groups") or [{}]
    steps = [groups[0].get("step"), state.get("common_step"), _mapping(state.get(0)).get("step")]
    num_steps = next((n for n in map(_scalar, steps) if n is not None), _number(source.common, "iteration"))
    return {
        "num_steps": int(num_steps),
        "loss_scale": _scalar(scaler.get("scale")) or 1.0,
        "loss_scale_good_steps": _number(scaler, "growth_tracker"),
    }


def _mapping(value: Any) -> dict[Any, Any]:
    return value if isinstance(value, dict) else {}


def _scalar(value: Any) -> float | None:
    """Return a number, or the one of a tensor."""
    if isinstance(value, TensorRef) and value.span == 1:
        value = value.read().item()
    return float(value) if isinstance(value, (int, float)) else None
