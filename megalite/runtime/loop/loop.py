"""The training loop, from the first step to the last save."""

from __future__ import annotations

import contextlib
import math
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing
from dataclasses import dataclass
from functools import partial
from typing import Any

from megalite.core.base.errors import UserError
from megalite.core.base.log import logger, warn_on_rank_0
from megalite.core.mesh.collectives import gather_texts
from megalite.core.options.rates import describe_warmup
from megalite.core.rows import MAX_WEIGHT
from megalite.core.step import StepResult, train_step
from megalite.runtime.base.collector import PeriodicCollector
from megalite.runtime.checkpoint.pruning import ranked
from megalite.runtime.checkpoint.save import SaveError
from megalite.runtime.loop.evaluate import evaluate
from megalite.runtime.loop.rewind import rewind
from megalite.runtime.loop.run import Run, finish_copy, keep_copy, save
from megalite.runtime.places.folder_place import FolderPlace
from megalite.runtime.places.names import step_folders
from megalite.runtime.record.device_report import DeviceReport
from megalite.runtime.record.expert_tokens import ExpertTokens
from megalite.runtime.record.fp8_amax import Fp8Amax
from megalite.runtime.record.step_record import log_batch_size, step_record
from megalite.runtime.record.tensor_stats import TensorStats
from megalite.runtime.recover.hub import UNFINISHED
from megalite.runtime.recover.interval import Interval
from megalite.runtime.recover.local_gradients import LocalGradients
from megalite.runtime.recover.replay import is_bad, replay
from megalite.runtime.start.exit import DivergenceError, leave_unfinished, raise_together
from megalite.runtime.start.signals import stop_on_signals
from megalite.runtime.watch.expert_watch import ExpertWatch
from megalite.runtime.watch.heartbeat import READING
from megalite.runtime.watch.straggler import StragglerReport
from megalite.runtime.watch.watchdog import CHILDREN, IDLE, OWN, STRICT

# Steps from which on a run without checkpoints gets a warning.
_LONG_RUN = 1000
# With fp32 and bf16 there is no loss scale to lower: this many steps in a row without an update mean a broken run.
_MAX_BAD_STEPS = 3


@dataclass
class Progress:
    """State of the loop that is kept from step to step.

    Attributes:
        stragglers: compares the ranks' own times.
        devices: puts the ranks' devices together.
        fp8_amax: follows the inputs of FP8 products.
        experts: warns of experts that nobody uses.
        expert_tokens: writes down the tokens of every expert.
        tensors: statistics of `--tensor-stats`, and what was not finite first.
        interval: steps between copies.
        gradients: what tells faults of hardware from bad data; None without `--recover`.
        begun: step after which this process started.
        saved_at: step of the last save.
        started: when the run began, as `time.monotonic`.
        bad_steps: steps in a row whose update was skipped, overflows of a dynamic loss scale excluded.
        failure: why this rank cannot continue; the others learn that it failed in the next step.
        stop: some rank was asked to stop.
    """

    stragglers: StragglerReport
    devices: DeviceReport
    fp8_amax: Fp8Amax
    experts: ExpertWatch
    expert_tokens: ExpertTokens
    tensors: TensorStats
    begun: int
    saved_at: int
    started: float
    interval: Interval
    gradients: LocalGradients | None = None
    bad_steps: int = 0
    failure: Exception | None = None
    stop: bool = False

    def is_over(self, minutes: float) -> bool:
        """Whether this many minutes have passed; 0: never."""
        return 0 < minutes * 60 <= time.monotonic() - self.started


StepCallback = Callable[[Run, dict[str, Any]], None]
"""Called with the run and the step's line of metrics.jsonl, on every rank."""


def fit(run: Run, callbacks: Sequence[StepCallback] = ()) -> None:
    """Train to the last step, or until a signal or a callback asks some rank to stop; save and evaluate at the end.

    Args:
        run: from `megalite.start`.
        callbacks: called after every step on every rank, once it is evaluated and its save has begun.
    """
    stop_on_signals(run)
    for record in steps(run):
        for callback in callbacks:
            run.heartbeat.beat("callback", run.step, OWN)
            callback(run, record)
    if run.only_saves or run.step < run.engine.cfg.train.train_steps:
        leave_unfinished(run.engine.ctx, UNFINISHED if run.only_saves else 0)


