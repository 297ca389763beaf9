"""Translation of the flags of Megatron-LM and Megatron-DeepSpeed.

A flag is renamed, sets some of our options, is computed from other options, or is refused (see
`megalite.extras.compat.refusals`). None is ignored silently. docs/megatron.md prints these tables. Underscores in flags
count as dashes.
"""

from __future__ import annotations

import ast
import dataclasses
from collections.abc import Callable, Mapping
from fractions import Fraction
from pathlib import Path
from typing import Any

from megalite.core.base.errors import UserError
from megalite.core.base.log import logger
from megalite.core.options.batch_sizes import BatchSizes
from megalite.core.options.shape import MAX_LAYERS
from megalite.runtime.options.dialect import ComputedOption

_UNITS = {"K": 10**3, "M": 10**6, "B": 10**9, "T": 10**12}
# Far more than any ramp has.
_MAX_INCREMENTS = 10_000

_SPELLINGS: dict[str, str] = {
    # layout
    "tp": "tensor-model-parallel-size model-parallel-size",
    "pp": "pipeline-model-parallel-size",
    "vp": "num-virtual-stages-per-pipeline-rank",
    "cp": "context-parallel-size",
    "cp_comm": "cp-comm-type",
    "ep": "expert-model-parallel-size",
    "pipeline_layout": "pipeline-model-parallel-layout",
    "zero": "zero-stage data-parallel-sharding-strategy",
    "device": "distributed-backend",
    "bucket_size": "ddp-bucket-size",
    "vocab_divisible_by": "make-vocab-size-divisible-by",
    # model
    "num_heads": "num-attention-heads",
    "num_kv_heads": "num-query-groups num-key-value-heads",
    "head_dim": "kv-channels",
    "seq_len": "seq-length encoder-seq-length",
    "norm": "normalization",
    "norm_eps": "norm-epsilon layernorm-epsilon",
    "position": "position-embedding-type",
    "rope_theta": "rotary-base rotary-position-embeddings-theta",
    "rope_fraction": "rotary-percent",
    "rope_linear_factor": "rotary-seq-len-interpolation-factor",
    "window_pattern": "window-attn-skip-freq",
    "qk_nope_head_dim": "qk-head-dim",
    "qk_rope_head_dim": "qk-pos-emb-head-dim",
    "init_std": "init-method-std",
    "moe_topk": "moe-router-topk",
    "moe_ffn_size": "moe-ffn-hidden-size",
    "moe_shared_ffn_size": "moe-shared-expert-intermediate-size",
    "moe_dispatch": "moe-token-dispatcher-type",
    # data
    "data": "data-path train-data-path",
    "valid_data": "valid-data-path",
    "tokenizer": "tokenizer-model tokenizer-name-or-path",
    # batch, time, memory
    "micro_batch_size": "batch-size",
    "train_steps": "train-iters",
    "recompute": "recompute-granularity",
    # optimizer
    "lr_decay": "lr-decay-style",
    "lr_decay_steps": "lr-decay-iters",
    "wsd_decay_steps": "lr-wsd-decay-iters",
    "warmup_steps": "lr-warmup-iters",
    "init_lr": "lr-warmup-init",
    "weight_decay": "end-weight-decay",
    "weight_decay_ramp": "weight-decay-incr-style",
    "beta2": "adam-beta2",
    "eps": "adam-eps",
    "muon_ns_steps": "muon-num-ns-steps",
    # run
    "run_dir": "save",
    "save_every": "save-interval persistent-save-interval",
    "eval_every": "eval-interval",
    "eval_steps": "eval-iters",
    "log_every": "log-interval",
    "max_minutes": "exit-duration-in-mins",
}

RENAMED: dict[str, str] = {flag: ours for ours, flags in _SPELLINGS.items() for flag in flags.split()}
"""Their flag -> our option; values are unchanged except for `VALUES`."""

VALUES: dict[str, dict[str, str]] = {
    "norm": {"RMSNorm": "rmsnorm", "LayerNorm": "layernorm"},
    "position": {"learned_absolute": "learned"},
    "lr_decay": {"WSD": "wsd"},
    "optimizer": {"adam": "adamw", "dist_muon": "muon"},
    "device": {"nccl": "cuda", "gloo": "cpu"},
    "moe_dispatch": {"flex": "alltoall"},
    "cp_comm": {"p2p": "ring", "all_gather": "gather", "a2a+p2p": "a2a+ring"},
    "zero": {"no_shard": "0", "optim": "1", "optim_grads": "2", "optim_grads_params": "3"},
}
"""Our option -> {their spelling of a value: ours}."""

