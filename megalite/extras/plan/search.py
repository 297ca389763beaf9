"""Search the layouts of a model on a cluster: memory and time of each, and why it does not fit."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from megalite.core.base.errors import UserError
from megalite.core.mesh.grid import Grid
from megalite.core.options.recompute import MODES
from megalite.core.pipeline.schedule import check_schedule
from megalite.extras.plan.cluster import Cluster
from megalite.extras.plan.layouts import batches, shapes, sharded
from megalite.extras.plan.memory.ranks import RankMemory, kept_per_rank, states_per_rank
from megalite.extras.plan.time.step import StepTime, pass_times, step_time
from megalite.runtime.base.collector import without_collector
from megalite.runtime.options.fields import GROUP_OF, LAYOUT
from megalite.runtime.options.run import Config

SHARE = 0.9
"""Share of the device's memory that a layout may use; the rest is for the allocator, the context and buffers."""
SAME_TIME = 1.03
"""Times within this factor count as equal; the simpler layout is then better."""
_OFFLOADS = (("activations", "optimizer"), ("optimizer+params",))
# Options that change together: schedules follow vp and pairs, the ZeRO group the stage, and dp tp, pp and cp.
_CHOICES = (
    ("tp", "sequence_parallel"),
    ("cp",),
    ("ep", "etp"),
    ("pp",),
    ("vp", "schedule", "moe_overlap"),
    ("micro_batch_size",),
    ("recompute",),
    ("zero", "zero_group"),
    ("offload",),
)


@dataclass(frozen=True)
class Candidate:
    """One layout.

    Attributes:
        cfg, grid: options and ranks of a run in this layout.
        ranks: memory by pipeline rank.
        time: predicted time of a step.
        limit: bytes that a rank may use.
        host_limit: bytes of host memory that a rank may use.
    """

    cfg: Config
    grid: Grid
    ranks: list[RankMemory]
    time: StepTime
    limit: float
    host_limit: float

    @cached_property
    def worst(self) -> RankMemory:
        """The pipeline rank with the most memory."""
        return max(self.ranks, key=lambda rank: rank.total)

    @cached_property
    def fits(self) -> bool:
        return self.worst.total <= self.limit and max(rank.host for rank in self.ranks) <= self.host_limit

    @cached_property
    def options(self) -> dict[str, Any]:
        return layout_options(self.cfg)

    @property
    def cause(self) -> str | None:
        """What does not fit: states, activations, logits or host memory; None if all fits."""
        if self.fits:
            return None
        worst = self.worst
        if worst.total <= self.limit:
            return "host memory"
        states = worst.total - worst.activations - worst.logits
        if states > self.limit:
            return "states"
        return "activations" if states + worst.activations > self.limit else "logits"

    @cached_property
    def order(self) -> tuple[Any, ...]:
        """Sort key of layouts of equal time: the simpler first. Sharding over dp alone is simpler than a pipeline."""
        o = self.options
        again = MODES[o["recompute"]].most
        axes = o["pp"], o["tp"], o["cp"], o["ep"]
        return o["offload"] != "none", again, *axes, o["moe_overlap"], o["zero"] != 1, o["zero"], o["vp"], str(o)


def layout_options(cfg: Config) -> dict[str, Any]:
    """Return the options of `LAYOUT` by name."""
    return {name: getattr(getattr(cfg, GROUP_OF[name]), name) for name in LAYOUT}


def search(
    cfg: Config,
    cluster: Cluster,
    fixed: Iterable[str] = (),
    limit: float | None = None,
    host_limit: float | None = None,
) -> list[Candidate]:
    """Evaluate every layout, those that fit first, by time.

    Few tokens on a rank of cp are considered only if nothing fits with many, offload only if nothing fits without it,
    and offloaded weights only if nothing else fits.

    Args:
        cfg: options of the run.
        fixed: names of options in `LAYOUT` that keep their values.
        limit: bytes that a rank may use; default: `SHARE` of the device.
        host_limit: bytes of host memory per rank; default: `SHARE` of what the cluster's hosts have.

    Raises:
        UserError: no layout is valid.
    """
    limit = SHARE * cluster.device.memory if limit is None else limit
    host_limit = SHARE * cluster.device.host_memory if host_limit is None else host_limit
    names = frozenset(fixed)
    with without_collector():
        candidates = list(_evaluate(cfg, cluster, names, limit, host_limit, ("none",)))
        if not any(f.fits for f in candidates) and "cp" not in names:
            candidates += _evaluate(cfg, cluster, names, limit, host_limit, ("none",), few_tokens=True)
        for offloads in () if "offload" in names else _OFFLOADS:
            if not any(f.fits for f in candidates):
                candidates += _evaluate(cfg, cluster, names, limit, host_limit, offloads)
    if not candidates:
        flags = " ".join(f"--{name.replace('_', '-')}" for name in sorted(names))
        raise UserError(
            f"{cluster.gpus} ranks, --global-batch-size {cfg.train.global_batch_size} {flags}".rstrip(),
            "no tp, cp, pp and micro-batch size suit both",
            "change the batch size or the number of ranks, or give fewer options",
        )
    return sorted(candidates, key=lambda f: (not f.fits, f.time.total, f.order))


