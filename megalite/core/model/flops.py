"""Model FLOPs per token, in the two conventions of published numbers, and the peak FLOP/s of a device.

Model FLOPs count what the model requires, forward and backward, not recomputation, padding or elementwise operations:
6 (L (W + q s) + V h) with causal attention, 6 (L (W + 2 q s) + V h) with every key counted (Chowdhery et al. 2022,
appendix B); W weight elements of a block's matrices, q = heads x head size, s sequence, V vocabulary, h hidden. A
module that predicts further tokens adds a block, its projection of 2 h to h, and the output layer once more.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from megalite.core.base.hardware import peak_of_name
from megalite.core.model.partition import block_work, blocks_by_kind, head_work, mtp_work
from megalite.core.options.model import ModelConfig

if TYPE_CHECKING:
    import torch


@dataclass(frozen=True)
class FlopsPerToken:
    """Model FLOPs of one token in training, forward and backward.

    Attributes:
        matrices: matrix products of all blocks, those that predict further tokens among them.
        attention: scores and weighted sums of all blocks, all seq_len keys counted, or those of a block's window.
        causal_attention: part of `attention` that a causal mask leaves: half of it, without windows.
        head: output layer, as often as it runs.
    """

    matrices: int
    attention: float
    causal_attention: float
    head: int

    @property
    def causal(self) -> float:
        """Total with the part of attention that a causal mask leaves (Megatron-LM today)."""
        return self.matrices + self.causal_attention + self.head

    @property
    def full(self) -> float:
        """Total with all of attention (PaLM's MFU, nanotron)."""
        return float(self.matrices + self.attention + self.head)

    def __str__(self) -> str:
        return (
            f"{self.causal:.5e} causal, {self.full:.5e} full attention "
            f"(matrices {self.matrices:.4e}, attention {self.causal_attention:.4e} or {self.attention:.4e}, "
            f"head {self.head:.4e})"
        )


def flops_per_token(cfg: ModelConfig) -> FlopsPerToken:
    """Count the model FLOPs of one token in a sequence of cfg.seq_len tokens."""
    works = [(len(blocks), block_work(cfg, kind)) for kind, blocks in blocks_by_kind(cfg).items()]
    works += [(cfg.mtp_num_layers, mtp_work(cfg))] if cfg.mtp_layers else []
    return FlopsPerToken(
        matrices=6 * sum(n * work.weights for n, work in works),
        attention=6 * sum(n * work.attention for n, work in works),
        causal_attention=6 * sum(n * work.causal_attention for n, work in works),
        head=6 * head_work(cfg) * (1 + cfg.mtp_num_layers),
    )


def peak_flops(device: torch.device) -> float | None:
    """Look up the dense bf16 peak of a device in FLOP/s; None for a CPU or an unknown GPU."""
    import torch

    return peak_of_name(torch.cuda.get_device_name(device)) if device.type == "cuda" else None
