"""The arguments that Megatron-LM saves with its checkpoints, as a `ModelConfig`."""

from __future__ import annotations

from typing import Any

from megalite.core.options.model import ModelConfig
from megalite.core.options.rope import RopeScaling
from megalite.extras.compat.megatron_defaults import family_of
from megalite.runtime.checkpoint.safetensors_io import BadCheckpoint

# Arguments that change the model and for which megalite has no option -> the only value that it supports.
_REQUIRED: dict[str, Any] = {
    "num_experts": None,
    "multi_latent_attention": False,
    "apply_residual_connection_post_layernorm": False,
    "embed_layernorm": False,
    "rotary_interleaved": False,
    "squared_relu": False,
    "quick_geglu": False,
    "glu_linear_offset": 0.0,
    "activation_func_clamp_value": None,
    "qk_l2_norm": False,
    "window_size": None,
    "softmax_type": "vanilla",
    "softmax_scale": None,
    "attention_output_gate": False,
    "no_rope_freq": None,
    "experimental_attention_variant": None,
    "linear_attention_freq": None,
    "heterogeneous_layers_config_path": None,
    "heterogeneous_layers_config_encoded_json": None,
    "hybrid_layer_pattern": None,
    "hybrid_override_pattern": None,
    "spec": None,
    "use_mup": False,
}
_POSITIONS = {"learned_absolute": "learned", "rope": "rope"}
_NORMS = {"LayerNorm": "layernorm", "RMSNorm": "rmsnorm"}


def arguments(common: dict[Any, Any], where: str) -> dict[str, Any]:
    """Return the arguments of the training, from what a checkpoint holds besides tensors."""
    args = getattr(common.get("args"), "state", None)
    if not isinstance(args, dict):
        raise BadCheckpoint(where, "holds no arguments", "use a checkpoint of Megatron-LM's pretrain_gpt.py")
    return args


class _Arguments:
    """The arguments of a training, and the errors about them."""

    def __init__(self, args: dict[str, Any], where: str) -> None:
        self.args, self.where = args, where

    def get(self, *names: str, default: Any = None) -> Any:
        """Return the first of these arguments that is set."""
        for name in names:
            if self.args.get(name) is not None:
                return self.args[name]
        if default is None:
            rule = f"has no argument {names[0]}"
            raise BadCheckpoint(self.where, rule, "use a checkpoint of Megatron-LM's pretrain_gpt.py")
        return default

    def one_of(self, name: str, default: str, known: dict[str, str]) -> str:
        """Return megalite's name for the value of an argument."""
        value = self.get(name, default=default)
        if value not in known:
            raise self.refusal(name, f"must be one of {', '.join(known)}")
        return known[value]

    def refusal(self, name: str, rule: str) -> BadCheckpoint:
        """Make the error for a value that megalite does not support."""
        given = f"{self.where}: {name} {self.args.get(name)!r:.80}"
        return BadCheckpoint(given, rule, "megalite cannot train this model")


def model_of(args: dict[str, Any], where: str) -> ModelConfig:
    """Read the model from the arguments of its training.

    The vocabulary is the padded one: Megatron-LM computes the loss over it.

    Raises:
        BadCheckpoint: an argument is missing, or has a value that megalite does not support.
    """
    theirs = _Arguments(args, where)
    for name, required in _REQUIRED.items():
        if (args.get(name, required) or None) != (required or None):
            raise theirs.refusal(name, f"is not supported: megalite computes {required!r}")
    if modules := args.get("mtp_num_layers"):
        rule, remedy = "modules of Megatron checkpoints are not imported", "convert one of a model without them"
        raise BadCheckpoint(f"{where}: mtp_num_layers {modules!r:.80}", rule, remedy)
    rotary = args.get("use_rotary_position_embeddings")
    position = "rope" if rotary else theirs.one_of("position_embedding_type", "learned_absolute", _POSITIONS)
    norm = theirs.one_of("normalization", "LayerNorm", _NORMS)
    if norm == "layernorm" and args.get("qk_layernorm"):
        raise theirs.refusal("qk_layernorm", "with LayerNorm is not supported: megalite has RMSNorm there")
    bias = bool(args.get("add_bias_linear", not args.get("disable_bias_linear", False)))
    options = {
        **_sizes(theirs),
        "norm": norm,
        "zero_centered_norm": bool(args.get("apply_layernorm_1p")),
        "position": position,
        "activation": _activation(args, bias),
        "qkv_bias": bias or bool(args.get("add_qkv_bias")),
        "o_bias": bias,
        "mlp_bias": bias,
        "qk_norm": "head" if args.get("qk_layernorm") else "none",
        "tie_embeddings": not args.get("untie_embeddings_and_output_weights", False),
        **(_rope(args) if position == "rope" else {}),
    }
    try:
        return ModelConfig(arch=family_of(options), **options)
    except TypeError as e:
        raise BadCheckpoint(where, f"has an argument of the wrong type ({e})") from None


def _sizes(theirs: _Arguments) -> dict[str, Any]:
    """Read the sizes and the plain numbers."""
    get, heads = theirs.get, theirs.get("num_attention_heads")
    return {
        "num_layers": get("num_layers", "encoder_num_layers"),
        "hidden_size": get("hidden_size"),
        "num_heads": heads,
        "num_kv_heads": get("num_query_groups", default=heads) if theirs.args.get("group_query_attention") else heads,
        "head_dim": get("kv_channels", default=get("hidden_size") // heads),
        "ffn_hidden_size": get("ffn_hidden_size", default=4 * get("hidden_size")),
        "vocab_size": get("padded_vocab_size"),
        "seq_len": get("seq_length", "encoder_seq_length"),
        "max_position_embeddings": get("max_position_embeddings", default=get("seq_length")),
        "norm_eps": get("norm_epsilon", "layernorm_epsilon", default=1e-5),
        "init_std": get("init_method_std", default=0.02),
        "hidden_dropout": get("hidden_dropout", default=0.0),
        "attention_dropout": get("attention_dropout", default=0.0),
    }


def _activation(args: dict[str, Any], bias: bool) -> str:
    """Name the activation; its fusion with the bias is the tanh approximation of GELU."""
    if args.get("swiglu"):
        return "swiglu"
    tanh = args.get("openai_gelu") or (bias and args.get("bias_gelu_fusion", True))
    return "gelu_tanh" if tanh else "gelu"


def _rope(args: dict[str, Any]) -> dict[str, Any]:
    """Read the rotary options."""
    options: dict[str, Any] = {
        "rope_theta": float(args.get("rotary_base") or 10000),
        "rope_fraction": float(args.get("rotary_percent") or 1.0),
        "rope_linear_factor": float(args.get("rotary_seq_len_interpolation_factor") or 1.0),
    }
    if args.get("use_rope_scaling"):
        options["rope_scaling"] = RopeScaling(factor=float(args.get("rope_scaling_factor") or 8.0))
    return options
