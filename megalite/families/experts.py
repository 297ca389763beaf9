"""The names and keys that families with experts share."""

from typing import Any

from megalite.families.common import Packing, rows
from megalite.families.llama import LLAMA_DEFAULTS

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


def dense_layers(options: dict[str, Any], step: int | None) -> tuple[int, ...]:
    """List the layers without experts: those that are named in the options, and all but every `step`-th."""
    layers = min(options["num_layers"] or 0, _MAX_LAYERS) if step and step > 1 else 0
    between = {layer for layer in range(layers) if (layer + 1) % (step or 1)}
    return tuple(sorted({*(options["moe_dense_layers"] or ()), *between}))