def pick(candidates: list[Candidate]) -> Candidate | None:
    """Choose the simplest of the layouts that fit within 3 % of the fastest; None if nothing fits.

    ZeRO-2 that reduces after each of several micro-batches sends more than ZeRO-1: it is chosen only if nothing else
    fits.
    """
    fits = [f for f in candidates if f.fits]
    usual = [f for f in fits if not _reduces_often(f)] or fits
    if not usual:
        return None
    best = min(f.time.total for f in usual)
    return min((f for f in usual if f.time.total <= best * SAME_TIME), key=lambda f: (f.order, f.time.total))


def _reduces_often(layout: Candidate) -> bool:
    p = layout.cfg.parallel
    return p.zero == 2 and p.zero_reduce == "microbatch" and layout.cfg.num_microbatches(layout.grid["dp"]) > 1


class Changes:
    """Single changes that make a layout fit: the layouts that do, by all of their options but one choice."""

    def __init__(self, candidates: list[Candidate]) -> None:
        self._fastest: dict[Any, Candidate] = {}
        for layout in candidates:
            if layout.fits:
                for key in _keys(layout):
                    other = self._fastest.setdefault(key, layout)
                    if (layout.time.total, layout.order) < (other.time.total, other.order):
                        self._fastest[key] = layout

    def cheapest(self, layout: Candidate) -> Candidate | None:
        """Find the fastest layout that fits and differs in one choice only; None if there is none."""
        near = [self._fastest[key] for key in _keys(layout) if key in self._fastest]
        return min(near, key=lambda f: (f.time.total, f.order), default=None)


def _keys(layout: Candidate) -> list[tuple[Any, ...]]:
    """Return a key per choice: all options but those of the choice."""
    values = tuple(layout.options.items())
    return [(choice, tuple(item for item in values if item[0] not in choice)) for choice in _CHOICES]


def _evaluate(
    cfg: Config,
    cluster: Cluster,
    fixed: frozenset[str],
    limit: float,
    host_limit: float,
    offloads: tuple[str, ...],
    few_tokens: bool = False,
) -> Iterator[Candidate]:
    """Yield every valid layout. States do not depend on the batch, nor activations and passes on ZeRO.

    Micro-batches larger than one whose activations alone do not fit are skipped.
    """
    for shape in shapes(cfg, cluster, fixed, few_tokens):
        grid = Grid.from_config(shape.parallel, cluster.gpus)
        states: dict[tuple[Any, ...], list[RankMemory]] = {}
        too_large: set[tuple[str, str]] = set()
        for batch in batches(shape, grid, fixed, offloads):
            schedule, dp = batch.parallel.schedule, grid["dp"]
            mode = (batch.train.recompute, batch.train.offload)
            if mode in too_large:
                continue
            try:
                for count in batch.microbatch_counts(dp):
                    check_schedule(schedule, batch.parallel.pp, batch.parallel.vp, count)
            except UserError:
                continue
            kept, passes = kept_per_rank(batch, grid, schedule), pass_times(batch, cluster, schedule)
            if max(activations + logits for activations, logits, _ in kept) > limit:
                too_large.add(mode)
            for layout in sharded(batch, cluster, grid.batch_ranks, fixed):
                p = layout.parallel
                key = (p.zero, p.zero_group, layout.train.offload)
                if key not in states:
                    states[key] = states_per_rank(layout, grid, schedule)
                ranks = [rank.with_kept(*peak) for rank, peak in zip(states[key], kept)]
                time = step_time(layout, grid, cluster, schedule, passes=passes)
                yield Candidate(layout, grid, ranks, time, limit, host_limit)
