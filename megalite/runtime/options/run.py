"""Options of a run: frozen dataclasses, checked on construction. Field names are the names of the flags.

Each group checks itself; `Config` checks them against each other. An error is a `UserError`, exit code 2.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

from megalite.core.base.errors import in_range, require
from megalite.core.options.names import dashed
from megalite.core.options.step import StepConfig
from megalite.runtime.base.urls import cached_at, check_local, check_url, check_user, is_url
from megalite.runtime.options.data import DataConfig
from megalite.runtime.options.windows import step_range, step_windows


@dataclass(frozen=True)
class RunConfig:
    """Output, checkpoints, evaluation and logging."""

    run_dir: str = "runs/run"
    """Directory of the run: config.yaml, metrics.jsonl, checkpoints/, logs/; or a URL (s3://, gs://) to which the
    checkpoints of its local folder in --cache-dir are uploaded."""
    cache_dir: str = "~/.cache/megalite"
    """Local folder for what stands in object stores, and for tokens of text; on a large disk."""
    cache_gb: float = 100.0
    """GB of token data from object stores that are kept there, and of tokens of text; the oldest are deleted first."""
    data_workers: int | None = None
    """Text as data: processes of each rank that tokenize; 0 tokenizes in the rank itself. Default: half of the host's
    cores, divided among its ranks."""
    upload_patience: float = 600.0
    """Seconds for which an upload to an object store is tried again while the store is away; training goes on."""
    read_patience: float = 600.0
    """Seconds for which a read of token data is tried again while their object store is away; training waits for it, as
    data_wait_s in metrics.jsonl shows."""
    save_every: int = 0
    """Steps between checkpoints; 0: only at the end."""
    keep_last: int = 2
    """Number of checkpoints to keep; older ones are deleted after each save."""
    keep_best: int = 0
    """Number of checkpoints with the lowest validation losses to keep besides; each is judged by the evaluation of its
    own step (--eval-every), and one of a step without is not."""
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
    exit_interval: int = 0
    """Save and end after every step whose number is a multiple of this; schedules go on to --train-steps. 0: never."""
    save_errors: Literal["stop", "warn"] = "stop"
    """Whether a failed save stops the run or only logs a warning."""
    save_code: Literal["none", "planes-zstd"] = "none"
    """Code each shard by itself, without loss, for uploads and slow disks: about 0.8 of the bytes, for a core's time at
    some 250 MB/s in the background (docs/checkpoints.md). Needs the package zstandard."""
    check_replicas: bool = True
    """Before every save, compare the copies of each weight over dp and tp; save nothing if they differ."""
    watchdog_timeout: float = 600.0
    """Stop the run, and name the rank that hangs, after this many seconds without progress; 0: no watchdog."""
    recover: Literal["none", "process", "host"] = "none"
    """When a process, or a host too, is lost: go on within seconds from copies in memory (docs/reliability.md)."""
    recover_every: int = 1
    """With --recover: steps between copies; 0: so many that copies add at most 2 % to the time of steps, by what the
    first ones did."""
    max_recoveries: int = 100
    """With --recover: after so many (or without a spare rank) the last state is saved, and the exit code is 75."""
    spare_ranks: int = 0
    """With --recover host: the launcher's last so many ranks do not train, but wait to take a lost host's place."""
    elastic: bool = False
    """With --recover host: without a spare rank left, go on with fewer replicas, the same samples, loss and norm."""
    min_ranks: int = 0
    """With --elastic: with fewer ranks than this the last state is saved, and the exit code is 75. 0: one replica."""
    grow_after: float = 60.0
    """With --elastic: seconds from a loss or a change until hosts that have come back may join."""
    on_spike: Literal["ignore", "skip", "rewind"] = "ignore"
    """On a loss spike: ignore it, skip its update, or rewind to the last checkpoint and skip the samples since then."""
    spike_threshold: float = 1.5
    """A loss above this multiple of the median of the last 32 losses is a spike."""
    save_model_every: int = 0
    """Steps between saves of the weights alone, as bf16; a step with a full save has none, also when --keep-last has
    deleted that one. 0: never."""
    save_model_delta: int = 0
    """With --save-model-every: of so many such saves the first is whole, the others are differences of it, without loss
    (docs/checkpoints.md). Needs the package zstandard. 0: all are whole."""
    eval_every: int = 0
    """Steps between evaluations; 0: only at the end."""
    eval_steps: int = 10
    """Number of global batches per evaluation; 0: no evaluation, not at the end either."""
    eval_tasks: tuple[str, ...] = ()
    """YAML files of tasks in lm-eval's form with local data, evaluated after the steps of --eval-every and at the end
    (docs/lm_eval.md)."""
    eval_limit: int = 0
    """With --eval-tasks: evaluate the first N documents of each task; 0: all."""
    log_every: int = 1
    """Steps between console lines (metrics.jsonl records every step)."""
    moe_per_layer_logging: bool = False
    """Also record the balance loss, z-loss and load of experts of each layer, as expert_load_layer_3."""
    record_schedule: str | None = None
    """Record the times of all pipeline operations of steps A to B - 1 in RUN_DIR/schedule (see megalite schedule)."""
    profile: str | None = None
    """Profile steps A to B - 1 (or of several windows, A:B,C:D): write a trace and a table of times per rank to
    RUN_DIR/profile."""
    profiler: Literal["torch", "nsight"] = "torch"
    """With --profile: torch's profiler, or NVTX ranges for nsys profile --capture-range=cudaProfilerApi (CUDA)."""
    tensor_stats: str | None = None
    """Write minimum, maximum, mean, deviation, NaN and Inf of every parameter, its gradient and each block's output to
    RUN_DIR/tensor_stats, at steps A to B - 1 (or of several windows)."""
    memory_snapshot: bool = False
    """CUDA: record every allocation; write RUN_DIR/profile/memory_rank_N.pickle at the end or when out of memory."""
    calibration: str | None = None
    """Measurements of this machine (megalite plan calibrate), to predict step times for --layout auto and the log."""
    tensorboard: bool = False
    """Also write TensorBoard events to RUN_DIR/tensorboard."""
    wandb_project: str | None = None
    """Also log to this Weights & Biases project (offline without an API key)."""

    def __post_init__(self) -> None:
        from_0 = (
            "save_every save_model_every save_model_delta eval_every eval_steps eval_limit max_recoveries spare_ranks "
            "recover_every min_ranks max_minutes exit_interval keep_best"
        )
        in_range(self, from_0, 0, 10**10)
        in_range(self, "log_every", 1, 10**10)
        in_range(self, "keep_last", 2, 10**6)
        require(
            not self.keep_best or (self.save_every > 0 and self.evaluates),
            f"--keep-best {self.keep_best}",
            "goes by the evaluations of steps that are saved",
            "give --eval-every, and a --save-every that is a multiple of it, or drop --keep-best",
        )
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
        in_range(self, "data_workers", 0, 1024)
        in_range(self, "upload_patience read_patience grow_after", 0, 10**6)
        check_url("--run-dir", self.run_dir)
        check_url("--resume", self.resume)
        given, rule = f"--run-dir {self.run_dir}", "is gone when a process ends, and each has its own"
        require(not self.run_dir.startswith("memory://"), given, rule, "give a store or a directory")
        given, rule = f"--recover {self.recover} with --run-dir {self.run_dir}", "uploads end with their process"
        require(self.recover == "none" or not is_url(self.run_dir), given, rule, "give a directory, or --recover none")
        given, rule = f"--spare-ranks {self.spare_ranks}", "needs copies on other hosts"
        require(self.spare_ranks == 0 or self.recover == "host", given, rule, "use --recover host")
        require(not self.elastic or self.recover == "host", "--elastic", rule, "use --recover host")
        given, rule = f"--min-ranks {self.min_ranks}", "applies to runs whose number of ranks may fall"
        require(self.min_ranks == 0 or self.elastic, given, rule, "use --elastic, or drop it")
        given, rule = f"--grow-after {self.grow_after:g}", "applies to runs whose number of ranks may grow"
        require(self.grow_after == RunConfig.grow_after or self.elastic, given, rule, "use --elastic, or drop it")
        given, rule = f"--save-model-delta {self.save_model_delta}", "applies to the saves of --save-model-every"
        require(not self.save_model_delta or self.save_model_every > 0, given, rule, "give that too, or drop it")
        check_url("--init-from-hf", str(self.init_from_hf))
        check_local("--calibration", self.calibration)
        for file in self.eval_tasks:
            check_local("--eval-tasks", file)
        given, rule = f"--eval-limit {self.eval_limit}", "bounds tasks, and there are none"
        require(not self.eval_limit or bool(self.eval_tasks), given, rule, "give --eval-tasks FILE, or drop it")
        step_range("--record-schedule", self.record_schedule)
        step_windows("--profile", self.profile)
        step_windows("--tensor-stats", self.tensor_stats)

    @property
    def evaluates(self) -> bool:
        """Whether there are evaluations between steps, for which data must be there."""
        return self.eval_every > 0 and self.eval_steps > 0

    @property
    def judged_every(self) -> int:
        """Steps from one that is both evaluated and saved to the next; 0: there are none but the last."""
        return math.lcm(self.save_every, self.eval_every if self.eval_steps else 0)

    @property
    def folder(self) -> Path:
        """The local folder of the run."""
        return cached_at(self.run_dir, self.cache_dir)


@dataclass(frozen=True)
class Config(StepConfig):
    """All options of a run, checked against each other."""

    data: DataConfig = field(default_factory=DataConfig)
    run: RunConfig = field(default_factory=RunConfig)

    def __post_init__(self) -> None:
        self._check_texts()
        super().__post_init__()
        check_local("--offload-dir", self.train.offload_dir)
        require(
            self.model.num_experts is not None or not self.run.moe_per_layer_logging,
            "--moe-per-layer-logging",
            "needs a model with experts",
            "give --num-experts, or drop it",
        )
        given, rule = "--eval-tasks with --stage reward", "tasks compare tokens, and a reward model predicts none"
        require(not self.run.eval_tasks or self.model.head == "lm", given, rule, "drop --eval-tasks")
        self._check_steps()
        if self.run.elastic:
            self._check_elastic()

    def _check_elastic(self) -> None:
        """Refuse what another number of ranks would change, or has not been run with."""
        group = self.parallel.zero_group
        rule, remedy = "rounds the sum of each rank: on fewer ranks there are other sums", "drop one of the two"
        require(not self.rounding, f"--elastic with {self.rounding}", rule, remedy)
        given, rule = f"--elastic with --zero-group {group}", "need not divide the number of ranks that are left"
        require(group == "full", given, rule, "drop --zero-group, or --elastic")

    def without_samples(self, dp: int) -> str:
        """Say how many of all ranks' micro-batches have no samples, where dp does not divide their number; else ""."""
        ran = self.num_microbatches(dp) * dp
        without = ran - self.train.global_batch_size // self.train.micro_batch_size
        return f" ({without} of {ran} without samples)" if without else ""

    @property
    def within_documents(self) -> bool:
        """Whether options of the data keep attention within documents; chat data implies it too."""
        return self.data.within_documents

    def _check_texts(self) -> None:
        """Refuse credentials where no URL is expected: config.yaml would hold them."""
        for name, value in (option for group in vars(self).values() for option in vars(group).items()):
            for text in value if isinstance(value, tuple) else (value,):
                check_user(f"--{dashed(name)}", str(text))

    def _check_steps(self) -> None:
        """Check the steps that are profiled, recorded or judged against those of the run."""
        run = self.run
        require(
            not run.keep_best or run.judged_every <= self.train.train_steps,
            f"--keep-best {run.keep_best} with --save-every {run.save_every} and --eval-every {run.eval_every}",
            f"no step up to --train-steps {self.train.train_steps} but the last is both evaluated and saved",
            "let --save-every be a multiple of --eval-every",
        )
        for name in ("profile", "tensor_stats", "record_schedule"):
            flag, asked, last = f"--{dashed(name)}", getattr(run, name), self.train.train_steps
            require(
                all(steps.start <= last for steps in step_windows(flag, asked)),
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
