"""The options of attention: what fits together."""

from __future__ import annotations

from megalite.core.base.errors import in_range, require
from megalite.core.options.model import ModelConfig
from megalite.core.options.part import PartOptions
from megalite.core.options.step import StepConfig


class AttentionOptions(PartOptions[ModelConfig, StepConfig]):
    """Chunks, layers without rope, and attention block by block."""

    def check_model(self, m: ModelConfig) -> None:
        in_range(m, "attention_chunk_size attention_temperature_floor", 1, 2**30)
        in_range(m, "no_rope_freq", 0, 10_000)
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


OPTIONS = AttentionOptions()