SWITCHES: dict[str, dict[str, Any]] = {
    "bf16": {"precision": "bf16"},
    "fp16": {"precision": "fp16"},
    "swiglu": {"activation": "swiglu"},
    "openai-gelu": {"activation": "gelu_tanh"},
    "use-rotary-position-embeddings": {"position": "rope"},
    "use-alibi-position-embeddings": {"position": "alibi"},
    "use-rope-scaling": {"rope_scaling": "{factor: 8.0}"},
    "disable-bias-linear": {"qkv_bias": False, "o_bias": False, "mlp_bias": False},
    "add-qkv-bias": {"qkv_bias": True},
    "apply-layernorm-1p": {"zero_centered_norm": True},
    "group-query-attention": {"num_kv_heads": 1},
    "moe-shared-expert-gate": {"moe_shared_gate": True},
    "overlap-moe-expert-parallel-comm": {"moe_overlap": True},
    "untie-embeddings-and-output-weights": {"tie_embeddings": False},
    "use-distributed-optimizer": {"zero": 1},
    "optimizer-cpu-offload": {"offload": "optimizer"},
    "accumulate-allreduce-grads-in-fp32": {"grad_reduce_dtype": "fp32"},
    "grad-reduce-in-bf16": {"grad_reduce_dtype": "bf16"},
    "recompute-activations": {"recompute": "selective"},
    "checkpoint-activations": {"recompute": "full"},
    "deepspeed-activation-checkpointing": {"recompute": "full"},
    "deterministic-mode": {"deterministic": True},
    "disable-doc-shuffling": {"shuffle": False},
    "finetune": {"reset_data": True, "reset_optimizer": True, "reset_step": True},
    "no-load-optim": {"reset_optimizer": True},
    "no-load-rng": {},
    "no-async-tensor-model-parallel-allreduce": {"overlap_tp_reduce": False},
}
"""Their flag without a value -> our options."""

REFINES: dict[str, str] = {
    "--add-qkv-bias": "--disable-bias-linear",
    "--openai-gelu": "--bias-gelu-fusion",  # `OptionValue.source` has no "no-"
    "--num-query-groups": "--group-query-attention",
    "--num-key-value-heads": "--group-query-attention",
    "--num-kv-heads": "--group-query-attention",
    "--rope-scaling-factor": "--use-rope-scaling",
    "--end-weight-decay": "--weight-decay",
    "--sgd-momentum": "--adam-beta1",
    "--recompute-num-layers": "--recompute-granularity",
}
"""Specific flag -> the general one that it overrides, in either order."""

NEEDS: dict[str, str] = {
    "num-query-groups": "group-query-attention",
    "rope-scaling-factor": "use-rope-scaling",
    "recompute-num-layers": "recompute-method",
}
"""Their flag -> the one without which it has no effect there, nor here."""


