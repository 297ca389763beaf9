"""Replicas compute each other's samples: what a repetition hides, a fault that comes back, shows on other hardware.

Replicas hold the same weights, and dropout masks belong to samples, so a rank's own gradients must be, bit for bit,
those of the rank whose samples it has.
"""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from megalite.core.engine import Engine
from megalite.core.mesh.collectives import gather_texts
from megalite.core.mesh.grid import Grid
from megalite.core.rows import Rows
from megalite.core.step import forward_backward
from megalite.runtime.options.run import Config
from megalite.runtime.recover.local_gradients import LocalGradients

Read = Callable[[int], tuple[Rows, Exception | None]]


@dataclass(frozen=True)
class Exchange:
    """What came of an exchange.

    Attributes:
        suspects: of each replica that may be at fault, the ranks whose gradients differ; empty: all have the same bits.
        obstacle: why nothing can be said; empty if something can.
    """

    suspects: list[list[int]]
    obstacle: str = ""


class Sums(NamedTuple):
    """What a rank has computed: digests of its samples and own gradients, and whether these are finite."""

    samples: str
    gradients: str
    finite: bool


def exchange(
    engine: Engine[Config], read: Read, batch: Rows, step: int, loss_scale: float, gradients: LocalGradients
) -> Exchange:
    """Compute the samples of another replica, of the step that was just repeated; every rank calls it.

    Nothing that lasts is changed: gradients are reduced, as others wait for that, and not used.

    Args:
        engine: what this rank trains with.
        read: reads the samples of the step that another dp rank has, as `BatchLoader.read_share`.
        batch: this rank's samples of the step.
        step: number of the step.
        loss_scale: under which the gradients were computed.
        gradients: what they were, looked at closely.
    """
    ctx = engine.ctx
    distance = replicas_together(ctx.grid)
    if ctx.dp.size == distance:
        return Exchange([], "dp 1" if distance == 1 else "all replicas share experts")
    before = _sums(batch, gradients)
    # Read here, not sent: what is wrong with the memory that holds them there stays there.
    place = (ctx.dp.rank + distance) % ctx.dp.size
    rows, failure = read(place)
    gradients.start(closely=True)
    full = engine.cfg.train.global_batch_size * engine.cfg.model.seq_len
    forward_backward(engine, rows, step, loss_scale / full, place)
    engine.optimizer.finish_grads()
    why = "" if failure is None else str(failure) or type(failure).__name__  # some errors say nothing
    told = json.dumps([before, _sums(rows, gradients), why])
    texts = [json.loads(text) for text in gather_texts(told, ctx.world, ctx.device)]
    if failures := [(rank, text) for rank, (*_, text) in enumerate(texts) if text]:
        return Exchange([], "rank {} could not read samples of another: {}".format(*failures[0]))
    own, there = ([Sums(*text[i]) for text in texts] for i in (0, 1))
    return judge(ctx.grid, own, there)


def replicas_together(grid: Grid) -> int:
    """Return how many neighbors on dp share experts, so that they cannot be told from each other."""
    if grid.experts is None:
        return 1
    width = grid["cp"] * (1 if "tp" in grid.experts.names else grid["tp"])
    return math.lcm(grid.experts["ep"], width) // width


def judge(grid: Grid, own: Sequence[Sums], there: Sequence[Sums]) -> Exchange:
    """Compare what the ranks' samples came to on each rank itself and on the rank that they were exchanged with.

    Args:
        own: of each rank, of its own samples.
        there: of each rank, of the samples of the rank `replicas_together` further on dp.
    """
    distance, odd = replicas_together(grid), set()
    pairs: list[tuple[int, int]] = []
    for rank, result in enumerate(there):
        at = grid.coords(rank)
        owner = grid.rank(**(at | {"dp": (at["dp"] + distance) % grid["dp"]}))
        if result.samples != own[owner].samples:
            return Exchange([], f"rank {rank} reads other samples than rank {owner}")
        if result.gradients != own[owner].gradients:
            pairs.append((rank, owner))
        if result.finite != own[owner].finite:
            odd.add(owner if result.finite else rank)
    return Exchange(_suspects(pairs, odd, lambda rank: grid.coords(rank)["dp"] // distance))


def _suspects(pairs: Sequence[tuple[int, int]], odd: set[int], replica: Callable[[int], int]) -> list[list[int]]:
    """Return the ranks in `pairs` of each replica that may be at fault.

    One at fault is in every pair: its samples have other gradients elsewhere, and others' samples have other gradients
    there. Where that is true of two, as there are no more replicas or one sample does not show the fault, it is the one
    alone in coming to numbers that are not finite (`odd`), if any.
    """
    if not pairs:
        return []
    met = [{replica(rank) for rank in pair} for pair in pairs]
    common = set.intersection(*met) or set.union(*met)
    found = {replica(rank) for rank in odd} & common or common
    ranks = sorted({rank for pair in pairs for rank in pair})
    return [[rank for rank in ranks if replica(rank) == index] for index in sorted(found)]


def _sums(rows: Rows, gradients: LocalGradients) -> Sums:
    samples = hashlib.sha256()
    for array in (rows.inputs, rows.targets, rows.starts, rows.weights, rows.padding):
        samples.update(b"" if array is None else np.ascontiguousarray(array).tobytes())
    sums = hashlib.sha256(json.dumps(gradients.read()).encode())
    return Sums(samples.hexdigest()[:16], sums.hexdigest()[:16], gradients.are_finite())
