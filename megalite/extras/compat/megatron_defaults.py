"""What Megatron-LM takes for options that a command in its words leaves out (`megatron/training/arguments.py`)."""

from __future__ import annotations

import dataclasses
from collections.abc import Collection, Mapping
from typing import Any

from megalite.core.base.errors import require
from megalite.core.base.log import logger
from megalite.core.options.model import ModelConfig
from megalite.core.options.names import dashed
from megalite.extras.compat.megatron import RENAMED
from megalite.extras.compat.tool_file import data_ranks
from megalite.runtime.options.fields import GROUPS, TYPES, Layer, OptionValue

_SIZES = {"num_heads", "num_kv_heads", "head_dim", "seq_len", "qk_nope_head_dim", "qk_rope_head_dim"}
_SIZES |= {"moe_ffn_size", "moe_shared_ffn_size"}
SIZE_FLAGS = frozenset(f"--{flag}" for flag, ours in RENAMED.items() if ours in _SIZES)
"""Their spelling of a size: a command with one of them is in Megatron-LM's words."""

TRAINED: dict[str, Any] = {
    "position": "learned",
    "norm": "layernorm",
    "activation": "gelu_tanh",
    "qkv_bias": True,
    "o_bias": True,
    "mlp_bias": True,
    "tie_embeddings": True,
    "hidden_dropout": 0.1,
    "attention_dropout": 0.1,
    "lr_decay": "linear",
    "weight_decay": 0.01,
    "beta2": 0.999,
    "split": "969,30,1",
}
"""Our option -> their default, where it differs and changes what is trained. GELU is fused with the bias: tanh's."""

KEPT: dict[str, Any] = {
    "sequence_parallel": False,
    "zero": 0,
    "overlap_grad_reduce": False,
    "overlap_param_gather": False,
    "eval_every": 1000,
    "eval_steps": 100,
    "log_every": 100,
}
"""Our option -> their default, where it differs and changes nothing of what is trained: ours holds."""


def defaults(flags: Layer, computed: Collection[str], given: Layer, world: int) -> Layer:
    """Return Megatron-LM's defaults for a command in its words that names no family, and log them; else nothing.

    Args:
        flags: options of the command line.
        computed: flags of the command line from which options are computed.
        given: options that any source gives.
        world: number of ranks; 0: the layout is not known.
    """
    words = [option.source for option in flags.values() if option.source in SIZE_FLAGS]
    if not words or {"arch", "init_from_hf"} & given.keys():
        return {}
    model = {f.name: f.default for f in dataclasses.fields(ModelConfig)}
    options = {**TRAINED, **_swiglu_width(given), **one_pass(computed, given, world)}
    if "qk-layernorm" in computed:
        model["qk_norm"] = "head"
    if "valid_data" in given:
        del options["split"]
    _check_groups({**model, **{name: option.value for name, option in given.items()}})
    if "mlp_bias" in given and not given["mlp_bias"].value:
        options["activation"] = "gelu"  # without a bias there is no fusion with it
    optimizer = given["optimizer"].value if "optimizer" in given else ""
    if optimizer == "lion":
        del options["beta2"]
    if optimizer == "muon":
        options["muon_momentum"] = 0.9
    options["arch"] = family_of({**model, **options, **{name: option.value for name, option in given.items()}})
    taken = " ".join(as_flag(name, value) for name, value in options.items() if name not in given)
    ours = {f.name: f.default for cls in GROUPS.values() for f in dataclasses.fields(cls)}
    kept = [
        f"{as_flag(name, ours[name])} (there {theirs if TYPES[name] is not bool else 'off'})"
        for name, theirs in KEPT.items()
        if name not in given
    ]
    differs = f"; not as there, and without effect on the weights: {', '.join(kept)}" if kept else ""
    logger.info(f"{words[0]} without --arch or --preset: as in Megatron-LM, {taken}{differs}")
    written = f"Megatron-LM's default (for {words[0]} without --arch)"
    model.pop("qk_norm")  # which the computed flag sets
    return {name: OptionValue(value, written) for name, value in {**model, **options}.items()}


def one_pass(computed: Collection[str], given: Layer, world: int) -> dict[str, int]:
    """Return the batch of a command that gives none: one pass per step, as in Megatron-LM and the Trainer."""
    batches = {"gradient-accumulation-steps", "rampup-batch-size", "step-batch-size-schedule"}
    if not world or batches & {*computed} or {"global_batch_size", "batch_size_schedule"} & given.keys():
        return {}

    def value(name: str) -> int:
        return int(given[name].value) if name in given else 1

    return {"global_batch_size": value("micro_batch_size") * data_ranks(value, world)}


def family_of(options: Mapping[str, Any]) -> str:
    """Return the family whose files in Hugging Face's format can hold a dense model of Megatron-LM's."""
    if options["position"] == "learned":
        return "gpt2"
    if options["norm"] == "layernorm":
        return "gpt_neox"
    if options["qk_norm"] == "head":
        return "qwen3"
    return "qwen2" if options["qkv_bias"] and not options["o_bias"] else "llama"


def _check_groups(options: Mapping[str, Any]) -> None:
    """Refuse groups of experts whose score is another one there: the sum of the best topk / group-topk."""
    topk, best, groups = (options[f"moe_{name}"] for name in ("topk", "router_group_topk", "router_num_groups"))
    ours, theirs = 2 if options["moe_router_score_function"] == "sigmoid" else 1, topk // max(best, 1)
    require(
        groups == 1 or best < 1 or theirs == ours,
        f"--moe-router-topk {topk} with --moe-router-group-topk {best}",
        f"groups are chosen by their best {theirs} there, and by their best {ours} here",
        f"give --moe-router-topk {ours * best}, or name the model with --arch or --preset",
    )


def _swiglu_width(given: Layer) -> dict[str, int]:
    """Return the inner width that --swiglu has there: rounded down to a multiple of 64, here up."""
    hidden = given["hidden_size"].value if "hidden_size" in given else ModelConfig.hidden_size
    width = int(4 * hidden * 2 / 3 / 64) * 64
    is_gated = "activation" in given and given["activation"].value == "swiglu"
    return {"ffn_hidden_size": width} if is_gated and width > 0 else {}


def as_flag(name: str, value: Any) -> str:
    """Write an option as a flag."""
    return f"--{'no-' * (not value)}{dashed(name)}" if TYPES[name] is bool else f"--{dashed(name)} {value}"
