"""The names and keys that families with experts share."""

from typing import Any

from megalite.core.parts.families.common import Packing, rows
from megalite.core.parts.families.llama import LLAMA_DEFAULTS, LLAMA_FIELDS

# Files are not trusted: more layers are refused, but only once they are listed.
_MAX_LAYERS = 10_001

EXPERT_FIELDS: tuple[tuple[str, str], ...] = (("num_experts_per_tok", "moe_topk"),)
EXPERT_TENSORS: dict[str, Packing] = {
    "layers.{}.mlp.router.weight": rows("model.layers.{}.mlp.gate.weight"),
    "layers.{}.mlp.experts.gate_up_proj.weight": rows(
        "model.layers.{}.mlp.experts.{{}}.gate_proj.weight", "model.layers.{}.mlp.experts.{{}}.up_proj.weight"
    ),
    "layers.{}.mlp.experts.down_proj.weight": rows("model.layers.{}.mlp.experts.{{}}.down_proj.weight"),
}
# Qwen's: experts have a width of their own, and some layers may be dense.
SPARSE_FIELDS: tuple[tuple[str, str], ...] = (
    *LLAMA_FIELDS,
    *EXPERT_FIELDS,
    ("num_experts", "num_experts"),
    ("moe_intermediate_size", "moe_ffn_size"),
    ("norm_topk_prob", "moe_renormalize"),
    ("mlp_only_layers", "moe_dense_layers"),
)
SPARSE_DEFAULTS: dict[str, Any] = {
    **LLAMA_DEFAULTS,
    "norm_topk_prob": False,
    "mlp_only_layers": [],
    "decoder_sparse_step": 1,
    "use_sliding_window": False,
}


def read_sparse(values: dict[str, Any], options: dict[str, Any]) -> dict[str, Any]:
    """Read Qwen's layers without experts: those that are named, and all but every `decoder_sparse_step`-th."""
    step = values["decoder_sparse_step"]
    layers = min(options["num_layers"] or 0, _MAX_LAYERS) if step and step > 1 else 0
    between = {layer for layer in range(layers) if (layer + 1) % (step or 1)}
    return {"moe_dense_layers": tuple(sorted({*(options["moe_dense_layers"] or ()), *between}))}


SPARSE: dict[str, Any] = {
    "constants": {"use_sliding_window": False},
    "derived": {"decoder_sparse_step": int},
    "read": read_sparse,
}


# Modules that predict further tokens follow the layers.
MTP_FIELDS: tuple[tuple[str, str], ...] = (("num_nextn_predict_layers", "mtp_num_layers"),)
MTP_TENSORS: dict[str, Packing] = {
    "layers.{}.norm.weight": rows("model.layers.{}.shared_head.norm.weight"),
    **{
        f"layers.{{}}.{name}.weight": rows(f"model.layers.{{}}.{name}.weight") for name in ("enorm", "hnorm", "eh_proj")
    },
}
MTP_COPIES = {
    "model.layers.{}.embed_tokens.weight": "embed_tokens.weight",
    "model.layers.{}.shared_head.head.weight": "lm_head.weight",
}

# DeepSeek's: dense layers first, shared experts of the width of the others, groups.
FIRST_DENSE: dict[str, type] = {
    "first_k_dense_replace": int,
    "n_shared_experts": int,
    "n_group": int,
    "topk_group": int,
}
SHARED_TENSORS: dict[str, Packing] = {
    "layers.{}.mlp.shared_expert.gate_up_proj.weight": rows(
        "model.layers.{}.mlp.shared_experts.gate_proj.weight", "model.layers.{}.mlp.shared_experts.up_proj.weight"
    ),
    "layers.{}.mlp.shared_expert.down_proj.weight": rows("model.layers.{}.mlp.shared_experts.down_proj.weight"),
}


def read_first_dense(values: dict[str, Any], options: dict[str, Any]) -> dict[str, Any]:
    """Read DeepSeek's layers of experts."""
    layers = min(values["first_k_dense_replace"] or 0, options["num_layers"] or 0, _MAX_LAYERS)
    return {
        "moe_dense_layers": tuple(range(layers)),
        "moe_shared_ffn_size": (values["n_shared_experts"] or 0) * (options["moe_ffn_size"] or 0),
        "moe_router_num_groups": values["n_group"] or 1,
        "moe_router_group_topk": values["topk_group"] or 1,
    }


def write_first_dense(cfg: Any) -> dict[str, Any]:
    """Write what `read_first_dense` reads."""
    return {
        "first_k_dense_replace": len(cfg.moe_dense_layers),
        "n_shared_experts": cfg.moe_shared_ffn_size // cfg.moe_ffn_size,
        "n_group": cfg.moe_router_num_groups,
        "topk_group": cfg.moe_router_group_topk,
    }
