"""The tables of rotary positions, with the frequencies that longer contexts take, and of layers without them."""

from __future__ import annotations

import math
from dataclasses import dataclass, field

import torch

from megalite.core.batch import Positions
from megalite.core.options.rope import RopeScaling


@dataclass(frozen=True)
class Temperature:
    """Makes what layers without rope multiply queries by: more at positions where a softmax has more keys to tell apart
    (Nakanishi 2025, arXiv:2501.19399; Llama 4).

    Args:
        strength: factor of the logarithm.
        floor: number of positions of one step.
    """

    strength: float
    floor: int

    def __call__(self, positions: Positions, device: torch.device) -> tuple[torch.Tensor, ...] | None:
        """Return (factors,), fp32 [tokens, B or 1, 1]; None where all are 1."""
        if not self.strength or positions.length < self.floor:
            return None
        at = torch.arange(1, positions.length + 1, dtype=torch.float32, device=device)
        return (positions.look_up((1 + self.strength * (at / self.floor).floor().log1p())[:, None]),)


@dataclass(unsafe_hash=True)
class Rotary:
    """Makes cos and sin (Su et al. 2021, section 3.4), and keeps those of the longest samples.

    Frequencies stay fp32 whatever the model's dtype: rounding them to bf16 changes the logits by a tenth.

    Args:
        dim: number of rotated dimensions of a head.
        theta: base of the frequencies.
        scaling: scaling of the frequencies by Llama 3's rule or YaRN, or None.
        divisor: divisor of all frequencies (position interpolation, Chen et al. 2023).
    """

    dim: int
    theta: float
    scaling: RopeScaling | None = None
    divisor: float = 1.0
    _tables: tuple[torch.Tensor, torch.Tensor] | None = field(default=None, init=False, compare=False, repr=False)

    def __call__(self, positions: Positions, device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
        """Return (cos, sin), fp32 [tokens, dim / 2], or [tokens B, dim / 2] where the samples have documents."""
        if self._tables is None or len(self._tables[0]) < positions.length:
            freq = self._frequencies(device)
            angles = torch.outer(torch.arange(positions.length, dtype=torch.float32, device=device), freq)
            amplitude = 1.0 if self.scaling is None else self.scaling.amplitude
            self._tables = angles.cos() * amplitude, angles.sin() * amplitude
        cos, sin = (positions.look_up(table).flatten(0, 1) for table in self._tables)
        return cos, sin

    def _frequencies(self, device: torch.device) -> torch.Tensor:
        freq = self.theta ** (-torch.arange(0, self.dim, 2, dtype=torch.float32, device=device) / self.dim)
        scaling = self.scaling
        if scaling is None:
            return freq / self.divisor
        # 1 keeps a (high) frequency, 0 divides a (low) one by the factor; linear in between.
        if scaling.rope_type == "yarn":
            keep = self._kept_by_yarn(scaling, device)
        else:
            turns = scaling.original_max_position_embeddings * freq / (2 * math.pi)
            low, high = scaling.low_freq_factor, scaling.high_freq_factor
            keep = ((turns - low) / (high - low or 1e-30)).clamp(0, 1)
        return (1 - keep) * freq / scaling.factor + keep * freq

    def _kept_by_yarn(self, scaling: RopeScaling, device: torch.device) -> torch.Tensor:
        """Return the kept share of every frequency; unlike Llama 3's it is linear in the dimension."""
        length = scaling.original_max_position_embeddings / (2 * math.pi)
        first, last = (
            self.dim * math.log(length / turns) / (2 * math.log(self.theta))
            for turns in (scaling.beta_fast, scaling.beta_slow)
        )
        if scaling.truncate:
            first, last = math.floor(first), math.ceil(last)
        first, last = max(first, 0), min(last, self.dim - 1)
        at = torch.arange(self.dim // 2, dtype=torch.float32, device=device)
        return 1 - ((at - first) / (last - first or 0.001)).clamp(0, 1)
