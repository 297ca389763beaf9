"""How flags of Megatron-LM and Megatron-DeepSpeed are spelled here; read by `megalite.config.cli`.

A flag of theirs is renamed, is a switch that stands for some of our options, needs arithmetic, or is refused with the
reason. Nothing is accepted and then ignored. docs/megatron.md prints these tables. Underscores in flags read as dashes.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from megalite.errors import UserError

RENAMED: dict[str, str] = {
    # layout
    "tensor-model-parallel-size": "tp",
    "model-parallel-size": "tp",
    "pipeline-model-parallel-size": "pp",
    "num-virtual-stages-per-pipeline-rank": "vp",
    "zero-stage": "zero",
    "data-parallel-sharding-strategy": "zero",
    "distributed-backend": "device",
    "ddp-bucket-size": "bucket_size",
    "make-vocab-size-divisible-by": "vocab_divisible_by",
    # model
    "num-attention-heads": "num_heads",
    "num-query-groups": "num_kv_heads",
    "num-key-value-heads": "num_kv_heads",
    "kv-channels": "head_dim",
    "seq-length": "seq_len",
    "encoder-seq-length": "seq_len",
    "normalization": "norm",
    "norm-epsilon": "norm_eps",
    "layernorm-epsilon": "norm_eps",
    "position-embedding-type": "position",
    "rotary-base": "rope_theta",
    "rotary-position-embeddings-theta": "rope_theta",
    "rotary-percent": "rope_fraction",
    "init-method-std": "init_std",
    # data
    "data-path": "data",
    "train-data-path": "data",
    "valid-data-path": "valid_data",
    "tokenizer-model": "tokenizer",
    "tokenizer-name-or-path": "tokenizer",
    # batch, time, memory
    "batch-size": "micro_batch_size",
    "train-iters": "train_steps",
    "recompute-granularity": "recompute",
    # optimizer
    "lr-decay-style": "lr_decay",
    "lr-decay-iters": "lr_decay_steps",
    "lr-wsd-decay-iters": "wsd_decay_steps",
    "lr-warmup-iters": "warmup_steps",
    "lr-warmup-init": "init_lr",
    "adam-beta1": "beta1",
    "adam-beta2": "beta2",
    "adam-eps": "eps",
    "sgd-momentum": "beta1",
    # run
    "save": "run_dir",
    "save-interval": "save_every",
    "persistent-save-interval": "save_every",
    "eval-interval": "eval_every",
    "eval-iters": "eval_steps",
    "log-interval": "log_every",
}
"""Their flag -> our option; values are taken as they are, but for `VALUES`."""

VALUES: dict[str, dict[str, str]] = {
    "norm": {"RMSNorm": "rmsnorm", "LayerNorm": "layernorm"},
    "position": {"learned_absolute": "learned"},
    "lr_decay": {"WSD": "wsd"},
    "optimizer": {"adam": "adamw"},
    "device": {"nccl": "cuda", "gloo": "cpu"},
    "zero": {"no_shard": "0", "optim": "1"},
}
"""Our option -> {value as they spell it: value as we do}."""

SWITCHES: dict[str, dict[str, str]] = {
    "bf16": {"precision": "bf16"},
    "fp16": {"precision": "fp16"},
    "swiglu": {"activation": "swiglu"},
    "openai-gelu": {"activation": "gelu_tanh"},
    "use-rotary-position-embeddings": {"position": "rope"},
    "use-rope-scaling": {"rope_scaling": "{factor: 8.0}"},
    "disable-bias-linear": {"qkv_bias": "False", "o_bias": "False", "mlp_bias": "False"},
    "add-qkv-bias": {"qkv_bias": "True"},
    "qk-layernorm": {"qk_norm": "head"},
    "untie-embeddings-and-output-weights": {"tie_embeddings": "False"},
    "use-distributed-optimizer": {"zero": "1"},
    "accumulate-allreduce-grads-in-fp32": {"grad_reduce_dtype": "fp32"},
    "grad-reduce-in-bf16": {"grad_reduce_dtype": "bf16"},
    "recompute-activations": {"recompute": "selective"},
    "checkpoint-activations": {"recompute": "full"},
    "deepspeed-activation-checkpointing": {"recompute": "full"},
    "deterministic-mode": {"deterministic": "True"},
    "disable-doc-shuffling": {"shuffle": "False"},
    "no-async-tensor-model-parallel-allreduce": {"overlap_tp_reduce": "False"},
}
"""Their flag without a value -> our options."""

REFINES: dict[str, str] = {"--add-qkv-bias": "--disable-bias-linear"}
"""Finer flag -> the coarser one that it overrides, in either order."""


def _number(written: str, value: str, kind: Callable[[str], Any], what: str) -> Any:
    try:
        return kind(value)
    except ValueError:
        raise UserError(written, f"must be a {what}", "correct the value") from None


def _layers_per_chunk(written: str, value: str, options: Mapping[str, Any]) -> dict[str, str]:
    layers, pp, chunk = options["num_layers"], options["pp"], _number(written, value, int, "whole number")
    if chunk < 1 or pp < 1 or layers % (pp * chunk):
        rule = f"--num-layers {layers} over --pp {pp} does not make whole chunks of {chunk}"
        raise UserError(written, rule, "give the number of chunks a rank as --vp (they may be uneven)")
    return {"vp": str(layers // (pp * chunk))}


def _steps(option: str) -> Callable[[str, str, Mapping[str, Any]], dict[str, str]]:
    def from_samples(written: str, value: str, options: Mapping[str, Any]) -> dict[str, str]:
        samples, batch = _number(written, value, int, "whole number"), options["global_batch_size"]
        if batch < 1 or samples % batch:
            remedy = f"give --{option.replace('_', '-')} {samples // max(batch, 1)}"
            raise UserError(written, f"is no multiple of --global-batch-size {batch}", remedy)
        return {option: str(samples // batch)}

    return from_samples


def _warmup_fraction(written: str, value: str, options: Mapping[str, Any]) -> dict[str, str]:
    fraction = _number(written, value, float, "number")
    if not 0 <= fraction <= 1:
        raise UserError(written, "must be between 0 and 1", "correct it, or give --warmup-steps")
    return {"warmup_steps": str(round(fraction * (options["lr_decay_steps"] or options["train_steps"])))}


def _load(written: str, value: str, options: Mapping[str, Any]) -> dict[str, str]:
    return {"resume": "latest" if Path(value) == Path(options["run_dir"]) else value}


COMPUTED: dict[str, Callable[[str, str, Mapping[str, Any]], dict[str, str]]] = {
    "num-layers-per-virtual-pipeline-stage": _layers_per_chunk,
    "train-samples": _steps("train_steps"),
    "lr-decay-samples": _steps("lr_decay_steps"),
    "lr-wsd-decay-samples": _steps("wsd_decay_steps"),
    "lr-warmup-samples": _steps("warmup_steps"),
    "lr-warmup-fraction": _warmup_fraction,
    "load": _load,
}
"""Their flag -> function of (the flag as written, its value, all options by name) -> our options."""

_REFUSED: list[tuple[str, str, str]] = [
    (
        "context parallelism is outside megalite's scope",
        "use --tp, which shards the sequence too",
        "context-parallel-size cp-comm-type hierarchical-context-parallel-sizes ds-sequence-parallel-size"
        " force-ds-sequence-parallel",
    ),
    (
        "mixture of experts is outside megalite's scope",
        "choose a dense model",
        "num-experts expert-model-parallel-size expert-tensor-parallel-size expert-interval topk mlp-type"
        " enable-expert-tensor-parallelism create-moe-param-group use-tutel",
    ),
    (
        "layers are split over the stages by cost, embedding and output layer counted",
        "drop it",
        "decoder-first-pipeline-num-layers decoder-last-pipeline-num-layers pipeline-model-parallel-layout"
        " account-for-embedding-in-pipeline-split account-for-loss-in-pipeline-split standalone-embedding-stage"
        " pipeline-model-parallel-split-rank",
    ),
    (
        "it runs --pp micro-batches through a chunk before the next",
        "drop it",
        "microbatch-group-size-per-virtual-pipeline-stage",
    ),
    (
        "communication is always overlapped with computation where the schedule allows it",
        "drop it",
        "overlap-param-gather-with-optimizer-step overlap-p2p-communication"
        " overlap-p2p-communication-warmup-flush tp-comm-overlap no-overlap-p2p-communication no-align-grad-reduce"
        " no-align-param-gather tp-comm-overlap-cfg"
        " tp-comm-overlap-rs-dgrad defer-embedding-wgrad-compute",
    ),
    (
        "megalite has one gradient buffer and one ZeRO of its own",
        "use --zero, --bucket-size and --grad-reduce-dtype",
        "DDP-impl no-contiguous-buffers-in-local-ddp use-megatron-fsdp use-torch-fsdp2 ddp-num-buckets"
        " ddp-average-in-collective ddp-pad-buckets-for-high-nccl-busbw num-distributed-optimizer-instances"
        " zero-reduce-scatter zero-contigious-gradients zero-reduce-bucket-size zero-allgather-bucket-size",
    ),
    (
        "nothing is offloaded to the CPU",
        "use --zero 1, more --tp or --pp, or --recompute",
        "cpu-optimizer cpu-torch-adam optimizer-cpu-offload optimizer-offload-fraction cpu-offloading-num-layers"
        " remote-device use-pin-memory checkpoint-in-cpu",
    ),
    (
        "there is no DeepSpeed engine here",
        "drop it; --zero, --precision and --clip-grad say what its file did",
        "deepspeed deepspeed-config no-pipeline-parallel ds-fused-adam",
    ),
    (
        "torchrun tells every rank who it is",
        "start with torchrun or tools/launch.py",
        "local-rank lazy-mpu-init",
    ),
    (
        "full recomputes every block and selective the attention core; there is no finer choice",
        "drop it",
        "recompute-method recompute-num-layers recompute-modules distribute-saved-activations"
        " checkpoint-num-layers distribute-checkpointed-activations partition-activations contigious-checkpointing",
    ),
    (
        "kernels are chosen by themselves, and the choice is printed",
        "drop it",
        "use-flash-attn use-flash-attn-v1 use-flash-attn-v2 use-flash-attn-triton attention-backend transformer-impl"
        " no-masked-softmax-fusion no-bias-gelu-fusion no-bias-swiglu-fusion no-bias-dropout-fusion no-rope-fusion"
        " no-gradient-accumulation-fusion no-persist-layer-norm cross-entropy-loss-fusion cross-entropy-fusion-impl"
        " use-fused-rmsnorm use-te-activation-func use-mcore-models use-legacy-models spec",
    ),
    (
        "norms, softmax and loss are computed in fp32 and the residual stream in --precision",
        "drop it",
        "attention-softmax-in-fp32 apply-query-key-layer-scaling no-query-key-layer-scaling fp32-residual-connection"
        " fp16-lm-cross-entropy embedding-weights-in-fp32 disable-bf16-reduced-precision-matmul",
    ),
    (
        "the model has no such variant",
        "drop it, or see --help for the model's options",
        "squared-relu quick-geglu apply-layernorm-1p apply-residual-connection-post-layernorm embed-layernorm"
        " use-alibi-position-embeddings no-position-embedding rotary-interleaved rope-type qk-l2-norm softmax-type"
        " rotary-seq-len-interpolation-factor multi-latent-attention window-size sliding-window mtp-num-layers"
        " relative-attention-num-buckets embedding-init-method-std init-method-xavier-uniform no-scaled-init"
        " data-parallel-random-init num-experts-switch",
    ),
    ("--num-kv-heads alone says it", "drop it, and give --num-kv-heads", "group-query-attention"),
    (
        "it is one number of --rope-scaling",
        "give --rope-scaling '{factor: F}'",
        "rope-scaling-factor",
    ),
    (
        "initial values depend on the seed and the parameter's name alone, on any device and layout",
        "drop it",
        "use-cpu-initialization no-initialization init-model-with-meta-device",
    ),
    (
        "the kind of tokenizer is read from its files",
        "drop it, and give the folder or file to --tokenizer",
        "tokenizer-type vocab-file merge-file tiktoken-pattern tiktoken-num-special-tokens tokenizer-metadata"
        " legacy-tokenizer trust-remote-code",
    ),
    (
        "padding follows from --vocab-size, --vocab-divisible-by and --tp",
        "drop it",
        "padded-vocab-size vocab-extra-ids",
    ),
    (
        "samples cross document ends, and every token counts in the loss",
        "drop it",
        "reset-position-ids reset-attention-mask eod-mask-loss calculate-per-token-loss"
        " create-attention-mask-in-dataloader no-create-attention-mask-in-dataloader",
    ),
    (
        "data files are memory-mapped and indices are made in memory, without cache files or worker processes",
        "drop it",
        "data-cache-path no-mmap-bin-files mmap-warmup num-workers dataloader-type data-impl"
        " num-dataset-builder-threads",
    ),
    (
        "data is named by --data, --valid-data and --split",
        "write the prefixes after --data",
        "test-data-path data-args-path per-split-data-args-path",
    ),
    (
        "the batch size is the same in every step",
        "give one --global-batch-size that --micro-batch-size x dp divides",
        "rampup-batch-size step-batch-size-schedule decrease-batch-size-if-needed",
    ),
    (
        "the run's length is counted in steps",
        "divide by --seq-len x --global-batch-size and give --train-steps, --warmup-steps or --lr-decay-steps",
        "train-tokens lr-decay-tokens lr-warmup-tokens warmup",
    ),
    (
        "weight decay and the two ends of the learning rate do not vary",
        "use --weight-decay, --lr and --min-lr",
        "start-weight-decay end-weight-decay weight-decay-incr-style decoupled-lr decoupled-min-lr"
        " do-norm-bias-weight-decay",
    ),
    ("the last part of wsd falls linearly", "drop it", "lr-wsd-decay-style"),
    (
        "the learning rate follows from the flags and the step, never from the checkpoint",
        "drop it",
        "override-opt-param-scheduler use-checkpoint-opt-param-scheduler no-load-lr-state",
    ),
    (
        "the dynamic loss scale has no such number",
        "use --loss-scale, --initial-loss-scale and --loss-scale-window",
        "min-loss-scale hysteresis",
    ),
    (
        "there is one checkpoint format: whole, checked, loadable in any layout, with every state in it",
        "drop it; --resume says what to start from",
        "ckpt-format use-dist-ckpt dist-ckpt-format auto-detect-ckpt-format ckpt-fully-parallel-save"
        " no-ckpt-fully-parallel-save ckpt-fully-parallel-load ckpt-assume-constant-structure dist-ckpt-strictness"
        " universal-checkpoint no-save-optim no-save-rng no-load-optim no-load-rng async-save ckpt-step load-tag"
        " finetune pretrained-checkpoint use-checkpoint-args use-mp-args-from-checkpoint-args"
        " exit-on-missing-checkpoint verify-checkpoint",
    ),
    ("checkpoints are counted, not spaced", "use --keep-last", "save-retain-interval"),
    (
        "a run stops at --train-steps, or with a checkpoint at SIGTERM or SIGINT",
        "send a signal instead",
        "exit-interval exit-duration-in-mins exit-signal-handler kill-switch-path adlr-autoresume skip-train",
    ),
    (
        "events go to RUN_DIR/tensorboard",
        "give --tensorboard",
        "tensorboard-dir tensorboard-log-interval tensorboard-queue-size",
    ),
    (
        "metrics.jsonl has every figure of every step",
        "drop it",
        "log-throughput log-progress log-params-norm log-num-zeros-in-grad timing-log-level timing-log-option"
        " log-timers-to-tensorboard log-memory-to-tensorboard log-batch-size-to-tensorboard"
        " log-validation-ppl-to-tensorboard log-world-size-to-tensorboard log-optimizer-states-to-tensorboard"
        " no-log-loss-scale-to-tensorboard",
    ),
    (
        "the run's name and folder are those of --run-dir",
        "drop it, or use wandb's own environment variables",
        "wandb-exp-name wandb-save-dir wandb-entity",
    ),
    (
        "metrics.jsonl has loss and gradient norm of every step",
        "drop it",
        "no-check-for-nan-in-loss-and-grad check-for-spiky-loss check-for-large-grads",
    ),
]
"""Why, what to do instead, and the flags it concerns."""

REFUSED: dict[str, tuple[str, str]] = {flag: (why, do) for why, do, flags in _REFUSED for flag in flags.split()}
"""Their flag -> (why it has no counterpart, what to do instead)."""

REFUSED_PREFIXES: dict[str, tuple[str, str]] = {
    "moe-": ("mixture of experts is outside megalite's scope", "choose a dense model"),
    "fp8-": ("there is no 8-bit training here", "use --precision bf16"),
    "rl-": ("megalite trains on plain text only", "drop it"),
    "retro-": ("megalite trains on plain text only", "drop it"),
}
"""Beginning of their flags -> the same."""
