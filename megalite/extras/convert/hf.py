"""Hugging Face folder to megalite checkpoint and back."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import torch

from megalite.core.base.dtypes import DTYPES, stored_name, torch_name
from megalite.core.base.errors import UserError
from megalite.core.base.log import logger
from megalite.core.model.parameters import buffer_map, param_map
from megalite.core.options.model import ModelConfig
from megalite.core.parts.families import FAMILIES
from megalite.core.sharding import ParamSpec
from megalite.extras.convert.stream import (
    SHARD_BYTES,
    ImportedTensor,
    TensorGroup,
    new_folder,
    shard_bytes_of,
    split_shards,
    write_checkpoint,
)
from megalite.extras.convert.tokenizer import export_tokenizer
from megalite.extras.convert.upcycle import upcycled, upcycled_tensors
from megalite.extras.saved_model import recorded_tokenizer, resolve_checkpoint
from megalite.runtime.checkpoint.hf.config import write_config
from megalite.runtime.checkpoint.hf.packing import FileTensor, file_tensors, pieces
from megalite.runtime.checkpoint.hf.source import HFSource
from megalite.runtime.checkpoint.load import model_config, weights_of
from megalite.runtime.checkpoint.manifest import Manifest, read_manifest
from megalite.runtime.checkpoint.reader import ShardReader
from megalite.runtime.checkpoint.safetensors_io import BadCheckpoint, make_header, num_bytes
from megalite.runtime.data.chats.chat import turn_ends
from megalite.runtime.data.tokenizer import load_tokenizer
from megalite.runtime.places.disk import BLOCK, write_file


def import_hf(
    source: str | Path,
    out: str | Path,
    shard_bytes: int = SHARD_BYTES,
    num_experts: int | None = None,
    topk: int = 2,
    seed: int = 1234,
) -> Manifest:
    """Convert a Hugging Face folder to a checkpoint (step 0, fp32 weights, no moments).

    Args:
        source: folder with config.json and safetensors.
        out: the checkpoint's folder; must be absent or empty.
        shard_bytes: largest size of a file.
        num_experts: number of copies of each layer's MLP, as experts; None: the model as it is.
        topk, seed: experts of each token, and seed of their routers.

    Raises:
        UserError: see `HFSource` and `upcycled`; or `out` is not empty or cannot be written. Nothing is left behind.
    """
    hf = HFSource(source)
    hf.warn_of_modules(hf.config.mtp_num_layers)
    model = hf.config if num_experts is None else upcycled(hf.config, num_experts, topk)
    tensors = [
        ImportedTensor("master", spec.name, spec.shape, lambda s=spec, p=packing, b=box: hf.full(s, p, b), box)  # type: ignore[misc]
        for spec, packing in hf.tensors()
        for box in pieces(spec)
    ]
    if num_experts is not None:
        tensors = upcycled_tensors(hf, model, seed)
    meta = {
        "step": 0,
        "consumed_samples": 0,
        "scalars": {},
        "config": {"model": dataclasses.asdict(model)},
        "hf": {**hf.special, "dtype": hf.dtype},
    }
    return write_checkpoint(out, tensors, meta, shard_bytes)


def export_hf(
    checkpoint: str | Path,
    out: str | Path,
    dtype: str | None = None,
    tokenizer: str | Path | None = None,
    shard_bytes: int = SHARD_BYTES,
) -> dict[str, Any]:
    """Write a checkpoint's weights as a Hugging Face folder.

    Args:
        checkpoint: a checkpoint's folder, `latest`, a checkpoints folder or a run directory.
        out: folder to create; must be absent or empty.
        dtype: "fp32", "bf16" or "fp16"; default: the precision of the training, or of a checkpoint that was imported
            and not trained the type in which it came.
        tokenizer: folder or file; default: the one of the run, if it still exists.
        shard_bytes: largest size of a file.

    Returns:
        The config.json that was written.

    Raises:
        UserError: a damaged checkpoint, a model that its family's config.json cannot describe, a tokenizer that would
            give other ids, or a target that is not empty or cannot be written. Nothing is left behind.
    """
    path = resolve_checkpoint(checkpoint)
    reader = ShardReader(path, read_manifest(path))
    try:
        _verify_weights(reader)
        meta = reader.manifest.meta
        _check_names(reader, saved := model_config(meta, path))
        cfg = _exported_model(saved)
        weight_dtype = _export_dtype(meta, dtype)
        tokenizer = tokenizer or recorded_tokenizer(meta)
        with new_folder(out) as folder:
            special = dict(meta.get("hf", {}))
            if tokenizer:
                sha256, template = meta.get("tokenizer_sha256"), meta.get("chat_template")
                special.update(export_tokenizer(tokenizer, folder, cfg, sha256, template))
            else:
                logger.warning("unknown tokenizer: the export has none (pass --tokenizer)")
            if cfg.head == "score":
                special["pad_token_id"] = _own_pad(special, tokenizer)
            config = write_config(_without_mup(cfg), torch_name(weight_dtype), special)
            _write_weights(reader, cfg, weight_dtype, folder, shard_bytes)
            _write_json(folder / "config.json", config)
            ids = {k: v for k, v in config.items() if k.endswith("_token_id") and v is not None}
            if cfg.head == "lm":
                _write_json(folder / "generation_config.json", {"_from_model_config": True, **ids})
    finally:
        reader.close()
    return config


def _own_pad(special: dict[str, Any], tokenizer: str | Path | None) -> int | None:
    """Return the id that pads batches, unless documents end in it: transformers reads a reward before the padding."""
    pad, ends = special.get("pad_token_id"), special.get("eos_token_id")
    of_turns = turn_ends(load_tokenizer(tokenizer)).values() if tokenizer else ()
    if pad is None or pad in {*(ends if isinstance(ends, list) else [ends]), *of_turns}:
        what = "pad_token_id is null: transformers gives the rewards of one document at a time"
        logger.warning(f"{what} (set it to an id that no document ends in, for batches)")
        return None
    return int(pad)


def _exported_model(cfg: ModelConfig) -> ModelConfig:
    """Return the model as config.json names it: without modules that its family's files do not hold."""
    if cfg.mtp_layers and not (family := FAMILIES[cfg.arch]).holds(cfg.mtp_num_layers):
        what = f"modules that predict further tokens left out: {cfg.mtp_num_layers}"
        logger.warning(f"{what} (files of --arch {cfg.arch} do not hold {'as many' if family.module else 'them'})")
        cfg = dataclasses.replace(cfg, mtp_num_layers=0)
    return dataclasses.replace(cfg, max_position_embeddings=_exported_positions(cfg))