def _layers_per_chunk(_: str, written: str, chunk: int, options: Mapping[str, Any]) -> int:
    layers, pp = options["num_layers"], options["pp"]
    if chunk < 1 or pp < 1 or layers % (pp * chunk):
        rule = f"--num-layers {layers} over --pp {pp} cannot be split into chunks of {chunk}"
        raise UserError(written, rule, "give the number of chunks per rank as --vp (they may be uneven)")
    return int(layers // (pp * chunk))


def _steps(flag: str, written: str, samples: int, options: Mapping[str, Any]) -> int:
    """Round down to whole steps, as Megatron does for the length of the run; its learning rate decays by samples."""
    schedule, by_samples = options["batch_size_schedule"], flag != "--train-steps" and options["lr_by"] == "samples"
    own = by_samples and options["lr_batch_size"] is not None
    # The final decay, and learning-rate schedules by samples, count full batches.
    if schedule is None or flag == "--wsd-decay-steps" or by_samples:
        batch = max(options["lr_batch_size" if own else "global_batch_size"], 1)
        steps, left_over = divmod(samples, batch)
        sizing = f"--{'lr' if own else 'global'}-batch-size {batch}"
    else:
        sizes = _read(BatchSizes.read, f"--batch-size-schedule {schedule}", schedule)
        steps, sizing = sizes.steps(samples), f"--batch-size-schedule {sizes}"
        left_over = samples - sizes.samples(steps)
    if left_over:
        logger.info(f"{written}: {flag} {steps}; {left_over} samples left over with {sizing}")
    return int(steps)


def _ramp(_: str, written: str, numbers: tuple[int, ...], options: Mapping[str, Any]) -> str:
    """Read START INCREMENT SAMPLES: each size below the full one gets an equal share of the samples."""
    batch = options["global_batch_size"]
    if len(numbers) != 3 or min(numbers[:2]) < 1 or numbers[2] < 0:
        raise UserError(written, "must be START INCREMENT SAMPLES", "write --rampup-batch-size 16 8 3000")
    start, increment, samples = numbers
    count, remainder = divmod(batch - start, increment)
    if remainder or not 0 <= count <= _MAX_INCREMENTS:
        rule = f"--global-batch-size {batch} must be START plus at most {_MAX_INCREMENTS} increments"
        raise UserError(written, rule, "correct one of the numbers")
    shares = [(-(-i * samples // max(count, 1)), start + i * increment) for i in range(count + 1)]
    return str(BatchSizes.by_samples(shares))


def _step_schedule(_: str, written: str, text: str, options: Mapping[str, Any]) -> str:
    """Read TOKENS:SIZE pairs; K, M, B and T are units."""

    def number(word: str) -> int:
        unit = _UNITS.get(word[-1:].upper())
        return int(float(word[:-1]) * unit) if unit else int(word)

    def read(words: str) -> BatchSizes:
        pairs = (pair.split(":") for pair in words.replace(",", " ").split())
        in_tokens = sorted((number(at), number(size)) for at, size in pairs)
        in_samples = [(tokens // max(options["seq_len"], 1), size) for tokens, size in in_tokens]
        BatchSizes.read(" ".join(f"{at}:{size}" for at, size in in_samples))
        return BatchSizes.by_samples(in_samples)

    return str(_read(read, written, text))


def _read(reader: Callable[[str], BatchSizes], written: str, text: str) -> BatchSizes:
    try:
        sizes = reader(text)
    except (ValueError, ArithmeticError):
        raise UserError(written, "must be pairs START:SIZE in rising order from 0 on", "write '0:16 400:32'") from None
    if sizes.sizes[0] < 1:
        raise UserError(written, "must have sizes of at least 1", "correct it")
    return sizes


def _warmup_fraction(_: str, written: str, fraction: float, options: Mapping[str, Any]) -> int:
    if not 0 <= fraction <= 1:
        raise UserError(written, "must be between 0 and 1", "correct it, or give --warmup-steps")
    last, schedule = options["train_steps"], options["batch_size_schedule"]
    if schedule is not None and options["lr_by"] == "samples":
        sizes = _read(BatchSizes.read, f"--batch-size-schedule {schedule}", schedule)
        last = sizes.samples(last) / (options["lr_batch_size"] or sizes.sizes[-1])
    return round(fraction * (options["lr_decay_steps"] or last))


def _instances(_: str, written: str, count: int, options: Mapping[str, Any]) -> str:
    if count < 1:
        raise UserError(written, "must be at least 1", "drop it, or give --zero-group")
    return "full" if count == 1 else f"dp/{count}"


def _expert_tp(_: str, written: str, ranks: int, options: Mapping[str, Any]) -> str:
    tp = options["tp"]
    if ranks not in (1, tp):
        raise UserError(written, f"experts are whole or cut over all of --tp {tp}", f"give 1 or {tp}, or --etp")
    return "tp" if ranks == tp else "1"


def _load(_: str, written: str, folder: str, options: Mapping[str, Any]) -> str:
    return "latest" if Path(folder) == Path(options["run_dir"]) else folder


def _window(_: str, written: str, window: str, options: Mapping[str, Any]) -> int | None:
    """Convert their numbers of positions before and after the current one, which ours includes; -1: no limit."""
    left, _, right = window.strip("() ").partition(",")
    try:
        before, after = int(left), int(right)
    except ValueError:
        raise UserError(written, "must be two whole numbers, LEFT,RIGHT", "give --window LEFT+1") from None
    if after != 0 or before < -1:
        raise UserError(written, "attention is causal: no position after the current one", "give LEFT,0")
    return None if before == -1 else before + 1


def _rope_scaling(_: str, written: str, factor: float, options: Mapping[str, Any]) -> Any:
    return dataclasses.replace(options["rope_scaling"], factor=factor)


def _latents(_: str, written: str, on: bool, options: Mapping[str, Any]) -> int:
    """The width of latents that is given, or theirs."""
    return int(options["kv_lora_rank"] or 32)


def _norm_of_queries(_: str, written: str, on: bool, options: Mapping[str, Any]) -> str:
    """With latents it is their norm, which they always have here."""
    if options["kv_lora_rank"] is not None:
        return "none"
    if options["norm"] != "rmsnorm":
        remedy = "give --normalization RMSNorm, or drop it"
        raise UserError(f"{written} with --norm {options['norm']}", "queries and keys have RMSNorm here", remedy)
    return "head"


def _exact_gelu(_: str, written: str, on: bool, options: Mapping[str, Any]) -> str:
    """GELU is exact where it is not fused with the bias, whose kernel is the tanh approximation."""
    return "gelu" if options["activation"] == "gelu_tanh" else str(options["activation"])


def _dense_layers(_: str, written: str, pattern: str, options: Mapping[str, Any]) -> tuple[int, ...]:
    """Read N (every n-th layer has experts, from the first on) or a list of 0 and 1 in Python, such as [0]*3+[1]*58."""
    layers = min(options["num_layers"], MAX_LAYERS)
    try:
        every = _read_list(ast.parse(pattern.strip("'\" "), mode="eval").body)
    except (ValueError, SyntaxError, RecursionError):
        every = []
    if isinstance(every, int):
        every = [int(layer % every == 0) for layer in range(layers)] if every > 0 else []
    if len(every) != layers or not {*every} <= {0, 1}:
        rule = f"must be a number, or a list of {layers} zeros and ones"
        raise UserError(written, rule, "write N, or a list as '[0]*3+[1]*58'")
    return tuple(layer for layer, has_experts in enumerate(every) if not has_experts)


def _read_list(node: ast.expr) -> int | list[int]:
    """Evaluate a number, a list of numbers, sums and multiples of lists; ValueError for all else."""
    match node:
        case ast.Constant(value=int(number)):
            return number
        case ast.List(elts=elements):
            items = [item for item in map(_read_list, elements) if isinstance(item, int)]
            if len(items) == len(elements):
                return items
        case ast.BinOp(left=left, op=ast.Add(), right=right):
            first, second = _read_list(left), _read_list(right)
            if isinstance(first, list) and isinstance(second, list):
                return first + second
        case ast.BinOp(left=left, op=ast.Mult(), right=right):
            both = _read_list(left), _read_list(right)
            numbers = next((x for x in both if isinstance(x, list)), None)
            times = next((x for x in both if isinstance(x, int)), None)
            if numbers is not None and times is not None and 0 <= len(numbers) * times <= MAX_LAYERS:
                return numbers * times
    raise ValueError


def _weights_before_choice(_: str, written: str, on: bool, options: Mapping[str, Any]) -> bool:
    """Leave sigmoids alone: those of the chosen experts are divided by their sum there, whatever this flag says."""
    if options["moe_router_score_function"] != "sigmoid" or options["moe_topk"] == 1:
        return False
    logger.info(f"{written}: has no effect on sigmoid scores, as in Megatron-LM")
    return bool(options["moe_renormalize"])


def _beta1(_: str, written: str, beta: float, options: Mapping[str, Any]) -> float:
    """Take the flag of the optimizer: SGD's momentum, and beta 1 of all others, are one option here."""
    if written.startswith("--sgd") == (options["optimizer"] == "sgd"):
        return beta
    logger.info(f"{written}: has no effect with --optimizer {options['optimizer']}, as in Megatron-LM")
    return float(options["beta1"])


def _recomputed_blocks(_: str, written: str, layers: int, options: Mapping[str, Any]) -> str:
    """Take as many blocks of each chunk of the pipeline as `--recompute-method block` does, which takes its first."""
    if options["recompute"] == "none":
        logger.info(f"{written}: has no effect without --recompute-granularity full, as in Megatron-LM")
        return "none"
    if options["recompute"] != "full":
        raise UserError(written, "requires --recompute-granularity full", "give it, or drop this")
    if layers < 1:
        raise UserError(written, "must be at least 1", "correct it")
    share = Fraction(layers * options["pp"] * options["vp"], max(options["num_layers"], 1))
    if share >= 1:
        return "full"
    logger.info(f"{written}: --recompute full:{share}, the same memory; these blocks are not each stage's first ones")
    return f"full:{share}"


def _delta_nets(_: str, written: str, variant: str, options: Mapping[str, Any]) -> int:
    """Return which layers keep attention, which both tools say by the same flag."""
    if variant != "gated_delta_net" or not options["linear_attention_freq"]:
        raise UserError(written, "gated_delta_net is the only variant here", "give it with --linear-attention-freq N")
    return int(options["linear_attention_freq"])


def _minutes(_: str, written: str, minutes: float, options: Mapping[str, Any]) -> float:
    return 60 * minutes


def _tensorboard(_: str, written: str, folder: str, options: Mapping[str, Any]) -> bool:
    logger.info(f"{written}: events are written to {Path(options['run_dir']) / 'tensorboard'}")
    return True


def _embedding_norm(_: str, written: str, on: bool, options: Mapping[str, Any]) -> bool:
    """Norms of embeddings come before learned positions there, and after them here."""
    if options["position"] == "learned":
        rule = "positions are added after the norm there, and before it here"
        raise UserError(f"{written} with --position learned", rule, "give --position-embedding-type alibi or rope")
    return on


def _vocabulary(_: str, written: str, path: str, options: Mapping[str, Any]) -> int:
    """Count the entries of GPT-2's vocab.json."""
    from megalite.runtime.data.tokenizer_files import read_json  # with what reads data, which other commands do without

    ids = read_json(Path(path)).values()
    if not ids or not all(type(i) is int for i in ids):
        rule = "must be a vocab.json of GPT-2: names and numbers of tokens"
        raise UserError(written, rule, "correct the path, or give --vocab-size")
    return max(ids) + 1


COMPUTED: dict[str, ComputedOption] = {
    "rampup-batch-size": ComputedOption("batch_size_schedule", tuple[int, ...], _ramp),
    "step-batch-size-schedule": ComputedOption("batch_size_schedule", str, _step_schedule),
    "num-layers-per-virtual-pipeline-stage": ComputedOption("vp", int, _layers_per_chunk),
    "train-samples": ComputedOption("train_steps", int, _steps),
    "lr-decay-samples": ComputedOption("lr_decay_steps", int, _steps),
    "lr-wsd-decay-samples": ComputedOption("wsd_decay_steps", int, _steps),
    "lr-warmup-samples": ComputedOption("warmup_steps", int, _steps),
    "lr-warmup-fraction": ComputedOption("warmup_steps", float, _warmup_fraction),
    "window-size": ComputedOption("window", str, _window),
    "adam-beta1": ComputedOption("beta1", float, _beta1),
    "sgd-momentum": ComputedOption("beta1", float, _beta1),
    "multi-latent-attention": ComputedOption("kv_lora_rank", bool, _latents),
    "qk-layernorm": ComputedOption("qk_norm", bool, _norm_of_queries),
    "no-bias-gelu-fusion": ComputedOption("activation", bool, _exact_gelu),
    "moe-layer-freq": ComputedOption("moe_dense_layers", str, _dense_layers),
    "moe-router-pre-softmax": ComputedOption("moe_renormalize", bool, _weights_before_choice),
    "rope-scaling-factor": ComputedOption("rope_scaling", float, _rope_scaling),
    "experimental-attention-variant": ComputedOption("linear_attention_freq", str, _delta_nets),
    "distributed-timeout-minutes": ComputedOption("watchdog_timeout", float, _minutes),
    "num-distributed-optimizer-instances": ComputedOption("zero_group", int, _instances),
    "expert-tensor-parallel-size": ComputedOption("etp", int, _expert_tp),
    "load": ComputedOption("resume", str, _load),
    "recompute-num-layers": ComputedOption("recompute", int, _recomputed_blocks),
    "embed-layernorm": ComputedOption("embedding_norm", bool, _embedding_norm),
    "vocab-file": ComputedOption("vocab_size", str, _vocabulary),
    "tensorboard-dir": ComputedOption("tensorboard", str, _tensorboard),
}
"""Their flag -> how our option is computed from it, in the order of computation."""

IMPLIED: dict[str, dict[str, Any]] = {
    "rampup-batch-size": {"lr_by": "samples"},
    "step-batch-size-schedule": {"lr_by": "samples"},
}
"""Their flag -> further options of ours that it sets."""
