"""Evaluation in any layout, on all ranks: log-probabilities of given tokens, logits of the next one.

Rank 0 sends requests to the others; data-parallel ranks split the rows. Shapes: B rows, S tokens, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Literal

import torch

from megalite.core.base.dtypes import DTYPES
from megalite.core.base.errors import UserError, require
from megalite.core.batch import ForwardPass, MicroBatch
from megalite.core.build import build_stages, resolve_ops
from megalite.core.mesh import collectives
from megalite.core.mesh.context import Axis, ParallelContext
from megalite.core.model.gpt import GPTStage
from megalite.core.options.parallel import ParallelConfig
from megalite.core.options.train import TrainConfig
from megalite.core.parts.schedules.choose import schedule_of
from megalite.core.pipeline.executor import Executor, forward_program
from megalite.core.pipeline.p2p import Channel
from megalite.core.rows import share_of
from megalite.core.tensor_parallel.loss import vocab_parallel_cross_entropy
from megalite.extras.inference.load import Weights
from megalite.runtime.options.run import Config

_END, _SCORE, _NEXT = range(3)


def scoring_config(
    weights: Weights,
    world: int,
    tp: int | None = None,
    pp: int | None = None,
    precision: Literal["fp32", "bf16", "fp16"] | None = None,
    rows: int = 8,
    max_length: int | None = None,
) -> Config:
    """Build the options of an evaluation: by default in the layout and precision of the weights' run.

    Args:
        weights: weights to evaluate.
        world: number of ranks.
        tp, pp, precision: layout and precision instead of the run's.
        rows: number of rows per pass and data-parallel rank.
        max_length: tokens of a row, instead of the run's sequence length.

    Raises:
        UserError: the layout does not fit the model or the ranks, or the rows are longer than its positions.
    """
    parallel, trained = weights.options.get("parallel", {}), weights.options.get("train", {})
    tp, pp = tp or parallel.get("tp", 1), pp or parallel.get("pp", 1)
    # A multiple of tp, so that the sequence can be sharded over tp.
    requested, limit = max_length or weights.cfg.seq_len, weights.cfg.positions
    length = -(-requested // tp) * tp
    if length > limit and weights.cfg.position_kind.limited:
        at_most = f"at most {limit}, the model's learned positions"
        require(requested <= limit, f"--max-length {requested}", f"must be {at_most}", "lower it")
        rule = f"{requested} tokens are padded to {length}, a multiple of it, and there may be {at_most}"
        raise UserError(f"--tp {tp}", rule, f"give --max-length {limit // tp * tp}, or another --tp")
    most = weights.cfg.position_kind.exact_length
    exact = f"must be at most {most}, up to which its positions are exact"
    require(most is None or length <= most, f"--max-length {length}", exact, "lower it")
    require(
        world % (tp * pp) == 0,
        f"{world} rank{'s' * (world > 1)} with --tp {tp} --pp {pp}",
        f"must be a multiple of tp x pp = {tp * pp}",
        f"start {tp * pp}, or give another --tp and --pp",
    )
    batch = TrainConfig(
        micro_batch_size=rows,
        # As many micro-batches as stages, so that no stage waits for long.
        global_batch_size=rows * pp * (world // (tp * pp)),
        precision=precision or trained.get("precision", "fp32"),
    )
    model = replace(weights.cfg, seq_len=length)
    return Config(model=model, parallel=ParallelConfig(tp=tp, pp=pp, zero=0, schedule="gpipe"), train=batch)


class Scorer:
    """A model in any layout that scores tokens. Every rank makes one; rank 0 calls the methods, the others `serve`.

    Args:
        cfg: options from `scoring_config`.
        ctx: this rank's axes.
        weights: weights to load into this rank's stage.

    Attributes:
        max_rows: maximum number of rows of a call.
    """

    def __init__(self, cfg: Config, ctx: ParallelContext, weights: Weights) -> None:
        self.cfg = cfg
        self.ctx = ctx
        self.max_rows = cfg.train.global_batch_size
        schedule, dtype = schedule_of(cfg, ctx.dp.size), DTYPES[cfg.train.precision]
        (self._stage,) = build_stages(cfg, ctx, schedule.placement, dtype, resolve_ops(cfg, ctx)).values()
        weights.load(self._stage, ctx)
        self._program = forward_program(schedule.programs[ctx.pp.rank])
        self._index = ctx.pp.rank

    def score(self, rows: Sequence[tuple[Sequence[int], int]]) -> list[tuple[float, bool]]:
        """Score the end of each row.

        Args:
            rows: at most `max_rows` of (token ids, n): the last n ids are scored, at least one id comes before them.

        Returns:
            For each row the sum of the log-probabilities of its last n ids, and whether each was the likeliest.
        """
        inputs = [(ids[:-1], [-1] * (len(ids) - 1 - n) + list(ids[-n:])) for ids, n in rows]
        logprobs_BS, likeliest_BS = self._ask(_SCORE, inputs)
        totals, hits = logprobs_BS.sum(1).tolist(), likeliest_BS.sum(1).tolist()
        return [(total, hit == n) for total, hit, (_, n) in zip(totals, hits, rows)]

    def next_logits(self, rows: Sequence[Sequence[int]]) -> torch.Tensor:
        """Compute the fp32 logits [B, V] of the token that follows each row; at most `max_rows` rows."""
        # The last position is the one with a target.
        inputs = [(ids, [-1] * (len(ids) - 1) + [0]) for ids in rows]
        return self._ask(_NEXT, inputs)[: len(rows)]

    def close(self) -> None:
        """End `serve` on the other ranks."""
        self._share(torch.tensor([_END, 0, 0], device=self.ctx.device))

    def serve(self) -> None:
        """Take part in rank 0's requests until it closes."""
        while True:
            kind, *shape = self._share(torch.zeros(3, dtype=torch.int64, device=self.ctx.device)).tolist()
            if kind == _END:
                return
            self._answer(kind, self._share(torch.empty(2, *shape, dtype=torch.int64, device=self.ctx.device)))

    def _ask(self, kind: int, rows: Sequence[tuple[Sequence[int], Sequence[int]]]) -> torch.Tensor:
        """Let all ranks answer a request for rows of (token ids, targets); a target of -1 means none."""
        tp, step = self.cfg.parallel.tp, self.ctx.dp.size * self.ctx.pp.size
        length = -(-max(len(ids) for ids, _ in rows) // tp) * tp
        # Every micro-batch of every rank gets the same number of rows.
        rows = [*rows, *[rows[0]] * (-len(rows) % step)]
        # Padding comes after the tokens, which therefore never attend to it.
        both = torch.zeros(2, len(rows), length, dtype=torch.int64)
        both[1] = -1
        for row, (ids, targets) in enumerate(rows):
            both[0, row, : len(ids)], both[1, row, : len(ids)] = torch.tensor(ids), torch.tensor(targets)
        both = both.to(self.ctx.device)
        try:
            self._share(torch.tensor([kind, *both.shape[1:]], device=self.ctx.device))
            return self._answer(kind, self._share(both))
        except UserError as e:
            # After a UserError the caller closes, but the other ranks would wait inside this request.
            raise RuntimeError(f"a request failed: {e}") from e

    def _share(self, x: torch.Tensor) -> torch.Tensor:
        collectives.broadcast(x, self.ctx.world).wait()
        return x

    @torch.no_grad()
    def _answer(self, kind: int, both_2BS: torch.Tensor) -> torch.Tensor:
        """Run this rank's part; returns log-probabilities and hits, fp64 [2, B, S], or fp32 logits [B, V]."""
        ctx, (_, rows, length) = self.ctx, both_2BS.shape
        own = share_of(rows, ctx.dp.size, ctx.dp.rank)
        share, mine = len(own), slice(own.start, own.stop)
        tokens_SB, targets_SB = both_2BS[:, mine].transpose(1, 2)
        size = share // ctx.pp.size
        batches = [
            MicroBatch.of_samples(tokens_SB[:, i : i + size].contiguous(), targets_SB[:, i : i + size].contiguous())
            for i in range(0, share, size)
        ]
        message = self._stage.message(length, size)
        stage = _AnswerStage(self._stage, kind, ctx)
        executor = Executor({self._index: stage}, *(Channel(a, message, ctx.device) for a in (ctx.pp, ctx.pp_grad)))
        executor.run(self._program, batches, 0, 0)
        if kind == _SCORE:
            out = torch.zeros(2, rows, length, dtype=torch.float64, device=ctx.device)
        else:
            out = torch.zeros(1, rows, self.cfg.model.vocab, device=ctx.device)
        if stage.last and ctx.tp.rank == 0:
            out[:, mine] = torch.cat(stage.answers, dim=1).to(out.dtype)
        collectives.all_reduce(out, ctx.world).wait()
        return out if kind == _SCORE else out[0]


class _AnswerStage(torch.nn.Module):
    """A stage for the executor that keeps the requested part of the last stage's logits, by micro-batch."""

    def __init__(self, stage: GPTStage, kind: int, ctx: ParallelContext) -> None:
        super().__init__()
        self.first = stage.first
        self.last = stage.last
        self.queue = stage.queue
        self._stage = stage
        self._kind = kind
        self._ctx = ctx
        self.answers: list[torch.Tensor] = []

    def forward(self, x: torch.Tensor, batch: MicroBatch, fwd: ForwardPass) -> torch.Tensor:
        y = self._stage(x, replace(batch, targets_SB=None), fwd)
        if not self.last:
            return y
        assert batch.targets_SB is not None
        answer = self._scores if self._kind == _SCORE else self._next
        self.answers.append(answer(y, batch.targets_SB))
        return y.new_zeros(())

    def _scores(self, logits_SBV: torch.Tensor, targets_SB: torch.Tensor) -> torch.Tensor:
        """Compute log-probabilities of the targets, and whether they are the likeliest: fp64 [2, B, S], else 0."""
        stage, tp = self._stage.lm_head, self._ctx.tp
        scored = targets_SB >= 0
        logits_NV, targets_N = logits_SBV[scored], targets_SB[scored]
        out = torch.zeros(2, *targets_SB.shape, dtype=torch.float64, device=targets_SB.device)
        out[1, scored] = (_likeliest(logits_NV, tp, stage.vocab_size) == targets_N).double()
        loss_N = vocab_parallel_cross_entropy(logits_NV, targets_N, tp, stage.vocab_size, stage.ops)
        out[0, scored] = -loss_N.double()
        return out.transpose(1, 2)

    def _next(self, logits_SBV: torch.Tensor, targets_SB: torch.Tensor) -> torch.Tensor:
        """Return all logits of each row's last position, fp32 [1, B, V]."""
        last_B = targets_SB.argmax(0)
        logits_BV = logits_SBV[last_B, torch.arange(len(last_B), device=last_B.device)]
        return _gather_vocabulary(logits_BV, self._ctx.tp, self._stage.lm_head.vocab_size).float().unsqueeze(0)


def _likeliest(logits_NV: torch.Tensor, tp: Axis, vocab_size: int) -> torch.Tensor:
    """Return the most likely token of each row, int64 [N]; the lowest id among equals.

    Args:
        logits_NV: this rank's columns [N, padded V / tp].
        vocab_size: vocabulary size without padding.
    """
    first = tp.rank * logits_NV.shape[1]
    real = max(0, min(logits_NV.shape[1], vocab_size - first))
    # A rank may hold only padding. Doubles represent every id exactly.
    best_N2 = torch.full((len(logits_NV), 2), -torch.inf, dtype=torch.float64, device=logits_NV.device)
    if real:
        values, ids = logits_NV[:, :real].max(1)
        best_N2[:, 0], best_N2[:, 1] = values, ids + first
    best_TN2, work = collectives.start_all_gather(best_N2.unsqueeze(0), tp)
    work.wait()
    owner_N = best_TN2[..., 0].argmax(0)
    return best_TN2[owner_N, torch.arange(len(owner_N), device=owner_N.device), 1].long()


def _gather_vocabulary(logits_NV: torch.Tensor, tp: Axis, vocab_size: int) -> torch.Tensor:
    """Gather all ranks' columns of logits [N, V / T] without the padding: [N, vocab_size]."""
    gathered, work = collectives.start_all_gather(logits_NV.t(), tp)
    work.wait()
    return gathered[:vocab_size].t()
