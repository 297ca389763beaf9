"""Micro-batches of a step: rows of samples, cut, weighed and moved to the device."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace
from itertools import repeat
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import torch

from megalite.core.base.errors import UserError
from megalite.core.batch import Documents, MicroBatch, uploaded
from megalite.core.engine import Engine
from megalite.core.mesh import collectives
from megalite.core.mesh.context import Axis
from megalite.core.options.step import StepConfig
from megalite.core.rows import Rows, share_of

_ALONE = Axis("cp")
Batch = Rows | npt.NDArray[np.integer[Any]] | torch.Tensor


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
    ahead = [rows.ahead(k) for k in range(1, m.mtp_num_layers + 1)] if engine.has_last_stage else []
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


def to_rows(batch: Batch, engine: Engine[StepConfig], samples: int) -> Rows:
    """Make rows of what this rank has of a global batch of `samples` samples, on the host.

    Raises:
        UserError: they are of another shape, not whole numbers, negative as inputs, or have a wrong weight.
    """
    share = len(share_of_rank(engine, samples))
    if isinstance(batch, Rows):
        if len(batch) != share:
            rule = f"must have the {share} samples of this rank's share of {samples}"
            raise UserError(f"a batch of {len(batch)} rows", rule, "give that many")
        return batch.check_inputs("the batch")
    tokens = np.asarray(batch.cpu() if isinstance(batch, torch.Tensor) else batch)
    shape = [share, engine.cfg.model.seq_len + 1]
    if [*tokens.shape] != shape or tokens.dtype.kind not in "iu":
        rule = f"must be token ids [global_batch_size / dp, seq_len + 1] = {shape}"
        raise UserError(f"a batch of {tokens.dtype} {list(tokens.shape)}", rule, "reshape the batch to that")
    return Rows.of(tokens).check_inputs("the batch")


def share_of_rank(engine: Engine[StepConfig], samples: int, replica: int | None = None) -> range:
    """Return the numbers of the samples that a rank on dp, this one unless another is named, has of so many."""
    dp = engine.ctx.dp
    return share_of(samples, dp.size, dp.rank if replica is None else replica, engine.cfg.train.micro_batch_size)


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
        parts = zip(split(rows.inputs), split(rows.targets), documents, split(rows.weights), counted, pairs)
        for *fields, counted_SB, (owners_SB, references_SB) in parts:
            batch = MicroBatch.of_samples(*fields)
            weights = None if router_weight is None else _times(router_weight, counted_SB, batch)
            yield replace(batch, router_weights_SB=weights, owners_SB=owners_SB, references_SB=references_SB)

    pairs = [*zip(split(rows.owners), split(rows.references))] if rows.owners is not None else repeat((None, None))
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
    return uploaded(torch.from_numpy(np.ascontiguousarray(x)), device)
