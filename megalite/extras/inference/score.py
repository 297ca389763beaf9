"""Evaluation in any layout, on all ranks: log-probabilities of given tokens, new texts, logits of the next token.

Rank 0 sends requests to the others; data-parallel ranks split the rows. Shapes: B rows, S tokens, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any, Literal, TypeVar

import torch

from megalite.core.base.dtypes import DTYPES
from megalite.core.base.errors import UserError, require
from megalite.core.batch import ForwardPass, MicroBatch
from megalite.core.build import build_executor, build_stages, resolve_ops
from megalite.core.engine import Forward
from megalite.core.mesh import collectives
from megalite.core.mesh.context import Axis, ParallelContext
from megalite.core.model.gpt import GPTStage
from megalite.core.optim.unit_weights import UnitWeights
from megalite.core.options.parallel import ParallelConfig
from megalite.core.options.train import TrainConfig
from megalite.core.parts.schedules.choose import schedule_of
from megalite.core.pipeline.executor import Executor, forward_program
from megalite.core.rows import share_of
from megalite.core.scoring import Scores, rows_of_rank, score_rows
from megalite.extras.inference.load import Weights
from megalite.extras.tasks.writing import CachedTexts, Reader, Request, WholeTexts, has_cache, write_texts
from megalite.runtime.data.scored import Document, pack_scored, scored_rows
from megalite.runtime.data.tokenizer import Tokenizer
from megalite.runtime.options.run import Config

Answer = TypeVar("Answer")

_END, _SCORE, _NEXT, _WRITE = range(4)


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
        self._schedule, self._program = schedule, forward_program(schedule.programs[ctx.pp.rank])
        self._index = ctx.pp.rank
        self._reader: Reader | None = None

    def score(self, documents: Sequence[Document]) -> list[tuple[float, bool]]:
        """Score the ends of documents.

        Args:
            documents: (token ids, n): the last n ids are scored, at least one id comes before them.

        Returns:
            For each the sum of the log-probabilities of its last n ids, and whether each was the likeliest.
        """
        scores = self._ask(_SCORE, len(documents), _numbers_of(documents), lambda _: self._scores(documents))
        return list(zip(scores.logprobs.tolist(), scores.is_greedy.tolist()))

    def write(self, requests: Sequence[Request], tokenizer: Tokenizer) -> list[str]:
        """Continue contexts greedily; with a cache of keys and values, if all layers have them. See `write_texts`."""
        numbers = _numbers_of([(request.ids, request.most) for request in requests])
        return self._ask(_WRITE, len(requests), numbers, lambda _: self._write(requests, tokenizer))

    def next_logits(self, rows: Sequence[Sequence[int]]) -> torch.Tensor:
        """Compute the fp32 logits [B, V] of the token that follows each row; at most `max_rows` rows."""
        tp, step = self.cfg.parallel.tp, self.ctx.dp.size * self.ctx.pp.size
        length = -(-max(map(len, rows)) // tp) * tp
        # Every micro-batch of every rank gets the same number of rows, and the last position is the one with a target.
        # Padding comes after the tokens, which therefore never attend to it.
        both = torch.zeros(2, len(rows) + -len(rows) % step, length, dtype=torch.int64)
        both[1] = -1
        for row, ids in enumerate([*rows, *[rows[0]] * (-len(rows) % step)]):
            both[0, row, : len(ids)], both[1, row, len(ids) - 1] = torch.tensor(ids), 0
        logits = self._ask(_NEXT, both.shape[1], both.flatten(), lambda told: self._next_logits(told.view_as(both)))
        return logits[: len(rows)]

    def close(self) -> None:
        """End `serve` on the other ranks."""
        self._share(torch.tensor([_END, 0, 0], device=self.ctx.device))

    def serve(self) -> None:
        """Take part in rank 0's requests until it closes."""
        while True:
            kind, *sizes = self._share(torch.zeros(3, dtype=torch.int64, device=self.ctx.device)).tolist()
            if kind == _END:
                return
            self._answer(kind, sizes[0], self._share(torch.empty(sizes[1], dtype=torch.int64, device=self.ctx.device)))

    def _ask(self, kind: int, items: int, numbers: torch.Tensor, answer: Callable[[torch.Tensor], Answer]) -> Answer:
        """Let all ranks answer a request about some documents or rows, described by numbers."""
        try:
            self._share(torch.tensor([kind, items, len(numbers)], device=self.ctx.device))
            return answer(self._share(numbers.to(self.ctx.device)))
        except UserError as e:
            # After a UserError the caller closes, but the other ranks would wait inside this request.
            raise RuntimeError(f"a request failed: {e}") from e

    def _share(self, x: torch.Tensor) -> torch.Tensor:
        collectives.broadcast(x, self.ctx.world).wait()
        return x

    def _answer(self, kind: int, items: int, numbers: torch.Tensor) -> None:
        """Take part in a request of rank 0."""
        if kind == _NEXT:
            self._next_logits(numbers.view(2, items, -1))
            return
        sizes, ids = numbers[: 2 * items].view(items, 2).tolist(), numbers[2 * items :].cpu()
        documents = [(part.tolist(), n) for part, (_, n) in zip(ids.split([m for m, _ in sizes]), sizes)]
        if kind == _WRITE:
            self._write([Request(*document) for document in documents], None)
        else:
            self._scores(documents)

    def _forward(self, length: int, size: int) -> Forward:
        executor, stages = self._executor(length, size, self._stage), {self._index: self._stage}
        return Forward(self.ctx, stages, executor, self._schedule, UnitWeights([], []))

    def _executor(self, length: int, size: int, stage: Any) -> Executor:
        """Make what runs micro-batches of `size` rows of `length` tokens."""
        return build_executor({self._index: stage}, self._stage.message(length, size), self.ctx)

    def _scores(self, documents: Sequence[Document]) -> Scores:
        """Run this rank's part of scoring. Rows are as long as the longest document, and shorter ones share them."""
        ctx, tp = self.ctx, self.cfg.parallel.tp
        length = -(-max(len(ids) - 1 for ids, _ in documents) // tp) * tp
        packs = pack_scored(documents, length)
        size = min(self.cfg.train.micro_batch_size, -(-len(packs) // (ctx.dp.size * ctx.pp.size)))
        forward = self._forward(length, size)
        rows, owners = scored_rows(documents, rows_of_rank(forward, packs, size), length)
        scores = score_rows(forward, rows, owners, len(documents), size)
        assert scores is not None
        return scores

    def _write(self, requests: Sequence[Request], tokenizer: Tokenizer | None) -> list[str]:
        """Run this rank's part of writing texts, which rank 0 reads."""
        if self._reader is None:
            forward = self._forward(self.cfg.model.seq_len, self.cfg.train.micro_batch_size)
            cached = has_cache(forward, self.cfg)
            self._reader = CachedTexts(forward, self.cfg, lambda: True) if cached else WholeTexts(self._scores)
        texts = write_texts(requests, tokenizer, self.ctx, self._reader)
        assert texts is not None
        return texts

    @torch.no_grad()
    def _next_logits(self, both_2BS: torch.Tensor) -> torch.Tensor:
        """Run this rank's part; returns fp32 logits [B, V] of the token after the one with a target."""
        ctx, (_, rows, length) = self.ctx, both_2BS.shape
        own = share_of(rows, ctx.dp.size, ctx.dp.rank)
        share, mine = len(own), slice(own.start, own.stop)
        tokens_SB, targets_SB = both_2BS[:, mine].transpose(1, 2)
        size = share // ctx.pp.size
        batches = [
            MicroBatch.of_samples(tokens_SB[:, i : i + size].contiguous(), targets_SB[:, i : i + size].contiguous())
            for i in range(0, share, size)
        ]
        stage = _AnswerStage(self._stage, ctx)
        self._executor(length, size, stage).run(self._program, batches, 0, 0)
        out = torch.zeros(rows, self.cfg.model.vocab, device=ctx.device)
        if stage.last and ctx.tp.rank == 0:
            out[mine] = torch.cat(stage.answers)
        collectives.all_reduce(out, ctx.world).wait()
        return out


def _numbers_of(documents: Sequence[Document]) -> torch.Tensor:
    """Return documents as numbers, int64: the length and the second number of each, then all ids."""
    return torch.tensor([x for ids, n in documents for x in (len(ids), n)] + [i for ids, _ in documents for i in ids])


class _AnswerStage(torch.nn.Module):
    """A stage for the executor that keeps the last stage's logits of the positions with a target, by micro-batch."""

    def __init__(self, stage: GPTStage, ctx: ParallelContext) -> None:
        super().__init__()
        self.first = stage.first
        self.last = stage.last
        self.queue = stage.queue
        self._stage = stage
        self._ctx = ctx
        self.answers: list[torch.Tensor] = []

    def forward(self, x: torch.Tensor, batch: MicroBatch, fwd: ForwardPass) -> torch.Tensor:
        y = self._stage(x, replace(batch, targets_SB=None), fwd)
        if not self.last:
            return y
        assert batch.targets_SB is not None
        last_B = batch.targets_SB.argmax(0)
        logits_BV = y[last_B, torch.arange(len(last_B), device=last_B.device)]
        self.answers.append(_gather_vocabulary(logits_BV, self._ctx.tp, self._stage.head.vocab_size).float())
        return y.new_zeros(())


def _gather_vocabulary(logits_NV: torch.Tensor, tp: Axis, vocab_size: int) -> torch.Tensor:
    """Gather all ranks' columns of logits [N, V / T] without the padding: [N, vocab_size]."""
    gathered, work = collectives.start_all_gather(logits_NV.t(), tp)
    work.wait()
    return gathered[:vocab_size].t()
