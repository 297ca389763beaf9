"""One training step, the same for every layout: forward and backward, reduce, agree, clip, update."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from itertools import repeat
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from torch.profiler import record_function

from megalite.core.base.errors import UserError
from megalite.core.batch import Documents, MicroBatch
from megalite.core.engine import Engine
from megalite.core.mesh import collectives
from megalite.core.mesh.context import Axis
from megalite.core.options.rates import StepRates, rates_at
from megalite.core.options.step import StepConfig
from megalite.core.parts.ffn.experts.routing_figures import RoutingFigures, move_biases, routing_figures, routing_sums
from megalite.core.pipeline.observe import OPTIMIZER_RANGE
from megalite.core.rows import Rows, share_of


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
        routing: figures of the routers, where there are experts.
        mtp_losses: mean cross-entropy of further tokens, of each module that predicts those.
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
    routing: RoutingFigures | None = None
    mtp_losses: tuple[float, ...] = ()


_ALONE = Axis("cp")
Batch = Rows | npt.NDArray[np.integer[Any]] | torch.Tensor


def train_step(
    engine: Engine[StepConfig],
    batch: Batch,
    step: int,
    stop: bool = False,
    failed: bool = False,
    loss_limit: float = math.inf,
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
    """
    cfg = engine.cfg
    scale = engine.scaler.scale
    rows = to_rows(batch, engine)
    # Gradients are of the loss sum divided by the tokens of the largest batch; the true weight comes with the status.
    full = cfg.train.global_batch_size * cfg.model.seq_len
    loss_sum = forward_backward(engine, rows, step, scale / full)
    totals = sum_over_world(engine, loss_sum, rows, engine.optimizer.finish_grads(), stop, failed)
    loss_sum_all, targets, squared, stops, failures, *more = collectives.to_host(totals)
    further, routed = more[: cfg.model.mtp_num_layers], more[cfg.model.mtp_num_layers :]
    loss, unscale = (loss_sum_all / targets, full / (targets * scale)) if targets else (math.nan, 0.0)
    grad_norm = math.sqrt(squared) * unscale if squared >= 0 else math.nan
    rates = rates_at(cfg.optim, cfg.train, step)
    routing = routing_figures(cfg.model, routed, targets)
    finite = math.isfinite(grad_norm) and math.isfinite(loss)
    spiked = finite and loss > loss_limit
    if finite and not spiked and not failures:
        update(engine, rates, grad_norm, unscale)
        move_biases(engine, routing)
    engine.scaler.update(overflow=not finite)
    return StepResult(
        loss=loss,
        targets=targets,
        grad_norm=grad_norm,
        rates=rates,
        loss_scale=scale,
        skipped=not finite,
        spiked=spiked,
        stop=stops > 0,
        failed=failures > 0,
        routing=routing,
        mtp_losses=tuple(x * len(further) / (targets * cfg.train.mtp_loss_scaling_factor) for x in further if targets),
    )


def forward_backward(
    engine: Engine[StepConfig], rows: Rows, step: int, loss_weight: float, replica: int | None = None
) -> torch.Tensor:
    """Run all micro-batches forward and backward, and start reducing their gradients; return this rank's loss sum.

    Args:
        replica: the rank on dp whose samples these are; None: this one.
    """
    ctx = engine.ctx
    share = share_of(len(rows) * ctx.dp.size, ctx.dp.size, ctx.dp.rank if replica is None else replica)
    size = engine.cfg.train.micro_batch_size
    microbatches = to_microbatches(rows, size, ctx.device, ctx.axis("cp"), *weigh_parts(engine, rows))
    engine.optimizer.start_step(len(microbatches), engine.scaler.scale)
    program = engine.train_program(len(microbatches))
    engine.unit_weights.start_pass()
    for stage in engine.stages.values():
        stage.start_step()
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
    rows = to_rows(batch, engine)
    size, ctx = engine.cfg.train.micro_batch_size, engine.ctx
    microbatches = to_microbatches(rows, size, ctx.device, ctx.axis("cp"))
    engine.unit_weights.start_pass()
    loss_sum = engine.executor.run(engine.eval_program, microbatches, 0, 0)
    engine.unit_weights.end_pass()
    loss, targets, _, _, failures, *_ = collectives.to_host(sum_over_world(engine, loss_sum, rows, failed=failed))
    return loss / targets if targets else 0.0, targets, failures > 0


