"""Tasks of `--eval-tasks` on trained weights, in one process (`megalite evaluate`)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from megalite.core.build import build_executor
from megalite.core.engine import Forward
from megalite.core.mesh.context import ParallelContext
from megalite.core.optim.unit_weights import UnitWeights
from megalite.core.options.parallel import ParallelConfig
from megalite.core.options.train import TrainConfig
from megalite.core.parts.schedules.choose import schedule_of
from megalite.extras.inference.load import Model
from megalite.extras.tasks.in_loop import prepare
from megalite.extras.tasks.writing import has_cache
from megalite.runtime.options.run import Config

_ROWS = 8


def evaluate_tasks(model: Model, files: Sequence[str], limit: int) -> dict[str, Any]:
    """Evaluate tasks; returns the figures that `megalite evaluate` prints, by the names that a run gives them.

    Args:
        model: model with a tokenizer.
        files: YAML files of the tasks.
        limit: number of documents of each that are evaluated; 0: all.

    Raises:
        UserError: a task cannot be read or used.
    """
    assert model.tokenizer is not None
    tasks = prepare(files, limit, model.tokenizer, model.cfg.seq_len)
    ctx = ParallelContext.single(next(model.stage.parameters()).device)
    train = TrainConfig(micro_batch_size=_ROWS, global_batch_size=_ROWS)
    cfg = Config(model=model.cfg, parallel=ParallelConfig(zero=0), train=train)
    executor = build_executor({0: model.stage}, model.stage.message(model.cfg.seq_len, _ROWS), ctx)
    forward = Forward(ctx, {0: model.stage}, executor, schedule_of(cfg, 1), UnitWeights([], []))
    tasks.cached = not tasks.requests or has_cache(forward, cfg)
    figures = tasks.figures(forward, cfg, lambda: True)
    assert figures is not None
    return {"source": "eval_tasks", "step": model.step, **figures}
