"""Inference in one process with a model trained in any layout: text generation and perplexity."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

from megalite import ops as kernels
from megalite.checkpoint.hf.start import hf_model_config, load_hf
from megalite.checkpoint.load import load_checkpoint, model_config, resolve_checkpoint
from megalite.checkpoint.manifest import read_manifest
from megalite.config.model import ModelConfig
from megalite.data import IndexedDataset, LossMask, PackedDataset, Rows
from megalite.data.prepare.documents import BadRecord, parse, read_chunks
from megalite.data.rows import IGNORE
from megalite.data.tokenizer import Tokenizer, load_tokenizer
from megalite.data.tokenizer_files import holds_tokenizer, of_run
from megalite.dist.context import ParallelContext
from megalite.dist.seeding import RngStreams, derive
from megalite.errors import UserError, require
from megalite.model.gpt import GPTStage
from megalite.model.layers import Layers
from megalite.model.parameters import param_map
from megalite.parameter import ShardedParameter
from megalite.pipeline.executor import MicroBatch, Pass
from megalite.sharding import Layout, StateTensor
from megalite.tensor_parallel.linear import WgradQueue

_HF_WINDOW = 2048
"""Longest window for a Hugging Face folder, which does not record the length that it was trained with."""


@dataclass
class Model:
    """A whole model for inference.

    Attributes:
        cfg: shape of the model.
        stage: all its layers.
        tokenizer: the tokenizer of its run, if known.
        step: optimizer steps it was trained for; None for a Hugging Face folder.
    """

    cfg: ModelConfig
    stage: GPTStage
    tokenizer: Tokenizer | None
    step: int | None

    @torch.no_grad()
    def logits(self, tokens_BS: torch.Tensor, starts_BS: torch.Tensor | None = None) -> torch.Tensor:
        """Compute logits [B, S, V] of token ids [B, S], and of where their documents start (see `Rows`)."""
        tokens_SB = tokens_BS.t().contiguous()
        starts_SB = None if starts_BS is None else starts_BS.t().contiguous()
        given = MicroBatch(tokens_SB, targets_SB=None, starts_SB=starts_SB)
        out = self.stage(tokens_SB, given, Pass(0, 0, 0, training=False))
        return out[..., : self.cfg.vocab].transpose(0, 1)

    @property
    def words(self) -> int:
        """Number of token ids in use: the vocabulary may be larger than the tokenizer's."""
        return min(self.cfg.vocab, self.tokenizer.vocab_size) if self.tokenizer else self.cfg.vocab


@dataclass(frozen=True)
class Weights:
    """Trained weights on disk: a checkpoint, or a Hugging Face folder.

    Attributes:
        path: the folder.
        cfg: shape of the model; of a Hugging Face folder, with a length for windows of text.
        tokenizer: folder or file of its tokenizer, if known.
        tokenizer_sha256: that of the training's tokenizer; None where nothing recorded it.
        step: optimizer steps of the training; None for a Hugging Face folder.
        options: the options of the run by group; empty for a Hugging Face folder.
    """

    path: Path
    cfg: ModelConfig
    tokenizer: str | None
    tokenizer_sha256: str | None
    step: int | None
    options: dict[str, Any]

    def load(self, parameters: Iterable[torch.nn.Parameter], ctx: ParallelContext) -> None:
        """Fill this rank's parts of the parameters, of any type and layout; every rank calls it."""
        states = [_part_of(p) for p in parameters]
        if self.step is None:
            load_hf(self.path, self.cfg, states, ctx)
        else:
            load_checkpoint(self.path, states, ctx)

    def load_tokenizer(self) -> Tokenizer:
        """Load the tokenizer.

        Raises:
            UserError: it is unknown, not that of the training, or has ids outside the model's vocabulary.
        """
        if self.tokenizer is None:
            raise UserError(f"{self.path}", "its run recorded no tokenizer that still exists", "pass --tokenizer")
        tokenizer = load_tokenizer(self.tokenizer)
        what, remedy = f"tokenizer {tokenizer.path}", "use the tokenizer that the model was trained with"
        if self.tokenizer_sha256 not in (None, tokenizer.sha256):
            rule = f"the model was trained with the one of SHA-256 {self.tokenizer_sha256}"
            raise UserError(f"{what} of SHA-256 {tokenizer.sha256}", rule, remedy)
        most, vocab = tokenizer.vocab_size - 1, self.cfg.vocab
        rule = f"must be within the model's vocabulary of {vocab}"
        require(most < vocab, f"{what} with ids up to {most}", rule, remedy)
        return tokenizer


