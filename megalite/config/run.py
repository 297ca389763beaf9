"""Options of a run: frozen dataclasses, checked on construction. Field names are the names of the flags.

Errors name the value, the rule it breaks, and the fix (`UserError`, exit code 2).
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from typing import Annotated, Literal

from megalite.config.model import ModelConfig
from megalite.config.names import NamedIn, check_names
from megalite.errors import in_range, require, step_range
from megalite.schedules.lr import LR_DECAYS
from megalite.schedules.pipeline import SCHEDULES


@dataclass(frozen=True)
class ParallelConfig:
    """Layout: world = dp x pp x tp; dp = world / (pp x tp)."""

    tp: int = 1
    """Tensor-parallel size: ranks that each layer is split over."""
    pp: int = 1
    """Pipeline-parallel size: ranks that the layers are distributed over."""
    vp: int = 1
    """Virtual pipeline stages per rank (interleaved and zb-v schedules)."""
    sequence_parallel: bool = True
    """Shard norms, dropout and residual stream over the sequence when tp > 1."""
    schedule: Annotated[str, NamedIn(SCHEDULES, ("auto",))] = "auto"
    """Pipeline schedule."""
    zero: Literal[0, 1, 2, 3] = 1
    """ZeRO stage: 1 shards optimizer states and fp32 masters over dp, 2 gradients too, 3 weights too; 0 nothing."""
    zero_group: str = "full"
    """ZeRO-2, 3: ranks that share: full (all of dp), node (of one host), N neighbors on dp, or dp/K (K groups)."""
    zero_keep: Literal["none", "backward", "step"] = "none"
    """ZeRO-3: how long gathered weights stay: while their layer runs, until its backward pass, or the whole step."""
    zero_reduce: Literal["microbatch", "step"] = "microbatch"
    """ZeRO-2, 3: reduce gradients after each micro-batch (least memory) or once per step (least traffic)."""
    zero_whole_below: int = 100_000
    """ZeRO-3: layers with fewer weights per rank stay whole; gathering them would be pure latency."""
    debug_zero: bool = False
    """ZeRO-3: make any read of a weight that is not gathered an error (slow)."""
    device: Literal["auto", "cpu", "cuda"] = "auto"
    """Where to run; auto uses CUDA if available."""
    bucket_size: int = 40_000_000
    """Gradient bucket size in elements. A bucket is reduced as soon as all its gradients are ready."""
    overlap_grad_reduce: bool = True
    """Reduce gradients over dp while backward is still running."""
    overlap_tp_reduce: bool = True
    """Compute weight gradients while the gradient of the input is reduced over tp."""
    overlap_param_gather: bool = True
    """ZeRO-1: gather updated weights while the next forward pass is already running."""
    vocab_divisible_by: int = 128
    """Pad the vocabulary to a multiple of this times tp; padding never counts in the loss."""

    def __post_init__(self) -> None:
        check_names(self)
        in_range(self, "tp pp vp bucket_size vocab_divisible_by", 1)
        in_range(self, "zero_whole_below", 0)
        require(
            re.fullmatch(r"full|node|(dp/)?[1-9]\d*", self.zero_group) is not None,
            f"--zero-group {self.zero_group}",
            "must be full, node, a number of ranks, or dp/K for K groups",
            "correct the value",
        )
        for stage, flag, value, default in (
            (2, "--zero-group", self.zero_group, "full"),
            (2, "--zero-reduce", self.zero_reduce, "microbatch"),
            (3, "--zero-keep", self.zero_keep, "none"),
        ):
            require(
                self.zero >= stage or value == default,
                f"{flag} {value} with --zero {self.zero}",
                f"applies from --zero {stage} on",
                f"raise --zero, or drop {flag}",
            )


@dataclass(frozen=True)
class DataConfig:
    """Training and evaluation data."""

    data: tuple[str, ...] = ()
    """PREFIX, or WEIGHT PREFIX pairs for a blend (PREFIX.bin and PREFIX.idx)."""
    valid_data: tuple[str, ...] = ()
    """Evaluation data, in the form of --data. Default: the second part of --split."""
    split: str = "99,1,0"
    """Proportions of documents for training, validation and test."""
    tokenizer: str | None = None
    """Tokenizer directory or file that the data was made with."""
    shuffle: bool = True
    """Shuffle samples by (seed, epoch)."""
    mock_data: bool = False
    """Train on synthetic sequences; requires no files."""


@dataclass(frozen=True)
class TrainConfig:
    """Batch, time, precision and memory."""

    micro_batch_size: int = 1
    """Samples per forward pass, per data-parallel rank."""
    global_batch_size: int = 8
    """Samples per optimizer step, across all data-parallel ranks."""
    train_steps: int = 100
    """Optimizer steps of the whole run."""
    seed: int = 1234
    """Seed for initial weights, data order and dropout."""
    deterministic: bool = False
    """Use deterministic kernels only (slower on CUDA)."""
    precision: Literal["fp32", "bf16", "fp16"] = "fp32"
    """Data type of parameters and activations; master weights and main gradients are fp32."""
    recompute: Literal["none", "selective", "full"] = "none"
    """What to recompute in backward: nothing, the attention core, or whole blocks."""
    ops: str = "auto"
    """Kernels: a backend for all ops (auto, torch, triton, cuda, cpp, apex), or OP=BACKEND pairs, comma-separated."""
    compile: bool = False
    """Compile each block (everything but the parallel linear layers). Requires dropout 0."""
    loss_chunk: int = 0
    """Compute output layer and loss for this many tokens at a time, to save memory for logits; 0: all at once."""
    label_smoothing: float = 0.0
    """Weight of the uniform distribution in the targets."""
    grad_reduce_dtype: Literal["fp32", "bf16"] = "fp32"
    """Data type in which gradients are reduced over dp."""
    compress: str = "none"
    """Compress gradients over dp: none, int8 (the one to use), topk:F (a fraction F of them) or powersgd:R (rank R)."""

    offload: Literal["none", "optimizer", "optimizer+params", "activations"] = "none"
    """Keep on the host: nothing; optimizer states, updated there; weights too; or the inputs of recomputed blocks."""
    offload_dir: str | None = None
    """With --offload optimizer: keep them on disk instead, in scratch files in this directory."""

    def __post_init__(self) -> None:
        in_range(self, "micro_batch_size global_batch_size train_steps", 1)
        in_range(self, "seed", 0, 2**63)
        in_range(self, "label_smoothing", 0, 1)
        in_range(self, "loss_chunk", 0)
        require(
            not (self.loss_chunk and self.label_smoothing),
            f"--loss-chunk {self.loss_chunk} with --label-smoothing {self.label_smoothing}",
            "the chunked loss does not support label smoothing",
            "drop one of the two",
        )
        require(
            bool(re.fullmatch(r"none|int8|powersgd:[1-9]\d*", self.compress)) or 0 < _fraction(self.compress) <= 1,
            f"--compress {self.compress}",
            "must be none, int8, topk:F with F above 0 and at most 1, or powersgd:R with a whole R of at least 1",
            "use --compress int8",
        )
        require(
            self.offload_dir is None or self.offload.startswith("optimizer"),
            f"--offload-dir {self.offload_dir} with --offload {self.offload}",
            "applies to optimizer states",
            "give --offload optimizer, or drop --offload-dir",
        )
        require(
            self.offload != "activations" or self.recompute == "full",
            f"--offload activations with --recompute {self.recompute}",
            "only the inputs of recomputed blocks are worth the way to the host",
            "give --recompute full, or drop --offload",
        )
        require(
            self.compress == "none" or self.grad_reduce_dtype == "fp32",
            f"--compress {self.compress} with --grad-reduce-dtype {self.grad_reduce_dtype}",
            "compressed gradients have a format of their own",
            "drop one of the two",
        )


def _fraction(compress: str) -> float:
    """The F of topk:F; 0 where there is none."""
    found = re.fullmatch(r"topk:(\d*\.?\d+(?:e-?\d+)?)", compress)
    return float(found[1]) if found else 0.0


@dataclass(frozen=True)
class OptimConfig:
    """Optimizer and learning-rate schedule."""

    optimizer: Literal["adamw", "lamb", "lars", "sgd"] = "adamw"
    """adamw (decoupled weight decay), lamb or lars (with trust ratios), or sgd (momentum beta1)."""
    lr: float = 3e-4
    """Peak learning rate."""
    min_lr: float = 0.0
    """Learning rate at the end of the decay."""
    warmup_steps: int = 0
    """Steps of linear warmup from init_lr."""
    init_lr: float = 0.0
    """Learning rate at step 0 of the warmup."""
    lr_decay: Annotated[str, NamedIn(LR_DECAYS)] = "cosine"
    """Shape of the decay after warmup."""
    lr_decay_steps: int | None = None
    """Step at which the decay ends. Default: train_steps."""
    wsd_decay_steps: int | None = None
    """wsd: steps of the final linear decay. Default: a tenth of the run."""
    weight_decay: float = 0.1
    """Decoupled weight decay; not applied to norms and biases."""
    beta1: float = 0.9
    """Adam's first decay rate (lars, sgd: momentum)."""
    beta2: float = 0.95
    """Adam's second decay rate."""
    eps: float = 1e-8
    """Adam's epsilon."""
    clip_grad: float = 1.0
    """Maximum global gradient norm; 0 disables clipping."""
    loss_scale: float | None = None
    """fp16: constant loss scale. Default: dynamic."""
    initial_loss_scale: float = 65536.0
    """fp16: first dynamic loss scale."""
    loss_scale_window: int = 1000
    """fp16: steps without overflow before the scale doubles."""

    @property
    def num_moments(self) -> int:
        """Number of fp32 states per weight: a momentum, or Adam's two moments."""
        return 1 if self.optimizer in ("lars", "sgd") else 2

    def __post_init__(self) -> None:
        check_names(self)
        in_range(self, "lr eps loss_scale initial_loss_scale", 0, above=True)
        in_range(self, "clip_grad weight_decay warmup_steps init_lr", 0)
        in_range(self, "lr_decay_steps wsd_decay_steps loss_scale_window", 1)
        in_range(self, "beta1 beta2", 0, 1)
        require(
            0 <= self.min_lr <= self.lr,
            f"--min-lr {self.min_lr}",
            f"must be between 0 and --lr {self.lr}",
            "lower --min-lr or raise --lr",
        )
        require(
            self.lr_decay_steps is None or self.lr_decay_steps >= self.warmup_steps,
            f"--lr-decay-steps {self.lr_decay_steps}",
            f"the decay would end before the --warmup-steps {self.warmup_steps} are over",
            "raise it (it counts from the start of the run) or lower --warmup-steps",
        )


