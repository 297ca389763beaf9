"""`--eval-tasks`: tasks evaluated in the training run, in its layout, after the steps of `--eval-every`."""

from __future__ import annotations

import hashlib
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import numpy as np
import torch

from megalite.core.base.errors import UserError, require
from megalite.core.base.log import logger
from megalite.core.engine import Forward
from megalite.core.mesh import collectives
from megalite.core.mesh.agree import agree, check_equal
from megalite.core.mesh.context import ParallelContext
from megalite.core.options.step import StepConfig
from megalite.core.scoring import Scores, rows_of_rank, score_rows
from megalite.extras.tasks.read import Task, read_task
from megalite.extras.tasks.writing import CachedTexts, Reader, Request, WholeTexts, has_cache, write_texts
from megalite.runtime.data.scored import pack_scored, scored_rows
from megalite.runtime.data.tokenizer import Tokenizer, load_tokenizer
from megalite.runtime.loop.run import Run
from megalite.runtime.options.run import Config
from megalite.runtime.places.downloads import bring_tree
from megalite.runtime.recover.member import NOBODY, Companion
from megalite.runtime.watch.watchdog import OWN

if TYPE_CHECKING:
    from megalite.extras.tasks.requests import Document, Question


@dataclass
class _Asked:
    """A task as it is scored: its questions, for each pair of a question the numbers of its documents, and
    of generation the number of each question's request."""

    task: Task
    questions: list[Question]
    parts: list[list[list[int]]] = field(default_factory=list)
    written: list[int] = field(default_factory=list)


