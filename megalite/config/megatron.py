"""Translation of the flags of Megatron-LM and Megatron-DeepSpeed, for `megalite.config.cli`.

One of their flags is renamed, is a switch that sets some of our options, requires arithmetic, or is refused with the
reason. None is accepted and then ignored. docs/megatron.md prints these tables. Underscores in flags count as dashes.
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterable, Mapping
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

from megalite.errors import UserError

_SPELLINGS: dict[str, str] = {
    # layout
    "tp": "tensor-model-parallel-size model-parallel-size",
    "pp": "pipeline-model-parallel-size",
    "vp": "num-virtual-stages-per-pipeline-rank",
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
    "init_std": "init-method-std",
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
    "beta1": "adam-beta1 sgd-momentum",
    "beta2": "adam-beta2",
    "eps": "adam-eps",
    # run
    "run_dir": "save",
    "save_every": "save-interval persistent-save-interval",
    "eval_every": "eval-interval",
    "eval_steps": "eval-iters",
    "log_every": "log-interval",
}

RENAMED: dict[str, str] = {flag: ours for ours, flags in _SPELLINGS.items() for flag in flags.split()}
"""Their flag -> our option; values are unchanged except for `VALUES`."""

VALUES: dict[str, dict[str, str]] = {
    "norm": {"RMSNorm": "rmsnorm", "LayerNorm": "layernorm"},
    "position": {"learned_absolute": "learned"},
    "lr_decay": {"WSD": "wsd"},
    "optimizer": {"adam": "adamw"},
    "device": {"nccl": "cuda", "gloo": "cpu"},
    "zero": {"no_shard": "0", "optim": "1"},
}
"""Our option -> {their spelling of a value: ours}."""

SWITCHES: dict[str, dict[str, Any]] = {
    "bf16": {"precision": "bf16"},
    "fp16": {"precision": "fp16"},
    "swiglu": {"activation": "swiglu"},
    "openai-gelu": {"activation": "gelu_tanh"},
    "use-rotary-position-embeddings": {"position": "rope"},
    "use-rope-scaling": {"rope_scaling": "{factor: 8.0}"},
    "disable-bias-linear": {"qkv_bias": False, "o_bias": False, "mlp_bias": False},
    "add-qkv-bias": {"qkv_bias": True},
    "qk-layernorm": {"qk_norm": "head"},
    "untie-embeddings-and-output-weights": {"tie_embeddings": False},
    "use-distributed-optimizer": {"zero": 1},
    "accumulate-allreduce-grads-in-fp32": {"grad_reduce_dtype": "fp32"},
    "grad-reduce-in-bf16": {"grad_reduce_dtype": "bf16"},
    "recompute-activations": {"recompute": "selective"},
    "checkpoint-activations": {"recompute": "full"},
    "deepspeed-activation-checkpointing": {"recompute": "full"},
    "deterministic-mode": {"deterministic": True},
    "disable-doc-shuffling": {"shuffle": False},
    "no-async-tensor-model-parallel-allreduce": {"overlap_tp_reduce": False},
}
"""Their flag without a value -> our options."""

REFINES: dict[str, str] = {"--add-qkv-bias": "--disable-bias-linear"}
"""Specific flag -> the general one that it overrides, in either order."""


def _layers_per_chunk(_: str, written: str, chunk: int, options: Mapping[str, Any]) -> int:
    layers, pp = options["num_layers"], options["pp"]
    if chunk < 1 or pp < 1 or layers % (pp * chunk):
        rule = f"--num-layers {layers} over --pp {pp} cannot be split into chunks of {chunk}"
        raise UserError(written, rule, "give the number of chunks per rank as --vp (they may be uneven)")
    return int(layers // (pp * chunk))


def _steps(flag: str, written: str, samples: int, options: Mapping[str, Any]) -> int:
    batch = options["global_batch_size"]
    if batch < 1 or samples % batch:
        remedy = f"give {flag} {samples // max(batch, 1)}"
        raise UserError(written, f"is not a multiple of --global-batch-size {batch}", remedy)
    return int(samples // batch)


def _warmup_fraction(_: str, written: str, fraction: float, options: Mapping[str, Any]) -> int:
    if not 0 <= fraction <= 1:
        raise UserError(written, "must be between 0 and 1", "correct it, or give --warmup-steps")
    return round(fraction * (options["lr_decay_steps"] or options["train_steps"]))


def _load(_: str, written: str, folder: str, options: Mapping[str, Any]) -> str:
    return "latest" if Path(folder) == Path(options["run_dir"]) else folder


COMPUTED: dict[str, tuple[str, type, Any]] = {
    "num-layers-per-virtual-pipeline-stage": ("vp", int, _layers_per_chunk),
    "train-samples": ("train_steps", int, _steps),
    "lr-decay-samples": ("lr_decay_steps", int, _steps),
    "lr-wsd-decay-samples": ("wsd_decay_steps", int, _steps),
    "lr-warmup-samples": ("warmup_steps", int, _steps),
    "lr-warmup-fraction": ("warmup_steps", float, _warmup_fraction),
    "load": ("resume", str, _load),
}
"""Their flag -> our option, type of their value, function of (our flag, theirs as written, its value, all options)."""

_REFUSED = """
context parallelism is outside megalite's scope -> use --tp, which shards the sequence too
    context-parallel-size cp-* hierarchical-context-parallel-sizes ds-sequence-parallel-size force-ds-sequence-parallel
