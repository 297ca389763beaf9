"""The options of gated delta nets among layers of attention: which they are, and what fits together."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from megalite.core.base.errors import in_range, require
from megalite.core.options.names import dashed
from megalite.core.options.part import PartRules, missing
from megalite.core.options.shape import ModelShape

if TYPE_CHECKING:
    from megalite.core.options.model import ModelConfig
    from megalite.core.options.step import StepConfig

LINEAR_SIZES = {
    "linear_num_key_heads": 16,
    "linear_num_value_heads": 32,
    "linear_key_head_dim": 128,
    "linear_value_head_dim": 128,
    "linear_conv_kernel_dim": 4,
}
"""Sizes of a gated delta net, and their defaults (Qwen3-Next)."""


@dataclass(frozen=True, eq=False, repr=False)
class DeltaNetOptions(ModelShape):
    """Which layers are gated delta nets, and their sizes."""

    linear_attention_freq: int = 0
    """Every n-th layer has attention, the others are gated delta nets (Qwen3-Next: 4); 0: every layer has attention."""
    linear_num_key_heads: int | None = None
    """With --linear-attention-freq: number of key and query heads of a gated delta net. Default: 16."""
    linear_num_value_heads: int | None = None
    """With --linear-attention-freq: number of its value heads, each with a state. Default: 32."""
    linear_key_head_dim: int | None = None
    """With --linear-attention-freq: size of its key heads. Default: 128."""
    linear_value_head_dim: int | None = None
    """With --linear-attention-freq: size of its value heads. Default: 128."""
    linear_conv_kernel_dim: int | None = None
    """With --linear-attention-freq: tokens that its convolution sees, the current one included. Default: 4."""

    def like(self, layer: int) -> int:
        """Return the layer whose options a block has: modules after the last layer are like the last attention."""
        every = self.linear_attention_freq or 1
        return layer if layer < self.num_layers else (self.num_layers // every * every or self.num_layers) - 1

    def is_delta_net(self, layer: int) -> bool:
        """Whether a layer is a gated delta net instead of attention."""
        return self.linear_attention_freq > 0 and (self.like(layer) + 1) % self.linear_attention_freq != 0

    @property
    def delta_heads(self) -> tuple[int, int, int, int]:
        """Key heads, value heads, and the size of either, of a gated delta net."""
        sizes = self.linear_num_key_heads, self.linear_num_value_heads
        dims = self.linear_key_head_dim, self.linear_value_head_dim
        assert None not in (*sizes, *dims)
        return (*sizes, *dims)  # type: ignore[return-value]


class DeltaNetRules(PartRules["ModelConfig", "StepConfig"]):
    """Gated delta nets among layers of attention."""

    options, after = DeltaNetOptions, "v_head_dim"

    def derived(self, m: ModelConfig) -> dict[str, int]:
        return missing(m, LINEAR_SIZES) if m.linear_attention_freq else {}

    def check_model(self, m: ModelConfig) -> None:
        in_range(m, "linear_attention_freq", 0, 10**6)
        in_range(m, " ".join(LINEAR_SIZES), 1, 2**20 + 1)
        gate = "--attention-output-gate with --kv-lora-rank"
        require(
            not (m.attention_output_gate and m.kv_lora_rank is not None), gate, "latents have no gate here", "drop one"
        )
        if not m.linear_attention_freq:
            words = " ".join(
                f"--{dashed(name)} {getattr(m, name)}" for name in LINEAR_SIZES if getattr(m, name) is not None
            )
            require(not words, words, "applies to gated delta nets", "give --linear-attention-freq, or drop it")
            return
        freq = f"--linear-attention-freq {m.linear_attention_freq}"
        require(m.linear_attention_freq > 1, freq, "leaves no layer without attention", "drop it, or give 2 or more")
        require(
            m.mtp_num_layers == 0 or m.num_layers >= m.linear_attention_freq,
            f"{freq} with --mtp-num-layers {m.mtp_num_layers}",
            f"modules are like the last layer with attention, and the {m.num_layers} layers have none",
            "lower --linear-attention-freq, or drop one of the two",
        )
        key_heads, value_heads, _, _ = m.delta_heads
        require(
            value_heads % key_heads == 0,
            f"--linear-num-value-heads {m.linear_num_value_heads}",
            f"must be a multiple of --linear-num-key-heads {m.linear_num_key_heads}: each serves as many",
            "change one of the two",
        )
        for given, wrong, why in (
            ("--kv-lora-rank", m.kv_lora_rank is not None, "latent attention has not been compared among delta nets"),
            (
                f"--mup-base-width {m.mup_base_width}",
                m.mup_base_width is not None,
                "muP has no rule for delta nets here",
            ),
        ):
            require(not wrong, f"{freq} with {given}", why, "drop one of the two")

    def check(self, cfg: StepConfig) -> None:
        m, p, t = cfg.model, cfg.parallel, cfg.train
        if not m.linear_attention_freq:
            return
        conv = m.linear_conv_kernel_dim or 0
        require(
            m.delta_heads[0] % p.tp == 0,
            f"--linear-num-key-heads {m.linear_num_key_heads}",
            f"must be divisible by --tp {p.tp}",
            "lower --tp",
        )
        tokens = m.seq_len // (2 * p.cp)
        require(
            p.cp == 1 or tokens >= conv - 1,
            f"--cp {p.cp}",
            f"leaves pieces of {tokens} tokens: --linear-conv-kernel-dim {m.linear_conv_kernel_dim} sees more",
            "lower --cp, or raise --seq-len",
        )
        given = f"--fp8 {t.fp8} with --linear-attention-freq {m.linear_attention_freq}"
        require(t.fp8 == "off", given, "the projections of delta nets have no FP8 form", "drop one of the two")


PART = DeltaNetRules()
