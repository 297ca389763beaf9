"""Models and layouts that several tests go through."""

from __future__ import annotations

from functools import partial
from typing import Any

from tests.parity import jobs

MODELS: dict[str, Any] = {"llama": jobs.llama, "gpt2": jobs.gpt2, "gemma2": jobs.gemma2, "gemma3": jobs.gemma3}
# Windows in layers that follow no pattern.
MODELS["layer_types"] = partial(jobs.gemma3, layer_types=("full_attention", *["sliding_attention"] * 2))

# name: (world, layers, layout)
LAYOUTS: dict[str, tuple[int, int, dict[str, Any]]] = {
    "tp2": (2, 4, {"tp": 2, "sequence_parallel": False}),
    "tp2-sp": (2, 4, {"tp": 2}),
    "tp4": (4, 4, {"tp": 4}),
    "pp2": (2, 4, {"pp": 2}),
    "pp2-gpipe": (2, 4, {"pp": 2, "schedule": "gpipe"}),
    "pp2-naive": (2, 4, {"pp": 2, "schedule": "naive"}),
    "pp4": (4, 4, {"pp": 4}),
    "pp4-eager": (4, 4, {"pp": 4, "schedule": "1f1b-eager"}),
    "pp4-zb-h1": (4, 4, {"pp": 4, "schedule": "zb-h1"}),
    "pp2-zb-v": (2, 4, {"pp": 2, "vp": 2, "schedule": "zb-v"}),
    "tp2-pp2-zb-v-zero1": (8, 4, {"tp": 2, "pp": 2, "vp": 2, "schedule": "zb-v"}),
    "tp2-pp2-zb-h1": (4, 4, {"tp": 2, "pp": 2, "schedule": "zb-h1"}),
    "pp2-vp2": (2, 4, {"pp": 2, "vp": 2}),
    "pp4-vp2": (4, 8, {"pp": 4, "vp": 2}),
    "dp2": (2, 4, {"zero": 0}),
    "dp2-zero1": (2, 4, {"zero": 1}),
    "tp2-pp2-vp2": (4, 4, {"tp": 2, "pp": 2, "vp": 2}),
    "tp2-pp2-dp2-zero1": (8, 4, {"tp": 2, "pp": 2}),
    "tp2-pp2-vp2-dp2-zero1": (8, 4, {"tp": 2, "pp": 2, "vp": 2}),
    "pp4-uneven": (4, 6, {"pp": 4, "pipeline_layout": "1,2,3,0"}),
}


def micro_batch_size(parallel: dict[str, Any]) -> int:
    """Return 1 where micro-batches fill a pipeline; else messages, not tokens, are what a row costs."""
    return 1 if parallel.get("pp", 1) > 1 else 4 if parallel.get("tp", 1) > 1 else 2


VARIANTS: dict[str, dict[str, Any]] = {
    "qwen2-tied": {"qkv_bias": True, "tie_embeddings": True},
    "qwen3": {"qk_norm": "head", "head_dim": 8},
    "olmo2": {"qk_norm": "full", "norm_position": "post"},
    "neox": {
        "norm": "layernorm",
        "activation": "gelu",
        "qkv_bias": True,
        "o_bias": True,
        "mlp_bias": True,
        "rope_fraction": 0.5,
        "parallel_residual": True,
    },
    "geglu": {"activation": "geglu"},
}
