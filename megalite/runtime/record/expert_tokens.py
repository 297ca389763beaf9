"""Tokens of every expert over a run: RUN_DIR/experts.jsonl."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

from megalite.core.base.log import logger
from megalite.runtime.record.metrics import lacks_newline

if TYPE_CHECKING:  # readers of the file know its name without torch
    from megalite.core.engine import Engine
    from megalite.core.parts.counters.routers import RoutingFigures
    from megalite.runtime.options.run import Config

EXPERTS_FILE = "experts.jsonl"
# A line of a large model has 100 kB.
_MOST_LINES = 500


class ExpertTokens:
    """Writes a line per step: {"step", "layers": their numbers, "tokens": for each the tokens of its experts}.

    Of all steps that have a console line some 500 are written, evenly spaced. Like metrics.jsonl the file is only
    appended to: the last line of a step counts.
    """

    def __init__(self, engine: Engine[Config]) -> None:
        run, steps = engine.cfg.run, engine.cfg.train.train_steps
        self._path = run.folder / EXPERTS_FILE
        self._every = run.log_every * max(1, steps // (_MOST_LINES * run.log_every))
        self._writes = engine.ctx.rank == 0

    def write(self, step: int, figures: RoutingFigures | None) -> None:
        """Write the line of a step, if it has one."""
        if figures is None or not self._writes or step % self._every:
            return
        tokens = [[round(count) for count in layer] for layer in figures.tokens.tolist()]
        try:
            broken = self._path.exists() and lacks_newline(self._path)
            with self._path.open("a") as file:
                line = json.dumps({"step": step, "layers": figures.layers, "tokens": tokens})
                file.write("\n" * broken + line + "\n")
        except OSError as e:
            logger.warning(f"{self._path} cannot be written ({e.strerror}): no more tokens of experts are")
            self._writes = False
