"""One training step, the same for every layout: forward and backward, reduce, agree, clip, update."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.profiler import record_function

from megalite.core.engine import Engine
from megalite.core.microbatches import Batch, share_of_rank, to_microbatches, to_rows, weigh_parts
from megalite.core.options.rates import StepRates, rates_at
from megalite.core.options.step import StepConfig
from megalite.core.pipeline.observe import OPTIMIZER_RANGE
from megalite.core.rows import Rows
from megalite.core.sums import StepSums


@dataclass(frozen=True)
class StepResult:
    """The outcome of a step, the same on every rank.

    Attributes:
        loss: mean next-token cross-entropy over the global batch; NaN without a target.
        targets: weight of all targets of the global batch, their number unless they have weights.
        grad_norm: global L2 norm before clipping.
        rates: learning rates and weight decay of the update.
        loss_scale: scale under which the gradients were computed.
        skipped: the update was skipped because a gradient was not finite.
        spiked: the update was skipped because the loss was above the limit.
        stop: some rank was asked to stop.
        failed: some rank could not read its data or save; nothing was updated.
        figures: what the counters of the engine have counted, by their names.
    """

    loss: float
    targets: float
    grad_norm: float
    rates: StepRates
    loss_scale: float
    skipped: bool
    spiked: bool
    stop: bool
    failed: bool
    figures: Mapping[str, Any] = field(default_factory=dict)


def train_step(
    engine: Engine[StepConfig],
    batch: Batch,
    step: int,
    stop: bool = False,
    failed: bool = False,
    loss_limit: float = math.inf,
    before_status: Callable[[], None] | None = None,
) -> StepResult:
    """Run optimizer step `step` (from 1) on this dp rank's samples.

    Args:
        engine: from `build_engine`.
        batch: this dp rank's samples of the global batch, as rows or as plain samples of seq_len + 1 token ids (an
            array or a tensor of integers).
        step: number of the step.
        stop: this rank was asked to stop; all ranks learn this from the step's one status all-reduce.
        failed: this rank cannot continue: its data could not be read (`batch` is a placeholder), or its last save
            failed. All ranks learn this from the same all-reduce.
        loss_limit: a mean loss above it is a spike, and the update is skipped.
        before_status: called once forward and backward are queued: no state has changed yet, and no rank updates its
            own before all have called it.
    """
    cfg = engine.cfg
    scale = engine.scaler.scale
    rows = to_rows(batch, engine, cfg.train.batches.size(step))
    # Gradients are of the loss sum divided by the tokens of the largest batch; the true weight comes with the status.
    full = cfg.train.global_batch_size * cfg.model.seq_len
    loss_sum = forward_backward(engine, rows, step, scale / full)
    if before_status is not None:
        before_status()
    sums = status_of(engine, loss_sum, rows, failed)
    sums.add("squared norm", engine.optimizer.finish_grads())
    sums.add("stops", stop)
    for counter in engine.counters:
        sums.add(counter.name, counter.sums())
    totals = sums.over_world()
    (targets,), (squared,) = totals["targets"], totals["squared norm"]
    loss, unscale = (totals["loss"][0] / targets, full / (targets * scale)) if targets else (math.nan, 0.0)
    grad_norm = math.sqrt(squared) * unscale if squared >= 0 else math.nan
    rates = rates_at(cfg.optim, cfg.train, step)
    figures = {counter.name: counter.figures(totals[counter.name], targets) for counter in engine.counters}
    finite = math.isfinite(grad_norm) and math.isfinite(loss)
    spiked = finite and loss > loss_limit
    some_failed = totals["failures"][0] > 0
    if finite and not spiked and not some_failed:
        update(engine, rates, grad_norm, unscale)
        for counter in engine.counters:
            counter.after_update(figures[counter.name])
    engine.scaler.update(overflow=not finite)
    return StepResult(
        loss=loss,
        targets=targets,
        grad_norm=grad_norm,
        rates=rates,
        loss_scale=scale,
        skipped=not finite,
        spiked=spiked,
        stop=totals["stops"][0] > 0,
        failed=some_failed,
        figures=figures,
    )


def forward_backward(
    engine: Engine[StepConfig], rows: Rows, step: int, loss_weight: float, replica: int | None = None
) -> torch.Tensor:
    """Run all micro-batches forward and backward, and start reducing their gradients; return this rank's loss sum.

    Args:
        replica: the rank on dp whose samples these are; None: this one.
    """
    cfg, ctx = engine.cfg, engine.ctx
    samples, size = cfg.train.batches.size(step), cfg.train.micro_batch_size
    share = share_of_rank(engine, samples, replica)
    rows = rows.filled(cfg.passes(samples, ctx.dp.size) * size)
    microbatches = to_microbatches(rows, size, ctx.device, ctx.axis("cp"), *weigh_parts(engine, rows))
    engine.optimizer.start_step(len(microbatches), engine.scaler.scale)
    program = engine.train_program(len(microbatches))
    engine.unit_weights.start_pass()
    for stage in engine.stages.values():
        stage.start_step()
    start_counting(engine)
    loss_sum = engine.executor.run(program, microbatches, step, share.start, loss_weight)
    engine.unit_weights.end_pass()
    return loss_sum


def update(engine: Engine[StepConfig], rates: StepRates, grad_norm: float, unscale: float) -> None:
    """Update the weights with gradients that are multiplied by `unscale` and clipped to `--clip-grad`."""
    limit = engine.cfg.optim.clip_grad
    clip = min(1.0, limit / (grad_norm + 1e-6)) if limit else 1.0
    with record_function(OPTIMIZER_RANGE):
        multiplier = torch.full((), clip * unscale, device=engine.ctx.device)
        engine.optimizer.step(rates.lr, multiplier, rates.weight_decay, rates.decoupled_lr)


@torch.no_grad()
def eval_step(engine: Engine[StepConfig], batch: Batch, failed: bool = False) -> tuple[float, float, bool]:
    """Compute (mean loss over one global batch; weight of its targets; whether a rank failed), the same on every rank.

    Neither dropout nor label smoothing applies. For the arguments see `train_step`.
    """
    ctx, samples, size = engine.ctx, engine.cfg.train.global_batch_size, engine.cfg.train.micro_batch_size
    rows = to_rows(batch, engine, samples).filled(engine.cfg.passes(samples, ctx.dp.size) * size)
    microbatches = to_microbatches(rows, size, ctx.device, ctx.axis("cp"))
    engine.unit_weights.start_pass()
    loss_sum = engine.executor.run(engine.eval_program, microbatches, 0, 0)
    engine.unit_weights.end_pass()
    totals = status_of(engine, loss_sum, rows, failed).over_world()
    (loss,), (targets,) = totals["loss"], totals["targets"]
    return loss / targets if targets else 0.0, targets, totals["failures"][0] > 0


def start_counting(engine: Engine[StepConfig]) -> None:
    """Begin a step, or an evaluation of several batches: the figures are of what comes after."""
    for counter in engine.counters:
        counter.start()


def eval_figures(engine: Engine[StepConfig], targets: float) -> dict[str, float]:
    """Return the figures of all evaluation steps since `start_counting`, the same on every rank; all ranks call it.

    Args:
        engine: from `build_engine`.
        targets: weight of the targets of these steps.

    Returns:
        The fields that the counters with a `headline` have beside the loss, as in the lines of training.
    """
    counters, sums = [counter for counter in engine.counters if counter.headline], StepSums(engine.ctx)
    for counter in counters:
        sums.add(counter.name, counter.sums())
    totals = sums.over_world() if counters else {}
    found = (counter.losses(counter.figures(totals[counter.name], targets)) for counter in counters)
    return {name: value for fields in found for name, value in fields.items()}


def status_of(engine: Engine[StepConfig], loss_sum: torch.Tensor, rows: Rows, failed: bool) -> StepSums:
    """Start the sums of a step or an evaluation: losses, weights of targets, ranks that cannot continue."""
    ctx = engine.ctx
    counts_rows = ctx.grid.is_first_except(ctx.rank, "pp", "dp") and engine.has_last_stage
    sums = StepSums(ctx)
    sums.add("loss", loss_sum if engine.owns_losses else 0.0)
    # Counted on the host: the step first waits for the GPU when it reads the status, which `collectives.to_host` times.
    sums.add("targets", rows.total_weight() if counts_rows else 0.0)
    sums.add("failures", failed)
    return sums