mixture of experts is outside megalite's scope -> choose a dense model
    num-experts* expert-* moe-* topk mlp-type enable-expert-tensor-parallelism create-moe-param-group use-tutel
layers are distributed over the stages by cost, including embedding and output layer -> drop it
    decoder-first-pipeline-num-layers decoder-last-pipeline-num-layers pipeline-model-parallel-* account-for-*
    standalone-embedding-stage
the interleaved schedule runs --pp micro-batches through a chunk before the next -> drop it
    microbatch-group-size-per-virtual-pipeline-stage
communication is always overlapped with computation where the schedule allows it -> drop it
    overlap-param-gather-with-optimizer-step *overlap-p2p-* tp-comm-* no-align-* defer-embedding-wgrad-compute
megalite has its own gradient buffer and ZeRO -> use --zero, --bucket-size and --grad-reduce-dtype
    DDP-impl ddp-* zero-* no-contiguous-buffers-in-local-ddp use-megatron-fsdp use-torch-fsdp2
    num-distributed-optimizer-instances
nothing is offloaded to the CPU -> use --zero 1, more --tp or --pp, or --recompute
    cpu-* optimizer-cpu-offload optimizer-offload-* remote-device use-pin-memory checkpoint-in-cpu
megalite has no DeepSpeed engine -> drop it; --zero, --precision and --clip-grad replace its file
    deepspeed* no-pipeline-parallel ds-fused-adam
torchrun sets the rank of each process -> start with torchrun or tools/launch.py
    local-rank lazy-mpu-init
full recomputes every block, selective the attention core; there is nothing in between -> drop it
    recompute-* checkpoint-num-layers distribute-*-activations partition-activations contigious-checkpointing
kernels are selected automatically and logged -> drop it
    no-*-fusion cross-entropy-* use-flash-attn* attention-backend transformer-impl no-persist-layer-norm
    use-fused-rmsnorm use-te-activation-func use-mcore-models use-legacy-models spec
norms, softmax and loss are computed in fp32 and the residual stream in --precision -> drop it
    *-query-key-layer-scaling attention-softmax-in-fp32 fp32-residual-connection fp16-lm-cross-entropy
    embedding-weights-in-fp32 disable-bf16-reduced-precision-matmul
the model does not support this variant -> drop it, or see --help for the model's options
    squared-relu quick-geglu apply-layernorm-1p apply-residual-connection-post-layernorm embed-layernorm
    use-alibi-position-embeddings no-position-embedding rotary-* rope-type qk-l2-norm softmax-type
    multi-latent-attention mtp-num-layers relative-attention-*
    embedding-init-method-std init-method-xavier-uniform no-scaled-init data-parallel-random-init