def find_weights(path: Path, tokenizer: str | None = None) -> Weights:
    """Find the weights that a path means.

    Args:
        path: run directory, checkpoint, or folder with config.json and safetensors.
        tokenizer: tokenizer folder or file; default: that of the run, if it still exists, or the one in the folder.
    """
    if (path / "config.json").is_file():
        cfg = hf_model_config(path)
        # Its length is the number of positions, which may be far beyond what a window of text needs.
        cfg = dataclasses.replace(cfg, seq_len=min(cfg.seq_len, _HF_WINDOW))
        return Weights(path, cfg, tokenizer or (str(path) if holds_tokenizer(path) else None), None, None, {})
    checkpoint = resolve_checkpoint(path)
    manifest = read_manifest(checkpoint)
    meta = manifest.meta
    cfg = model_config(meta, checkpoint)
    name, sha256 = tokenizer or of_run(meta), meta.get("tokenizer_sha256")
    return Weights(checkpoint, cfg, name, sha256, manifest.step, meta["config"])


def load_model(path: Path, device: torch.device, tokenizer: str | None = None) -> Model:
    """Load the weights of a checkpoint or of a Hugging Face folder in fp32.

    Args:
        path, tokenizer: see `find_weights`.
        device: where to put the model.
    """
    ctx, weights = ParallelContext.single(device), find_weights(path, tokenizer)
    stage = _empty(weights.cfg, device, ctx)
    weights.load(stage.parameters(), ctx)
    name = weights.tokenizer
    return Model(weights.cfg, stage.eval(), load_tokenizer(name) if name else None, weights.step)


def _empty(cfg: ModelConfig, device: torch.device, ctx: ParallelContext) -> GPTStage:
    """Build a whole model whose weights are to be loaded."""
    layers = Layers(
        cfg=cfg,
        specs=param_map(cfg),
        tp=ctx.tp,
        sequence_parallel=False,
        dtype=torch.float32,
        device=device,
        layout=Layout(),
        ops=kernels.resolve(None, device, torch.float32),
        rng=RngStreams(),
        queue=WgradQueue(),
    )
    return GPTStage(layers, range(cfg.num_layers), first=True, last=True)


def _part_of(param: torch.nn.Parameter) -> StateTensor:
    """Describe this rank's part of a parameter as a tensor that a checkpoint can be loaded into."""
    assert isinstance(param, ShardedParameter)
    spec, flat = param.shard.spec, param.data.view(-1)
    slices = param.shard.flat_slices(0, flat.numel())
    return StateTensor(spec.tied_to or spec.name, "master", spec.shape, flat, slices, primary=False)


@torch.no_grad()
def generate(
    model: Model,
    prompt: list[int],
    max_new_tokens: int,
    temperature: float = 0.8,
    top_k: int = 50,
    seed: int = 0,
    top_p: float = 1.0,
    stop_id: int | None = None,
) -> list[int]:
    """Continue a prompt.

    Args:
        model: from `load_model`.
        prompt: token ids, at least one.
        max_new_tokens: maximum number of tokens to add.
        temperature: 0 always takes the most likely token.
        top_k: sample among the k most likely tokens; 0 = all.
        seed: same seed, same text.
        top_p: sample among the most likely tokens that together have this probability (nucleus sampling, Holtzman et
            al. 2020); after top_k.
        stop_id: token that ends the text; not returned.

    Returns:
        The new token ids.
    """
    device = next(model.stage.parameters()).device
    tokens = torch.tensor([prompt], device=device)
    generator = torch.Generator(device).manual_seed(derive(seed, "generate") >> 65)
    for _ in range(max_new_tokens):
        # The window slides once the text is longer than the model's positions; every token is recomputed.
        window = tokens[:, -model.cfg.positions :]
        logits = model.logits(window)[0, -1, : model.words].float()
        new = choose_token(logits, temperature, top_k, top_p, generator).view(1, 1)
        if stop_id is not None and int(new) == stop_id:
            break
        tokens = torch.cat((tokens, new), dim=1)
    return tokens[0, len(prompt) :].tolist()


def choose_token(
    logits_V: torch.Tensor, temperature: float, top_k: int, top_p: float, generator: torch.Generator
) -> torch.Tensor:
    """Choose the next token, 0-dim, from fp32 logits, which are overwritten. For the arguments see `generate`."""
    if temperature == 0:
        return logits_V.argmax()
    if 0 < top_k < logits_V.numel():
        logits_V[logits_V < logits_V.topk(top_k).values[-1]] = -math.inf
    probabilities, ids = (logits_V / temperature).softmax(0).sort(descending=True, stable=True)
    # The one that reaches top_p is kept.
    probabilities[probabilities.cumsum(0) - probabilities >= top_p] = 0.0
    return ids[torch.multinomial(probabilities, 1, generator=generator)][0]


