"""A checkpoint of Megatron-LM in the layout before Megatron Core, made by hand."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

import torch

HIDDEN, FFN, HEADS, GROUPS, HEAD, LAYERS, VOCAB = 16, 24, 4, 2, 4, 4, 32
ARGS: dict[str, Any] = {
    "num_layers": LAYERS,
    "hidden_size": HIDDEN,
    "num_attention_heads": HEADS,
    "group_query_attention": True,
    "num_query_groups": GROUPS,
    "ffn_hidden_size": FFN,
    "seq_length": 8,
    "max_position_embeddings": 8,
    "padded_vocab_size": VOCAB,
    "normalization": "RMSNorm",
    "layernorm_epsilon": 1e-5,
    "use_rotary_position_embeddings": True,
    "swiglu": True,
    "add_bias_linear": False,
    "untie_embeddings_and_output_weights": True,
    "num_experts": None,
}


def draw(*shape: int) -> torch.Tensor:
    return torch.randn(shape, dtype=torch.float32)


def write_legacy(folder: Path, args: dict[str, Any], **extra: Any) -> dict[str, torch.Tensor]:
    """A checkpoint of tp 2, pp 2, vp 2 in the layout before Megatron Core; return what megalite must make of it.

    Stage v pp + p is chunk v of pipeline rank p; a tensor-parallel rank packs its own gate rows, then its up rows.
    """
    torch.manual_seed(0)
    wanted: dict[str, torch.Tensor] = {}
    files: dict[tuple[int, int], dict[str, Any]] = {
        (t, p): {"args": argparse.Namespace(**args), "checkpoint_version": 3.0, "iteration": 3, **extra}
        for t in (0, 1)
        for p in (0, 1)
    }
    for stage in range(4):
        v, p = divmod(stage, 2)
        q, k, w = draw(HEADS * HEAD, HIDDEN), draw(GROUPS * HEAD, HIDDEN), draw(GROUPS * HEAD, HIDDEN)
        gate, up, down, proj = draw(FFN, HIDDEN), draw(FFN, HIDDEN), draw(HIDDEN, FFN), draw(HIDDEN, HEADS * HEAD)
        norms, ours = [draw(HIDDEN), draw(HIDDEN)], f"layers.{stage}."
        wanted |= {
            f"{ours}self_attn.qkv_proj.weight": torch.cat([q, k, w]),
            f"{ours}self_attn.o_proj.weight": proj,
            f"{ours}mlp.gate_up_proj.weight": torch.cat([gate, up]),
            f"{ours}mlp.down_proj.weight": down,
            f"{ours}input_layernorm.weight": norms[0],
            f"{ours}post_attention_layernorm.weight": norms[1],
        }
        ends = [draw(VOCAB, HIDDEN), draw(HIDDEN), draw(VOCAB, HIDDEN)]
        for t in (0, 1):
            # One group of two heads per rank.
            mine = [x.chunk(2)[t] for x in (q, k, w)]
            encoder = {
                "layers.0.input_norm.weight": norms[0],
                "layers.0.self_attention.query_key_value.weight": torch.cat(mine),
                "layers.0.self_attention.dense.weight": proj.chunk(2, 1)[t].clone(),
                "layers.0.post_attention_norm.weight": norms[1],
                "layers.0.mlp.dense_h_to_4h.weight": torch.cat([gate.chunk(2)[t], up.chunk(2)[t]]),
                "layers.0.mlp.dense_4h_to_h.weight": down.chunk(2, 1)[t],
            }
            model: dict[str, Any] = {"encoder": encoder}
            if stage == 0:
                model = {"embedding": {"word_embeddings": {"weight": ends[0].chunk(2)[t]}}, **model}
                wanted["embed_tokens.weight"] = ends[0]
            if stage == 3:
                encoder["final_norm.weight"] = ends[1]
                model["output_layer"] = {"weight": ends[2].chunk(2)[t]}
                wanted |= {"norm.weight": ends[1], "lm_head.weight": ends[2]}
            files[t, p][f"model{v}"] = {"language_model": model}
    for (t, p), content in files.items():
        path = folder / "iter_0000003" / f"mp_rank_{t:02d}_{p:03d}"
        path.mkdir(parents=True)
        torch.save(content, path / "model_optim_rng.pt")
    (folder / "latest_checkpointed_iteration.txt").write_text("3\n")
    return wanted
