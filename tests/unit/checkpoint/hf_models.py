"""Tiny Hugging Face models with random weights everywhere, norms and biases included. Needs transformers."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file

from megalite.core.parts.families import FAMILIES

SIZES: dict[str, Any] = {
    "vocab_size": 90,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "max_position_embeddings": 32,
    "initializer_range": 0.1,
}
GROUPED = {**SIZES, "num_key_value_heads": 2}
EXPERTS: dict[str, Any] = {**GROUPED, "num_experts": 8, "num_experts_per_tok": 3, "pad_token_id": None}
LLAMA3_ROPE = {
    "rope_type": "llama3",
    "rope_theta": 10000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 16,
}
YARN_ROPE = {
    "rope_type": "yarn",
    "rope_theta": 10000.0,
    "factor": 8.0,
    "original_max_position_embeddings": 16,
}
LINEAR_ROPE = {"rope_type": "linear", "rope_theta": 1e5, "factor": 4.0}
LOCAL_ROPE = {"rope_type": "default", "rope_theta": 200.0}
LATENTS: dict[str, Any] = {
    **SIZES,
    "num_key_value_heads": 4,
    "kv_lora_rank": 20,
    "q_lora_rank": None,
    "qk_nope_head_dim": 6,
    "qk_rope_head_dim": 4,
    "v_head_dim": 7,
    "first_k_dense_replace": 1,
    "n_routed_experts": 8,
    "n_shared_experts": 2,
    "num_experts_per_tok": 3,
    "moe_intermediate_size": 20,
}
GROUPS: dict[str, Any] = {"q_lora_rank": 12, "n_group": 4, "topk_group": 2, "routed_scaling_factor": 1.7}
STRETCHED = {**YARN_ROPE, "mscale": 0.7, "mscale_all_dim": 0.9}
_LONG: dict[str, Any] = {k: v for k, v in SIZES.items() if k not in ("intermediate_size", "initializer_range")}
_BLOOM: dict[str, Any] = {"vocab_size": 90, "hidden_size": 32, "n_layer": 2, "n_head": 4, "initializer_range": 0.1}
_NEO: dict[str, Any] = {k: v for k, v in _LONG.items() if not k.startswith("num_")}
_NEO |= {"num_layers": 4, "num_heads": 4, "window_size": 5, "attention_types": [[["global", "local"], 2]]}
_NEO |= {"initializer_range": 0.2}
_GPTJ: dict[str, Any] = {"vocab_size": 90, "n_embd": 40, "n_layer": 2, "n_head": 4, "n_positions": 32}
_GPTJ |= {"initializer_range": 0.1}
# Name of the case -> (model_type, options); the head may be tied, biased, scaled, odd.
_CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("llama", {**GROUPED, "rope_parameters": {"rope_type": "default", "rope_theta": 500.0}}),
    "llama3_tied_biased": (
        "llama",
        {**GROUPED, "tie_word_embeddings": True, "attention_bias": True, "mlp_bias": True}
        | {"rope_parameters": LLAMA3_ROPE},
    ),
    "qwen2": ("qwen2", {**GROUPED, "tie_word_embeddings": True}),
    "qwen3": ("qwen3", {**GROUPED, "head_dim": 12}),
    "gpt2": (
        "gpt2",
        {"vocab_size": 90, "n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 32, "initializer_range": 0.1},
    ),
    "opt": ("opt", {**_LONG, "ffn_dim": 48, "init_std": 0.1, "pad_token_id": None}),
    "opt_unbiased": ("opt", {**_LONG, "ffn_dim": 40, "enable_bias": False, "tie_word_embeddings": False}),
    # Norms of sums, and embeddings that are projected.
    "opt_350m": (
        "opt",
        {**_LONG, "ffn_dim": 48, "init_std": 0.1, "pad_token_id": None}
        | {"do_layer_norm_before": False, "word_embed_proj_dim": 12},
    ),
    "gpt_neo": ("gpt_neo", _NEO),
    "gpt_neo_types": (
        "gpt_neo",
        {**_NEO, "num_layers": 3, "attention_types": [[["local", "local", "global"], 1]], "intermediate_size": 40},
    ),
    # 6 of 10 dimensions of a head are rotated.
    "gptj": ("gptj", {**_GPTJ, "rotary_dim": 6}),
    "gptj_whole": ("gptj", {**_GPTJ, "rotary_dim": 10, "n_inner": 48}),
    # Slopes of 4 heads, and of 6, which are those of 4 and two of those of 8.
    "bloom": ("bloom", _BLOOM),
    "bloom_6_heads": ("bloom", {**_BLOOM, "hidden_size": 48, "n_head": 6, "tie_word_embeddings": False}),
    "gpt_neox": ("gpt_neox", {**SIZES, "rope_parameters": {"rope_theta": 300.0, "partial_rotary_factor": 0.25}}),
    "gpt_neox_serial": ("gpt_neox", {**SIZES, "use_parallel_residual": False}),
    # The window is shorter than the sequence; tp and pp cut between windowed layers and others.
    "gemma2": (
        "gemma2",
        {**GROUPED, "head_dim": 12, "num_hidden_layers": 4, "query_pre_attn_scalar": 20, "sliding_window": 5}
        | {"attn_logit_softcapping": 2.0, "final_logit_softcapping": 1.5},
    ),
    "gemma3": (
        "gemma3_text",
        {**GROUPED, "head_dim": 12, "num_hidden_layers": 4, "query_pre_attn_scalar": 20, "sliding_window": 5}
        | {"rope_parameters": {"full_attention": LINEAR_ROPE, "sliding_attention": LOCAL_ROPE}}
        | {"sliding_window_pattern": 3},
    ),
    "llama_yarn": ("llama", {**GROUPED, "rope_parameters": YARN_ROPE}),
    "qwen3_yarn": ("qwen3", {**GROUPED, "head_dim": 16, "rope_parameters": {**YARN_ROPE, "attention_factor": 0.8}}),
    "gpt_neox_yarn": (
        "gpt_neox",
        {**SIZES, "hidden_size": 64, "rope_parameters": {**YARN_ROPE, "partial_rotary_factor": 0.5, "truncate": False}},
    ),
    "gemma3_yarn": (
        "gemma3_text",
        {**GROUPED, "head_dim": 12, "num_hidden_layers": 4, "query_pre_attn_scalar": 20, "sliding_window": 5}
        | {
            "rope_parameters": {
                "full_attention": {**YARN_ROPE, "attention_factor": 1.0},
                "sliding_attention": LOCAL_ROPE,
            }
        }
        | {"sliding_window_pattern": 3},
    ),
    "gemma3_layer_types": (
        "gemma3_text",
        {**GROUPED, "head_dim": 12, "num_hidden_layers": 4, "sliding_window": 5}
        | {"layer_types": ["full_attention", "sliding_attention", "sliding_attention", "full_attention"]},
    ),
    "gemma3_capped": ("gemma3_text", {**GROUPED, "sliding_window": 64, "final_logit_softcapping": 1.5}),
    "phi3": ("phi3", {**GROUPED, "pad_token_id": 0}),
    "mixtral": ("mixtral", {**GROUPED, "num_local_experts": 4, "num_experts_per_tok": 2}),
    "olmoe": ("olmoe", EXPERTS),
    "qwen2_moe": (
        "qwen2_moe",
        {**EXPERTS, "num_hidden_layers": 4, "moe_intermediate_size": 20, "shared_expert_intermediate_size": 28}
        | {"mlp_only_layers": [2]},
    ),
    "qwen3_moe": (
        "qwen3_moe",
        {**EXPERTS, "head_dim": 12, "num_hidden_layers": 4, "moe_intermediate_size": 20, "decoder_sparse_step": 2}
        | {"norm_topk_prob": True},
    ),
    # A large epsilon: where query and key are nearly orthogonal, a norm magnifies the roundings of values near 0.
    "qwen3_next": (
        "qwen3_next",
        {**EXPERTS, "num_hidden_layers": 4, "head_dim": 16, "moe_intermediate_size": 20, "initializer_range": 0.1}
        | {"shared_expert_intermediate_size": 28, "full_attention_interval": 2, "linear_conv_kernel_dim": 3}
        | {"linear_num_key_heads": 4, "linear_num_value_heads": 8, "linear_key_head_dim": 6, "rms_norm_eps": 0.1}
        | {"linear_value_head_dim": 10, "rope_parameters": {"rope_theta": 300.0, "partial_rotary_factor": 0.5}},
    ),
    "deepseek_v2": (
        "deepseek_v2",
        {**LATENTS, **GROUPS, "num_hidden_layers": 4, "topk_method": "group_limited_greedy", "attention_bias": True},
    ),
    "deepseek_v2_lite": ("deepseek_v2", {**LATENTS, "rope_parameters": STRETCHED}),
    "deepseek_v3": (
        "deepseek_v3",
        {**LATENTS, **GROUPS, "num_hidden_layers": 3, "rope_parameters": STRETCHED},
    ),
    "glm4_moe": (
        "glm4_moe",
        {**LATENTS, **GROUPED, "num_hidden_layers": 3, "head_dim": 8, "attention_bias": True, "use_qk_norm": True}
        | {"routed_scaling_factor": 2.5, "pad_token_id": None},
    ),
    "gpt_oss": (
        "gpt_oss",
        {**GROUPED, "num_hidden_layers": 4, "head_dim": 8, "num_local_experts": 8, "num_experts_per_tok": 3}
        | {"sliding_window": 5, "rope_parameters": {**YARN_ROPE, "truncate": False}, "pad_token_id": None},
    ),
    "llama4": (
        "llama4_text",
        {**GROUPED, "num_hidden_layers": 4, "head_dim": 8, "num_local_experts": 8, "intermediate_size_mlp": 40}
        | {
            "interleave_moe_layer_step": 2,
            "no_rope_layer_interval": 3,
            "attention_chunk_size": 5,
            "initializer_range": 0.2,
        }
        | {"floor_scale": 4, "attn_scale": 0.5, "rope_parameters": {**LLAMA3_ROPE, "high_freq_factor": 1.0}},
    ),
    "llama4_maverick": (
        "llama4_text",
        {**GROUPED, "num_hidden_layers": 4, "head_dim": 8, "num_local_experts": 8, "intermediate_size_mlp": 40}
        | {"moe_layers": [1, 2], "use_qk_norm": False, "attention_bias": True, "no_rope_layer_interval": 8},
    ),
    "kimi_k2": ("deepseek_v3", {**LATENTS, "n_group": 1, "topk_group": 1, "norm_topk_prob": False}),
}
# Sizes that are multiples of 32, for MXFP4.
_WIDE = {"gpt_oss_wide": ("gpt_oss", {**_CASES["gpt_oss"][1], "num_hidden_layers": 1, "intermediate_size": 96})}
# A family without a case of its own is tested with Llama's keys.
CASES = _CASES | {name: (name, GROUPED) for name in FAMILIES if name not in {family for family, _ in _CASES.values()}}


def make_model(case: str, folder: Path, dtype: torch.dtype = torch.float32, **save: Any) -> Any:
    """Build, randomise, save; the model in evaluation mode."""
    import transformers
    from transformers import AutoConfig, AutoModelForCausalLM

    model_type, options = (CASES | _WIDE)[case]
    if transformers.__version__.startswith("4."):
        options = _old_keys(options)
    config = AutoConfig.for_model(model_type, **options)
    torch.manual_seed(3)
    # Eager: the one implementation that has every part of every model.
    model = AutoModelForCausalLM.from_config(config, attn_implementation="eager").to(dtype)
    with torch.no_grad():
        for name, p in model.named_parameters():
            if p.dim() == 1 or name.endswith("_bias"):
                p.normal_(1.0 if "norm" in name or "ln_" in name else 0.0, 0.2)
            elif "conv1d" in name:  # a feature has few weights: with as little as others have, an epsilon would decide
                p.normal_(0.0, 0.5)
        for name, bias in model.named_buffers():
            if name.endswith("e_score_correction_bias"):
                bias.normal_(0.0, 0.1)
    model.save_pretrained(folder, **save)
    return model.eval()


def _old_keys(options: dict[str, Any]) -> dict[str, Any]:
    """Rotary options as transformers 4 takes them."""
    old = {k: v for k, v in options.items() if k != "rope_parameters"}
    rope = dict(options.get("rope_parameters", {}))
    if "sliding_attention" in rope:
        old["rope_local_base_freq"] = rope["sliding_attention"]["rope_theta"]
        rope = dict(rope["full_attention"])
    if "partial_rotary_factor" in rope:
        return old | {"rotary_emb_base": rope["rope_theta"], "rotary_pct": rope["partial_rotary_factor"]}
    if rope:
        old["rope_theta"] = rope.pop("rope_theta")
        old["rope_scaling"] = None if rope["rope_type"] == "default" else rope
    return old


def gradients(model: Any, folder: Path) -> dict[str, torch.Tensor]:
    """Gradients under the names and in the shapes of the file, as transformers itself writes weights."""
    with torch.no_grad():
        for p in model.parameters():
            p.copy_(p.grad)
    model.save_pretrained(folder)
    return load_file(folder / "model.safetensors")


def tokens() -> torch.Tensor:
    """Fixed ids [2, 16]."""
    return torch.arange(32).view(2, 16) * 7 % 90


def load_model(folder: Path) -> Any:
    """A folder as `from_pretrained` loads it, in fp32 and evaluation mode, nothing missing and nothing left over."""
    from transformers import AutoModelForCausalLM

    loaded: Any = AutoModelForCausalLM.from_pretrained(
        folder, dtype=torch.float32, output_loading_info=True, attn_implementation="eager"
    )
    model, info = loaded
    assert not info["missing_keys"], info
    assert not info["unexpected_keys"], info
    assert not info["mismatched_keys"], info
    return model.eval()


def logits_of(folder: Path) -> torch.Tensor:
    """fp32 logits of a folder."""
    with torch.no_grad():
        return load_model(folder)(tokens()).logits


def read_all(folder: Path) -> dict[str, torch.Tensor]:
    """Every tensor of a folder."""
    out: dict[str, torch.Tensor] = {}
    for path in sorted(folder.glob("*.safetensors")):
        out.update(load_file(path))
    return out
