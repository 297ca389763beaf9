"""The options of rotary position embeddings: how frequencies are scaled, and what fits together."""

from __future__ import annotations

import dataclasses
import math
from dataclasses import dataclass
from typing import Literal

from megalite.core.base.errors import require

_MAX_FACTOR = 10**6


@dataclass(frozen=True)
class RopeScaling:
    """Scaling of the rotary frequencies, in Hugging Face's words.

    Llama 3's rule (technical report, section 3.2), or YaRN (Peng et al. 2023, arXiv:2309.00071, section 3).

    Attributes:
        factor: divisor of low frequencies; high ones are kept.
        low_freq_factor, high_freq_factor: turns within the original length up to which a frequency is low, and from
            which it is high (llama3).
        beta_slow, beta_fast: the same (yarn).
        attention_factor: factor of rotated queries and keys (yarn); 0: that of mscale over that of mscale_all_dim where
            both are given, else 0.1 ln(factor) + 1.
        mscale, mscale_all_dim: DeepSeek's factors of the logarithm, of which the second applies to all dimensions in
            latent attention (yarn; see `stretch`); 0: not given.
        truncate: whether the bounds are rounded to whole dimensions (yarn).
    """

    rope_type: Literal["llama3", "yarn"] = "llama3"
    factor: float = 8.0
    original_max_position_embeddings: int = 8192
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    beta_slow: float = 1.0
    beta_fast: float = 32.0
    attention_factor: float = 0.0
    mscale: float = 0.0
    mscale_all_dim: float = 0.0
    truncate: bool = True

    def __post_init__(self) -> None:
        for name in SCALING_FIELDS["yarn" if self.rope_type == "llama3" else "llama3"]:
            require(
                getattr(self, name) == getattr(RopeScaling, name),
                f"--rope-scaling with {name}",
                f"is not of rope_type {self.rope_type}",
                f"drop it, or change rope_type, which has {', '.join(SCALING_FIELDS[self.rope_type])}",
            )
        require(
            1 <= self.factor < _MAX_FACTOR
            and 0 < self.low_freq_factor <= self.high_freq_factor < _MAX_FACTOR
            and 0 < self.beta_slow <= self.beta_fast < _MAX_FACTOR
            and all(0 <= x < _MAX_FACTOR for x in (self.attention_factor, self.mscale, self.mscale_all_dim))
            and 1 <= self.original_max_position_embeddings < 2**30,
            f"--rope-scaling {dataclasses.asdict(self)}",
            "needs factor >= 1, 0 < low_freq_factor <= high_freq_factor, 0 < beta_slow <= beta_fast, attention_factor, "
            "mscale and mscale_all_dim >= 0, all below a million, and a positive original length",
            "take the values of the model's config.json",
        )

    def stretch(self, mscale: float) -> float:
        """Return 0.1 mscale ln(factor) + 1: how much queries and keys grow with the length (YaRN, section 3.4)."""
        return 0.1 * mscale * math.log(self.factor) + 1.0

    @property
    def amplitude(self) -> float:
        """Factor of the rotated parts of queries and keys; 1 but for YaRN."""
        if self.rope_type != "yarn":
            return 1.0
        if not self.attention_factor and self.mscale and self.mscale_all_dim:
            return self.stretch(self.mscale) / self.stretch(self.mscale_all_dim)
        return self.attention_factor or self.stretch(1.0)


SCALING_FIELDS = {
    "llama3": ("low_freq_factor", "high_freq_factor"),
    "yarn": ("beta_slow", "beta_fast", "attention_factor", "mscale", "mscale_all_dim", "truncate"),
}
"""Fields of `RopeScaling` that one type of scaling has and the other has not."""
