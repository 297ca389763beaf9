"""The options of multi-head latent attention: which they are, and what fits together."""

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

LATENT_SIZES = {"qk_nope_head_dim": 128, "qk_rope_head_dim": 64, "v_head_dim": 128}
"""Sizes of a head that go with --kv-lora-rank, and their defaults (DeepSeek-V2)."""


@dataclass(frozen=True, eq=False, repr=False)
class LatentOptions(ModelShape):
    """Sizes of latents, and of the parts of a head."""

    kv_lora_rank: int | None = None
    """Width of the latents that keys and values are made of (multi-head latent attention, DeepSeek-V2). Default: none,
    grouped-query attention."""
    q_lora_rank: int | None = None
    """With --kv-lora-rank: width of the latents that queries are made of. Default: none, one projection."""
    qk_nope_head_dim: int | None = None
    """With --kv-lora-rank: size of the part of a query or key head that is not rotated. Default: 128."""
    qk_rope_head_dim: int | None = None
    """With --kv-lora-rank: size of the rotated part, of which all key heads share one. Default: 64."""
    v_head_dim: int | None = None
    """With --kv-lora-rank: size of a value head. Default: 128."""

    @property
    def nope_size(self) -> int:
        assert self.qk_nope_head_dim is not None
        return self.qk_nope_head_dim

    @property
    def value_size(self) -> int:
        return self.head_size if self.v_head_dim is None else self.v_head_dim

    @property
    def latent_size(self) -> int:
        assert self.kv_lora_rank is not None
        return self.kv_lora_rank


class LatentRules(PartRules["ModelConfig", "StepConfig"]):
    """Multi-head latent attention."""

    options, after = LatentOptions, "head_dim"

    def derived(self, m: ModelConfig) -> dict[str, int]:
        if m.kv_lora_rank is None:
            return {}
        sizes = {name: getattr(m, name) or size for name, size in LATENT_SIZES.items()}
        return missing(m, {**sizes, "head_dim": sizes["qk_nope_head_dim"] + sizes["qk_rope_head_dim"]})

    def check_model(self, m: ModelConfig) -> None:
        names = ("q_lora_rank", *LATENT_SIZES)
        in_range(m, " ".join(("kv_lora_rank", *names)), 1, 2**20 + 1)
        if m.kv_lora_rank is None:
            words = " ".join(f"--{dashed(name)} {getattr(m, name)}" for name in names if getattr(m, name) is not None)
            require(not words, words, "applies to latent attention", "give --kv-lora-rank, or drop it")
            return
        width = m.nope_size + m.rotary_dim
        require(
            m.head_dim == width,
            f"--head-dim {m.head_dim} with --kv-lora-rank",
            f"a head has --qk-nope-head-dim {m.qk_nope_head_dim} + --qk-rope-head-dim {m.qk_rope_head_dim} = {width}",
            "drop --head-dim",
        )
        require(
            m.value_size <= width,
            f"--v-head-dim {m.v_head_dim}",
            f"is wider than queries and keys ({width})",
            "lower it",
        )
        require(
            m.rotary_dim % 2 == 0,
            f"--qk-rope-head-dim {m.qk_rope_head_dim}",
            "must be even: pairs are rotated",
            "change it",
        )
        for given, wrong, why in (
            (f"--num-kv-heads {m.num_kv_heads}", m.num_kv_heads != m.num_heads, "every head has keys of its own"),
            (f"--rope-fraction {m.rope_fraction:g}", m.rope_fraction != 1, "--qk-rope-head-dim says what is rotated"),
            (f"--position {m.position}", m.position != "rope", "its keys have a rotated part"),
            ("--attention-sinks", m.attention_sinks, "its heads have no sinks here"),
            (f"--qk-norm {m.qk_norm}", m.qk_norm != "none", "its latents are normalized instead"),
            (f"--mup-base-width {m.mup_base_width}", m.mup_base_width is not None, "muP has no rule for latents here"),
        ):
            require(not wrong, f"{given} with --kv-lora-rank {m.kv_lora_rank}", why, "drop one of the two")

    def check(self, cfg: StepConfig) -> None:
        m, p, t = cfg.model, cfg.parallel, cfg.train
        if m.kv_lora_rank is None:
            return
        for given, refused, why in (
            (f"--fp8 {t.fp8}", t.fp8 != "off", "the projections to latents have no FP8 form"),
            (f"--cp-comm {p.cp_comm}", p.cp > 1 and p.cp_comm not in ("auto", "gather"), "latents are gathered"),
        ):
            require(not refused, f"{given} with --kv-lora-rank {m.kv_lora_rank}", why, "drop one of the two")


PART = LatentRules()
