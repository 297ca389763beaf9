"""From a config to a run: data, engine, run directory, and the state of an earlier run in it."""

from __future__ import annotations

import contextlib
import dataclasses
import hashlib
import math
import signal
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from types import FrameType, TracebackType
from typing import Any

import torch

from megalite.checkpoint.folder import step_folders
from megalite.checkpoint.hf.start import load_hf
from megalite.checkpoint.replicas import check_replicas
from megalite.checkpoint.save import Checkpointer
from megalite.config import cli
from megalite.config.run import Config
from megalite.data import BatchLoader, Datasets, Samples, chat_template_of, prefixes_of
from megalite.dist.agree import agree, check_equal
from megalite.dist.context import ParallelContext
from megalite.errors import step_range
from megalite.log import logger, setup_logging
from megalite.model.parameters import param_map
from megalite.pipeline.record import Recorder
from megalite.sharding import count_parameters
from megalite.train.build import Engine, build_engine
from megalite.train.inputs import open_data, resolve_vocabulary
from megalite.train.metrics import MetricsLogger
from megalite.train.profile import StepProfiler
from megalite.train.quiet import GpuReadings
from megalite.train.resume import check_folders, choose_checkpoint, log_start, resume
from megalite.train.run_dir import make_run_dir, write_config
from megalite.train.spike import SpikeDetector
from megalite.train.watch.heartbeat import Heartbeat
from megalite.train.watch.watchdog import CHILDREN, IDLE, OWN


@dataclass
class Run:
    """All that `fit` works on.

    Attributes:
        engine: model, schedule and optimizer of this rank.
        datasets: training and evaluation data.
        loader: global batches from the first sample that is not consumed yet.
        metrics: writes metrics.jsonl, log lines and trackers.
        checkpointer: saves of this run.
        recorder: times of pipeline operations, in the steps that `--record-schedule` names.
        profiler: `--profile` and `--memory-snapshot`.
        gpu: readings of rank 0's GPU.
        meta: what every checkpoint records about the run besides its state (config, hashes).
        heartbeat: reports to the watchdog where this rank is.
        spikes: decides which loss is a spike.
        step: completed optimizer steps.
        sample_offset: samples consumed beyond those of `step` batches: skipped by a rewind, or of other batch sizes.
        skipped_steps: steps of the whole run whose update was skipped.
        saved: (step, folder) of the checkpoints of this run's history, oldest first; the last may not be committed.
        rewinds: number of rewinds to each of them.
        stop_asked: this process got SIGTERM or SIGINT; set it to stop after the next step.
        around: what ends when the run is closed, after its own parts.
        closed: whether it is.
    """

    engine: Engine
    datasets: Datasets
    loader: BatchLoader
    metrics: MetricsLogger
    checkpointer: Checkpointer
    recorder: Recorder
    profiler: StepProfiler
    gpu: GpuReadings
    meta: dict[str, Any]
    heartbeat: Heartbeat
    spikes: SpikeDetector
    step: int = 0
    sample_offset: int = 0
    skipped_steps: int = 0
    saved: list[tuple[int, Path]] = field(default_factory=list)
    rewinds: dict[str, int] = field(default_factory=dict)
    stop_asked: bool = field(default=False, init=False)
    around: contextlib.ExitStack = field(default_factory=contextlib.ExitStack, init=False)
    closed: bool = field(default=False, init=False)

    @property
    def consumed_samples(self) -> int:
        """Samples of all ranks up to the end of the last step."""
        return self.engine.cfg.train.batches.samples(self.step) + self.sample_offset

    @property
    def modules(self) -> dict[str, torch.nn.Module]:
        """All modules of the stages on this rank by their global names, for hooks: "layers.0.self_attn", "lm_head"."""
        stages = self.engine.stages.values()
        return {name: module for stage in stages for name, module in stage.named_modules() if name}

    def close(self) -> None:
        """Wait for a save in progress, and end all that the run started; every rank calls it."""
        self.__exit__(None, None, None)

    def __enter__(self) -> Run:
        return self

    def __exit__(self, kind: type[BaseException] | None, e: BaseException | None, tb: TracebackType | None) -> None:
        if self.closed:
            return
        self.closed = True
        # All of them, from the last to the first, even if one fails.
        left = self.around.pop_all()
        for part in (self.heartbeat, self.checkpointer, self.metrics, self.loader, self.profiler, self.gpu):
            left.callback(part.close)
        left.callback(self.heartbeat.beat, "closing", self.step, OWN)
        if kind is None:
            left.callback(self.checkpointer.finish)
            left.callback(self.heartbeat.beat, "last save", self.step, CHILDREN)
        left.__exit__(kind, e, tb)

    def on_signal(self, signum: int, _frame: FrameType | None) -> None:
        """Ask for a stop after this step; a second Ctrl-C ends the process at once."""
        if self.stop_asked and signum == signal.SIGINT:
            raise KeyboardInterrupt
        self.stop_asked = True
        logger.info(f"{signal.Signals(signum).name}: saving after this step, then exiting")