sliding windows have options of their own -> give --window, and --window-pattern if some layers have none
    window-size sliding-window
--num-kv-heads is enough -> drop it, and give --num-kv-heads
    group-query-attention
it is one field of --rope-scaling -> give --rope-scaling '{factor: F}'
    rope-scaling-factor
initial values depend only on the seed and the name of the parameter, on any device and layout -> drop it
    use-cpu-initialization no-initialization init-model-with-meta-device
the type of the tokenizer is read from its files -> drop it, and pass the directory or file to --tokenizer
    tokenizer-* tiktoken-* vocab-file merge-file legacy-tokenizer trust-remote-code
padding follows from --vocab-size, --vocab-divisible-by and --tp -> drop it
    padded-vocab-size vocab-extra-ids
samples cross document boundaries, and every token counts in the loss -> drop it
    reset-position-ids reset-attention-mask eod-mask-loss calculate-per-token-loss *create-attention-mask-in-dataloader
data files are memory-mapped and indices built in memory, without cache files or worker processes -> drop it
    data-cache-path no-mmap-bin-files mmap-warmup num-workers dataloader-type data-impl num-dataset-builder-threads
--data, --valid-data and --split define the data -> write the prefixes after --data
    test-data-path *data-args-path
the batch size is constant -> give one --global-batch-size that --micro-batch-size x dp divides
    rampup-batch-size step-batch-size-schedule decrease-batch-size-if-needed
the length of a run is counted in steps -> divide by --seq-len x --global-batch-size and \
give --train-steps, --warmup-steps or --lr-decay-steps
    train-tokens lr-*-tokens warmup
weight decay is constant and not applied to norms and biases; all layers share one learning rate -> \
use --weight-decay, --lr and --min-lr
    start-weight-decay end-weight-decay weight-decay-incr-style decoupled-*
    do-norm-bias-weight-decay
the final decay of wsd is linear -> drop it
    lr-wsd-decay-style
the learning rate depends on the flags and the step, never on the checkpoint -> drop it
    *-opt-param-scheduler no-load-lr-state
the dynamic loss scale has no such setting -> use --loss-scale, --initial-loss-scale and --loss-scale-window
    min-loss-scale hysteresis
there is one checkpoint format: complete, verified, loadable in any layout -> \
drop it; --resume selects the checkpoint
    *ckpt* *-checkpoint use-*-checkpoint-args use-checkpoint-args no-save-optim no-save-rng
    no-load-optim no-load-rng async-save load-tag finetune
checkpoints are kept by number, not by distance -> use --keep-last
    save-retain-interval
a run stops at --train-steps, or with a checkpoint at SIGTERM or SIGINT -> send a signal instead
    exit-* kill-switch-path adlr-autoresume skip-train
events are written to RUN_DIR/tensorboard -> give --tensorboard
    tensorboard-*
metrics.jsonl records all metrics of every step -> drop it
    log-* timing-log-* no-log-loss-scale-to-tensorboard
name and directory of the run are those of --run-dir -> drop it, or use the environment variables of wandb
    wandb-*
metrics.jsonl records loss and gradient norm of every step -> drop it
    *check-for-*
8-bit training is not supported -> use --precision bf16
    fp8-*
megalite trains on plain text only -> drop it
    rl-* retro-*
"""

REFUSED: list[tuple[str, str, list[str]]] = [
    (why, instead, flags.split())
    for why, instead, flags in re.findall(r"^(\S.*) -> (.*)\n((?: +.*\n)+)", _REFUSED, re.M)
]
"""Reason, remedy, and their flags; `*` matches anything."""


def refusal(flag: str, known: Iterable[str]) -> tuple[str, str] | None:
    """Return why one of their flags is refused and the remedy; None if it is not, or is a typo of one of `known`."""
    typo = difflib.get_close_matches(flag, list(known), n=1, cutoff=0.9)
    for why, instead, patterns in REFUSED:
        if flag in patterns or not typo and any(fnmatchcase(flag, pattern) for pattern in patterns):
            return why, instead
    return None
