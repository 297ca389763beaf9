"""The parts of every block: the factory that makes modules from declared parameters, and norms."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import torch
from torch import nn

from megalite.core.batch import Positions
from megalite.core.mesh.context import Axis
from megalite.core.model.dropout import Dropout, MaskWords
from megalite.core.model.specs import layout_holding
from megalite.core.model.stage_log import StageLog
from megalite.core.ops import Ops
from megalite.core.options.choices import Function
from megalite.core.options.model import ModelConfig
from megalite.core.options.recompute import MODES, Recomputation
from megalite.core.sharding import Layout, ParamSpec, Shard, StateTensor
from megalite.core.sharding.parameter import ShardedParameter
from megalite.core.tensor_parallel.embedding import VocabParallelEmbedding
from megalite.core.tensor_parallel.linear import (
    ColumnParallelLinear,
    GatheredLinear,
    ReplicatedLinear,
    RowParallelLinear,
    WgradQueue,
)
from megalite.core.tensor_parallel.products import GroupedProducts, Products, Quantization

Rope = tuple[torch.Tensor, ...] | None
"""What a layer knows of positions: (cos, sin), (factors of queries,) without rope, (columns of keys,) of ALiBi, or
nothing."""


@dataclass(frozen=True, kw_only=True)
class Layers:
    """Makes the layers of one stage on this rank. Modules take what they need from it in their constructors only.

    Args:
        cfg: the model.
        specs: its parameters and buffers.
        tp: tensor-parallel axis.
        sequence_parallel: whether the residual stream is sharded along the sequence.
        dtype, device: type and device of parameters and activations.
        layout: where parameters live.
        ops: the kernels in use.
        words: of this rank's samples and tokens, for dropout.
        queue: weight-gradient queue of the stage.
        quant: number format of the blocks' matrices; None: that of activations.
        cp, ep: context- and expert-parallel axes.
        log: what the layers of the stage note in a step.
        most_rows: rows of this rank's experts over those that it sends, above which they are recomputed.
        dispatch: way of tokens to experts, a name of `tensor_parallel.dispatch.DISPATCHES`.
        allocate: whether parameters get memory; otherwise buckets hold their weights.
        tp_chunks: chunks of a linear layer's forward product.
        recompute: what each block recomputes in backward.
    """

    cfg: ModelConfig
    specs: Mapping[str, ParamSpec]
    tp: Axis
    sequence_parallel: bool
    dtype: torch.dtype
    device: torch.device
    layout: Layout
    ops: Ops
    words: MaskWords
    queue: WgradQueue
    quant: Quantization | None = None
    cp: Axis = field(default_factory=lambda: Axis("cp"))
    ep: Axis = field(default_factory=lambda: Axis("ep"))
    log: StageLog = field(default_factory=StageLog)
    most_rows: float = math.inf
    dispatch: str = "alltoall"
    allocate: bool = True
    tp_chunks: int = 1
    recompute: Recomputation = field(default_factory=lambda: MODES["none"])
    _positions: dict[object, Any] = field(default_factory=dict, init=False, repr=False)

    def param(self, name: str, adds_to_main_grad: bool = False) -> ShardedParameter:
        """Make this rank's (uninitialized) shard of a declared parameter."""
        spec = self.specs[name]
        shard = Shard(spec, layout_holding(spec, self.layout))
        param = ShardedParameter.empty(shard, self.dtype, self.device, adds_to_main_grad)
        if not self.allocate:
            param.untyped_storage().resize_(0)
        return param

    def buffer(self, name: str) -> StateTensor:
        """Make a declared buffer, zeros in fp32; this rank's copy is saved if it is the first of all."""
        spec = self.specs[name]
        shard, flat = Shard(spec, self.layout), torch.zeros(spec.numel, device=self.device)
        return StateTensor(name, "master", spec.shape, flat, shard.slices, shard.is_owner(), exact=True)

    def column(self, name: str) -> ColumnParallelLinear:
        """Make a column-parallel linear layer with the declared weight and bias."""
        return ColumnParallelLinear(**self.linear(name))

    def row(self, name: str) -> RowParallelLinear:
        """Make a row-parallel linear layer with the declared weight and bias."""
        return RowParallelLinear(**self.linear(name))

    def replicated(self, name: str) -> ReplicatedLinear:
        """Make a linear layer with the declared weight and bias, whole on every rank."""
        return ReplicatedLinear(**self.linear(name) | {"tp": Axis("own"), "sequence_parallel": False})

    def gathered(self, name: str) -> GatheredLinear:
        """Make a column-parallel linear layer with the declared weight and bias that leaves communication to others."""
        return GatheredLinear(**self.linear(name) | {"tp": Axis("own"), "sequence_parallel": False})

    def linear(self, name: str) -> dict[str, Any]:
        """Make the arguments of a declared parallel linear layer."""
        return {
            "weight": self.matrix(f"{name}.weight"),
            "bias": self.bias(name),
            "tp": self.tp,
            "sequence_parallel": self.sequence_parallel,
            "queue": self.queue,
            "ops": self.ops,
            "products": self.products(self.specs[f"{name}.weight"]),
            "chunks": self.tp_chunks,
        }

    def bias(self, name: str) -> ShardedParameter | None:
        """Make the bias of a linear layer, if one is declared."""
        return self.param(f"{name}.bias", True) if f"{name}.bias" in self.specs else None

    def matrix(self, name: str) -> ShardedParameter:
        """Make a declared matrix, or stack of them, that is read by `products`."""
        weight = self.param(name, True)
        weight.fp8 = self._quant_of(self.specs[name])
        return weight

    def products(self, spec: ParamSpec) -> Products:
        """Make the products of a declared matrix."""
        quant = self._quant_of(spec)
        return Products(self.ops) if quant is None else quant.products(self.ops, *self._cut(spec))

    def grouped_products(self, spec: ParamSpec) -> GroupedProducts:
        """Make the products of a declared stack of matrices."""
        quant = self._quant_of(spec)
        return GroupedProducts(self.ops) if quant is None else quant.grouped_products(self.ops, *self._cut(spec))

    def _quant_of(self, spec: ParamSpec) -> Quantization | None:
        return self.quant if spec.matrix and self._quantizes(int(spec.name.split(".")[1])) else None

    def _quantizes(self, index: int) -> bool:
        return self.quant is not None and index in self.quant.layers

    def _cut(self, spec: ParamSpec) -> tuple[Axis, str]:
        """Return the axis that a matrix is sharded over, and along which features: "O" or "I"."""
        cut = layout_holding(spec, self.layout).grid["tp"] > 1
        return self.tp if cut else Axis("tp"), "OI"[dict(spec.sharded_dims)["tp"] - len(spec.shape)]

    def embedding(self, name: str, weight: ShardedParameter | None = None) -> VocabParallelEmbedding:
        """Make an embedding with its rows sharded over tp, of the declared weight or of one that is there."""
        scale = math.sqrt(self.cfg.hidden_size) if self.cfg.scale_embeddings else 1.0
        # Rounded to the model's type, as transformers does.
        scale = torch.tensor(scale, dtype=self.dtype).item()
        weight = self.param(f"{name}.weight", True) if weight is None else weight
        return VocabParallelEmbedding(weight, self.tp, self.sequence_parallel, scale)

    @cached_property
    def _noting(self) -> Ops:
        return self.ops if self.quant is None else self.quant.noting(self.ops)

    def ops_before(self, index: int) -> Ops:
        """Return the ops of what a dense linear layer of block `index` reads: with `--fp8`, they may note its codes."""
        return self._noting if self._quantizes(index) else self.ops

    def norm(self, name: str, ops: Ops | None = None) -> Norm:
        """Make a norm over the hidden size, of the model's kind; `ops`: see `ops_before`."""
        bias = self.param(f"{name}.bias") if f"{name}.bias" in self.specs else None
        functions = self.cfg.norm_kind.make(ops or self.ops)
        return Norm(self.param(f"{name}.weight"), bias, self.cfg.norm_eps, functions, self.cfg.zero_centered_norm)

    def dropout(self, site: str, layer: int) -> Dropout:
        """Make the dropout of one site of a layer; site "attention" means attention probabilities."""
        rate = self.cfg.attention_dropout if site == "attention" else self.cfg.hidden_dropout
        return Dropout(rate, self.words, (layer, site), self.ops.keep_mask)

    def positions(self, layer: int) -> Callable[[Positions, torch.device], Rope] | None:
        """Return what makes a layer's tables of positions, the same where they are equal; None: it has none."""
        tables = self.cfg.position_kind.tables(self.cfg, layer)
        return self._positions.setdefault(tables, tables)


