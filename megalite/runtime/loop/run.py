"""A run in progress: what `fit` works on, how it is saved, and how it ends."""

from __future__ import annotations

import contextlib
import json
import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType
from typing import Any

import torch

from megalite.core.engine import Engine
from megalite.core.mesh.collectives import gather_texts
from megalite.runtime.checkpoint.check_replicas import check_replicas
from megalite.runtime.checkpoint.save import Checkpointer
from megalite.runtime.data import BatchLoader, Dataset, Datasets
from megalite.runtime.loop.spike import SpikeDetector
from megalite.runtime.options.run import Config
from megalite.runtime.places.names import model_name, step_name
from megalite.runtime.record.gpu_readings import GpuReadings
from megalite.runtime.record.metrics import MetricsLogger
from megalite.runtime.record.profile import StepProfiler
from megalite.runtime.record.schedule_recorder import Recorder
from megalite.runtime.recover.copies import Copies
from megalite.runtime.recover.member import NOBODY, Companion
from megalite.runtime.watch.heartbeat import Heartbeat
from megalite.runtime.watch.watchdog import CHILDREN, OWN


def open_loader(
    engine: Engine[Config], dataset: Dataset, global_batch_size: int | Iterable[int], consumed_samples: int = 0
) -> BatchLoader:
    """Return a loader of this rank's samples, which are read where its stages need them."""
    reads = dataset.has_documents or any(stage.first or stage.last for stage in engine.stages.values())
    dp, size = engine.ctx.dp, engine.cfg.train.micro_batch_size
    return BatchLoader(
        dataset, global_batch_size, dp.rank, dp.size, consumed_samples, reads=reads, micro_batch_size=size
    )


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
        profiler: profiler of `--profile` and `--memory-snapshot`.
        gpu: readings of this rank's GPU.
        meta: what every checkpoint records about the run besides its state (config, hashes).
        heartbeat: reports to the watchdog where this rank is.
        spikes: decides which loss is a spike.
        step: completed optimizer steps.
        sample_offset: samples consumed beyond those of `step` batches: skipped by a rewind, or of other batch sizes.
        skipped_steps: steps of the whole run whose update was skipped.
        saved: (step, folder) of the checkpoints of this run's history, oldest first; the last may not be committed.
        rewinds: number of rewinds to each of them.
        stop_asked: this process got SIGTERM or SIGINT (`signals`); set it to stop after the next step.
        exit_stack: callbacks for the end of the run, called after its own parts are closed.
        closed: whether the run is closed.
        companion: guard of this process, or nobody.
        copies: the copies of this rank's state that its guard keeps; None without `--recover`.
        recovered: another process has trained to `step`, and what is due after that step may not be done.
        continues: checkpoint whose history the run continues, from before its first process, and its step.
        save_lost: a save before `step` was cut short with an earlier process.
        weights: name of the last checkpoint of weights alone, and the samples consumed by then; None before the first.
        weights_lost: it was cut short with an earlier process.
        written: samples consumed at each checkpoint that earlier processes of this run have written, by its name.
        evaluated: step, samples consumed and loss of the last evaluation in this process.
        tasks: evaluates the tasks of `--eval-tasks` and records them; None: there are none.
    """

    engine: Engine[Config]
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
    exit_stack: contextlib.ExitStack = field(default_factory=contextlib.ExitStack, init=False)
    closed: bool = field(default=False, init=False)
    companion: Companion = NOBODY
    copies: Copies | None = None
    recovered: bool = False
    continues: tuple[int, Path] | None = None
    save_lost: bool = False
    weights: tuple[str, int] | None = None
    weights_lost: bool = False
    written: dict[str, int] = field(default_factory=dict)
    evaluated: tuple[int, int, float] = (-1, 0, math.nan)
    tasks: Callable[[Run], None] | None = None

    @property
    def consumed_samples(self) -> int:
        """Samples of all ranks up to the end of the last step."""
        return self.engine.cfg.train.batches.samples(self.step) + self.sample_offset

    @property
    def valid_loss(self) -> float | None:
        """Loss of the evaluation of the state as it is now; None: there was none, or it is not finite."""
        step, samples, loss = self.evaluated
        return loss if (step, samples) == (self.step, self.consumed_samples) and math.isfinite(loss) else None

    @property
    def only_saves(self) -> bool:
        """Whether recoveries are used up: nothing is left to do but a save."""
        return bool(self.companion.turn.go.gave_up)

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
        # Called from the last to the first, all of them even if one fails.
        exit_stack = contextlib.ExitStack()
        if kind is None:
            exit_stack.callback(self.companion.leaving, False)
        exit_stack.push(self.exit_stack.pop_all())
        exit_stack.callback(self.heartbeat.close)
        if kind is None:
            exit_stack.callback(self.companion.leaving)
        # The data before the loader: it waits for its thread, which may wait for tokens.
        for part in (self.checkpointer, self.metrics, self.loader, self.datasets, self.profiler, self.gpu):
            exit_stack.callback(part.close)
        exit_stack.callback(self.heartbeat.beat, "closing", self.step, OWN)
        if kind is None:
            # Whoever leaves first closes connections on which others may still gather the weights of the last step.
            exit_stack.callback(self.engine.optimizer.wait_weights)
            exit_stack.callback(self.checkpointer.settle)
            exit_stack.callback(self.heartbeat.beat, "last save", self.step, CHILDREN)
        exit_stack.__exit__(kind, e, tb)


def save(run: Run, weights_only: bool = False) -> None:
    """Start writing a checkpoint of the state after `run.step`; the writing happens in the background.

    One that is there already, of the same step and samples before a recovery, is not written again.

    Args:
        weights_only: write only the weights, as bf16.
    """
    engine = run.engine
    name = (model_name if weights_only else step_name)(run.step)
    run.weights = (name, run.consumed_samples) if weights_only else run.weights
    if run.written.get(name) == run.consumed_samples:
        if not weights_only:
            run.saved.append((run.step, run.checkpointer.root / name))
        return
    engine.optimizer.wait_weights()
    if engine.cfg.run.check_replicas:
        check_replicas(engine.optimizer.copies(), engine.ctx)
    position = _position(run)
    judged = {} if run.valid_loss is None else {"valid_loss": run.valid_loss}
    meta = {**run.meta, **position, **judged, **_state(run)}
    write = run.checkpointer.save_model if weights_only else run.checkpointer.save
    path = write(run.step, engine.optimizer.states(), meta, background=True)
    if path is None:
        return
    if not weights_only:
        run.saved.append((run.step, path))
    run.metrics.event("save_model" if weights_only else "save", step=run.step, checkpoint=str(path))


def _position(run: Run) -> dict[str, Any]:
    """Return where in the data the run is, on rank 0; of text, each rank knows the lanes that it has read."""
    ctx, datasets, consumed = run.engine.ctx, run.datasets, run.consumed_samples
    if not datasets.is_stream:
        return datasets.position_meta(consumed) if ctx.rank == 0 else {}
    own = datasets.position_meta(consumed)["windows"] if run.loader.reads else []
    texts = gather_texts(json.dumps(own), ctx.world, ctx.device)
    if ctx.rank != 0:
        return {}
    return datasets.position_meta(consumed, [row for text in texts for row in json.loads(text)])


def keep_copy(run: Run, trained: bool = True) -> None:
    """Copy this rank's state into the memory of its guard, if it has one; a recovery goes on from there.

    Args:
        trained: this process has trained the step, and evaluates or saves after it if that is due.
    """
    if run.copies is None:
        return
    history = {
        "run_id": run.checkpointer.run_id,
        "continues": [(step, str(path)) for step, path in filter(None, [run.continues])],
        "saved": [(step, str(path)) for step, path in run.saved],
        # None once it is there to stay: then it is no loss if somebody moves it.
        "weights": run.weights if run.weights and run.checkpointer.pending == run.weights[0] else None,
        "rewinds": run.rewinds,
        "meta": run.meta,
        "data_version": run.meta["data_version"],
        "chat_template": run.meta["chat_template"],
        "trained": trained,
    }
    if run.loader.reads:
        history |= run.datasets.position_meta(run.consumed_samples)
    run.copies.take(run.step, _state(run) | history)


def finish_copy(run: Run) -> None:
    """Have the copy that was taken last count before the next step, which otherwise finishes it."""
    if run.copies is not None:
        run.copies.finish()


def _state(run: Run) -> dict[str, Any]:
    """Return the state of a run that is not held in tensors."""
    engine = run.engine
    return {
        "step": run.step,
        "loss_history": run.spikes.history,
        "consumed_samples": run.consumed_samples,
        "skipped_steps": run.skipped_steps,
        "scalars": {**engine.optimizer.scalars(), **engine.scaler.scalars()},
    }