@dataclass(frozen=True)
class RunConfig:
    """Output, checkpoints, evaluation and logging."""

    run_dir: str = "runs/run"
    """Directory of the run: config.yaml, metrics.jsonl, checkpoints/, logs/."""
    save_every: int = 0
    """Steps between checkpoints; 0: only at the end."""
    keep_last: int = 2
    """Number of checkpoints to keep; older ones are deleted after each commit."""
    resume: str = "latest"
    """latest, never, or the path of a checkpoint or run directory to resume from."""
    reset_data: bool = False
    """With --resume PATH: train on other data (or --split, --seed, --seq-len), from its first sample."""
    reset_optimizer: bool = False
    """With --resume PATH: start with zero moments, Adam's bias correction from step 1 and the initial loss scale."""
    reset_step: bool = False
    """With --resume PATH: count steps from 1 again, and with them the learning-rate schedule."""
    init_from_hf: str | None = None
    """Start a new run with the model options and weights of this Hugging Face directory."""
    resume_fallback: bool = False
    """If the newest checkpoint is damaged, resume from the one before it."""
    save_errors: Literal["stop", "warn"] = "stop"
    """Whether a failed save stops the run or only logs a warning."""
    check_replicas: bool = True
    """Before every save, compare the copies of each weight over dp and tp; save nothing if they differ."""
    watchdog_timeout: float = 600.0
    """Seconds without progress after which the run is stopped and the hanging rank named; 0: no watchdog."""
    on_spike: Literal["ignore", "skip", "rewind"] = "ignore"
    """On a loss spike: continue, skip its update, or rewind to the last checkpoint and skip the samples since."""
    spike_threshold: float = 1.5
    """A spike is a loss above this multiple of the median of the last 32 losses."""
    save_model_every: int = 0
    """Steps between saves of the weights only, as bf16; 0: never."""
    eval_every: int = 0
    """Steps between evaluations; 0: only at the end."""
    eval_steps: int = 10
    """Number of global batches per evaluation."""
    log_every: int = 1
    """Steps between console lines (metrics.jsonl records every step)."""
    record_schedule: str | None = None
    """A:B records to RUN_DIR/schedule when each pipeline operation of steps A to B - 1 ran (see tools/schedule.py)."""
    profile: str | None = None
    """A:B profiles steps A to B - 1: a trace and a table of times per rank in RUN_DIR/profile."""
    memory_snapshot: bool = False
    """CUDA: record every allocation; write RUN_DIR/profile/memory_rank_N.pickle at the end or when out of memory."""
    tensorboard: bool = False
    """Also write TensorBoard events to RUN_DIR/tensorboard."""
    wandb_project: str | None = None
    """Also log to this Weights & Biases project (offline without an API key)."""

    def __post_init__(self) -> None:
        in_range(self, "save_every save_model_every eval_every", 0)
        in_range(self, "eval_steps log_every", 1)
        in_range(self, "keep_last", 2)
        in_range(self, "watchdog_timeout", 0)
        in_range(self, "spike_threshold", 1, above=True)
        resets = [f"--reset-{name}" for name in ("data", "optimizer", "step") if getattr(self, f"reset_{name}")]
        require(
            not resets or self.resume not in ("latest", "never"),
            f"{' '.join(resets)} with --resume {self.resume}",
            "resets what a new stage of training takes over from the checkpoint of another",
            "name that checkpoint with --resume PATH, and give a new --run-dir",
        )
        require(self.run_dir != "", "--run-dir ''", "is empty", "give a directory")
        step_range("--record-schedule", self.record_schedule)
        step_range("--profile", self.profile)