class Norm(nn.Module):
    """The norm of `functions` (see `options.choices.Norm`); `zero_centered`: scales by 1 + weight."""

    def __init__(
        self,
        weight: ShardedParameter,
        bias: ShardedParameter | None,
        eps: float,
        functions: tuple[Function, Function],
        zero_centered: bool = False,
    ) -> None:
        super().__init__()
        self.weight = weight
        self.bias = bias
        self.eps = eps
        self.zero_centered = zero_centered
        self.norm, self.add_norm = functions

    def forward(self, x_SBH: torch.Tensor) -> torch.Tensor:
        """Normalize over the last dimension; the result has the shape of x."""
        bias = () if self.bias is None else (self.bias,)
        return self.norm(x_SBH, norm_scale(self.weight, self.zero_centered), *bias, self.eps)

    def add(self, x_SBH: torch.Tensor, residual_SBH: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Add, then normalize: (norm(x + residual), x + residual)."""
        bias = () if self.bias is None else (self.bias,)
        scale = norm_scale(self.weight, self.zero_centered)
        return self.add_norm(x_SBH, residual_SBH, scale, *bias, self.eps)


def norm_scale(weight: torch.Tensor, zero_centered: bool) -> torch.Tensor:
    """Return what a norm multiplies by: its weight, or 1 + weight in fp32 (bf16 would round small weights away)."""
    return 1.0 + weight.float() if zero_centered else weight


class NoNorm:
    """Takes the place of a norm that a block does not have."""

    def __call__(self, x_SBH: torch.Tensor) -> torch.Tensor:
        return x_SBH

    def add(self, x_SBH: torch.Tensor, residual_SBH: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Add: (x + residual, x + residual)."""
        total = residual_SBH + x_SBH
        return total, total
