"""Options of a run: frozen dataclasses, checked on construction. Field names are the names of the flags.

Each group checks itself; `Config` checks them against each other. An error is a `UserError`, exit code 2.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

from megalite.base.errors import in_range, require, step_range
from megalite.base.store import cached_at, check_local, check_url, is_url
from megalite.config.attention import check_attention
from megalite.config.context_parallel import check_context_parallel
from megalite.config.data import DataConfig
from megalite.config.expert_parallel import check_experts
from megalite.config.fp8 import check_fp8
from megalite.config.latent_attention import check_latent_attention
from megalite.config.model import ModelConfig
from megalite.config.multi_token import check_mtp
from megalite.config.optim import OptimConfig
from megalite.config.parallel import ParallelConfig
from megalite.config.train import TrainConfig
from megalite.update_rules import RULES

_MAX_MICROBATCHES = 100_000


@dataclass(frozen=True)
class RunConfig:
    """Output, checkpoints, evaluation and logging."""

    run_dir: str = "runs/run"
    """Directory of the run: config.yaml, metrics.jsonl, checkpoints/, logs/; or a URL (s3://, gs://) to which the
    checkpoints of its local folder in --cache-dir are uploaded."""
    cache_dir: str = "~/.cache/megalite"
    """Local folder for what stands in object stores; on a large disk."""
    cache_gb: float = 100.0
    """GB of token data from object stores that are kept there; the oldest are deleted first."""
    save_every: int = 0
    """Steps between checkpoints; 0: only at the end."""
    keep_last: int = 2
    """Number of checkpoints to keep; older ones are deleted after each save."""
    resume: str = "latest"
    """Checkpoint to resume from: the latest in --run-dir, none (never), or that of a run or checkpoint at PATH."""
    reset_data: bool = False
    """With --resume PATH: train on other data (or --split, --seed, --seq-len), from its first sample."""
    reset_optimizer: bool = False
    """With --resume PATH: start with zero moments, Adam's bias correction at step 1, and the initial loss scale."""
    reset_step: bool = False
    """With --resume PATH: count steps from 1 again, and restart the learning-rate schedule."""
    init_from_hf: str | None = None
    """Start a new run with the model options and weights of this Hugging Face directory, or URL of one."""
    resume_fallback: bool = False
    """If the newest checkpoint is damaged, resume from the one before it."""
    max_minutes: float = 0.0
    """Save and end after the first step that begins this many minutes after training (not start-up) began; 0: never."""
    save_errors: Literal["stop", "warn"] = "stop"
    """Whether a failed save stops the run or only logs a warning."""
    check_replicas: bool = True
    """Before every save, compare the copies of each weight over dp and tp; save nothing if they differ."""
    watchdog_timeout: float = 600.0
    """Stop the run, and name the rank that hangs, after this many seconds without progress; 0: no watchdog."""
    recover: Literal["none", "process", "host"] = "none"
    """When a process, or a host too, is lost: go on within seconds from copies in memory (docs/reliability.md)."""
    recover_every: int = 1
    """With --recover: steps between copies."""
    max_recoveries: int = 100
    """With --recover: after so many (or without a spare rank) the last state is saved, and the exit code is 75."""
    spare_ranks: int = 0
    """With --recover host: the launcher's last so many ranks do not train, but wait to take a lost host's place."""
    on_spike: Literal["ignore", "skip", "rewind"] = "ignore"
    """On a loss spike: ignore it, skip its update, or rewind to the last checkpoint and skip the samples since then."""
    spike_threshold: float = 1.5
    """A loss above this multiple of the median of the last 32 losses is a spike."""
    save_model_every: int = 0
    """Steps between saves of the weights alone, as bf16; 0: never."""
    eval_every: int = 0
    """Steps between evaluations; 0: only at the end."""
    eval_steps: int = 10
    """Number of global batches per evaluation."""
    log_every: int = 1
    """Steps between console lines (metrics.jsonl records every step)."""
    moe_per_layer_logging: bool = False
    """Also record the balance loss, z-loss and load of experts of each layer, as expert_load_layer_3."""
    record_schedule: str | None = None
    """Record the times of all pipeline operations of steps A to B - 1 in RUN_DIR/schedule (see megalite schedule)."""
    profile: str | None = None
    """Profile steps A to B - 1: write a trace and a table of times per rank to RUN_DIR/profile."""
    memory_snapshot: bool = False
    """CUDA: record every allocation; write RUN_DIR/profile/memory_rank_N.pickle at the end or when out of memory."""
    calibration: str | None = None
    """Measurements of this machine (megalite plan calibrate), to predict step times for --layout auto and the log."""
    tensorboard: bool = False
    """Also write TensorBoard events to RUN_DIR/tensorboard."""
    wandb_project: str | None = None
    """Also log to this Weights & Biases project (offline without an API key)."""

    def __post_init__(self) -> None:
        in_range(self, "save_every save_model_every eval_every max_recoveries spare_ranks max_minutes", 0, 10**10)
        in_range(self, "eval_steps log_every recover_every", 1, 10**10)
        in_range(self, "keep_last", 2, 10**6)
        # A timeout shorter than a step, or than reading a file at start-up, would end healthy runs.
        in_range(self, "watchdog_timeout", 1 if self.watchdog_timeout != 0 else 0, 10**7)
        in_range(self, "spike_threshold", 1, 10**6, above=True)
        resets = [f"--reset-{name}" for name in ("data", "optimizer", "step") if getattr(self, f"reset_{name}")]
        require(
            not resets or self.resume not in ("latest", "never"),
            f"{' '.join(resets)} with --resume {self.resume}",
            "applies to a run that continues from the checkpoint of another",
            "name that checkpoint with --resume PATH, and give a new --run-dir",
        )
        require(self.run_dir != "", "--run-dir ''", "is empty", "give a directory")
        in_range(self, "cache_gb", 0.001, 10**7)
        check_url("--run-dir", self.run_dir)
        check_url("--resume", self.resume)
        given, rule = f"--run-dir {self.run_dir}", "is gone when a process ends, and each has its own"
        require(not self.run_dir.startswith("memory://"), given, rule, "give a store or a directory")
        given, rule = f"--recover {self.recover} with --run-dir {self.run_dir}", "uploads end with their process"
        require(self.recover == "none" or not is_url(self.run_dir), given, rule, "give a directory, or --recover none")
        given, rule = f"--spare-ranks {self.spare_ranks}", "needs copies on other hosts"
        require(self.spare_ranks == 0 or self.recover == "host", given, rule, "use --recover host")
        check_url("--init-from-hf", str(self.init_from_hf))
        check_local("--calibration", self.calibration)
        step_range("--record-schedule", self.record_schedule)
        step_range("--profile", self.profile)

    @property
    def folder(self) -> Path:
        """The local folder of the run."""
        return cached_at(self.run_dir, self.cache_dir)


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
        self._check_tensor_parallel()
        check_context_parallel(self.model, self.parallel, self.data.within_documents)
        check_latent_attention(self.model, self.parallel, self.train)
        check_attention(self.model, self.parallel, self.train)
        check_mtp(self.model, self.parallel)
        check_experts(self.model, self.parallel, self.run.moe_per_layer_logging)
        self._check_features()
        check_fp8(self.model, self.parallel, self.train)
        self._check_steps()
        m, p, counts = self.model, self.parallel, self.parallel.stage_layers
        require(
            counts is not None or p.pp * p.vp <= m.num_layers,
            f"--pp {p.pp} --vp {p.vp}",
            f"makes {p.pp * p.vp} stages of {m.num_layers} layers, and each stage needs at least one layer",
            "lower --pp or --vp, raise --num-layers, or say with --pipeline-layout which have none",
        )
        given, rule = f"--pipeline-layout {p.pipeline_layout}", f"must have the {m.num_layers} layers of --num-layers"
        require(counts is None or sum(counts) == m.num_layers, given, rule, f"it has {sum(counts or ())}: change one")

    def _check_tensor_parallel(self) -> None:
        m, p = self.model, self.parallel
        for value, what in ((m.num_heads, "--num-heads"), (m.kv_heads, "--num-kv-heads")):
            require(
                value % p.tp == 0,
                f"{what} {value}",
                f"must be divisible by --tp {p.tp}: heads are never split",
                f"use a --tp that divides {value}, or change {what}",
            )
        given, rule = f"--ffn-hidden-size {m.ffn_hidden_size}", f"must be divisible by --tp {p.tp}"
        require(m.ffn_size % p.tp == 0, given, rule, "change one of the two")
        require(
            not self.sequence_parallel or m.seq_len % (p.tp * p.cp * p.tp_chunks) == 0,
            f"--seq-len {m.seq_len}",
            f"must be divisible by --tp {p.tp} x --tp-chunks {p.tp_chunks}"
            + f" x --cp {p.cp}" * (p.cp > 1)
            + " with sequence parallelism",
            "change --seq-len" + (", or lower --tp-chunks" if p.tp_chunks > 1 else ", or give --no-sequence-parallel"),
        )

    def _check_features(self) -> None:
        """Check what cannot be combined, whatever the sizes are."""
        m, p = self.model, self.parallel
        require(
            not (self.train.compile and (m.hidden_dropout or m.attention_dropout)),
            f"--compile with --hidden-dropout {m.hidden_dropout} --attention-dropout {m.attention_dropout}",
            "compiled blocks do not support dropout",
            "drop --compile, or set both to 0",
        )
        require(
            self.train.offload != "optimizer+params" or p.zero == 3,
            f"--offload optimizer+params with --zero {p.zero}",
            "weights can be offloaded only if they are gathered before use",
            "give --zero 3, or --offload optimizer",
        )
        rule = self.optim.optimizer
        require(
            m.mup_base_width is None or (RULES[rule].width_power is not None and self.optim.decoupled_lr is None),
            f"--mup-base-width {m.mup_base_width} with --optimizer {rule} --decoupled-lr {self.optim.decoupled_lr}",
            f"muP sets the rates of {', '.join(name for name in RULES if RULES[name].width_power is not None)} only",
            "choose one of these, without --decoupled-lr",
        )
        given, wide = f"--grad-dtype {self.train.grad_dtype} with --zero {p.zero}", self.train.grad_dtype == "fp32"
        rule = "saves nothing: the update requires an fp32 gradient of all that a rank owns, here everything"
        require(wide or p.zero > 0, given, rule, "give --zero 1, or drop --grad-dtype")
        given, wide = f"--master-dtype {self.optim.master_dtype}", self.optim.master_dtype == "fp32"
        rule = f"requires weights in bf16, which are then the masters, not --precision {self.train.precision}"
        require(wide or self.train.precision == "bf16", given, rule, "give --precision bf16, or drop --master-dtype")
        require(
            self.train.compress == "none" or p.zero < 2,
            f"--compress {self.train.compress} with --zero {p.zero}",
            "compression requires full gradients once per step, which --zero 2 and 3 do not keep",
            "use --zero 1, or drop --compress",
        )

    def _check_steps(self) -> None:
        """Check the steps that are profiled or recorded against those of the run."""
        for flag, asked in (("--profile", self.run.profile), ("--record-schedule", self.run.record_schedule)):
            steps, last = step_range(flag, asked), self.train.train_steps
            require(
                asked is None or steps.start <= last,
                f"{flag} {asked}",
                f"starts after the last of --train-steps {last}",
                "choose earlier steps",
            )
        recorded, sizes = step_range("--record-schedule", self.run.record_schedule), self.train.batches
        require(
            not recorded or len({sizes.size(step) for step in (recorded[0], recorded[-1])}) == 1,
            f"--record-schedule {self.run.record_schedule}",
            "the steps have different batch sizes, and so different schedules",
            "choose steps of one batch size",
        )

    @property
    def local_data(self) -> DataConfig:
        """The data options with local stand-ins in place of URLs."""
        return self.data.local(self.run.cache_dir)

    @property
    def sequence_parallel(self) -> bool:
        return self.parallel.sequence_parallel and self.parallel.tp > 1

    @property
    def rates(self) -> OptimConfig:
        """The optimizer options, with learning rates for this batch size (`--scale-lr`)."""
        return self.optim.scaled(self.train.global_batch_size)

    @property
    def peak_rate(self) -> str:
        """The peak learning rate and how `--scale-lr` computes it; empty without that option."""
        o, batch = self.optim, self.train.global_batch_size
        if o.scale_lr is None:
            return ""
        return f"{self.rates.lr:.6g} = --lr {o.lr:.6g} at batch {o.base_batch_size}, --scale-lr {o.scale_lr} to {batch}"

    def zero_stage(self, dp: int) -> int:
        """Return the ZeRO stage in effect (`ParallelConfig.zero_stage`)."""
        return self.parallel.zero_stage(dp, self.train.offload == "optimizer+params")

    def num_microbatches(self, dp: int) -> int:
        """Return the number of micro-batches per step and dp rank, for the largest batch.

        Raises:
            UserError: some batch does not divide.
        """
        return self.microbatch_counts(dp)[-1]

    def microbatch_counts(self, dp: int) -> list[int]:
        """List the numbers of micro-batches per step and dp rank that occur in a run, in rising order.

        Raises:
            UserError: some batch does not divide.
        """
        t = self.train
        per_pass, counts = t.micro_batch_size * dp, []
        for size in t.batches.sizes:
            flag = f"--global-batch-size {size}"
            if t.batch_size_schedule is not None:
                flag = f"--batch-size-schedule {t.batch_size_schedule}: {size}"
            require(
                size % per_pass == 0,
                flag,
                f"must be divisible by micro-batch size {t.micro_batch_size} x dp {dp} = {per_pass}",
                f"use {max(1, round(size / per_pass)) * per_pass}, or change --micro-batch-size",
            )
            counts.append(size // per_pass)
            # The schedule lists every pass of every micro-batch before the first step.
            require(
                counts[-1] <= _MAX_MICROBATCHES,
                flag,
                f"makes {counts[-1]} micro-batches per step on each of {dp} data-parallel ranks, more than "
                f"{_MAX_MICROBATCHES}",
                "raise --micro-batch-size, or use more ranks",
            )
        return counts
