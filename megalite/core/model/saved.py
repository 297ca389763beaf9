"""What layers keep for the backward pass: one row per tensor that autograd saves, with its bytes on a rank.

Tensors on the residual stream are sharded over the sequence with sequence parallelism; those inside a mixer or
feed-forward layer are sharded over heads and features (Korthikanti et al. 2022, section 4, with fused attention).
"""

from __future__ import annotations

from dataclasses import dataclass

from megalite.core.options.step import StepConfig


@dataclass(frozen=True)
class SavedTensor:
    """A tensor kept for backward: its name, and its bytes on a rank per micro-batch."""

    name: str
    bytes: int


def element_size(cfg: StepConfig) -> int:
    """Get the size of a weight or activation in bytes."""
    return 4 if cfg.train.precision == "fp32" else 2


def tokens(cfg: StepConfig) -> int:
    """Count the tokens of a micro-batch that a rank holds."""
    return cfg.train.micro_batch_size * cfg.model.seq_len // cfg.parallel.cp


def residual_rows(cfg: StepConfig) -> int:
    """Count the tokens of a micro-batch on the residual stream of a rank (its shard, with sequence parallelism)."""
    return tokens(cfg) // (cfg.parallel.tp if cfg.sequence_parallel else 1)


def residual_bytes(cfg: StepConfig) -> int:
    """Compute the bytes of a micro-batch on the residual stream of a rank: what full recomputation keeps per block."""
    return element_size(cfg) * residual_rows(cfg) * cfg.model.hidden_size


def inside(cfg: StepConfig, name: str, per_token: int) -> SavedTensor:
    """Describe a tensor that is sharded over heads or features, `per_token` bytes over all tensor-parallel ranks."""
    return SavedTensor(name, tokens(cfg) * per_token // cfg.parallel.tp)
