"""Shapes of published models (`--preset`): data only. Values are those of the models' own configurations.

Each holds the family and what differs from `megalite.config.model.ARCHS[arch]`; the rest is defaults of `ModelConfig`.
`seq_len` is the length of (most of) its training; dropout, where a model was trained with it, is left at 0.
"""

from __future__ import annotations

from typing import Any


def _preset(arch: str, layers: int, hidden: int, heads: int, vocab: int, seq_len: int, **more: Any) -> dict[str, Any]:
    sizes = {"num_layers": layers, "hidden_size": hidden, "num_heads": heads, "vocab_size": vocab, "seq_len": seq_len}
    return {"arch": arch, **sizes, **more}


def _llama3(factor: float) -> dict[str, Any]:
    """Context extension of Llama 3.1 and 3.2: 8,192 positions stretched to 131,072."""
    scaling = {"factor": factor, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
    return {"max_position_embeddings": 131072, "rope_scaling": scaling | {"original_max_position_embeddings": 8192}}


_LLAMA3: dict[str, Any] = {"num_kv_heads": 8, "ffn_hidden_size": 14336, "rope_theta": 5e5}

PRESETS: dict[str, dict[str, Any]] = {
    "tiny": _preset("llama", 4, 128, 4, 512, 128, num_kv_heads=2),
    # Radford et al. 2019, table 2 (sizes as of the released weights)
    "gpt2-124m": _preset("gpt2", 12, 768, 12, 50257, 1024),
    "gpt2-350m": _preset("gpt2", 24, 1024, 16, 50257, 1024),
    "gpt2-774m": _preset("gpt2", 36, 1280, 20, 50257, 1024),
    "gpt2-1.5b": _preset("gpt2", 48, 1600, 25, 50257, 1024),
    # Brown et al. 2020, table 2.1 (all layers dense here; the paper alternates dense and sparse attention)
    "gpt3-175b": _preset("gpt2", 96, 12288, 96, 50257, 2048),
    # Black et al. 2022, table 1 and EleutherAI/gpt-neox-20b; Biderman et al. 2023 and EleutherAI/pythia-160m
    "gpt-neox-20b": _preset("gpt_neox", 44, 6144, 64, 50432, 2048, activation="gelu_tanh"),
    "pythia-160m": _preset("gpt_neox", 12, 768, 12, 50304, 2048),
    # Touvron et al. 2023 and meta-llama/Llama-2-*
    "llama-2-7b": _preset("llama", 32, 4096, 32, 32000, 4096, ffn_hidden_size=11008),
    "llama-2-13b": _preset("llama", 40, 5120, 40, 32000, 4096, ffn_hidden_size=13824),
    "llama-2-70b": _preset("llama", 80, 8192, 64, 32000, 4096, ffn_hidden_size=28672, num_kv_heads=8),
    # Grattafiori et al. 2024, table 3, and meta-llama/Meta-Llama-3-*, Llama-3.1-*, Llama-3.2-*
    "llama-3-8b": _preset("llama", 32, 4096, 32, 128256, 8192, **_LLAMA3),
    "llama-3-70b": _preset("llama", 80, 8192, 64, 128256, 8192, **(_LLAMA3 | {"ffn_hidden_size": 28672})),
    "llama-3.1-8b": _preset("llama", 32, 4096, 32, 128256, 8192, **_LLAMA3, **_llama3(8.0)),
    "llama-3.2-1b": _preset(
        "llama",
        16,
        2048,
        32,
        128256,
        8192,
        **(_LLAMA3 | {"ffn_hidden_size": 8192}),
        **_llama3(32.0),
        tie_embeddings=True,
    ),
    # mistralai/Mistral-7B-v0.1, with full attention: at 4,096 tokens its sliding window of 4,096 masks nothing
    "mistral-7b": _preset("mistral", 32, 4096, 32, 32000, 4096, ffn_hidden_size=14336, num_kv_heads=8),
    # Qwen/Qwen2.5-*, Qwen/Qwen3-*
    "qwen2.5-0.5b": _preset(
        "qwen2", 24, 896, 14, 151936, 4096, ffn_hidden_size=4864, num_kv_heads=2, tie_embeddings=True
    ),
    "qwen2.5-7b": _preset("qwen2", 28, 3584, 28, 152064, 4096, ffn_hidden_size=18944, num_kv_heads=4),
    "qwen3-0.6b": _preset(
        "qwen3", 28, 1024, 16, 151936, 4096, ffn_hidden_size=3072, num_kv_heads=8, head_dim=128, tie_embeddings=True
    ),
    "qwen3-8b": _preset("qwen3", 36, 4096, 32, 151936, 4096, ffn_hidden_size=12288, num_kv_heads=8, head_dim=128),
}
"""Name -> options of `ModelConfig`."""