@torch.no_grad()
def mean_loss(model: Model, ids: np.ndarray, batch: int = 8) -> tuple[float, int]:
    """Compute the mean next-token cross-entropy over a stream of ids, in windows of the training length.

    Windows do not overlap: each token after the first is predicted once, from its own window.

    Returns:
        (mean loss, number of predicted tokens)
    """
    device, seq = next(model.stage.parameters()).device, model.cfg.seq_len
    if len(ids) < 2:
        raise UserError(f"{len(ids)} tokens", "an evaluation predicts each token from those before it", "use more text")
    if int(ids.max()) >= model.cfg.vocab:
        rule = f"must be below the model's vocabulary of {model.cfg.vocab}"
        raise UserError(f"token id {int(ids.max())}", rule, "use the tokenizer that the model was trained with")
    total, count = 0.0, len(ids) - 1
    whole = count // seq
    windows = [ids[i * seq : i * seq + seq + 1] for i in range(whole)]
    groups = [np.stack(windows[i : i + batch]) for i in range(0, whole, batch)]
    if count > whole * seq:
        groups.append(ids[None, whole * seq :])
    for group in groups:
        tokens = torch.from_numpy(group.astype(np.int64)).to(device)
        logits = model.logits(tokens[:, :-1]).float()
        loss = torch.nn.functional.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten(), reduction="sum")
        total += loss.item()
    return total / count, count


@torch.no_grad()
def chat_loss(model: Model, prefix: str, limit: int, batch: int = 8) -> tuple[tuple[float, int], tuple[float, int]]:
    """Compute the mean cross-entropy over the tokens of conversations, each seen alone, and over those of answers.

    Conversations of more than the training length are cut, as in training.

    Args:
        prefix: data with a `PREFIX.mask.bin`.
        limit: stop after so many tokens.

    Returns:
        (mean loss, number of predicted tokens) of all tokens, and of the answers.
    """
    device, indexed = next(model.stage.parameters()).device, IndexedDataset(prefix)
    answers, size = LossMask(indexed, "answers"), model.cfg.seq_len
    everything = LossMask(indexed, "all")
    data = PackedDataset(indexed, size, everything, shuffle=False, vocab_size=model.cfg.vocab, split="all")
    sums, counts = np.zeros(2), np.zeros(2, np.int64)
    for first in range(0, len(data), batch):
        packs = range(first, min(first + batch, len(data)))
        rows = Rows.stack([data.sample(i) for i in packs])
        marked = [np.concatenate([answers.of(d)[1 : data.places[d] + 1] for d in data.documents_at(i)]) for i in packs]
        of_answers = np.stack([np.pad(marks, (0, size - len(marks))) for marks in marked])
        tokens, starts, targets = (torch.from_numpy(x).to(device) for x in (rows.inputs, rows.starts, rows.targets))
        logits = model.logits(tokens, starts).float().flatten(0, 1)
        loss = torch.nn.functional.cross_entropy(logits, targets.flatten(), ignore_index=IGNORE, reduction="none")
        losses = loss.cpu().double().numpy().reshape(rows.targets.shape)
        for i, counted in enumerate((rows.targets >= 0, of_answers)):
            sums[i] += losses[counted].sum()
            counts[i] += counted.sum()
        if counts[0] >= limit:
            break
    (whole, part), (all_tokens, marked_tokens) = (sums / np.maximum(counts, 1)).tolist(), counts.tolist()
    return (whole, all_tokens), (part, marked_tokens)


def encode_text(tokenizer: Tokenizer, paths: Sequence[Path], key: str, limit: int) -> tuple[np.ndarray, int]:
    """Encode the documents of text files, an end-of-text id between them, up to `limit` ids.

    Returns:
        (ids [at most limit], bytes of UTF-8 text that they encode)
    """
    ids: list[int] = []
    num_bytes = 0
    for text in (text for path in paths for chunk in read_chunks(path, key) for text in parse(chunk, key)):
        if isinstance(text, BadRecord):
            raise text.error(skippable=False)
        if ids and tokenizer.eos_id is not None:
            ids.append(tokenizer.eos_id)
        document = tokenizer.encode(text)
        cut = document[: max(limit - len(ids), 0)]
        num_bytes += len((text if len(cut) == len(document) else tokenizer.decode(cut)).encode())
        ids += cut
        if len(ids) >= limit:
            break
    return np.array(ids[:limit], dtype=np.int64), num_bytes


def tokens_of(prefix: str, limit: int) -> np.ndarray:
    """Read the first `limit` tokens of a data set, documents concatenated."""
    data = IndexedDataset(prefix)
    return data.tokens(0, min(limit, data.num_tokens)).astype(np.int64)
