"""One training step, the same for every layout: forward and backward, reduce, agree, clip, update."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch.profiler import record_function

from megalite.dist import collectives
from megalite.errors import UserError
from megalite.pipeline.executor import MicroBatch
from megalite.schedules.lr import learning_rate
from megalite.train.build import Engine
from megalite.train.profile import OPTIMIZER_RANGE


@dataclass(frozen=True)
class StepResult:
    """The outcome of a step, the same on every rank.

    Attributes:
        loss: mean next-token cross-entropy over the global batch.
        grad_norm: global L2 norm before clipping.
        lr: learning rate of the update.
        loss_scale: scale under which the gradients were computed.
        skipped: the update was skipped because a gradient was not finite.
        spiked: the update was skipped because the loss was above the limit.
        stop: some rank was asked to stop.
        failed: some rank could not read its data or save; nothing was updated.
    """

    loss: float
    grad_norm: float
    lr: float
    loss_scale: float
    skipped: bool
    spiked: bool
    stop: bool
    failed: bool


Batch = npt.NDArray[np.integer[Any]] | torch.Tensor


def train_step(
    engine: Engine,
    batch: Batch,
    step: int,
    stop: bool = False,
    failed: bool = False,
    loss_limit: float = math.inf,
) -> StepResult:
    """Run optimizer step `step` (from 1) on this dp rank's samples.

    Args:
        engine: from `build_engine`.
        batch: token ids [global_batch_size / dp, seq_len + 1], an array or a tensor of whole numbers.
        step: number of the step.
        stop: this rank was asked to stop; all ranks learn this from the step's one status all-reduce.
        failed: this rank cannot continue: its data could not be read (`batch` is a placeholder), or its last save
            failed. All ranks learn this from the same all-reduce.
        loss_limit: a mean loss above it is a spike, and the update is skipped.
    """
    cfg, ctx, optimizer, scale = engine.cfg, engine.ctx, engine.optimizer, engine.scaler.scale
    batch = on_host(batch, engine)
    microbatches = to_microbatches(batch, cfg.train.micro_batch_size, ctx.device)
    optimizer.start_step(len(microbatches), scale)
    # Gradients are of the loss sum divided by the tokens of a full batch; the true count comes with the status.
    full = cfg.train.global_batch_size * cfg.model.seq_len
    loss_sum = engine.executor.run(engine.train_program, microbatches, step, ctx.dp.rank, scale / full)
    engine.unit_weights.end_pass()
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
    return StepResult(
        loss=loss / tokens,
        grad_norm=grad_norm,
        lr=lr,
        loss_scale=scale,
        skipped=not finite,
        spiked=spiked,
        stop=stops > 0,
        failed=failures > 0,
    )


@torch.no_grad()
def eval_step(engine: Engine, batch: Batch, failed: bool = False) -> tuple[float, bool]:
    """Compute (mean loss over one global batch; whether a rank failed), the same on every rank.

    Neither dropout nor label smoothing applies. For the arguments see `train_step`.
    """
    batch = on_host(batch, engine)
    microbatches = to_microbatches(batch, engine.cfg.train.micro_batch_size, engine.ctx.device)
    loss_sum = engine.executor.run(engine.eval_program, microbatches, 0, engine.ctx.dp.rank)
    engine.unit_weights.end_pass()
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
    """Run the one status all-reduce of a step.

    Returns:
        fp64 [loss sum, counted tokens, squared gradient norm, ranks asked to stop, ranks that cannot continue].
    """
    ctx = engine.ctx
    # All tensor-parallel ranks of the last stage hold the same losses; other stages hold zero.
    speaks = ctx.grid.is_first(ctx.rank, "tp")
    # Counted on the host: the step first waits for the GPU when it reads the status, which `collectives.to_host` times.
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


def on_host(batch: Batch, engine: Engine) -> npt.NDArray[np.int64]:
    """Return this rank's samples as an array.

    Raises:
        UserError: they are of another shape, or not whole numbers.
    """
    tokens = np.asarray(batch.cpu() if isinstance(batch, torch.Tensor) else batch)
    shape = (engine.num_microbatches * engine.cfg.train.micro_batch_size, engine.cfg.model.seq_len + 1)
    if tokens.shape != shape or tokens.dtype.kind not in "iu":
        rule = f"must be token ids [global_batch_size / dp, seq_len + 1] = {list(shape)}"
        raise UserError(f"a batch of {tokens.dtype} {list(tokens.shape)}", rule, "cut it so")
    return tokens.astype(np.int64, copy=False)


def to_microbatches(batch: npt.NDArray[np.int64], size: int, device: torch.device) -> list[MicroBatch]:
    """Cut samples [n, S + 1] into micro-batches of inputs and shifted targets, [S, size] each."""
    host = torch.from_numpy(batch)
    if device.type == "cuda":
        host = host.pin_memory()  # a copy from pageable memory would wait for the GPU to finish its work
    tokens = host.to(device, non_blocking=True).t()
    whole = MicroBatch(tokens[:-1], tokens[1:])
    return [whole.samples(i, i + size) for i in range(0, len(batch), size)]