@dataclass
class EvalTasks:
    """The tasks of a run. Called with it after a step, on every rank, it scores them and records their metrics.

    Attributes:
        asked: the tasks; on rank 0 only.
        documents: what is scored, the same on every rank.
        packs: numbers of the documents of each row.
        requests: what is to be continued, the same on every rank.
        tokenizer: reads what is written; on rank 0 only.
        cached: whether texts are written with a cache of keys and values, where the layers have them.
    """

    asked: list[_Asked]
    documents: list[Document]
    packs: list[list[int]] = field(default_factory=list)
    requests: list[Request] = field(default_factory=list)
    tokenizer: Tokenizer | None = None
    cached: bool = True

    def identity(self) -> str:
        """Return what hosts compare: a digest of the tasks and their documents; on rank 0."""
        return hashlib.sha256(repr([asked.task for asked in self.asked]).encode()).hexdigest()

    def __call__(self, run: Run) -> None:
        started = time.perf_counter()

        def go_on() -> bool:
            run.heartbeat.beat("evaluation of tasks", run.step, OWN)
            return not run.stop_asked

        run.engine.optimizer.wait_weights()
        figures = self.figures(run.engine, run.engine.cfg, go_on)
        if figures is None:
            logger.info("a rank was asked to stop: --eval-tasks ends without figures")
            return
        if run.engine.ctx.rank != 0:
            return
        seconds = time.perf_counter() - started
        run.metrics.event("eval_tasks", step=run.step, **figures, seconds=seconds)
        shown = " | ".join(f"{name} {value:.4f}" for name, value in figures.items() if "_stderr" not in name)
        logger.info(f"tasks after step {run.step} | {shown} | {seconds:.1f} s")

    def figures(self, forward: Forward, cfg: StepConfig, go_on: Callable[[], bool]) -> dict[str, float] | None:
        """Evaluate the tasks; every rank calls it.

        Args:
            forward: the model; its weights must have arrived.
            cfg: its options.
            go_on: called before each pass, on every rank; where it returns False on one of them, all end.

        Returns:
            {task/metric: value} on rank 0, elsewhere nothing of use; None if the evaluation was ended.
        """
        scores = self._score(forward, cfg, go_on, self.documents, self.packs)
        texts = None if scores is None else self.write(forward, cfg, go_on)
        return None if scores is None or texts is None else self.metrics(scores, texts)

    def write(self, forward: Forward, cfg: StepConfig, go_on: Callable[[], bool]) -> list[str] | None:
        """Continue the contexts of all requests, in rank 0's answer; see `figures`."""

        def score(documents: list[Document]) -> Scores | None:
            return self._score(forward, cfg, go_on, documents, pack_scored(documents, cfg.model.seq_len))

        cached = self.cached and bool(self.requests)
        reader: Reader = CachedTexts(forward, cfg, go_on) if cached else WholeTexts(score)
        return write_texts(self.requests, self.tokenizer, forward.ctx, reader)

    @staticmethod
    def _score(
        forward: Forward,
        cfg: StepConfig,
        go_on: Callable[[], bool],
        documents: list[Document],
        packs: list[list[int]],
    ) -> Scores | None:
        size = cfg.train.micro_batch_size
        rows, owners = scored_rows(documents, rows_of_rank(forward, packs, size), cfg.model.seq_len)
        return score_rows(forward, rows, owners, len(documents), size, go_on)

    def metrics(self, scores: Scores, texts: Sequence[str] = ()) -> dict[str, float]:
        """Return {task/metric: value}, on rank 0."""
        from megalite.extras.tasks.requests import mean_of, metrics_of

        out: dict[str, float] = {}
        for asked in self.asked:
            answers = [
                [(float(scores.logprobs[p].sum()), bool(scores.is_greedy[p].all())) for p in pairs]
                for pairs in asked.parts
            ]
            if (how := asked.task.generation) is None:
                found = metrics_of(asked.task, asked.questions, answers)
            else:
                pairs_of = zip(asked.written, asked.questions, strict=True)
                found = mean_of(how.metrics, [how.judged(texts[i], q.target) for i, q in pairs_of])
            out |= {f"{asked.task.name}/{name}": value for name, value in found.items()}
        return out

    def prepare(self, run: Run) -> None:
        """Choose before the first step how texts are written, and log what an evaluation takes; on every rank."""
        cfg, tokens = run.engine.cfg, sum(len(ids) - 1 for ids, _ in self.documents)
        rows, every = len(self.packs), cfg.run.eval_every
        when = f"every {every} step{'s' * (every > 1)}" if every else "at the end"
        if self.documents:
            # A forward pass is a third of a step's work.
            share = rows / (3 * cfg.train.global_batch_size * every) if every else 0
            on_top = f": about {share:.1%} on top of training" if every else ""
            scored = sum(asked.task.generation is None for asked in self.asked)
            logger.info(
                f"--eval-tasks: {scored} task{'s' * (scored > 1)}, {len(self.documents):,} requests, "
                f"{tokens:,} tokens in {rows:,} rows of {cfg.model.seq_len:,}, {when}{on_top}"
            )
        if self.requests:
            new = sum(request.most for request in self.requests)
            logger.info(f"--eval-tasks: {len(self.requests):,} texts to write, {new:,} new tokens at most, {when}")
            self.cached = has_cache(run.engine, run.engine.cfg)


def identity_of_tasks(cfg: Config) -> str:
    """Return the identity of the tasks as this host has them, see `EvalTasks`; "" without any.

    Raises:
        UserError: a task cannot be read or used.
    """
    return _prepare_of_run(cfg).identity() if cfg.run.eval_tasks else ""


def open_tasks(cfg: Config, ctx: ParallelContext, companion: Companion = NOBODY) -> EvalTasks | None:
    """Read the tasks of `--eval-tasks` and encode their requests, on rank 0, and share these; None without any.

    After a recovery a run goes on without tasks that cannot be read any more: its state is in memory alone.

    Raises:
        UserError: a task cannot be read or used, or there is no tokenizer for it; raised on every rank.
    """
    # Before the collectives that only a run with tasks has.
    remedy = "start every rank with the same flags and files"
    check_equal(ctx, "--eval-tasks", " ".join(cfg.run.eval_tasks) or "none", remedy)
    if not cfg.run.eval_tasks or companion.turn.go.gave_up:
        return None
    try:
        prepared = agree(ctx, lambda: _prepare_of_run(cfg) if ctx.rank == 0 else EvalTasks([], []))
    except UserError as e:
        if companion.round == 0:
            raise
        if ctx.rank == 0:
            logger.warning(f"the tasks cannot be read any more ({e}): the run goes on without them")
        return None
    documents = _shared(prepared.documents, ctx)
    # A request is its context, and its number of new tokens.
    requests = [Request(ids, most) for ids, most in _shared([(r.ids, r.most) for r in prepared.requests], ctx)]
    packs = _packs(documents, cfg.model.seq_len)
    return EvalTasks(prepared.asked, documents, packs, prepared.requests or requests, prepared.tokenizer)