def sum_over_world(
    engine: Engine[StepConfig],
    loss_sum: torch.Tensor,
    rows: Rows,
    squared_norm: torch.Tensor | None = None,
    stop: bool = False,
    failed: bool = False,
) -> torch.Tensor:
    """Run the one status all-reduce of a step.

    Returns:
        fp64 [loss sum, weight of the targets, squared gradient norm, ranks asked to stop, ranks that cannot continue],
        of a training step the weighted loss sum of each module that predicts further tokens, and what routers have
        counted (`routing_sums`).
    """
    ctx = engine.ctx
    # Ranks of the last stage that see the same tokens hold the same losses; other stages hold zero.
    is_owner = ctx.grid.is_first_except(ctx.rank, "pp", *ctx.grid.batch)
    counts_rows = ctx.grid.is_first_except(ctx.rank, "pp", "dp") and _has_last_stage(engine)
    # Counted on the host: the step first waits for the GPU when it reads the status, which `collectives.to_host` times.
    targets = rows.total_weight() if counts_rows else 0.0
    status = torch.zeros(5, dtype=torch.float64, device=ctx.device)
    status[0] = loss_sum if is_owner else 0.0
    status[1] = targets
    if squared_norm is not None:
        status[2] = squared_norm
    status[3] = float(stop)
    status[4] = float(failed)
    if squared_norm is not None:
        status = torch.cat((status, *_further_sums(engine, is_owner), *routing_sums(engine)))
    collectives.all_reduce(status, ctx.world).wait()
    return status


class Further(NamedTuple):
    """What a module that predicts further tokens reads and is to predict.

    Attributes:
        rows: its inputs and targets, at the places of the model's.
        weight: weight of its losses, fp32, 0-dim.
        router_weight: weight of a token in the losses of its routers, fp32, 0-dim; None without experts.
    """

    rows: Rows
    weight: torch.Tensor
    router_weight: torch.Tensor | None


def weigh_parts(engine: Engine[StepConfig], rows: Rows) -> tuple[torch.Tensor | None, list[Further]]:
    """Weigh what is a mean over something else than the main targets, by whose weight in the global batch the gradients
    of a step are divided: it weighs main / own.

    Returns:
        The weight of a token in the losses of routers, whose own number is that of the tokens that are not padding,
        fp32, 0-dim; None without experts. On ranks of the last stage, each module that predicts further tokens: its
        targets, fewer at the ends of samples and documents, weigh factor / modules x main / own, and its tokens alike.
    """
    m, ctx = engine.cfg.model, engine.ctx
    ahead = [rows.ahead(k) for k in range(1, m.mtp_num_layers + 1)] if _has_last_stage(engine) else []
    if m.num_experts is None and not ahead:
        return None, []
    own = [(part.total_weight(), float(part.num_tokens())) for part in (rows, *ahead)]
    counts = _to_device(np.array(own), ctx.device)
    collectives.all_reduce(counts, ctx.dp).wait()
    of_targets, of_tokens = torch.where(counts > 0, counts[0, 0] / counts, 0.0).t()
    factor = engine.cfg.train.mtp_loss_scaling_factor / max(len(ahead), 1)
    router_weights = [None if m.num_experts is None else weight for weight in of_tokens.float()]
    further = [Further(*part) for part in zip(ahead, (of_targets[1:] * factor).float(), router_weights[1:])]
    return router_weights[0], further