def open_run(
    cfg: Config, ctx: ParallelContext, train_data: Samples | None = None, valid_data: Samples | None = None
) -> Run:
    """Check everything, build the engine, and resume from the run directory's last checkpoint if there is one.

    Args:
        cfg: all options.
        ctx: this rank's axes.
        train_data, valid_data: samples of the caller's own, in place of `--data`.

    Raises:
        UserError: on every rank, if a request cannot be met on one; whatever was opened is closed again.
    """
    with contextlib.ExitStack() as opened:
        agree(ctx, lambda: check_folders(cfg))
        heartbeat = Heartbeat(Path(cfg.run.run_dir), ctx, cfg.run.watchdog_timeout)
        opened.callback(heartbeat.close)
        cfg, tokenizer = agree(ctx, lambda: resolve_vocabulary(cfg, train_data is not None))
        check_equal(
            ctx, "the configuration", digest_of(cli.to_yaml(cfg)), "start every rank with the same flags and files"
        )
        cfg.num_microbatches(ctx.dp.size)
        heartbeat.beat("set-up: data", patience=OWN)
        share = (ctx.rank, ctx.world.size)
        datasets = agree(ctx, lambda: open_data(cfg, tokenizer, train_data, valid_data, share))
        hashes = agree(ctx, datasets.content_hashes)
        check_equal(ctx, "the data", digest_of(str(hashes)), "give every host the same files")
        meta = {
            "config": dataclasses.asdict(cfg),
            **hashes,
            "tokenizer_sha256": tokenizer.sha256 if tokenizer else None,
        }
        heartbeat.beat("set-up: model", patience=OWN)
        engine = agree(ctx, lambda: build_engine(cfg, ctx))
        run_dir = Path(cfg.run.run_dir)
        agree(ctx, lambda: make_run_dir(run_dir))
        agree(ctx, lambda: setup_logging(ctx.rank, run_dir / "logs" / f"rank_{ctx.rank}.log"))
        logger.info(banner(engine))
        if cfg.peak_rate:
            logger.info(f"peak learning rate {cfg.peak_rate}")
        heartbeat.beat("set-up: checkpoint", patience=OWN)
        folder, keep, on_error = run_dir / "checkpoints", cfg.run.keep_last, cfg.run.save_errors
        scratch = Path(cfg.train.offload_dir) if cfg.train.offload_dir is not None else None
        checkpointer = Checkpointer(folder, ctx, keep_last=keep, on_error=on_error, scratch=scratch)
        opened.callback(checkpointer.close)
        source = choose_checkpoint(cfg, run_dir, ctx)
        state = source.state(resume(engine, source, meta)) if source else init_weights(engine)
        prefixes, learned = prefixes_of(cfg.data.data) if cfg.data.data else (), state.get("chat_template")
        meta["chat_template"] = agree(ctx, lambda: chat_template_of(prefixes, learned))
        if source:
            log_start(engine, source, meta)
        # Only now is it this run's folder: an earlier run's config stays until this run is certain to start.
        agree(ctx, lambda: write_config(run_dir, cli.to_yaml(cfg)) if ctx.rank == 0 else None)
        run = make_run(
            engine, datasets=datasets, meta=meta, state=state, checkpointer=checkpointer, heartbeat=heartbeat
        )
        if source and not source.resets:
            continue_history(run, source.path)
        happened = {"checkpoint": str(source.path), "resets": " ".join(source.resets)} if source else {}
        run.metrics.event(
            "resume" if source else "start", step=run.step, consumed_samples=run.consumed_samples, **happened
        )
        opened.pop_all()
        run.heartbeat.beat("between calls", run.step, IDLE)
        return run


def digest_of(text: str) -> str:
    """Return a short hash, for `check_equal`."""
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def continue_history(run: Run, source: Path) -> None:
    """Make the checkpoint that a run starts from, and those before it in its folder, part of this run's history."""
    run.checkpointer.continues(source)
    older = step_folders(source.parent) if source.parent == run.checkpointer.root else []
    run.saved = [(step, path) for step, path in reversed(older) if step < run.step] + [(run.step, source)]


