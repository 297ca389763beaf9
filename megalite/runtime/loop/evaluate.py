"""Evaluation between two steps: the loss on evaluation data, and tasks."""

from __future__ import annotations

import math

from megalite.core.base.errors import UserError
from megalite.core.base.log import logger
from megalite.core.step import eval_figures, eval_step, start_counting
from megalite.runtime.loop.run import Run, open_loader
from megalite.runtime.start.exit import raise_together
from megalite.runtime.watch.heartbeat import READING
from megalite.runtime.watch.watchdog import IDLE


def evaluate(run: Run) -> float | None:
    """Log and return the mean loss over `eval_steps` global batches of the evaluation data, the same every time.

    Tasks of `--eval-tasks` are evaluated too.

    Returns:
        The loss on every rank; None where there is no evaluation data, or no step of it is asked for.
    """
    loss = _evaluate_loss(run)
    if run.tasks is not None:
        run.tasks(run)
    run.heartbeat.beat("between steps", run.step, IDLE)
    return loss


def _evaluate_loss(run: Run) -> float | None:
    cfg, ctx = run.engine.cfg, run.engine.ctx
    if run.datasets.valid is None or not cfg.run.eval_steps:
        return None
    run.engine.optimizer.wait_weights()
    start_counting(run.engine)
    with open_loader(run.engine, run.datasets.valid, cfg.train.global_batch_size) as loader:
        total = targets = 0.0
        for _ in range(cfg.run.eval_steps):
            run.heartbeat.beat(READING, run.step)
            batch, failure = loader.next()
            run.heartbeat.beat("evaluation", run.step)
            mean, weight, failed = eval_step(run.engine, batch, failed=failure is not None)
            if failed:
                raise_together(ctx, failure)
            total, targets = total + mean * weight, targets + weight
    if not targets:
        rule = f"contain no target token with --loss-on {cfg.data.loss_on or 'answers'}"
        remedy = "raise --seq-len if answers are cut off, or evaluate on other data"
        raise UserError(f"the {cfg.run.eval_steps} batches of an evaluation", rule, remedy)
    loss = total / targets
    run.evaluated = run.step, run.consumed_samples, loss
    figures = eval_figures(run.engine, targets)
    run.metrics.event("eval", step=run.step, loss=loss, **figures)
    perplexity = f" | perplexity {math.exp(min(loss, 700.0)):.2f}" if cfg.train.stage == "lm" else ""
    shown = "".join(f" | {c.headline} {figures[c.headline]:.4f}" for c in run.engine.counters if c.headline)
    logger.info(f"evaluation after step {run.step} | loss {loss:.4f}{perplexity}{shown}")
    return loss