def _further_sums(engine: Engine[StepConfig], is_owner: bool) -> list[torch.Tensor]:
    """List what this rank adds to each module's weighted loss sum of further tokens, each fp64 [1]."""
    if not engine.cfg.model.mtp_num_layers:
        return []
    zero = torch.zeros(1, dtype=torch.float64, device=engine.ctx.device)
    held = [stage.mtp_losses for stage in engine.stages.values() if is_owner and stage.last]
    return [zero + sum(losses[k] for losses in held) for k in range(engine.cfg.model.mtp_num_layers)]


def _has_last_stage(engine: Engine[StepConfig]) -> bool:
    return any(stage.last for stage in engine.stages.values())


def to_rows(batch: Batch, engine: Engine[StepConfig]) -> Rows:
    """Make rows of this rank's samples, on the host.

    Raises:
        UserError: they are of another shape, not whole numbers, or negative as inputs.
    """
    if isinstance(batch, Rows):
        return batch
    tokens = np.asarray(batch.cpu() if isinstance(batch, torch.Tensor) else batch)
    sizes = engine.cfg.train.batches.sizes
    length = engine.cfg.model.seq_len + 1
    dp = engine.ctx.dp
    shapes = [(len(share_of(size, dp.size, dp.rank)), length) for size in sizes]
    if tokens.shape not in shapes or tokens.dtype.kind not in "iu":
        rule = f"must be token ids [global_batch_size / dp, seq_len + 1] = {' or '.join(str([*s]) for s in shapes)}"
        raise UserError(f"a batch of {tokens.dtype} {list(tokens.shape)}", rule, "reshape the batch to that")
    return Rows.of(tokens).check_inputs("the batch")


def to_microbatches(
    rows: Rows,
    size: int,
    device: torch.device,
    cp: Axis = _ALONE,
    router_weight: torch.Tensor | None = None,
    further: Sequence[Further] = (),
) -> list[MicroBatch]:
    """Cut rows into micro-batches of `size` samples, on the device, and these into the tokens of each rank of `cp`.

    Args:
        router_weight, further: see `weigh_parts`.
    """

    def split(x_NS: npt.NDArray[Any] | None) -> Iterable[Any]:
        if x_NS is None:
            return repeat(None)
        return [part.contiguous() for part in _to_device(x_NS, device).t().split(size, dim=1)]

    def batches(rows: Rows, router_weight: torch.Tensor | None) -> Iterable[MicroBatch]:
        padding = None if router_weight is None else rows.padding
        counted = split(None if padding is None else ~padding)
        parts = zip(split(rows.inputs), split(rows.targets), documents, split(rows.weights), counted)
        for *fields, counted_SB in parts:
            batch = MicroBatch.of_samples(*fields)
            weights = None if router_weight is None else _times(router_weight, counted_SB, batch)
            yield replace(batch, router_weights_SB=weights)

    documents: Iterable[Documents | None] = repeat(None)
    if rows.starts is not None:
        host_starts = (rows.starts[i : i + size] for i in range(0, len(rows), size))
        documents = [Documents.of(*starts) for starts in zip(host_starts, split(rows.starts))]
    whole = list(batches(rows, router_weight))
    for part in further:
        for i, ahead in enumerate(batches(part.rows, part.router_weight)):
            weights = _times(part.weight, ahead.weights_SB, ahead)
            ahead = replace(ahead, weights_SB=weights, positions=whole[i].positions)
            whole[i] = replace(whole[i], further=(*whole[i].further, ahead))
    return [batch.shared(cp.size, cp.rank) for batch in whole]


def _times(weight: torch.Tensor, x_SB: torch.Tensor | None, batch: MicroBatch) -> torch.Tensor:
    return weight.expand(batch.tokens_SB.shape) if x_SB is None else x_SB * weight


def _to_device(x: npt.NDArray[Any], device: torch.device) -> torch.Tensor:
    host = torch.from_numpy(np.ascontiguousarray(x))
    if device.type == "cuda":
        host = host.pin_memory()  # a copy from pageable memory would wait for the GPU to finish its work
    return host.to(device, non_blocking=True)
