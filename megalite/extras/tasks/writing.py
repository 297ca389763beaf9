"""Greedy texts in any layout of ranks, through the stages of a step.

With a cache of keys and values each token is computed once: ranks of dp and cp share the texts, and a pipeline has as
many micro-batches of them as stages. Where layers have none, each token takes a pass over its whole text.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field, replace
from typing import Protocol

import torch

from megalite.core.base.log import logger
from megalite.core.batch import MicroBatch
from megalite.core.build import build_executor
from megalite.core.engine import Forward
from megalite.core.mesh import collectives
from megalite.core.mesh.context import ParallelContext
from megalite.core.options.step import StepConfig
from megalite.core.scoring import Scored, Scores, run_forward
from megalite.extras.inference.cache import KeptTexts, without_keys
from megalite.extras.tasks.new_text import NewText
from megalite.runtime.data.tokenizer import Tokenizer

_ROOM = 4
"""Micro-batches whose keys and values are kept at once: they take about a tenth of what a step keeps of a token."""


@dataclass(frozen=True)
class Request:
    """A context to continue: its token ids, at least one, the stop texts, and the maximum number of new tokens."""

    ids: list[int]
    most: int
    until: tuple[str, ...] = ()


class Reader(Protocol):
    """Reads texts, and says how they go on; the same on every rank."""

    def waves(self, requests: Sequence[Request]) -> list[list[int]]:
        """Return the numbers of the requests that are written together."""

    def next_ids(self, texts: Mapping[int, list[int]]) -> list[int] | None:
        """Return the likeliest next id of unfinished texts of a wave, by their requests' numbers; None if it was ended.

        The first call for a wave has its contexts, each later one a further id of the texts that it still has.
        """


def write_texts(
    requests: Sequence[Request], tokenizer: Tokenizer | None, ctx: ParallelContext, reader: Reader
) -> list[str] | None:
    """Continue contexts greedily; every rank calls it.

    Args:
        requests: the contexts, the same on every rank but for `until`, which rank 0 alone reads.
        tokenizer: reads the new tokens, on rank 0.
        ctx: this rank's axes.
        reader: reads the texts.

    Returns:
        The new texts, without their stops, on rank 0 (elsewhere empty ones); None if it was ended.
    """
    written = [[*request.ids] for request in requests]
    texts = [NewText(tokenizer, request.until) for request in requests] if tokenizer is not None else []
    for wave in reader.waves(requests):
        unfinished = wave
        while unfinished:
            found = reader.next_ids({i: written[i] for i in unfinished})
            if found is None:
                return None
            ended = torch.zeros(len(unfinished), dtype=torch.int64, device=ctx.device)
            for at, (i, token) in enumerate(zip(unfinished, found)):
                written[i].append(token)
                if texts:
                    ended[at] = texts[i].add(token)
            collectives.broadcast(ended, ctx.world).wait()
            most = {i: len(requests[i].ids) + requests[i].most for i in unfinished}
            unfinished = [i for i, end in zip(unfinished, ended.tolist()) if not end and len(written[i]) < most[i]]
    return [text.text() for text in texts] if texts else [""] * len(requests)


@dataclass(frozen=True)
class WholeTexts:
    """Reads every text from its start each time.

    Attributes:
        score: scores documents, as `score_rows`; None if it was ended.
    """

    score: Callable[[list[tuple[list[int], int]]], Scores | None]

    def waves(self, requests: Sequence[Request]) -> list[list[int]]:
        return [[*range(len(requests))]]

    def next_ids(self, texts: Mapping[int, list[int]]) -> list[int] | None:
        # The place after the text is scored, with any id.
        scores = self.score([([*ids, 0], 1) for ids in texts.values()])
        return None if scores is None else scores.likeliest.tolist()


def has_cache(forward: Forward, cfg: StepConfig) -> bool:
    """Whether all layers of all ranks have keys and values to keep; every rank calls it. A line says why not."""
    missing = without_keys(forward.stages.values())
    without = torch.tensor([bool(missing)], dtype=torch.int32, device=forward.ctx.device)
    collectives.all_reduce(without, forward.ctx.world).wait()
    # The scales of FP8 are of all tokens of a pass.
    fp8 = cfg.train.fp8 != "off"
    if fp8 or without.item():
        why = "--fp8 rounds tokens by those beside them" if fp8 else "some layers have a state of their own"
        logger.info(f"texts are written without a cache, each token by a pass over its whole text: {why}")
    return not fp8 and not without.item()


@dataclass
class CachedTexts:
    """Reads each token of a text once.

    Attributes:
        forward: the model; its weights must have arrived.
        cfg: its options.
        go_on: called before each pass, on every rank; where it returns False on one of them, all end.
    """

    forward: Forward
    cfg: StepConfig
    go_on: Callable[[], bool]
    _requests: Sequence[Request] = ()
    _rows: int = 0
    # Rank of the batch's axes, micro-batch and row of each text.
    _places: dict[int, tuple[int, int, int]] = field(default_factory=dict)
    _kept: KeptTexts | None = None

    @property
    def _groups(self) -> tuple[int, int]:
        """Ranks that share the texts, and micro-batches of each: a pipeline is full with as many as it has stages."""
        return self.forward.ctx.batch.size, self.forward.ctx.pp.size

    def waves(self, requests: Sequence[Request]) -> list[list[int]]:
        """Group requests of like length, the longest first, by what there is room for."""
        self._requests = requests
        train, seq_len = self.cfg.train, self.cfg.model.seq_len
        order = sorted(range(len(requests)), key=lambda i: -self._length(i))
        waves = []
        while order:
            rows = _ROOM * train.micro_batch_size * seq_len // self._length(order[0])
            ranks, parts = self._groups
            waves.append(order[: rows * ranks * parts])
            order = order[rows * ranks * parts :]
        return waves

    def _length(self, i: int) -> int:
        return len(self._requests[i].ids) + self._requests[i].most

    def next_ids(self, texts: Mapping[int, list[int]]) -> list[int] | None:
        """Read what is new of the texts, see `Reader`."""
        if self._places.keys().isdisjoint(texts):
            return self._begin(texts)
        self._shrink(texts)
        return self._pass(texts, {i: len(ids) - 1 for i, ids in texts.items()}, 1)

    def _begin(self, texts: Mapping[int, list[int]]) -> list[int] | None:
        """Read contexts in pieces of at most a micro-batch's tokens."""
        (ranks, parts), cfg = self._groups, self.cfg
        cells = [(rank, part) for part in range(parts) for rank in range(ranks)]
        self._places = {i: (*cells[at % len(cells)], at // len(cells)) for at, i in enumerate(texts)}
        self._rows = self._padded(-(-len(texts) // len(cells)))
        self._kept = KeptTexts(self.forward.stages.values(), max(map(self._length, texts)), cfg.model.seq_len)
        longest = max(map(len, texts.values()))
        piece, found = max(cfg.train.micro_batch_size * cfg.model.seq_len // self._rows, 1), [0] * len(texts)
        for start in range(0, longest, piece):
            ids = self._pass(texts, dict.fromkeys(texts, start), min(piece, longest - start))
            if ids is None:
                return None
            # A text is answered by the piece in which it ends.
            found = [old + new for old, new in zip(found, ids)]
        return found

    def _shrink(self, texts: Mapping[int, list[int]]) -> None:
        """Leave out the texts that have ended, once they are half of the rows."""
        assert self._kept is not None
        going: dict[tuple[int, int], list[int]] = {}
        for i in texts:
            rank, part, _ = self._places[i]
            going.setdefault((rank, part), []).append(i)
        rows = self._padded(max(map(len, going.values())))
        if 2 * rows > self._rows:
            return
        for part in range(self._groups[1]):
            mine = [self._places[i][2] for i in going.get((self.forward.ctx.batch.rank, part), ())]
            self._kept.keep(mine + [0] * (rows - len(mine)), part)
        self._rows = rows
        self._places = {i: (*cell, row) for cell, numbers in going.items() for row, i in enumerate(numbers)}

    def _padded(self, rows: int) -> int:
        """Return a number of rows whose tokens ranks of tp can share."""
        cut = self.forward.ctx.tp.size if self.cfg.sequence_parallel else 1
        return -(-rows // cut) * cut

    def _pass(self, texts: Mapping[int, list[int]], starts: Mapping[int, int], length: int) -> list[int] | None:
        """Run `length` tokens of each text from its start on; returns the next id of those that end there, else 0."""
        ctx, kept = self.forward.ctx, self._kept
        assert kept is not None
        found = torch.zeros(len(texts) + 1, dtype=torch.int64, device=ctx.device)
        found[-1] = not self.go_on()
        batches, answered = [], []
        for part in range(self._groups[1]):
            ids = [[0] * length for _ in range(self._rows)]
            # A row without a text, or whose text has ended, reads anything.
            at, targets, numbers = [0] * self._rows, [-1] * (self._rows * length), {}
            for number, (i, text) in enumerate(texts.items()):
                rank, of, row = self._places[i]
                if (rank, of) != (ctx.batch.rank, part):
                    continue
                piece = text[starts[i] : starts[i] + length]
                ids[row][: len(piece)], at[row] = piece, starts[i]
                if 0 < len(text) - starts[i] <= length:
                    last = row * length + len(text) - starts[i] - 1
                    targets[last], numbers[last] = 0, number
            targets_SB = torch.tensor(targets, device=ctx.device).view(-1, 1)
            batches.append(kept.next_piece(ids, at, ctx.device, targets_SB, part))
            answered.append([numbers[last] for last in sorted(numbers)])
        for scored in self._run(kept, batches):
            if self.forward.owns_losses:
                found[answered[scored.microbatch]] = scored.values_3N[2].long()
        collectives.all_reduce(found, ctx.world).wait()
        *ids_of_texts, ended = found.tolist()
        return None if ended else ids_of_texts

    def _run(self, kept: KeptTexts, batches: Sequence[MicroBatch]) -> list[Scored]:
        ctx, stages = self.forward.ctx, self.forward.stages
        message = next(iter(stages.values())).message(len(batches[0].tokens_SB), 1)
        executor = build_executor(stages, message, ctx)
        # A compiled block would be compiled again for each length.
        eager = torch.compiler.set_stance("force_eager") if self.cfg.train.compile else nullcontext()
        with torch.no_grad(), kept.attending(), executor.observed_by(kept), eager:
            return run_forward(replace(self.forward, executor=executor), batches)
