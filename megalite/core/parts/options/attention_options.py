"""The options of windows and chunks of attention: which they are, and what fits together."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from megalite.core.base.errors import in_range, require
from megalite.core.options.part import PartRules
from megalite.core.options.shape import MAX_LAYERS, ModelShape

if TYPE_CHECKING:
    from megalite.core.options.model import ModelConfig
    from megalite.core.options.step import StepConfig


FULL, SLIDING = "full_attention", "sliding_attention"


@dataclass(frozen=True, eq=False, repr=False)
class AttentionOptions(ModelShape):
    """What each layer attends to, and which layers have no rope."""

    window: int | None = None
    """Size of the sliding attention window in tokens, the current one included. Default: full attention in every
    layer."""
    window_pattern: int = 0
    """With --window: every n-th layer uses full attention (Gemma 2: 2, Gemma 3: 6); 0: no layer does."""
    layer_types: tuple[str, ...] = ()
    """With --window: sliding_attention or full_attention for each layer, as config.json of Hugging Face names them; a
    shorter list is repeated. Overrides --window-pattern."""
    attention_chunk_size: int | None = None
    """Layers of attention with rope attend within chunks of this many positions (Llama 4: 8192), counted from the start
    of the document where documents are masked. Default: within the sequence."""
    no_rope_freq: int = 0
    """Every n-th layer has no rope, and attends to the whole sequence (Llama 4: 4); 0: none."""
    attention_temperature: float = 0.0
    """In layers without rope, multiply queries by 1 + this * ln(1 + floor(position / --attention-temperature-floor)),
    positions counted from 1 (Llama 4: 0.1)."""
    attention_temperature_floor: int = 8192
    """Number of positions of one step of --attention-temperature."""

    def window_of(self, layer: int) -> int | None:
        """Return the number of positions that a layer attends to, the current one included; None: no limit."""
        layer = self.like(layer)
        if self.layer_types:
            return self.window if self.layer_types[layer] == SLIDING else None
        sees_all = self.window_pattern and (layer + 1) % self.window_pattern == 0
        return None if sees_all else self.window

    def has_rope(self, layer: int) -> bool:
        """Whether a layer rotates queries and keys."""
        return self.position == "rope" and not (self.no_rope_freq and (self.like(layer) + 1) % self.no_rope_freq == 0)


class AttentionRules(PartRules["ModelConfig", "StepConfig"]):
    """Windows, chunks, layers without rope, and attention block by block."""

    options, after = AttentionOptions, "rope_theta_local"

    def derived(self, m: ModelConfig) -> dict[str, object]:
        types, pattern = _read_layer_types(m)
        return {"layer_types": types, "window_pattern": pattern}

    def check_model(self, m: ModelConfig) -> None:
        in_range(m, "attention_chunk_size attention_temperature_floor", 1, 2**30)
        in_range(m, "window", 1, 2**30)
        in_range(m, "no_rope_freq", 0, MAX_LAYERS)
        in_range(m, "attention_temperature", 0, 100)
        freq, chunk = f"--no-rope-freq {m.no_rope_freq}", m.attention_chunk_size is not None
        for given, wrong, why in (
            (f"{freq} with --position {m.position}", m.no_rope_freq and m.position != "rope", "no layer has rope"),
            (freq, m.no_rope_freq == 1, "leaves no layer with rope"),
            (
                f"{freq} with --kv-lora-rank",
                m.no_rope_freq and m.kv_lora_rank is not None,
                "latents have a rotated part",
            ),
            (
                f"--attention-temperature {m.attention_temperature:g}",
                m.attention_temperature > 0 and not m.no_rope_freq,
                "is of layers without rope, see --no-rope-freq",
            ),
            (
                f"--attention-chunk-size {m.attention_chunk_size} with --window",
                chunk and m.window,
                "a layer has one limit",
            ),
            ("--attention-chunk-size with --kv-lora-rank", chunk and m.kv_lora_rank is not None, "has no chunks here"),
        ):
            require(not wrong, given, why, "drop it")

    def check(self, cfg: StepConfig) -> None:
        m, t = cfg.model, cfg.train
        for given, by_block in (
            ("--attention-sinks", m.attention_sinks),
            (f"--attention-dropout {m.attention_dropout}", m.attention_dropout > 0),
        ):
            kernel, why = f"--attention {t.attention}", "kernels that return a log-sum-exp are torch's choice"
            require(not by_block or t.attention == "auto", f"{kernel} with {given}", why, "drop one of the two")


def _read_layer_types(m: ModelConfig) -> tuple[tuple[str, ...], int]:
    """Return the types of all layers and the pattern; types that follow a pattern are written as that pattern.

    So each model has one description.

    Raises:
        UserError: not one of the types, too many, or no window for them.
    """
    in_range(m, "window_pattern", 0, MAX_LAYERS)
    given, pattern = m.layer_types, m.window_pattern
    if not given:
        return (), pattern
    require(
        set(given) <= {FULL, SLIDING} and len(given) <= m.num_layers and (SLIDING not in given or m.window is not None),
        f"--layer-types {' '.join(given)[:80]}",
        f"must name at most {m.num_layers} layers, each {SLIDING} or {FULL}; {SLIDING} requires --window",
        "correct the list, or give --window",
    )
    types = (given * -(-m.num_layers // len(given)))[: m.num_layers]
    for period in (pattern, types.index(FULL) + 1 if FULL in types else 0):
        if types == tuple(FULL if period and (i + 1) % period == 0 else SLIDING for i in range(m.num_layers)):
            return (), period
    return types, 0


PART = AttentionRules()
