"""The readers of files that may come from a stranger: a valid set of files for each, and how it is read."""

from __future__ import annotations

import base64
import contextlib
import dataclasses
import gzip
import hashlib
import io
import json
import struct
from pathlib import Path
from random import Random
from typing import Any

import numpy as np
import torch

from megalite.core.base.errors import printable
from megalite.core.base.slices import Slice
from megalite.core.model.parameters import param_map
from megalite.extras.convert.hf import export_hf
from megalite.extras.convert.stream import ImportedTensor, write_checkpoint
from megalite.extras.launch.hosts import check_equal_slots, filter_hosts, parse_hostfile
from megalite.extras.prepare.token_writer import IndexedDatasetWriter
from megalite.extras.prepare.train_tokenizer import train_tokenizer
from megalite.extras.view.checkpoint import describe
from megalite.runtime.checkpoint.hf.source import HFSource
from megalite.runtime.checkpoint.load import model_config
from megalite.runtime.checkpoint.manifest import commit_text, read_manifest
from megalite.runtime.checkpoint.reader import ShardReader
from megalite.runtime.data.build import build_datasets, read_sidecar
from megalite.runtime.data.documents import BadRecord, expand_inputs, parse, read_chunks
from megalite.runtime.data.tokenizer import load_tokenizer
from megalite.runtime.data.tokens import IndexedDataset, token_dtype
from megalite.runtime.options import cli
from megalite.runtime.options.run import Config
from tests.soak import mutate
from tests.soak.more_readers import MORE
from tests.soak.reader import Reader

TEXT = "It was a dark and stormy night; the rain fell in torrents, 12 times 34, and the loss did not.\n"
_MODEL = {"num_layers": 2, "hidden_size": 16, "num_heads": 2, "vocab_size": 64, "seq_len": 16}


# ------------------------------------------------------------------------------------------------------- token files


def _make_tokens(folder: Path) -> None:
    with IndexedDatasetWriter(folder / "data", token_dtype(64)) as writer:
        ids = np.arange(400) % 64
        writer.add_documents(ids, [100, 0, 37, 63, 200])
        writer.finalize({"tokenizer_kind": "bytes", "tokenizer_sha256": "0" * 64, "vocab_size": 64})


def _read_tokens(folder: Path) -> Any:
    prefix = folder / "data"
    data = IndexedDataset(prefix)
    documents = [data.document(i).sum() for i in range(min(data.num_documents, 1000))]
    read_sidecar(prefix)
    built = build_datasets([str(prefix)], split="90,10,0", seq_len=16, seed=1, vocab_size=64, evaluate=False)
    return documents, built.train.content_hash(), built.train.sample(0)


# ------------------------------------------------------------------------------------------------------- checkpoints


def _config() -> Config:
    return cli.parse([f"--{k.replace('_', '-')}={v}" for k, v in _MODEL.items()] + ["--mock-data"]).config


def _make_checkpoint(folder: Path) -> None:
    cfg = _config()
    tensors = []
    for kind in ("master", "exp_avg", "exp_avg_sq"):
        for spec in param_map(cfg.model).values():
            if spec.tied_to is None:
                make = lambda s=spec: torch.arange(s.numel, dtype=torch.float32).view(s.shape)  # noqa: E731
                tensors.append(ImportedTensor(kind, spec.name, spec.shape, make))
    meta = {
        "config": dataclasses.asdict(cfg),
        "data_hash": "0" * 64,
        "tokenizer_sha256": None,
        "step": 4,
        "loss_history": [4.1, 4.0],
        "consumed_samples": 32,
        "skipped_steps": 0,
        "scalars": {"num_steps": 4},
        "hf": {"bos_token_id": 1, "eos_token_id": 2, "dtype": "float32"},
    }
    write_checkpoint(folder / "checkpoint", tensors, json.loads(json.dumps(meta)), shard_bytes=20_000)


def _read_checkpoint(folder: Path) -> Any:
    path = folder / "checkpoint"
    for line in describe(path, tensors=True, verify=True):
        printable(line)
    manifest = read_manifest(path)
    reader = ShardReader(path, manifest)
    digest = hashlib.sha256()
    try:
        reader.verify()
        cfg = model_config(manifest.meta, path)
        for tensors in manifest.tensors.values():
            for name, entry in sorted(tensors.items()):
                out = torch.empty(entry.shape)
                reader.read(entry, Slice((0,) * len(entry.shape), entry.shape), out)
                digest.update(name.encode() + out.numpy().tobytes())
    finally:
        reader.close()
    export_hf(path, folder / "out" / "export")
    return manifest.step, manifest.meta, cfg, digest.hexdigest()


def _signed(folder: dict[str, bytes]) -> None:
    """Whoever changes a manifest can also write its COMMIT."""
    folder["checkpoint/COMMIT"] = commit_text(folder["checkpoint/manifest.json"])


def _safetensors(rng: Random, data: bytes) -> bytes:
    """The header changed as JSON, its length corrected."""
    (length,) = struct.unpack_from("<Q", data)
    header = mutate.json_of(rng, data[8 : 8 + length])
    return struct.pack("<Q", len(header)) + header + data[8 + length :]


# ------------------------------------------------------------------------------------------------ Hugging Face folders


def _make_hf(folder: Path) -> None:
    with contextlib.redirect_stderr(io.StringIO()):
        _make_checkpoint(folder)
        export_hf(folder / "checkpoint", folder / "model", shard_bytes=10_000)
    for path in (folder / "checkpoint").iterdir():
        path.unlink()
    (folder / "checkpoint").rmdir()


def _read_hf(folder: Path) -> Any:
    source = HFSource(folder / "model")
    return [source.full(spec, where).sum() for spec, where in source.tensors()], source.config, source.special


