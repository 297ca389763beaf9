"""One training step, the same for every layout: forward and backward, reduce, agree, clip, update."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch.profiler import record_function

from megalite.config.run import rates_at
from megalite.data.rows import Rows
from megalite.dist import collectives
from megalite.errors import UserError
from megalite.pipeline.executor import MicroBatch
from megalite.train.build import Engine
from megalite.train.profile import OPTIMIZER_RANGE


@dataclass(frozen=True)
class StepResult:
    """The outcome of a step, the same on every rank.

    Attributes:
        loss: mean next-token cross-entropy over the global batch; NaN without a target.
        targets: weight of all targets of the global batch, their number unless they have weights.
        grad_norm: global L2 norm before clipping.
        lr, decoupled_lr, weight_decay: of the update.
        loss_scale: scale under which the gradients were computed.
        skipped: the update was skipped because a gradient was not finite.
        spiked: the update was skipped because the loss was above the limit.
        stop: some rank was asked to stop.
        failed: some rank could not read its data or save; nothing was updated.
    """

    loss: float
    targets: float
    grad_norm: float
    lr: float
    decoupled_lr: float
    weight_decay: float
    loss_scale: float
    skipped: bool
    spiked: bool
    stop: bool
    failed: bool


Batch = Rows | npt.NDArray[np.integer[Any]] | torch.Tensor


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
        batch: a dp-th of the step's global batch as rows, or that many plain samples of seq_len + 1 token ids, an array
            or a tensor of whole numbers.
        step: number of the step.
        stop: this rank was asked to stop; all ranks learn this from the step's one status all-reduce.
        failed: this rank cannot continue: its data could not be read (`batch` is a placeholder), or its last save
            failed. All ranks learn this from the same all-reduce.
        loss_limit: a mean loss above it is a spike, and the update is skipped.
    """
    cfg, ctx, optimizer, scale = engine.cfg, engine.ctx, engine.optimizer, engine.scaler.scale
    rows = on_host(batch, engine)
    microbatches = to_microbatches(rows, cfg.train.micro_batch_size, ctx.device)
    optimizer.start_step(len(microbatches), scale)
    # Gradients are of the loss sum divided by the tokens of the largest batch; the true weight comes with the status.
    full = cfg.train.global_batch_size * cfg.model.seq_len
    program = engine.train_program(len(microbatches))
    loss_sum = engine.executor.run(program, microbatches, step, ctx.dp.rank, scale / full)
    engine.unit_weights.end_pass()
    squared_norm = optimizer.finish_grads()
    totals = sum_over_world(engine, loss_sum, rows, squared_norm, stop, failed)
    loss_sum_all, targets, squared, stops, failures = collectives.to_host(totals)
    loss, unscale = (loss_sum_all / targets, full / (targets * scale)) if targets else (math.nan, 0.0)
    grad_norm = math.sqrt(squared) * unscale if squared >= 0 else math.nan
    lr, decoupled_lr, decay = rates_at(cfg.optim, cfg.train, step)
    finite = math.isfinite(grad_norm) and math.isfinite(loss)
    spiked = finite and loss > loss_limit
    if finite and not spiked and not failures:
        clip = min(1.0, cfg.optim.clip_grad / (grad_norm + 1e-6)) if cfg.optim.clip_grad else 1.0
        with record_function(OPTIMIZER_RANGE):
            multiplier = torch.tensor(clip * unscale, dtype=torch.float32, device=ctx.device)
            optimizer.step(lr, multiplier, decay, decoupled_lr)
    engine.scaler.update(overflow=not finite)
    return StepResult(
        loss=loss,
        targets=targets,
        grad_norm=grad_norm,
        lr=lr,
        decoupled_lr=decoupled_lr,
        weight_decay=decay,
        loss_scale=scale,
        skipped=not finite,
        spiked=spiked,
        stop=stops > 0,
        failed=failures > 0,
    )


