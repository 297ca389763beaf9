"""Models whose plans are compared with what is counted."""

from __future__ import annotations

from typing import Any

from megalite.core.options.model import ModelConfig
from megalite.core.options.optim import OptimConfig
from megalite.core.options.parallel import ParallelConfig
from megalite.core.options.train import TrainConfig
from megalite.core.parts.families import FAMILIES
from megalite.runtime.options.run import Config

SMALL = {"num_layers": 6, "hidden_size": 64, "num_heads": 4, "num_kv_heads": 2, "vocab_size": 300, "seq_len": 32}
EXPERTS = {"num_experts": 8, "moe_topk": 2, "moe_ffn_size": 48, "ffn_hidden_size": 128}
NEW_FAMILIES = ("deepseek_v2", "deepseek_v3", "glm4_moe", "gpt_oss", "llama4_text", "qwen3_next")
NEW_PRESETS = [preset for family in NEW_FAMILIES for preset in FAMILIES[family].presets]


def config(
    arch: str = "llama",
    model: dict[str, Any] | None = None,
    parallel: dict[str, Any] | None = None,
    optim: dict[str, Any] | None = None,
    **train: Any,
) -> Config:
    return Config(
        model=ModelConfig.from_arch(arch, **{**SMALL, **(model or {})}),
        parallel=ParallelConfig(**{"device": "cpu", "schedule": "1f1b", "vocab_divisible_by": 8, **(parallel or {})}),
        train=TrainConfig(**train),
        optim=OptimConfig(**(optim or {})),
    )
