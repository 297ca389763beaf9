"""More readers: the lock, other tools' checkpoints and configurations, packed texts, conversations, metrics."""

from __future__ import annotations

import argparse
import io
import json
import pickle
import shutil
from pathlib import Path
from random import Random
from typing import Any

import torch
import yaml
from torch.distributed.checkpoint import filesystem, metadata

from megalite.core.base.errors import UserError, printable
from megalite.core.model.parameters import param_map
from megalite.extras.compat.dialect import DIALECT
from megalite.extras.convert.megatron.config import model_of
from megalite.extras.convert.megatron.convert import import_megatron
from megalite.extras.convert.megatron.names import place
from megalite.extras.view.metrics import read_metrics
from megalite.runtime.data.chats.chat import ChatEncoder
from megalite.runtime.data.chats.find_template import find_template
from megalite.runtime.data.documents import BadRecord, parse, read_chunks
from megalite.runtime.data.tokenizer import load_tokenizer
from megalite.runtime.options import cli
from megalite.runtime.places.lock import RunLock
from tests.soak import mutate
from tests.soak.reader import Reader
from tests.unit.extras.convert.legacy_megatron import ARGS, write_legacy

# --------------------------------------------------------------------------------------------------------------- lock


def _make_lock(folder: Path) -> None:
    (folder / "lock").write_text("")
    root = folder / "checkpoints"
    root.mkdir()
    lock = RunLock(root, "first")
    lock.acquire()
    owner = json.loads((root / "lock").read_text()) | {"pid": 2**22 + 1}
    (folder / "lock").write_text(json.dumps(owner))
    lock.release()
    root.rmdir()


def _read_lock(folder: Path) -> Any:
    root = folder / "out" / "checkpoints"
    root.mkdir(parents=True)
    shutil.copy(folder / "lock", root / "lock")
    lock = RunLock(root, "second")
    lock.acquire()
    lock.release()


# ---------------------------------------------------------------------------------------------------------- Megatron-LM

_SMALL = ARGS | {"num_layers": 4, "hidden_size": 8, "ffn_hidden_size": 8, "kv_channels": 2}


def _make_torch_dist(folder: Path) -> None:
    path = folder / "theirs"
    path.mkdir()
    tensors: dict[str, Any] = {}
    stored: dict[Any, Any] = {}
    with (path / "__0_0.distcp").open("wb") as f:
        for spec in param_map(model_of(_SMALL, "args")).values():
            key, data = place(spec), io.BytesIO()
            torch.save(torch.ones(spec.shape), data)
            zero = torch.Size([0] * len(spec.shape))
            chunk = metadata.ChunkStorageMetadata(zero, torch.Size(spec.shape))
            tensors[key] = metadata.TensorStorageMetadata(metadata.TensorProperties(), chunk.sizes, [chunk])
            at = filesystem._StorageInfo("__0_0.distcp", f.tell(), len(data.getvalue()))
            stored[metadata.MetadataIndex(key, zero)] = at
            f.write(data.getvalue())
    (path / ".metadata").write_bytes(pickle.dumps(metadata.Metadata(tensors, storage_data=stored)))
    torch.save({"args": argparse.Namespace(**_SMALL), "iteration": 3}, path / "common.pt")


def _make_legacy(folder: Path) -> None:
    write_legacy(folder / "theirs", ARGS)


def _read_megatron(folder: Path) -> Any:
    return import_megatron(folder / "theirs", folder / "out" / "ckpt").step


# ----------------------------------------------------------------------------------------- other tools' configurations


def _make_deepspeed(folder: Path) -> None:
    tree = {
        "train_batch_size": 8,
        "train_micro_batch_size_per_gpu": "auto",
        "gradient_accumulation_steps": 2,
        "gradient_clipping": 1.0,
        "bf16": {"enabled": False},
        "fp16": {"enabled": True, "loss_scale": 0, "initial_scale_power": 12, "hysteresis": 2, "min_loss_scale": 1},
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-4, "betas": [0.9, 0.95], "eps": 1e-8, "weight_decay": 0.1}},
        "scheduler": {"type": "WarmupDecayLR", "params": {"warmup_num_steps": 10, "total_num_steps": 100}},
        "zero_optimization": {"stage": 2, "overlap_comm": True, "offload_optimizer": {"device": "cpu"}},
        "tensor_parallel": {"autotp_size": 1},
    }
    (folder / "config.json").write_text(json.dumps(tree))


def _make_accelerate(folder: Path) -> None:
    (folder / "config.yaml").write_text(
        "compute_environment: LOCAL_MACHINE\ndebug: false\ndistributed_type: FSDP\nfsdp_config:\n"
        "  fsdp_sharding_strategy: FULL_SHARD\n  fsdp_offload_params: false\nmixed_precision: bf16\n"
        "num_processes: 4\nuse_cpu: false\ngradient_accumulation_steps: 2\n"
    )


