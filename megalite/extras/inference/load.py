"""Trained weights of a run or a Hugging Face folder: loaded in any layout, or as a full model in one process."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from megalite.core.base.errors import UserError, require
from megalite.core.batch import Documents, ForwardPass, MicroBatch
from megalite.core.build import build_stages, resolve_ops
from megalite.core.mesh.context import ParallelContext
from megalite.core.model.gpt import GPTStage
from megalite.core.model.parameters import buffer_map, param_map
from megalite.core.options.model import ModelConfig
from megalite.core.options.parallel import ParallelConfig
from megalite.core.parts.schedules.choose import schedule_of
from megalite.core.sharding import StateTensor
from megalite.core.sharding.parameter import ShardedParameter
from megalite.extras.saved_model import holds_tokenizer, recorded_tokenizer, resolve_checkpoint
from megalite.runtime.checkpoint.hf.start import hf_model_config, load_hf
from megalite.runtime.checkpoint.load import load_checkpoint, model_config
from megalite.runtime.checkpoint.manifest import read_manifest
from megalite.runtime.data.tokenizer import Tokenizer, load_tokenizer
from megalite.runtime.options.run import Config

_HF_WINDOW = 2048
"""Longest window for a Hugging Face folder, which does not record the training length."""


@dataclass
class Model:
    """A full model for inference.

    Attributes:
        cfg: shape of the model.
        stage: all its layers.
        tokenizer: tokenizer of its run, if known.
        step: number of optimizer steps of the training; None for a Hugging Face folder.
        chat_template: template of the conversations that it was trained on; None if there is none, or for a folder.
    """

    cfg: ModelConfig
    stage: GPTStage
    tokenizer: Tokenizer | None
    step: int | None
    chat_template: str | None = None

    @torch.no_grad()
    def logits(self, tokens_BS: torch.Tensor, starts_BS: torch.Tensor | None = None) -> torch.Tensor:
        """Compute logits [B, S, V] of token ids [B, S], and of where their documents start (see `Rows`)."""
        tokens_SB = tokens_BS.t().contiguous()
        documents = None if starts_BS is None else Documents(starts_BS.t().contiguous())
        batch = MicroBatch.of_samples(tokens_SB, documents=documents)
        out = self.stage(tokens_SB, batch, ForwardPass(0, 0, training=False))
        return out[..., : self.cfg.vocab].transpose(0, 1)

    @property
    def words(self) -> int:
        """Number of token ids in use: the vocabulary may be larger than the tokenizer's."""
        return min(self.cfg.vocab, self.tokenizer.vocab_size) if self.tokenizer else self.cfg.vocab


@dataclass(frozen=True)
class Weights:
    """Trained weights on disk: a checkpoint, or a Hugging Face folder.

    Attributes:
        path: path of the folder.
        cfg: shape of the model; for a Hugging Face folder, its length is that of the windows to evaluate.
        tokenizer: folder or file of its tokenizer, if known.
        tokenizer_sha256: SHA-256 of the tokenizer used in training; None if it was not recorded.
        step: number of optimizer steps of the training; None for a Hugging Face folder.
        options: options of the run by group; empty for a Hugging Face folder.
        chat_template: see `Model`.
    """

    path: Path
    cfg: ModelConfig
    tokenizer: str | None
    tokenizer_sha256: str | None
    step: int | None
    options: dict[str, Any]
    chat_template: str | None = None

    def load(self, stage: GPTStage, ctx: ParallelContext) -> None:
        """Fill this rank's shards of the parameters, of any data type and layout; every rank calls it."""
        states = [*map(_part_of, stage.parameters()), *stage.log.states.values()]
        if self.step is None:
            load_hf(self.path, self.cfg, states, ctx)
        else:
            saved = ModelConfig.from_dict(self.options["model"])
            load_checkpoint(self.path, states, ctx, left_out=_tensors(saved) - _tensors(self.cfg))

    def load_tokenizer(self) -> Tokenizer:
        """Load the tokenizer.

        Raises:
            UserError: it is unknown, is not the one used in training, or has ids outside the model's vocabulary.
        """
        if self.tokenizer is None:
            raise UserError(f"{self.path}", "records no tokenizer that still exists", "pass --tokenizer")
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
    """Find the weights at a path, without modules that predict further tokens.

    Args:
        path: run directory, checkpoint, or folder with config.json and safetensors.
        tokenizer: tokenizer folder or file; default: the run's, if it still exists, or the one in the folder.
    """
    if (path / "config.json").is_file():
        cfg = hf_model_config(path)
        _check_head(cfg, path)
        # Its length is the number of positions, which may be far more than a window needs.
        cfg = dataclasses.replace(cfg, seq_len=min(cfg.seq_len, _HF_WINDOW), mtp_num_layers=0)
        return Weights(path, cfg, tokenizer or (str(path) if holds_tokenizer(path) else None), None, None, {})
    checkpoint = resolve_checkpoint(path)
    manifest = read_manifest(checkpoint)
    meta = manifest.meta
    cfg = dataclasses.replace(model_config(meta, checkpoint), mtp_num_layers=0)
    _check_head(cfg, checkpoint)
    name, sha256 = tokenizer or recorded_tokenizer(meta), meta.get("tokenizer_sha256")
    return Weights(checkpoint, cfg, name, sha256, manifest.step, meta["config"], meta.get("chat_template"))


def load_model(path: Path, device: torch.device, tokenizer: str | None = None) -> Model:
    """Load the weights of a checkpoint or of a Hugging Face folder in fp32.

    Args:
        path, tokenizer: see `find_weights`.
        device: where to put the model.
    """
    ctx, weights = ParallelContext.single(device), find_weights(path, tokenizer)
    cfg = Config(model=weights.cfg, parallel=ParallelConfig(zero=0))
    placement = schedule_of(cfg, 1).placement
    (stage,) = build_stages(cfg, ctx, placement, torch.float32, resolve_ops(cfg, ctx)).values()
    weights.load(stage, ctx)
    name = weights.tokenizer
    tokenizer_ = load_tokenizer(name) if name else None
    return Model(weights.cfg, stage.eval(), tokenizer_, weights.step, weights.chat_template)


def _check_head(cfg: ModelConfig, path: Path) -> None:
    rule = "is a reward model, which predicts no token"
    require(cfg.head == "lm", str(path), rule, "export it, and read its rewards with transformers")


def _tensors(cfg: ModelConfig) -> set[str]:
    return {*param_map(cfg), *buffer_map(cfg)}


def _part_of(param: torch.nn.Parameter) -> StateTensor:
    """Describe this rank's shard of a parameter as a tensor that a checkpoint can be loaded into."""
    assert isinstance(param, ShardedParameter)
    spec, flat = param.shard.spec, param.data.view(-1)
    slices = param.shard.flat_slices(0, flat.numel())
    return StateTensor(spec.tied_to or spec.name, "master", spec.shape, flat, slices, is_owner=False)