@torch.no_grad()
def eval_step(engine: Engine, batch: Batch, failed: bool = False) -> tuple[float, float, bool]:
    """Compute (mean loss over one global batch; weight of its targets; whether a rank failed), the same on every rank.

    Neither dropout nor label smoothing applies. For the arguments see `train_step`.
    """
    rows = on_host(batch, engine)
    microbatches = to_microbatches(rows, engine.cfg.train.micro_batch_size, engine.ctx.device)
    loss_sum = engine.executor.run(engine.eval_program, microbatches, 0, engine.ctx.dp.rank)
    engine.unit_weights.end_pass()
    loss, targets, *_, failures = collectives.to_host(sum_over_world(engine, loss_sum, rows, failed=failed))
    return loss / targets if targets else 0.0, targets, failures > 0


def sum_over_world(
    engine: Engine,
    loss_sum: torch.Tensor,
    rows: Rows,
    squared_norm: torch.Tensor | None = None,
    stop: bool = False,
    failed: bool = False,
) -> torch.Tensor:
    """Run the one status all-reduce of a step.

    Returns:
        fp64 [loss sum, weight of the targets, squared gradient norm, ranks asked to stop, ranks that cannot continue].
    """
    ctx = engine.ctx
    # All tensor-parallel ranks of the last stage hold the same losses; other stages hold zero.
    speaks = ctx.grid.is_first(ctx.rank, "tp")
    # Counted on the host: the step first waits for the GPU when it reads the status, which `collectives.to_host` times.
    targets = rows.total_weight() if speaks and _holds_last(engine) else 0.0
    status = torch.zeros(5, dtype=torch.float64, device=ctx.device)
    status[0] = loss_sum if speaks else 0.0
    status[1] = targets
    if squared_norm is not None:
        status[2] = squared_norm
    status[3] = float(stop)
    status[4] = float(failed)
    collectives.all_reduce(status, ctx.world).wait()
    return status


def _holds_last(engine: Engine) -> bool:
    return any(stage.last for stage in engine.stages.values())


def on_host(batch: Batch, engine: Engine) -> Rows:
    """Return this rank's samples as rows of arrays.

    Raises:
        UserError: they are of another shape, not whole numbers, or negative as inputs.
    """
    if isinstance(batch, Rows):
        return batch
    tokens = np.asarray(batch.cpu() if isinstance(batch, torch.Tensor) else batch)
    sizes, length = engine.cfg.train.batches.sizes, engine.cfg.model.seq_len + 1
    shapes = [(size // engine.ctx.dp.size, length) for size in sizes]
    if tokens.shape not in shapes or tokens.dtype.kind not in "iu":
        rule = f"must be token ids [global_batch_size / dp, seq_len + 1] = {' or '.join(str([*s]) for s in shapes)}"
        raise UserError(f"a batch of {tokens.dtype} {list(tokens.shape)}", rule, "cut it so")
    return Rows.of(tokens).check_inputs("the batch")


def to_microbatches(rows: Rows, size: int, device: torch.device) -> list[MicroBatch]:
    """Cut rows into micro-batches of `size` samples, on the device."""
    given = (None if x is None else _to_device(x, device).t() for x in vars(rows).values())
    whole = MicroBatch(*given)  # type: ignore[arg-type]
    microbatches = []
    for i in range(0, len(rows), size):
        part = whole.samples(i, i + size)
        if rows.starts is not None and device.type == "cuda":
            # Found on the host: the device would have to be asked how many documents there are.
            bounds = document_bounds(rows.starts[i : i + size])
            part = replace(part, bounds=_to_device(bounds, device), longest=int(np.diff(bounds).max()))
        microbatches.append(part)
    return microbatches


def document_bounds(starts_BS: npt.NDArray[np.int64]) -> npt.NDArray[np.int32]:
    """Return where documents begin in samples laid end to end, and the number of tokens, int32 [documents + 1]."""
    begins = np.flatnonzero(starts_BS == np.arange(starts_BS.shape[1]))
    return np.append(begins, starts_BS.size).astype(np.int32)


def _to_device(x: npt.NDArray[Any], device: torch.device) -> torch.Tensor:
    host = torch.from_numpy(np.ascontiguousarray(x))
    if device.type == "cuda":
        host = host.pin_memory()  # a copy from pageable memory would wait for the GPU to finish its work
    return host.to(device, non_blocking=True)