def steps(run: Run) -> Iterator[dict[str, Any]]:
    """Train step by step: yield each step's line of metrics.jsonl; save and evaluate when no step is left.

    Leaving the loop early saves nothing (see `save`), and a new loop continues from there. Ctrl-C interrupts it like
    any other loop; `run.stop_asked = True` on some rank ends it with a save after the next step.
    """
    cfg = run.engine.cfg
    saved_at = run.saved[-1][0] if run.saved else 0
    if run.step >= cfg.train.train_steps and run.step == saved_at and not run.recovered:
        logger.info(f"nothing to do: the run is at step {run.step} of {cfg.train.train_steps}")
        return
    if not run.recovered:
        log_plan(run)
    engine = run.engine
    watches = StragglerReport(engine.ctx), DeviceReport(engine.ctx, run.gpu), Fp8Amax(engine)
    watched = ExpertWatch(engine.cfg.model), ExpertTokens(engine), TensorStats(engine)
    begun, interval = run.companion.began, Interval(cfg.run.recover_every)
    # Who trained that step may have died before the run had ended.
    stop = run.only_saves or (run.recovered and _ends(run, run.step))
    progress = Progress(*watches, *watched, run.step, saved_at, begun, interval, stop=stop)
    progress.gradients = LocalGradients(engine) if run.copies else None
    with closing(PeriodicCollector()) as garbage:
        catch_up(run, progress)
        run.recovered = False  # nor does a later loop of this process end where it begins
        while run.step < cfg.train.train_steps and not progress.stop:
            result, record = one_step(run, progress)
            pauses = _is_asked_to_pause(run, progress)
            if result.spiked and cfg.run.on_spike == "rewind" and go_back(run, result, progress):
                continue
            count_bad_steps(run, result, progress)
            # After a bad step there is no state to go on from.
            pauses &= not progress.bad_steps and run.step < cfg.train.train_steps
            due = run.copies is not None and progress.interval.is_due(run.step, time.monotonic(), run.engine.ctx)
            if not progress.bad_steps and (pauses or due):
                keep_copy(run)
            if not pauses:
                follow_up(run, progress)
            garbage.end_of_step(run.step, saves=progress.saved_at == run.step)
            run.heartbeat.beat("between steps", run.step, IDLE)
            yield record
            if pauses:
                finish_copy(run)
                run.companion.pause()
    if progress.bad_steps and result.skipped:
        run.heartbeat.beat("last save", run.step, CHILDREN)
        run.checkpointer.settle()
        raise DivergenceError(
            f"stopped after step {run.step}, whose update was skipped; nothing was saved after step "
            f"{progress.saved_at}: the same command resumes from there"
        )
    finish_copy(run)
    if progress.saved_at != run.step:
        save_now(run, progress)
    run.heartbeat.beat("last save", run.step, CHILDREN)
    saved = run.checkpointer.settle()
    if run.step < cfg.train.train_steps:
        remedy = "the same command resumes from here" if saved else "the last save failed"
        logger.info(f"stopped after step {run.step} of {cfg.train.train_steps}: {remedy}")
    elif not run.only_saves and not is_evaluated(run) and run.evaluated[0] != run.step:
        # The first evaluation: if it fails, all that was trained is saved.
        evaluate(run)
    log_best(run)
    run.stop_asked = False
    run.heartbeat.beat("after the last step", run.step, IDLE)


def log_plan(run: Run) -> None:
    """Log what is about to run: the first step may take minutes, and console lines may be many steps apart."""
    cfg, last = run.engine.cfg, run.engine.cfg.train.train_steps
    size = f"{cfg.train.batches.size(run.step + 1)} samples of {cfg.model.seq_len} tokens"
    every = cfg.run.log_every
    lines = f"one line every {every} steps" if every > 1 else "one line per step"
    logger.info(f"training from step {run.step + 1} of {last}: {size} per step, {lines}; the first step takes longer")
    if cfg.train.batch_size_schedule is not None:
        logger.info(f"--batch-size-schedule: {cfg.train.batches.summary}")
    if warmup := describe_warmup(cfg.optim, cfg.train):
        logger.info(warmup)
    if cfg.run.keep_best and cfg.run.judged_every != cfg.run.save_every:
        steps_judged = f"checkpoints of every {cfg.run.judged_every} steps and of the last are evaluated"
        logger.info(f"--keep-best {cfg.run.keep_best}: {steps_judged}, the others never count as best")
    both = math.lcm(cfg.run.save_every, cfg.run.save_model_every)
    if 0 < both <= last - cfg.run.save_every * cfg.run.keep_last:
        logger.info(
            f"--save-model-every {cfg.run.save_model_every}: every {both} steps the weights are in the full checkpoint "
            f"alone, which goes with the newest {cfg.run.keep_last} (--keep-last)"
        )
    if not cfg.run.save_every and last - run.step >= _LONG_RUN:
        warn_on_rank_0(f"--save-every 0: nothing is saved before step {last}; a crash loses everything up to there")