def _exported_positions(cfg: ModelConfig) -> int:
    """Return the length that config.json names."""
    if cfg.rope_scaling is not None and cfg.rope_scaling.rope_type == "yarn":
        # transformers 4 takes this quotient of lengths for YaRN's factor, whatever `factor` says.
        return round(cfg.rope_scaling.factor * cfg.rope_scaling.original_max_position_embeddings)
    # Rotary positions have no end: a model that was trained on longer sequences is used on them too.
    return max(cfg.positions, cfg.seq_len)


def _verify_weights(reader: ShardReader) -> None:
    """Check the blocks that hold weights, and the headers of their shards: moments are not used."""
    blocks: dict[int, set[int]] = {}
    for tensor in weights_of(reader.manifest, reader.path).values():
        for file, box in tensor.boxes:
            end = box.at + num_bytes(tensor.dtype, box.shape)
            for part in reader.stored(file, box.at, end):
                blocks.setdefault(file, set()).update(range(part.start // BLOCK, -(-part.stop // BLOCK)))
    buffer = bytearray(BLOCK)
    for number in sorted(blocks):
        for block in sorted(blocks[number]):
            reader.verify_block(number, block, buffer)
    reader.check_headers(blocks)


def _export_dtype(meta: dict[str, Any], option: str | None) -> torch.dtype:
    """Return the type of `--dtype`, else that of the imported weights, else the precision of the training."""
    if option is not None:
        if option not in DTYPES:
            raise UserError(f"--dtype {option}", f"must be one of {', '.join(DTYPES)}", "choose one of these")
        return DTYPES[option]
    imported = {torch_name(dtype): dtype for dtype in DTYPES.values()}.get(meta.get("hf", {}).get("dtype"))
    precision = meta.get("config", {}).get("train", {}).get("precision", "fp32")
    if imported is None and precision not in DTYPES:
        rule = f"is not one of {', '.join(DTYPES)}"
        raise UserError(f"--precision {precision} of the checkpoint", rule, "choose the export's type with --dtype")
    return imported or DTYPES[precision]


def _write_weights(reader: ShardReader, cfg: ModelConfig, dtype: torch.dtype, folder: Path, shard_bytes: int) -> None:
    """Write model.safetensors, or numbered files and their index."""
    family, tensors = FAMILIES[cfg.arch], weights_of(reader.manifest, reader.path)
    buffers = buffer_map(cfg)
    specs = _stored_specs(cfg)

    def group(spec: ParamSpec, part: FileTensor) -> TensorGroup:
        own = torch.float32 if spec.name in buffers else dtype

        def make() -> list[torch.Tensor]:
            full = torch.empty(part.shape, dtype=torch.float32 if spec.readout else own)
            for box, rows in part.views(full):
                reader.read(tensors[spec.name], box, rows)
            if spec.readout:
                full /= cfg.width_multiplier
            return [full.to(own)]

        return TensorGroup(((part.name, stored_name(own), part.shape),), make)

    parts = [
        (spec, part)
        for spec in specs.values()
        for part in file_tensors(family.place(spec.name, cfg.num_layers), spec, cfg)
    ]
    for copy, of in family.copies_in(cfg.mtp_layers).items():
        spec = specs[of if of in specs else "embed_tokens.weight"]
        (part,) = file_tensors(family.place(spec.name, cfg.num_layers), spec, cfg)
        parts.append((spec, dataclasses.replace(part, name=copy)))
    groups = [group(spec, part) for spec, part in parts]
    shards = split_shards(groups, shard_bytes)
    weight_map, total = {}, 0
    for number, shard in enumerate(shards, 1):
        name = "model.safetensors" if len(shards) == 1 else f"model-{number:05d}-of-{len(shards):05d}.safetensors"
        header, _ = make_header(t for g in shard for t in g.tensors)
        write_file(folder / name, shard_bytes_of(header, shard))
        weight_map.update({tensor: name for g in shard for tensor, _, _ in g.tensors})
        total += sum(g.num_bytes for g in shard)
    if len(shards) > 1:
        index = {"metadata": {"total_size": total}, "weight_map": dict(sorted(weight_map.items()))}
        _write_json(folder / "model.safetensors.index.json", index)


def _without_mup(cfg: ModelConfig) -> ModelConfig:
    """Return the model whose output layer holds muP's multiplier.

    Raises:
        UserError: the output layer is the embedding, which has no multiplier.
    """
    if cfg.width_multiplier != 1.0 and cfg.tie_embeddings:
        rule = "tied embeddings cannot hold the multiplier of muP's logits, and the format has none"
        raise UserError(f"--mup-base-width {cfg.mup_base_width}", rule, "train with --no-tie-embeddings")
    return dataclasses.replace(cfg, mup_base_width=None, mup_base_head_dim=None)


def _stored_specs(cfg: ModelConfig) -> dict[str, ParamSpec]:
    """Return the tensors that a checkpoint holds: each that is shared, once."""
    return {name: spec for name, spec in {**param_map(cfg), **buffer_map(cfg)}.items() if spec.tied_to is None}


def _check_names(reader: ShardReader, cfg: ModelConfig) -> None:
    specs, tensors = _stored_specs(cfg), weights_of(reader.manifest, reader.path)
    mismatches = sorted(specs.keys() ^ tensors.keys())
    mismatches += [n for n, s in specs.items() if n in tensors and tensors[n].shape != s.shape]
    if mismatches:
        raise BadCheckpoint(str(reader.path), f"tensor {mismatches[0]} does not match its own model config")


def _write_json(path: Path, content: dict[str, Any]) -> None:
    write_file(path, [json.dumps(content, indent=2, sort_keys=True).encode() + b"\n"])