@dataclass(frozen=True)
class Config:
    """All options of a run, checked against each other."""

    model: ModelConfig = field(default_factory=ModelConfig)
    parallel: ParallelConfig = field(default_factory=ParallelConfig)
    data: DataConfig = field(default_factory=DataConfig)
    train: TrainConfig = field(default_factory=TrainConfig)
    optim: OptimConfig = field(default_factory=OptimConfig)
    run: RunConfig = field(default_factory=RunConfig)

    def __post_init__(self) -> None:
        m, p = self.model, self.parallel
        for value, what in ((m.num_heads, "--num-heads"), (m.kv_heads, "--num-kv-heads")):
            require(
                value % p.tp == 0,
                f"{what} {value}",
                f"must be divisible by --tp {p.tp}: heads are never split",
                f"use a --tp that divides {value}, or change {what}",
            )
        require(
            m.ffn_size % p.tp == 0,
            f"--ffn-hidden-size {m.ffn_hidden_size}",
            f"must be divisible by --tp {p.tp}",
            "change one of the two",
        )
        require(
            not self.sequence_parallel or m.seq_len % p.tp == 0,
            f"--seq-len {m.seq_len}",
            f"must be divisible by --tp {p.tp} with sequence parallelism",
            "change --seq-len, or give --no-sequence-parallel",
        )
        require(
            not (self.train.compile and (m.hidden_dropout or m.attention_dropout)),
            f"--compile with --hidden-dropout {m.hidden_dropout} --attention-dropout {m.attention_dropout}",
            "compiled blocks do not support dropout",
            "drop --compile, or set both to 0",
        )
        require(
            self.train.offload != "optimizer+params" or p.zero == 3,
            f"--offload optimizer+params with --zero {p.zero}",
            "weights leave the device only where they are gathered before use",
            "give --zero 3, or --offload optimizer",
        )
        require(
            self.train.compress == "none" or p.zero < 2,
            f"--compress {self.train.compress} with --zero {p.zero}",
            "whole gradients are compressed, once per step, and --zero 2 and 3 do not keep them",
            "use --zero 1, or drop --compress",
        )
        for flag, asked in (("--profile", self.run.profile), ("--record-schedule", self.run.record_schedule)):
            steps, last = step_range(flag, asked), self.train.train_steps
            require(
                asked is None or steps.start <= last,
                f"{flag} {asked}",
                f"starts after the last of --train-steps {last}",
                "choose earlier steps",
            )
        require(
            p.pp * p.vp <= m.num_layers,
            f"--pp {p.pp} --vp {p.vp}",
            f"makes {p.pp * p.vp} stages of {m.num_layers} layers, and each stage needs at least one layer",
            "lower --pp or --vp, or raise --num-layers",
        )

    @property
    def sequence_parallel(self) -> bool:
        return self.parallel.sequence_parallel and self.parallel.tp > 1

    def zero_group_size(self, dp: int, local_ranks: int) -> int | None:
        """Return how many data-parallel ranks share with ZeRO, None: all of them.

        Args:
            dp: data-parallel size.
            local_ranks: ranks on one host.

        Raises:
            UserError: `--zero-group` does not divide dp, or leaves one rank per group.
        """
        asked = self.parallel.zero_group
        if asked == "full":
            return None
        if asked == "node":
            size = min(max(1, local_ranks // self.parallel.tp), dp)
        else:
            size = dp // int(asked[3:]) if asked.startswith("dp/") else int(asked)
        exact = not asked.startswith("dp/") or dp % int(asked[3:]) == 0
        divisors = ", ".join(str(n) for n in range(2, dp + 1) if dp % n == 0)
        require(
            size > 1 and exact and dp % size == 0,
            f"--zero-group {asked}",
            f"must make groups of at least two ranks that divide dp {dp}",
            f"use full, or one of {divisors}" if divisors else "use full",
        )
        return size

    def num_microbatches(self, dp: int) -> int:
        """Return the number of micro-batches per step and dp rank; UserError if the batch does not divide."""
        t = self.train
        per_pass = t.micro_batch_size * dp
        require(
            t.global_batch_size % per_pass == 0,
            f"--global-batch-size {t.global_batch_size}",
            f"must be divisible by micro-batch size {t.micro_batch_size} x dp {dp} = {per_pass}",
            f"use {max(1, round(t.global_batch_size / per_pass)) * per_pass}, or change --micro-batch-size",
        )
        return t.global_batch_size // per_pass