def log_best(run: Run) -> None:
    """Log which of the local checkpoints has the lowest validation loss, if such are kept."""
    if not run.engine.cfg.run.keep_best or run.engine.ctx.rank != 0:
        return
    root = run.checkpointer.root
    with contextlib.suppress(OSError):
        for loss, name in ranked(FolderPlace(root), [path.name for _, path in step_folders(root)])[:1]:
            logger.info(f"the lowest validation loss of the checkpoints that are kept is {loss:.4f}: {root / name}")
            run.metrics.best(root / name, loss)


def one_step(run: Run, progress: Progress) -> tuple[StepResult, dict[str, Any]]:
    """Read a batch, train on it, and record the result; return it with its record."""
    step, engine = run.step + 1, run.engine
    log_batch_size(run)
    # The first step may have kernels to compile.
    patience = OWN if run.step == progress.begun else STRICT
    started = time.perf_counter()
    progress.stragglers.start()
    run.heartbeat.beat(READING, step, patience)
    batch, failure = run.loader.next()
    waited = time.perf_counter() - started
    failure = failure or progress.failure
    run.heartbeat.beat("training", step, patience)
    settle = engine.optimizer.wait_weights
    stop = _is_asked_to_stop(run, progress, step) or run.companion.pauses()
    scalars = {**engine.optimizer.scalars(), **engine.scaler.scalars()}

    train = partial(train_step, engine, batch, step, stop=stop, failed=failure is not None, loss_limit=run.spikes.limit)
    if run.copies is not None:
        train = partial(train, before_status=run.copies.finish)

    def once() -> StepResult:
        return progress.tensors.watch(step, train)

    if progress.gradients is not None:
        progress.gradients.start()
    with run.recorder.step(step), run.profiler.step(step, engine.executor, settle, waited):
        result = once()
    if result.failed:
        raise_together(engine.ctx, failure)
    _check_weight(run, result.targets)
    if progress.gradients is not None and is_bad(run, result):
        run.heartbeat.beat("training again", step, patience)
        result = replay(run, result, batch, progress.gradients, scalars, once)
    seconds = time.perf_counter() - started
    run.step = step
    progress.stop = result.stop
    run.skipped_steps += result.skipped or result.spiked
    record = step_record(run, result, seconds, waited) | progress.fp8_amax.read(step)
    run.metrics.step(record)
    progress.experts.look(result.figures.get("routing"))
    progress.expert_tokens.write(step, result.figures.get("routing"))
    for rank, own, usual in progress.stragglers.end(seconds):
        run.metrics.event("straggler", step=step, rank=rank, own_seconds=own, peers_seconds=usual)
        if engine.ctx.rank == 0:
            logger.warning(f"rank {rank} is slow: {own:.3f} s per step of its own work, its peers {usual:.3f} s")
    if devices := progress.devices.end():
        run.metrics.event("devices", step=step, **devices)
    return result, record


def _is_asked_to_stop(run: Run, progress: Progress, step: int) -> bool:
    return run.stop_asked or progress.is_over(run.engine.cfg.run.max_minutes) or _ends(run, step)


def _ends(run: Run, step: int) -> bool:
    """Whether the step is one of those of `--exit-interval`."""
    every = run.engine.cfg.run.exit_interval
    return every > 0 and step % every == 0


def _is_asked_to_pause(run: Run, progress: Progress) -> bool:
    """Whether all ranks are to wait for the next round, in which ranks come or go; every rank calls it.

    What is due after the step, an evaluation or a save, is then left to those who take over. A run that is to stop as
    well stops.
    """
    options = run.engine.cfg.run
    if not (progress.stop and options.elastic and run.copies):
        return False
    stops = "stop" * _is_asked_to_stop(run, progress, run.step)
    if any(gather_texts(stops, run.engine.ctx.world, run.engine.ctx.device)):
        return False
    progress.stop = False
    return True


def _check_weight(run: Run, targets: float) -> None:
    """Check that a step had something to learn.

    Raises:
        UserError: there was no target, or their weights are so small that squares of gradients are no fp32 numbers, and
            the gradient norm too small or 0; on every rank.
    """
    first, cfg = run.consumed_samples, run.engine.cfg
    size = cfg.train.batches.size(run.step + 1)
    least = size * cfg.model.seq_len / MAX_WEIGHT
    if targets >= least:
        return
    given = f"samples {first} to {first + size - 1} (step {run.step + 1})"
    if targets:
        rule = f"have targets that weigh {targets:.3g} together, less than {least:.3g}"
        raise UserError(given, rule, "multiply all weights by one number, so that most are near 1")
    raise UserError(
        given,
        f"contain no target token with --loss-on {cfg.data.loss_on or 'answers'}",
        "check the answers marked in PREFIX.mask.bin, or raise --global-batch-size or --seq-len",
    )


