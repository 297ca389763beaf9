"""One training step, whatever the layout: forward and backward, reduce, agree, clip, update."""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch
from torch.profiler import record_function

from megalite.dist import collectives
from megalite.optim.lr_schedule import learning_rate
from megalite.pipeline.executor import MicroBatch
from megalite.train.build import Engine
from megalite.train.profile import OPTIMIZER_RANGE


@dataclass(frozen=True)
class StepResult:
    """What a step came to; the same on every rank.

    Attributes:
        loss: mean next-token cross-entropy over the global batch.
        grad_norm: global L2 norm before clipping.
        lr: learning rate of the update.
        loss_scale: scale under which the gradients were computed.
        skipped: the update was left out because a gradient was not finite.
        spiked: the update was left out because the loss was above the limit.
        stop: some rank was asked to stop.
        failed: some rank had no data or could not save; nothing was updated.
    """

    loss: float
    grad_norm: float
    lr: float
    loss_scale: float
    skipped: bool
    spiked: bool
    stop: bool
    failed: bool


def train_step(
    engine: Engine,
    batch: npt.NDArray[np.int64],
    step: int,
    stop: bool = False,
    failed: bool = False,
    loss_limit: float = math.inf,
) -> StepResult:
    """Run optimizer step `step` (from 1) on this dp rank's samples.

    Args:
        engine: from `build_engine`.
        batch: token ids [global_batch_size / dp, seq_len + 1].
        step: number of the step.
        stop: this rank was asked to stop; every rank learns of it in the step's one status all-reduce.
        failed: this rank cannot go on (its batch is a stand-in as the data could not be read, or its last save
            failed); every rank learns of it likewise.
        loss_limit: a mean loss above it is a spike, and the update is left out.
    """
    cfg, ctx, optimizer, scale = engine.cfg, engine.ctx, engine.optimizer, engine.scaler.scale
    microbatches = to_microbatches(batch, cfg.train.micro_batch_size, ctx.device)
    optimizer.start_step(len(microbatches))
    # Gradients are those of the sum of losses over a full batch's tokens; the true count comes with the status.
    full = cfg.train.global_batch_size * cfg.model.seq_len
    loss_sum = engine.executor.run(engine.train_program, microbatches, step, ctx.dp.rank, scale / full)
    squared_norm = optimizer.finish_grads()
    totals = sum_over_world(engine, loss_sum, batch, squared_norm, stop, failed)
    loss, tokens, squared, stops, failures = collectives.to_host(totals)
    unscale = full / (tokens * scale)
    grad_norm = math.sqrt(squared) * unscale if squared >= 0 else math.nan
    lr = learning_rate(step, cfg.optim, cfg.train.train_steps)
    finite = math.isfinite(grad_norm) and math.isfinite(loss)
    spiked = finite and loss / tokens > loss_limit
    if finite and not spiked and not failures:
        clip = min(1.0, cfg.optim.clip_grad / (grad_norm + 1e-6)) if cfg.optim.clip_grad else 1.0
        with record_function(OPTIMIZER_RANGE):
            optimizer.step(lr, torch.tensor(clip * unscale, dtype=torch.float32, device=ctx.device))
    engine.scaler.update(overflow=not finite)
    return StepResult(loss / tokens, grad_norm, lr, scale, not finite, spiked, stops > 0, failures > 0)


@torch.no_grad()
def eval_step(engine: Engine, batch: npt.NDArray[np.int64], failed: bool = False) -> tuple[float, bool]:
    """(mean loss over one global batch, without dropout; whether a rank failed), the same on every rank."""
    microbatches = to_microbatches(batch, engine.cfg.train.micro_batch_size, engine.ctx.device)
    loss_sum = engine.executor.run(engine.eval_program, microbatches, 0, engine.ctx.dp.rank)
    loss, tokens, *_, failures = collectives.to_host(sum_over_world(engine, loss_sum, batch, failed=failed))
    return loss / tokens, failures > 0


def sum_over_world(
    engine: Engine,
    loss_sum: torch.Tensor,
    batch: npt.NDArray[np.int64],
    squared_norm: torch.Tensor | None = None,
    stop: bool = False,
    failed: bool = False,
) -> torch.Tensor:
    """The one status all-reduce of a step.

    Returns:
        fp64 [loss sum, counted tokens, squared gradient norm, ranks asked to stop, ranks that cannot go on].
    """
    ctx = engine.ctx
    # Losses are alike on all tensor-parallel ranks of the last stage, and zero on other stages.
    speaks = ctx.grid.is_first(ctx.rank, "tp")
    # Counted on the host: the first wait for a GPU in a step is that for the status, which `collectives.to_host` times.
    tokens = int((batch[:, 1:] >= 0).sum()) if speaks and _holds_last(engine) else 0
    status = torch.zeros(5, dtype=torch.float64, device=ctx.device)
    status[0] = loss_sum if speaks else 0.0
    status[1] = tokens
    if squared_norm is not None:
        status[2] = squared_norm
    status[3] = float(stop)
    status[4] = float(failed)
    collectives.all_reduce(status, ctx.world).wait()
    return status


def _holds_last(engine: Engine) -> bool:
    return any(stage.last for stage in engine.stages.values())


def to_microbatches(batch: npt.NDArray[np.int64], size: int, device: torch.device) -> list[MicroBatch]:
    """Cut samples [n, S + 1] into micro-batches of inputs and shifted targets, [S, size] each."""
    host = torch.from_numpy(batch)
    if device.type == "cuda":
        host = host.pin_memory()  # from other memory the copy would wait for what the GPU still does
    tokens = host.to(device, non_blocking=True).t()
    whole = MicroBatch(tokens[:-1], tokens[1:])
    return [whole.samples(i, i + size) for i in range(0, len(batch), size)]
