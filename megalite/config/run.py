"""Options of a run: frozen dataclasses, checked on construction. Field names are the names of the flags.

Each group checks itself; `Config` checks them against each other. Errors name the value, the rule it breaks, and the
fix (`UserError`, exit code 2).
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

from megalite.config.data import DataConfig
from megalite.config.model import ModelConfig
from megalite.config.optim import OptimConfig
from megalite.config.parallel import ParallelConfig
from megalite.config.train import TrainConfig
from megalite.errors import in_range, require, step_range
from megalite.schedules.lr import learning_rate, weight_decay

_MAX_MICROBATCHES = 100_000


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
    calibration: str | None = None
    """Constants of this machine (see tools/plan.py calibrate), to predict step times for --layout auto and the log."""
    tensorboard: bool = False
    """Also write TensorBoard events to RUN_DIR/tensorboard."""
    wandb_project: str | None = None
    """Also log to this Weights & Biases project (offline without an API key)."""

    def __post_init__(self) -> None:
        in_range(self, "save_every save_model_every eval_every", 0, 10**10)
        in_range(self, "eval_steps log_every", 1, 10**10)
        in_range(self, "keep_last", 2, 10**6)
        # Shorter than a step, or than the reading of a file in set-up, it would end healthy runs.
        in_range(self, "watchdog_timeout", 1 if self.watchdog_timeout != 0 else 0, 10**7)
        in_range(self, "spike_threshold", 1, 10**6, above=True)
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
        recorded, sizes = step_range("--record-schedule", self.run.record_schedule), self.train.batches
        require(
            not recorded or len({sizes.size(step) for step in (recorded[0], recorded[-1])}) == 1,
            f"--record-schedule {self.run.record_schedule}",
            "the steps have different batch sizes, and so different schedules",
            "choose steps of one batch size",
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

    @property
    def rates(self) -> OptimConfig:
        """The options of the optimizer, with learning rates for this batch size (`--scale-lr`)."""
        return self.optim.scaled(self.train.global_batch_size)

    @property
    def peak_rate(self) -> str:
        """How `--scale-lr` makes the peak learning rate, in words; empty without it."""
        o, batch = self.optim, self.train.global_batch_size
        if o.scale_lr is None:
            return ""
        return f"{self.rates.lr:.6g} = --lr {o.lr:.6g} at batch {o.base_batch_size}, --scale-lr {o.scale_lr} to {batch}"

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
        """Return the number of micro-batches per step and dp rank, of the largest batch.

        Raises:
            UserError: some batch does not divide.
        """
        return self.microbatch_counts(dp)[-1]

    def microbatch_counts(self, dp: int) -> list[int]:
        """List the numbers of micro-batches per step and dp rank that a run has, in rising order.

        Raises:
            UserError: some batch does not divide.
        """
        t = self.train
        per_pass, counts = t.micro_batch_size * dp, []
        for size in t.batches.sizes:
            given = f"--global-batch-size {size}"
            if t.batch_size_schedule is not None:
                given = f"--batch-size-schedule {t.batch_size_schedule}: {size}"
            require(
                size % per_pass == 0,
                given,
                f"must be divisible by micro-batch size {t.micro_batch_size} x dp {dp} = {per_pass}",
                f"use {max(1, round(size / per_pass)) * per_pass}, or change --micro-batch-size",
            )
            counts.append(size // per_pass)
            # The schedule lists every pass of every micro-batch before the first step.
            require(
                counts[-1] <= _MAX_MICROBATCHES,
                given,
                f"makes {counts[-1]} micro-batches per step on each of {dp} data-parallel ranks, more than "
                f"{_MAX_MICROBATCHES}",
                "raise --micro-batch-size, or use more ranks",
            )
        return counts


def rates_at(optim: OptimConfig, train: TrainConfig, step: int) -> tuple[float, float, float]:
    """Return a step's learning rate, that of embedding and output layer, and weight decay (the first step is 1)."""
    # By samples, a step stands where their number of full batches would end.
    by_samples, batch = optim.lr_by == "samples", train.global_batch_size
    at, last = (train.batches.samples(n) / batch if by_samples else n for n in (step, train.train_steps))
    rates = optim.scaled(batch)
    lr, decoupled_lr = (learning_rate(at, options, last) for options in (rates, rates.decoupled))
    return lr, decoupled_lr, weight_decay(at, rates, last)
