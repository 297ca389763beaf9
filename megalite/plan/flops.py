"""Model FLOPs per token, in the two conventions of published numbers, and peak FLOP/s of GPUs.

Model FLOPs count what the model requires, forward and backward, not recomputation, padding or elementwise operations:
6 (L (W + q s) + V h) with causal attention, 6 (L (W + 2 q s) + V h) with every key counted (Chowdhery et al. 2022,
appendix B); W weight elements of a block's matrices, q = heads x head size, s sequence, V vocabulary, h hidden.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import TYPE_CHECKING

from megalite.config.model import ModelConfig
from megalite.model.partition import token_work

if TYPE_CHECKING:
    import torch

# Dense bf16 peaks in FLOP/s, from the data sheets (with sparsity they are twice as high). The first match counts.
_PEAKS = (
    ("H100 PCIe", 756e12),
    ("H100 NVL", 835e12),
    ("H200 NVL", 835e12),
    ("A100", 312e12),
    ("H100", 989e12),
    ("H200", 989e12),
    ("B200", 2250e12),
)


@dataclass(frozen=True)
class FlopsPerToken:
    """Model FLOPs of one token in training, forward and backward.

    Attributes:
        matrices: matrix products of all blocks.
        attention: scores and weighted sums of all blocks, all seq_len keys counted, or those of a block's window.
        causal_attention: the part of it that a causal mask leaves: half, without windows.
        head: output layer.
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
    work, layers = token_work(cfg), cfg.num_layers
    attention, causal = 6 * layers * work.attention, 6 * layers * work.causal_attention
    return FlopsPerToken(6 * layers * work.layer, attention, causal, 6 * work.head)


def peak_flops(device: torch.device) -> float | None:
    """Look up the dense bf16 peak of a device in FLOP/s; None for a CPU or an unknown GPU."""
    import torch

    return peak_of_name(torch.cuda.get_device_name(device)) if device.type == "cuda" else None


def peak_of_name(name: str) -> float | None:
    """Look up the peak by the device name of torch.cuda ("NVIDIA H100 80GB HBM3"); None if it is unknown."""
    if "MIG" in name:  # a slice of a GPU, under the name of the whole GPU
        return None
    # Whole words: GH200 and GB200 are different chips from H200 and B200.
    return next((peak for words, peak in _PEAKS if re.search(rf"\b{words}\b", name)), None)
