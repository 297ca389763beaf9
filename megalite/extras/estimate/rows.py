"""Numbers of rows for the experts of a step on fake tensors, which have no values for a router to choose by."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from unittest import mock

import torch

from megalite.core.mesh.context import ParallelContext
from megalite.core.parts.ffn.experts import dispatch, rows_sent
from megalite.runtime.options.run import Config


@contextmanager
def assumed_rows(
    cfg: Config, ctx: ParallelContext, busy: float = 1.0, syncs: Counter[str] | None = None
) -> Iterator[None]:
    """Let every expert get the same number of rows.

    Args:
        cfg: the run's config.
        ctx: the rank's axes.
        busy: what this rank gets over what it sends, above 1 where it is the busiest of ep.
        syncs: counts the host's waits for the numbers.
    """
    num, ranks = cfg.model.num_experts or 1, ctx.ep.size
    sent = [rows_sent(cfg) // num + (expert < rows_sent(cfg) % num) for expert in range(num)]
    here = sent[ctx.ep.rank * (num // ranks) : (ctx.ep.rank + 1) * (num // ranks)]
    arriving = [round(busy * rows) for rows in here] * ranks

    def start_host_counts(*counts: torch.Tensor) -> Callable[[], list[list[int]]]:
        def wait() -> list[list[int]]:
            if syncs is not None:
                syncs["rows of experts"] += 1
            # What is sent and what arrives; alone, what arrives.
            return [sent, arriving][-len(counts) :]

        return wait

    with mock.patch.object(dispatch, "start_host_counts", start_host_counts):
        yield