# --------------------------------------------------------------------------------------------------------- tokenizers


def _make_tokenizer_json(folder: Path) -> None:
    vocab = {c: i for i, c in enumerate(sorted(set(TEXT) | set("Ġ▁")))}
    vocab |= {
        "th": len(vocab),
        "he": len(vocab) + 1,
        "the": len(vocab) + 2,
        "<s>": len(vocab) + 3,
        "</s>": len(vocab) + 4,
    }
    special = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False, "special": True}
    added = [{"id": vocab[t], "content": t, **special} for t in ("<s>", "</s>")]
    content = {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": added,
        "normalizer": {"type": "Sequence", "normalizers": [{"type": "NFC"}, {"type": "Lowercase"}]},
        "pre_tokenizer": {
            "type": "Split",
            "pattern": {"Regex": "\\s+|[a-z]+"},
            "behavior": "Isolated",
            "invert": False,
        },
        "post_processor": None,
        "decoder": {"type": "Fuse"},
        "model": {"type": "BPE", "vocab": vocab, "merges": [["t", "h"], ["h", "e"], ["th", "e"]], "unk_token": "<s>"},
    }
    (folder / "tokenizer.json").write_text(json.dumps(content))
    tokens = {"bos_token": "<s>", "eos_token": {"content": "</s>"}, "tokenizer_class": "PreTrainedTokenizerFast"}
    (folder / "tokenizer_config.json").write_text(json.dumps(tokens))


def _make_sentencepiece(folder: Path) -> None:
    text = folder / "text.txt"
    text.write_text(TEXT * 50)
    train_tokenizer([str(text)], 300, folder)
    for path in folder.iterdir():
        if path.suffix != ".model":
            path.unlink()


def _make_tiktoken(folder: Path) -> None:
    tokens = [bytes([i]) for i in range(256)] + [b"th", b"the"]
    lines = [base64.b64encode(token).decode() + f" {rank}\n" for rank, token in enumerate(tokens)]
    (folder / "own.tiktoken").write_text("".join(lines))
    extra = {"pattern": r"\w+|\s+|[^\w\s]+", "special_tokens": {"<end>": 258}, "eos": "<end>"}
    (folder / "own.tiktoken.json").write_text(json.dumps(extra))


def _read_tokenizer(folder: Path) -> Any:
    tokenizer = load_tokenizer(folder)
    ids = tokenizer.encode(TEXT)
    return tokenizer.vocab_size, tokenizer.eos_id, tokenizer.decode(ids[:100])


# ------------------------------------------------------------------------------------- hosts, options, training text


def _make_hostfile(folder: Path) -> None:
    (folder / "hostfile").write_text("# hosts\nnode1 slots=8\nnode2:8  # spare\n\nnode-3.rack slots=8\n")


def _read_hostfile(folder: Path) -> Any:
    hosts = parse_hostfile(folder / "hostfile")
    check_equal_slots(filter_hosts(hosts, hosts[0].name, None))
    return hosts


def _make_yaml(folder: Path) -> None:
    (folder / "recipe.yaml").write_text(cli.to_yaml(_config()))


def _read_yaml(folder: Path) -> Any:
    config = cli.parse(["--config", str(folder / "recipe.yaml")]).config
    again = folder / "out" / "again.yaml"
    again.parent.mkdir()
    again.write_text(cli.to_yaml(config))
    assert cli.parse(["--config", str(again)]).config == config, "--print-config does not read back"
    return config


def _make_jsonl(folder: Path) -> None:
    lines = "".join(json.dumps({"text": TEXT + str(i), "id": i}) + "\n" for i in range(200))
    (folder / "text.jsonl").write_text(lines)
    (folder / "packed.jsonl.gz").write_bytes(gzip.compress(lines.encode(), mtime=0))


def _read_jsonl(folder: Path) -> Any:
    good, bad = 0, []
    for path in expand_inputs([str(folder / "text.jsonl"), str(folder / "packed.jsonl.gz")]):
        for chunk in read_chunks(path, "text"):
            for text in parse(chunk, "text"):
                if isinstance(text, BadRecord):
                    bad.append(str(text.error(skippable=True)))
                else:
                    good += len(text)
    assert all(line == printable(line) for line in bad), bad
    return good


def _gzipped(rng: Random, data: bytes) -> bytes:
    return gzip.compress(mutate.bytes_of(rng, gzip.decompress(data)), mtime=0)


READERS: dict[str, Reader] = {
    "tokens": Reader(_make_tokens, _read_tokens, {".json": mutate.json_of}),
    "checkpoint": Reader(_make_checkpoint, _read_checkpoint, exact=True),
    "manifest": Reader(_make_checkpoint, _read_checkpoint, {"manifest.json": mutate.json_of}),
    "hf": Reader(_make_hf, _read_hf, {".json": mutate.json_of, ".safetensors": _safetensors}),
    "tokenizer_json": Reader(_make_tokenizer_json, _read_tokenizer, {".json": mutate.json_of}),
    "sentencepiece": Reader(_make_sentencepiece, _read_tokenizer),
    "tiktoken": Reader(_make_tiktoken, _read_tokenizer, {".json": mutate.json_of}),
    "hostfile": Reader(_make_hostfile, _read_hostfile),
    "yaml": Reader(_make_yaml, _read_yaml),
    "jsonl": Reader(_make_jsonl, _read_jsonl, {".gz": _gzipped}),
    **MORE,
}


def sign(reader: str, files: dict[str, bytes]) -> None:
    """Correct what proves a file's origin, where its writer could."""
    if reader == "manifest":
        _signed(files)