def init_weights(engine: Engine) -> dict[str, Any]:
    """Give a new run its weights, random or from a Hugging Face folder; return what a checkpoint would record."""
    folder = engine.cfg.run.init_from_hf
    if folder is None:
        engine.optimizer.init_parameters(engine.cfg.train.seed)
        logger.info(f"new run: random weights of --seed {engine.cfg.train.seed}")
    else:
        dtype = load_hf(folder, engine.cfg.model, engine.optimizer.states(), engine.ctx)
        engine.optimizer.finish_load()
        logger.info(f"weights from {folder} ({dtype}); the optimizer starts at zero")
    return {"step": 0, "consumed_samples": 0}


def make_run(
    engine: Engine,
    *,
    datasets: Datasets,
    meta: dict[str, Any],
    state: dict[str, Any],
    checkpointer: Checkpointer,
    heartbeat: Heartbeat,
) -> Run:
    """Make the run, given the state that it starts from."""
    cfg, ctx = engine.cfg, engine.ctx
    run_dir, sizes = Path(cfg.run.run_dir), cfg.train.batches
    step, consumed = int(state["step"]), int(state["consumed_samples"])
    following = sizes.following(step)
    loader = BatchLoader(datasets.train, following, ctx.dp.rank, ctx.dp.size, consumed_samples=consumed)
    make_metrics = partial(
        MetricsLogger,
        run_dir,
        ctx.rank,
        total_steps=cfg.train.train_steps,
        log_every=cfg.run.log_every,
        tensorboard=cfg.run.tensorboard,
        wandb_project=cfg.run.wandb_project,
        config=meta["config"],
    )
    metrics = agree(ctx, make_metrics)
    profiler = agree(ctx, lambda: StepProfiler(cfg, ctx))
    steps = step_range("--record-schedule", cfg.run.record_schedule)
    count = sizes.size(max(1, steps.start)) // (cfg.train.micro_batch_size * ctx.dp.size)
    recorder = Recorder(run_dir / "schedule", ctx, engine.executor, engine.schedule_of(count), steps)
    threshold = cfg.run.spike_threshold if cfg.run.on_spike != "ignore" else math.inf
    spikes = SpikeDetector(threshold, state.get("loss_history", ()))
    engine.executor.observers = (heartbeat,)
    return Run(
        engine=engine,
        datasets=datasets,
        loader=loader,
        metrics=metrics,
        checkpointer=checkpointer,
        recorder=recorder,
        profiler=profiler,
        gpu=GpuReadings(ctx.device if ctx.rank == 0 else torch.device("cpu")),
        meta=meta,
        heartbeat=heartbeat,
        spikes=spikes,
        step=step,
        sample_offset=consumed - sizes.samples(step),
        skipped_steps=int(state.get("skipped_steps", 0)),
    )


def banner(engine: Engine) -> str:
    """Describe in one line what is about to be trained."""
    cfg, ctx = engine.cfg, engine.ctx
    *fewer, count = cfg.microbatch_counts(ctx.dp.size)
    parameters = count_parameters(param_map(cfg.model))
    sharing = f"ZeRO-{cfg.parallel.zero}" + f", gradients {cfg.train.compress}" * (cfg.train.compress != "none")
    return (
        f"{cfg.model.arch}, {parameters:,} parameters, on {ctx.world.size} x {ctx.device.type}: dp {ctx.dp.size}, "
        f"pp {ctx.pp.size}, tp {ctx.tp.size}; {f'{fewer[0]} to ' if fewer else ''}{count} "
        f"micro-batch{'es' * (count > 1)} of "
        f"{cfg.train.micro_batch_size} per dp rank and step; {cfg.train.precision}, {sharing}"
    )


def save(run: Run, weights_only: bool = False) -> None:
    """Start writing a checkpoint of the state after `run.step`; the writing happens in the background.

    Args:
        weights_only: write only the weights, as bf16.
    """
    engine = run.engine
    engine.optimizer.wait_weights()
    if engine.cfg.run.check_replicas:
        check_replicas(engine.optimizer.copies(), engine.ctx)
    meta = {
        **run.meta,
        "step": run.step,
        "loss_history": run.spikes.history,
        "consumed_samples": run.consumed_samples,
        "skipped_steps": run.skipped_steps,
        "scalars": {**engine.optimizer.scalars(), **engine.scaler.scalars()},
    }
    write = run.checkpointer.save_model if weights_only else run.checkpointer.save
    path = write(run.step, engine.optimizer.states(), meta, background=True)
    if path is None:
        return
    if not weights_only:
        run.saved.append((run.step, path))
    run.metrics.event("save_model" if weights_only else "save", step=run.step, checkpoint=str(path))
