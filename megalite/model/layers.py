"""What every block is made of: how parameters are made from their declarations, norms, dropout, rotary tables."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import nn
from torch.nn import functional as F

from megalite.config.model import ModelConfig
from megalite.dist.context import Axis
from megalite.dist.seeding import RngStreams
from megalite.ops import Ops
from megalite.sharding import ParamSpec, Shard, ShardedParameter
from megalite.tensor_parallel.linear import ColumnParallelLinear, RowParallelLinear, WgradQueue

# Where a dropout mask is drawn: (step, data-parallel rank, micro-batch).
Position = tuple[int, int, int]


@dataclass(frozen=True)
class Maker:
    """Makes the modules of one stage on this rank out of the parameter table.

    Args:
        cfg: the model.
        specs: its parameter table.
        tp: tensor-parallel axis.
        sequence_parallel: whether the residual stream is cut over the sequence.
        dtype, device: of parameters and activations.
        vocab_multiple: the vocabulary is padded to a multiple of this times tp.
        ops: the kernels in use.
        rng: dropout streams.
        queue: weight-gradient queue of the stage.
    """

    cfg: ModelConfig
    specs: Mapping[str, ParamSpec]
    tp: Axis
    sequence_parallel: bool
    dtype: torch.dtype
    device: torch.device
    vocab_multiple: int
    ops: Ops
    rng: RngStreams
    queue: WgradQueue

    def param(self, name: str, adds_to_main_grad: bool = False) -> ShardedParameter:
        """This rank's (uninitialised) shard of a declared parameter."""
        shard = Shard(self.specs[name], self.tp.rank, self.tp.size, self.vocab_multiple)
        return ShardedParameter.empty(shard, self.dtype, self.device, adds_to_main_grad)

    def _bias(self, name: str) -> ShardedParameter | None:
        return self.param(f"{name}.bias", True) if f"{name}.bias" in self.specs else None

    def column(self, name: str) -> ColumnParallelLinear:
        """A column-parallel linear layer with the declared weight and bias."""
        weight = self.param(f"{name}.weight", True)
        return ColumnParallelLinear(weight, self._bias(name), self.tp, self.sequence_parallel, self.queue, self.ops)

    def row(self, name: str) -> RowParallelLinear:
        """A row-parallel linear layer with the declared weight and bias."""
        weight = self.param(f"{name}.weight", True)
        return RowParallelLinear(weight, self._bias(name), self.tp, self.sequence_parallel, self.queue, self.ops)

    def norm(self, name: str) -> Norm:
        """The model's kind of norm over the hidden size."""
        bias = self.param(f"{name}.bias") if f"{name}.bias" in self.specs else None
        return Norm(self.param(f"{name}.weight"), bias, self.cfg.norm_eps, self.ops)

    def dropout(self, x: torch.Tensor, position: Position, layer: int, site: str) -> torch.Tensor:
        """Dropout on the residual stream: one mask for all tensor-parallel ranks, or one for each sequence shard."""
        if self.cfg.hidden_dropout == 0.0 or not torch.is_grad_enabled():
            return x
        stream = "tensor_parallel" if self.sequence_parallel else "replicated"
        with self.rng.fork(stream, x.device, *position, layer, site):
            return F.dropout(x, self.cfg.hidden_dropout)


class Norm(nn.Module):
    """RMSNorm, or LayerNorm where there is a bias."""

    def __init__(self, weight: ShardedParameter, bias: ShardedParameter | None, eps: float, ops: Ops) -> None:
        super().__init__()
        self.weight, self.bias, self.eps, self.ops = weight, bias, eps, ops

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.bias is None:
            return self.ops.rmsnorm(x, self.weight, self.eps)
        return self.ops.layernorm(x, self.weight, self.bias, self.eps)

    def add(self, x: torch.Tensor, residual: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """(norm(x + residual), x + residual)."""
        if self.bias is None:
            return self.ops.add_rmsnorm(x, residual, self.weight, self.eps)
        return self.ops.add_layernorm(x, residual, self.weight, self.bias, self.eps)


def rotary_tables(cfg: ModelConfig, length: int, device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
    """cos and sin, fp32 [length, rotary_dim / 2] (Su et al. 2021, section 3.4), with Llama-3 scaling where asked for.

    Frequencies stay fp32 whatever the model's type: rounded to bf16 they move the logits by a tenth.
    """
    dim = cfg.rotary_dim
    freq = cfg.rope_theta ** (-torch.arange(0, dim, 2, dtype=torch.float32, device=device) / dim)
    scaling = cfg.rope_scaling
    if scaling is not None:
        turns = scaling.original_max_position_embeddings * freq / (2 * math.pi)
        low, high = scaling.low_freq_factor, scaling.high_freq_factor
        # 1 keeps the frequency (fast ones), 0 divides it by the factor (slow ones), in between linearly.
        keep = ((turns - low) / (high - low)).clamp(0, 1)
        freq = (1 - keep) * freq / scaling.factor + keep * freq
    angles = torch.outer(torch.arange(length, dtype=torch.float32, device=device), freq)
    return angles.cos(), angles.sin()
