"""Log-probabilities summed per document, out of the last stage, in any layout; no step imports this.

Rows run forward through the stages of a step. The output layer computes logits of the scored tokens alone, by chunks;
sums are fp64, each document's counted once. Shapes: S tokens of a row, B rows of a micro-batch, N scored tokens,
D documents, V columns of this rank.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import partial

import numpy as np
import numpy.typing as npt
import torch

from megalite.core.batch import ForwardPass, MicroBatch
from megalite.core.engine import Forward
from megalite.core.mesh import collectives
from megalite.core.mesh.context import Axis
from megalite.core.microbatches import to_microbatches
from megalite.core.ops.linear_cross_entropy import LinearCrossEntropy
from megalite.core.parts.heads.lm.output_layer import LMHead
from megalite.core.pipeline.executor import forward_program
from megalite.core.rows import Rows

CHUNK = 1024
"""Tokens whose logits exist at once where `--loss-chunk` does not say."""


@dataclass(frozen=True)
class Scores:
    """What the model makes of documents, the same on every rank.

    Attributes:
        logprobs: fp64 [D], sum of the natural log-probabilities of a document's scored tokens.
        is_greedy: bool [D], whether each of them was the likeliest, the lowest id among equals.
        likeliest: int64 [D], of documents with one scored token: the id that is likeliest in its place.
    """

    logprobs: npt.NDArray[np.float64]
    is_greedy: npt.NDArray[np.bool_]
    likeliest: npt.NDArray[np.int64]


def rows_of_rank(forward: Forward, rows: Sequence[list[int]], size: int) -> list[list[int]]:
    """Return the rows that this data-parallel rank scores, of the numbers of each row's documents.

    All ranks have as many, whole micro-batches of `size` rows; the last ones may be empty.
    """
    most, dp, pp = forward.schedule.num_microbatches, forward.ctx.dp, forward.ctx.pp.size
    count = -(-len(rows) // (dp.size * size))
    # An interleaved schedule takes micro-batches in groups.
    if forward.schedule.vp > 1 and (last := count % most):
        count += min(-(-last // pp) * pp, most) - last
    mine = [*rows[dp.rank * count * size : (dp.rank + 1) * count * size]]
    return mine + [[] for _ in range(count * size - len(mine))]


@torch.no_grad()
def score_rows(
    forward: Forward,
    rows: Rows,
    owners: npt.NDArray[np.int64],
    documents: int,
    size: int,
    go_on: Callable[[], bool] = lambda: True,
) -> Scores | None:
    """Score documents; every rank calls it.

    Args:
        forward: the model; its weights must have arrived (`optimizer.wait_weights`).
        rows: this data-parallel rank's rows; those with a target are the scored tokens. See
            `rows_of_rank`.
        owners: [rows, S], number of the document that each scored token counts for; -1 elsewhere.
        documents: number D of documents of all ranks.
        size: rows of a micro-batch.
        go_on: called before each program, on every rank; where it returns False on one of them, all end.

    Returns:
        The scores; None if the scoring was ended.
    """
    ctx, most = forward.ctx, forward.schedule.num_microbatches
    sums = torch.zeros(3, documents, dtype=torch.float64, device=ctx.device)
    per_program = most * size
    for first in range(0, len(rows), per_program):
        ended = torch.tensor([not go_on()], dtype=torch.int32, device=ctx.device)
        collectives.all_reduce(ended, ctx.world).wait()
        if ended.item():
            return None
        part = slice(first, first + per_program)
        batches = to_microbatches(rows[part], size, ctx.device, ctx.axis("cp"))
        of_batches = [torch.from_numpy(x.T.copy()) for x in np.split(owners[part], len(batches))]
        for batch, found in zip(batches, run_forward(forward, batches)):
            if forward.owns_losses:
                owner_SB = of_batches[found.microbatch]
                held = torch.cat([owner_SB[run.start : run.stop] for run in batch.positions.runs])
                sums += sums_of_documents(held[held >= 0].to(ctx.device), found.values_3N, documents)
    collectives.all_reduce(sums, ctx.world).wait()
    logprobs, misses, likeliest_ids = sums.cpu().numpy()
    return Scores(logprobs, misses == 0, likeliest_ids.astype(np.int64))


def sums_of_documents(owner_N: torch.Tensor, values_KN: torch.Tensor, documents: int) -> torch.Tensor:
    """Sum values of tokens by the document that each belongs to, on this rank: fp64 [K, documents]."""
    sums = values_KN.new_zeros(len(values_KN), documents, dtype=torch.float64)
    return sums.index_add_(1, owner_N, values_KN.double())


@dataclass(frozen=True)
class Scored:
    """The scored tokens of a micro-batch that this rank holds, in the order of `targets_SB >= 0`.

    Attributes:
        microbatch: index of the micro-batch.
        values_3N: fp64, log-probabilities, 1 where another token was likelier, and the likeliest token's id.
    """

    microbatch: int
    values_3N: torch.Tensor


def run_forward(forward: Forward, batches: Sequence[MicroBatch]) -> list[Scored]:
    """Run micro-batches through all stages under `no_grad`; returns their scored tokens, on the last stage."""
    found: list[Scored] = []
    schedule = forward.schedule_of(len(batches))
    with ExitStack() as stack:
        for stage in forward.stages.values():
            if stage.last:
                stack.enter_context(_scoring(stage.head, found))
        forward.unit_weights.start_pass()
        forward.executor.run(forward_program(schedule.programs[forward.ctx.pp.rank]), batches, 0, 0)
        forward.unit_weights.end_pass()
    return sorted(found, key=lambda scored: scored.microbatch)


@contextmanager
def _scoring(head: LMHead, found: list[Scored]) -> Iterator[None]:
    """Let the output layer score its targets instead of computing all losses; hooks on it run as ever."""
    head.forward = partial(_score, head, found)  # type: ignore[method-assign]
    try:
        yield
    finally:
        del head.forward


def _score(head: LMHead, found: list[Scored], x: torch.Tensor, batch: MicroBatch, fwd: ForwardPass) -> torch.Tensor:
    """Take the place of `LMHead.forward`; returns the negative log-probability of every target, fp32 [N]."""
    targets_SB = batch.targets_SB
    assert targets_SB is not None
    full_x, work = head.gather(x if head.scale == 1.0 else x * head.scale)
    work.wait()
    counted = targets_SB >= 0
    target_N, x_NH = targets_SB[counted], full_x[counted]
    width = len(head.weight)
    first, real = head.tp.rank * width, max(0, min(width, head.vocab_size - head.tp.rank * width))
    chunk = head.loss_chunk or CHUNK
    output = LinearCrossEntropy(
        head.ops, head.weight, target_N, first, real, chunk, softcap=head.softcap, bias_V=head.bias
    )
    best_N = torch.zeros_like(target_N)

    def compare(rows: slice, _: torch.Tensor, logits_NV: torch.Tensor, __: torch.Tensor) -> None:
        best_N[rows] = likeliest(logits_NV, head.tp, head.vocab_size)

    loss_N = output.losses(x_NH, lambda stats: _gathered(stats, head.tp), compare)
    found.append(
        Scored(fwd.microbatch, torch.stack((-loss_N.double(), (best_N != target_N).double(), best_N.double())))
    )
    return loss_N


def _gathered(stats: torch.Tensor, tp: Axis) -> torch.Tensor:
    gathered, work = collectives.start_all_gather(stats.unsqueeze(0), tp)
    work.wait()
    return gathered


def likeliest(logits_NV: torch.Tensor, tp: Axis, vocab_size: int) -> torch.Tensor:
    """Return the most likely token of each row, int64 [N]; the lowest id among equals.

    Args:
        logits_NV: this rank's columns [N, padded V / tp].
        tp: tensor-parallel axis.
        vocab_size: vocabulary size without padding.
    """
    first = tp.rank * logits_NV.shape[1]
    real = max(0, min(logits_NV.shape[1], vocab_size - first))
    # A rank may hold only padding. Doubles represent every id exactly.
    best_N2 = torch.full((len(logits_NV), 2), -torch.inf, dtype=torch.float64, device=logits_NV.device)
    if real:
        values, ids = logits_NV[:, :real].max(1)
        best_N2[:, 0], best_N2[:, 1] = values, ids + first
    best_TN2 = _gathered(best_N2, tp)
    owner_N = best_TN2[..., 0].argmax(0)
    return best_TN2[owner_N, torch.arange(len(owner_N), device=owner_N.device), 1].long()