def _yaml_of(rng: Random, data: bytes) -> bytes:
    changed = mutate.json_of(rng, json.dumps(yaml.safe_load(data)).encode())
    # Python reads some kilobytes of YAML in a second.
    return changed if len(changed) < 10_000 else mutate.bytes_of(rng, data)


def _read_deepspeed(folder: Path) -> Any:
    return cli.parse(
        ["--deepspeed-config", str(folder / "config.json"), "--mock-data"], world=4, dialect=DIALECT
    ).config


def _read_accelerate(folder: Path) -> Any:
    return cli.parse(
        ["--accelerate-config", str(folder / "config.yaml"), "--mock-data"], world=4, dialect=DIALECT
    ).config


# ---------------------------------------------------------------------------------------- texts, conversations, metrics


def _texts(path: Path) -> Any:
    total = 0
    for chunk in read_chunks(path, "text"):
        for text in parse(chunk, "text"):
            if isinstance(text, BadRecord):
                error = str(text.error(skippable=True))
                assert error == printable(error)
            else:
                total += len(text)
    return total


_RECORDS = [{"text": f"record {i}: the rain fell in torrents", "id": i} for i in range(300)]


def _make_zst(folder: Path) -> None:
    import zstandard

    data = "".join(json.dumps(r) + "\n" for r in _RECORDS).encode()
    cut = len(data) // 2
    (folder / "a.jsonl.zst").write_bytes(b"".join(zstandard.compress(part) for part in (data[:cut], data[cut:])))


def _make_parquet(folder: Path) -> None:
    import pyarrow
    import pyarrow.parquet

    pyarrow.parquet.write_table(
        pyarrow.Table.from_pylist(_RECORDS), folder / "a.parquet", row_group_size=100, write_page_checksum=True
    )


def _line_of(rng: Random, data: bytes) -> bytes:
    """Change one line as JSON."""
    lines = data.split(b"\n")
    at = rng.randrange(len(lines))
    lines[at] = mutate.json_of(rng, lines[at])
    return b"\n".join(lines)


def _make_chat(folder: Path) -> None:
    turns = [{"role": "user", "content": "Where?"}, {"role": "assistant", "content": "In the <|im_end|> woods."}]
    sharegpt = [{"from": "human", "value": "Who?"}, {"from": "gpt", "value": "The fox."}]
    call = {"id": "1", "type": "function", "function": {"name": "look", "arguments": {"at": "woods"}}}
    records: list[dict[str, Any]] = [
        {"messages": [{"role": "system", "content": "Be brief."}, *turns, *turns], "tools": [call]},
        {"conversations": sharegpt, "system": "Be kind."},
        {"prompt": "2 + 2?", "completion": "4"},
        {"prompt": turns[:1], "completion": turns[1:]},
        {"messages": [turns[0], {"role": "assistant", "content": [{"type": "text", "text": "There."}]}]},
    ]
    (folder / "chat.jsonl").write_text("".join(json.dumps(r) + "\n" for r in records))


def _read_chat(folder: Path) -> Any:
    tokenizer = load_tokenizer("bytes")
    encoder = ChatEncoder(tokenizer, find_template("chatml", tokenizer), None)
    sizes = []
    for chunk in read_chunks(folder / "chat.jsonl", "messages"):
        encoded = encoder(chunk)
        for bad in encoded.bad:
            error = str(bad.error(skippable=True))
            assert error == printable(error)
        if encoded.bad and not encoded.sizes:
            raise encoded.bad[0].error(skippable=True)
        sizes += encoded.sizes
    return sizes


def _make_metrics(folder: Path) -> None:
    usual = {"loss": 4.0, "grad_norm": 1.5, "lr": 1e-3, "consumed_tokens": 512, "step_time_s": 0.5}
    lines: list[dict[str, Any]] = [{"event": "start", "step": 0}]
    lines += [{"step": step, **usual} for step in range(1, 6)]
    lines += [{"event": "eval", "step": 4, "loss": 3.9}, {"event": "resume", "step": 3}, {"step": 4, **usual}]
    (folder / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))


def _read_metrics(folder: Path) -> Any:
    steps, events = read_metrics(folder)
    if len(steps) < 4:
        raise UserError("metrics.jsonl", f"has {len(steps)} steps left", "")
    return steps, events


MORE: dict[str, Reader] = {
    "lock": Reader(_make_lock, _read_lock, {"lock": mutate.json_of}),
    "megatron_legacy": Reader(_make_legacy, _read_megatron),
    "torch_dist": Reader(_make_torch_dist, _read_megatron),
    "deepspeed": Reader(_make_deepspeed, _read_deepspeed, {".json": mutate.json_of}),
    "accelerate": Reader(_make_accelerate, _read_accelerate, {".yaml": _yaml_of}),
    "zst": Reader(_make_zst, lambda folder: _texts(folder / "a.jsonl.zst")),
    "parquet": Reader(_make_parquet, lambda folder: _texts(folder / "a.parquet")),
    "chat": Reader(_make_chat, _read_chat, {".jsonl": _line_of}),
    "metrics": Reader(_make_metrics, _read_metrics, {".jsonl": _line_of}),
}