def _prepare_of_run(cfg: Config) -> EvalTasks:
    files = cfg.run.eval_tasks
    given, rule = f"--eval-tasks {files[0]}", "texts of tasks become tokens by the run's tokenizer, and there is none"
    if (name := cfg.data.tokenizer) is None:
        raise UserError(given, rule, "give --tokenizer, the one that the data was made with")
    bring_tree(name, cfg.run.cache_dir)
    return prepare(files, cfg.run.eval_limit, load_tokenizer(str(cfg.local_data.tokenizer)), cfg.model.seq_len)


def prepare(files: Sequence[str], limit: int, tokenizer: Tokenizer, longest: int) -> EvalTasks:
    """Read tasks and encode their requests, in one process.

    Args:
        files: their YAML files.
        limit: number of documents of each that are evaluated; 0: all.
        tokenizer: tokenizer of the model.
        longest: most tokens that the model reads at once.

    Raises:
        UserError: a task cannot be read or used.
    """
    # Here: it loads jinja2, a hundredth of a rank's start, which a run without tasks need not pay.
    from megalite.extras.tasks.requests import documents_of, questions

    given = f"--eval-tasks {files[0]}"
    rule = f"tokenizer {tokenizer.path} has no end of text, which separates documents"
    require(tokenizer.eos_id is not None, given, rule, "use a tokenizer that has one")
    asked: list[_Asked] = []
    documents: list[Document] = []
    requests: list[Request] = []
    for file in files:
        task = read_task(file, limit)
        rule = f"another file has a task of the name {task.name}"
        require(task.name not in [a.task.name for a in asked], f"--eval-tasks {file}", rule, "rename one of them")
        asked.append(_Asked(task, questions(task)))
        for question in asked[-1].questions:
            asked[-1].parts.append([])
            if (how := task.generation) is not None:
                room = longest - how.most
                rule = f"max_gen_toks {how.most} leaves no room for a context in {longest} tokens (--seq-len)"
                require(room > 0, f"task {task.name}", rule, "set it lower, or leave the task out")
                ids = tokenizer.encode(question.context)[-room:] or [int(tokenizer.eos_id or 0)]
                asked[-1].written.append(len(requests))
                requests.append(Request(ids, how.most, how.until))
            for parts in documents_of(question, tokenizer, longest, task.name):
                asked[-1].parts[-1].append([*range(len(documents), len(documents) + len(parts))])
                documents += parts
    rule = "none of its documents has a token to score"
    require(bool(documents or requests), given, rule, "use files with texts")
    return EvalTasks(asked, documents, _packs(documents, longest), requests, tokenizer)


def _packs(documents: Sequence[Document], longest: int) -> list[list[int]]:
    return pack_scored(documents, longest) if documents else []


def _shared(documents: Sequence[Document], ctx: ParallelContext) -> list[Document]:
    """Give every rank rank 0's documents, so that only its host needs the files."""
    sizes = torch.tensor([len(documents), sum(len(ids) for ids, _ in documents)], device=ctx.device)
    collectives.broadcast(sizes, ctx.world).wait()
    number, length = sizes.tolist()
    numbers = torch.zeros(2 * number + length, dtype=torch.int64, device=ctx.device)
    if ctx.rank == 0:
        flat = [len(ids) for ids, _ in documents] + [n for _, n in documents] + [i for ids, _ in documents for i in ids]
        numbers.copy_(torch.tensor(flat))
    collectives.broadcast(numbers, ctx.world).wait()
    lengths, scored, ids = np.split(numbers.cpu().numpy(), [number, 2 * number])
    return list(zip((part.tolist() for part in np.split(ids, lengths.cumsum()[:-1])), scored.tolist()))