def go_back(run: Run, result: StepResult, progress: Progress) -> bool:
    """Rewind after a spike; return False if there is no checkpoint to go back to."""
    spiked_at = run.step
    limit = run.spikes.limit
    skips_from = run.consumed_samples
    run.heartbeat.beat("rewind", run.step, CHILDREN)
    if (source := rewind(run)) is None:
        return False
    progress.saved_at, progress.bad_steps = run.step, 0
    reason = f"loss {result.loss:.4f} after step {spiked_at} is a spike (above {limit:.4f})"
    logger.info(f"{reason}: back to {source}, continuing with the sample after {skips_from}")
    run.metrics.event(
        "rewind", step=spiked_at, loss=result.loss, limit=limit, checkpoint=str(source), next_sample=skips_from
    )
    return True


def catch_up(run: Run, progress: Progress) -> None:
    """Before the first step, do what an earlier process may not have done."""
    if run.only_saves:
        return  # anything but the save may be what kills
    if not run.recovered:
        keep_copy(run, trained=False)
        return
    follow_up(run, progress)
    if run.weights_lost and progress.saved_at != run.step:
        save_weights(run)
    if run.save_lost and progress.saved_at != run.step:
        save_now(run, progress)
    if run.companion.turn.go.was:
        keep_copy(run)  # until then this layout has none


def follow_up(run: Run, progress: Progress) -> None:
    """Do what is due after a step, besides its record: the evaluation first, as a save records its loss."""
    cfg = run.engine.cfg
    # The last step's too, which the save may be judged by, unless it were the first that could fail.
    proved = bool(cfg.run.eval_every) and (run.evaluated[0] >= 0 or cfg.run.keep_best > 0)
    if is_evaluated(run) or (proved and run.step == cfg.train.train_steps):
        finish_copy(run)  # the next step is far
        evaluate(run)
    progress.failure = save_failure(run)
    save_if_due(run, progress)


def is_evaluated(run: Run) -> bool:
    """Whether the step is one of those of `--eval-every`."""
    every = run.engine.cfg.run.eval_every
    return every > 0 and run.step % every == 0


def count_bad_steps(run: Run, result: StepResult, progress: Progress) -> None:
    """Report a skipped update.

    Raises:
        DivergenceError: too many in a row.
    """
    if result.spiked:
        logger.info(f"loss {result.loss:.4f} of step {run.step} is a spike: update skipped")
        run.metrics.event("spike", step=run.step, loss=result.loss, limit=run.spikes.limit)
    elif result.skipped:
        first = f"; first: {progress.tensors.first_bad}" if progress.tensors.first_bad else ""
        logger.info(f"gradients of step {run.step} are not finite: update skipped{first}")
    else:
        run.spikes.accept(result.loss)
    progress.bad_steps = progress.bad_steps + 1 if is_bad(run, result) else 0
    if progress.bad_steps == _MAX_BAD_STEPS:
        raise DivergenceError(
            f"{'the loss spiked' if result.spiked else 'gradients were not finite'} in {_MAX_BAD_STEPS} steps in a row "
            f"(up to step {run.step}, loss {result.loss}); nothing was saved after them: lower --lr, or resume from an "
            "earlier checkpoint"
        )


def save_if_due(run: Run, progress: Progress) -> None:
    """Start the save that is due after this step, if any; after bad steps, wait for a good one."""
    options = run.engine.cfg.run
    if progress.bad_steps or progress.saved_at == run.step:
        return
    if options.save_every and run.step % options.save_every == 0:
        save_now(run, progress)
    elif options.save_model_every and run.step % options.save_model_every == 0:
        save_weights(run)


def save_weights(run: Run) -> None:
    """Start a save of the weights alone."""
    run.heartbeat.beat("save of the weights", run.step, CHILDREN)
    run.weights_lost = False
    save(run, weights_only=True)


def save_now(run: Run, progress: Progress) -> None:
    """Start a full save."""
    run.heartbeat.beat("save", run.step, CHILDREN)
    save(run)
    progress.saved_at = run.step


def save_failure(run: Run) -> SaveError | None:
    """Return why this rank's part of a background save failed, if it did; the next step informs the other ranks."""
    try:
        run.checkpointer.poll()
    except SaveError as e:
        return e
    return None
