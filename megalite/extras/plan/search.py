"""Search the layouts of a model on a cluster: memory and time of each, and why it does not fit."""

from __future__ import annotations

import dataclasses
import gc
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

from megalite.base.errors import UserError
from megalite.config.options import LAYOUT
from megalite.config.run import Config
from megalite.dist.grid import Grid
from megalite.extras.plan.cluster import Cluster
from megalite.extras.plan.memory.activations import block_activations
from megalite.extras.plan.memory.ranks import RankMemory, kept_per_rank, states_per_rank
from megalite.extras.plan.time.step import StepTime, step_time
from megalite.model.partition import blocks_by_kind
from megalite.pipeline.schedule import check_schedule

SHARE = 0.9
"""Share of the device's memory that a layout may use; the rest is for the allocator, the context and buffers."""
SAME_TIME = 1.03
"""Times within this factor count as equal; the simpler layout is then better."""
_MICRO_BATCHES = (1, 2, 4, 8, 16)
_MOST_PP = 64
_OFFLOADS = (("activations", "optimizer"), ("optimizer+params",))
# Options that change together: the schedule follows vp, the ZeRO group follows the stage; dp follows tp and pp.
_CHOICES = (("tp", "sequence_parallel"), ("pp",), ("vp", "schedule"), ("micro_batch_size",), ("recompute",),
            ("zero", "zero_group"), ("offload",))  # fmt: skip


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
        """The options of `LAYOUT` by name."""
        groups = (self.cfg.parallel, self.cfg.train)
        return {name: next(getattr(g, name) for g in groups if hasattr(g, name)) for name in LAYOUT}

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

    @property
    def order(self) -> tuple[Any, ...]:
        """Sort key of layouts of equal time: the simpler first. Sharding over dp alone is simpler than a pipeline."""
        o = self.options
        again = ("none", "selective", "full").index(o["recompute"])
        return o["offload"] != "none", again, o["pp"], o["tp"], o["zero"] != 1, o["zero"], o["vp"], str(o)


def search(
    cfg: Config,
    cluster: Cluster,
    fixed: Iterable[str] = (),
    limit: float | None = None,
    host_limit: float | None = None,
) -> list[Candidate]:
    """Evaluate every layout, those that fit first, by time.

    Offload is considered only if nothing fits without it, and offloaded weights only if nothing else fits.

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
    with _without_gc():
        candidates = list(_evaluate(cfg, cluster, names, limit, host_limit, ("none",)))
        for offloads in () if "offload" in names else _OFFLOADS:
            if not any(f.fits for f in candidates):
                candidates += _evaluate(cfg, cluster, names, limit, host_limit, offloads)
    if not candidates:
        flags = " ".join(f"--{name.replace('_', '-')}" for name in sorted(names))
        raise UserError(
            f"{cluster.gpus} ranks, --global-batch-size {cfg.train.global_batch_size} {flags}".rstrip(),
            "no tp, pp and micro-batch size divide both",
            "change the batch size or the number of ranks, or give fewer options",
        )
    return sorted(candidates, key=lambda f: (not f.fits, f.time.total, f.order))


@contextmanager
def _without_gc() -> Iterator[None]:
    """Suspend garbage collection: the search makes no cycles of objects, and it would take a third of the time."""
    was = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was:
            gc.enable()


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
    cfg: Config, cluster: Cluster, fixed: frozenset[str], limit: float, host_limit: float, offloads: tuple[str, ...]
) -> Iterator[Candidate]:
    """Yield every valid layout. States do not depend on the batch, nor activations on ZeRO: each is computed once.

    Micro-batches larger than one whose activations alone do not fit are skipped.
    """
    for shape in _shapes(cfg, cluster, fixed):
        grid = Grid.from_config(shape.parallel, cluster.gpus)
        states: dict[tuple[Any, ...], list[RankMemory]] = {}
        too_large: set[tuple[str, str]] = set()
        for batch in _batches(shape, grid, fixed, offloads):
            schedule, dp = batch.parallel.schedule, grid["dp"]
            mode = (batch.train.recompute, batch.train.offload)
            if mode in too_large:
                continue
            try:
                for count in batch.microbatch_counts(dp):
                    check_schedule(schedule, batch.parallel.pp, batch.parallel.vp, count)
            except UserError:
                continue
            kept = kept_per_rank(batch, grid, schedule)
            if max(activations + logits for activations, logits, _ in kept) > limit:
                too_large.add(mode)
            for sharded in _sharded(batch, cluster, grid.batch_ranks, fixed):
                p = sharded.parallel
                key = (p.zero, p.zero_group, sharded.train.offload)
                if key not in states:
                    states[key] = states_per_rank(sharded, grid, schedule)
                ranks = [rank.with_kept(*peak) for rank, peak in zip(states[key], kept)]
                yield Candidate(sharded, grid, ranks, step_time(sharded, grid, cluster, schedule), limit, host_limit)


def _shapes(cfg: Config, cluster: Cluster, fixed: frozenset[str]) -> Iterator[Config]:
    """Yield tp, pp, vp and schedule."""
    p, world, layers = cfg.parallel, cluster.gpus // cfg.parallel.cp, cfg.model.num_layers
    for tp in _held(fixed, "tp", p.tp, [n for n in range(1, cluster.domain + 1) if world % n == 0]):
        deepest = min(world // tp, layers, _MOST_PP)
        for pp in _held(fixed, "pp", p.pp, [n for n in range(1, deepest + 1) if world % (tp * n) == 0]):
            # A --pp that is kept may not go with every tp.
            for vp in () if world % (tp * pp) else _held(fixed, "vp", p.vp, _chunks(layers, pp)):
                for schedule in _held(fixed, "schedule", p.schedule, _schedules(pp, vp)):
                    sp = p.sequence_parallel and ("sequence_parallel" in fixed or cfg.model.seq_len % tp == 0)
                    asked = {"tp": tp, "pp": pp, "vp": vp, "schedule": schedule, "sequence_parallel": sp}
                    yield from _valid(cfg, asked, {})


def _chunks(layers: int, pp: int) -> list[int]:
    """List the values of vp worth trying: the fewest chunks for each number of layers per chunk."""
    if pp == 1:
        return [1]
    sizes: dict[int, int] = {}
    for vp in range(1, layers // pp + 1):
        sizes.setdefault(-(-layers // (pp * vp)), vp)
    return sorted(sizes.values())


def _schedules(pp: int, vp: int) -> list[str]:
    if pp == 1:
        return ["1f1b"]
    if vp == 1:
        return ["1f1b", "zb-h1"]
    return ["interleaved", "zb-v"] if vp == 2 else ["interleaved"]


def _batches(cfg: Config, grid: Grid, fixed: frozenset[str], offloads: tuple[str, ...]) -> Iterator[Config]:
    """Yield micro-batch size, recomputation and offload."""
    t = cfg.train
    share, remainder = divmod(t.global_batch_size, grid["dp"])
    if remainder:
        return
    for samples in _held(fixed, "micro_batch_size", t.micro_batch_size, _MICRO_BATCHES):
        if share % samples:
            continue
        for recompute in _held(fixed, "recompute", t.recompute, ("none", "selective", "full")):
            if recompute == "selective" and "recompute" not in fixed and not _selective_saves(cfg):
                continue
            if recompute == "full" and cfg.parallel.schedule.startswith("zb") and "schedule" not in fixed:
                continue  # a split backward keeps what recomputation brings back
            for offload in _held(fixed, "offload", t.offload, offloads):
                asked = {"micro_batch_size": samples, "recompute": recompute, "offload": offload}
                asked_zero = {"zero": 3} if offload == "optimizer+params" and "zero" not in fixed else {}
                yield from _valid(cfg, asked_zero, asked)


def _selective_saves(cfg: Config) -> bool:
    """Whether recomputing the attention core saves a twentieth of a block's activations: not with fused attention."""
    return any(
        block_activations(cfg, kind, "selective") < 0.95 * block_activations(cfg, kind, "none")
        for kind in blocks_by_kind(cfg.model)
    )


def _sharded(cfg: Config, cluster: Cluster, dp: int, fixed: frozenset[str]) -> Iterator[Config]:
    """Yield ZeRO stages and groups."""
    p = cfg.parallel
    stages = (3,) if cfg.train.offload == "optimizer+params" else (1,) if dp == 1 else (1, 0, 2, 3)
    for zero in _held(fixed, "zero", p.zero, stages):
        near = cluster.domain // p.tp
        split = zero >= 2 and 1 < near < dp and dp % near == 0
        for group in _held(fixed, "zero_group", p.zero_group, ("full", str(near)) if split else ("full",)):
            yield from _valid(cfg, {"zero": zero, "zero_group": group}, {})


def _held(fixed: frozenset[str], name: str, value: Any, choices: Iterable[Any]) -> Iterable[Any]:
    return (value,) if name in fixed else choices


def _valid(cfg: Config, parallel: Mapping[str, Any], train: Mapping[str, Any]) -> Iterator[Config]:
    """Yield the changed config, or nothing if its options do not fit together."""
    try:
        p = replace(cfg.parallel, **parallel) if parallel else cfg.parallel
        yield dataclasses.replace(cfg, parallel=p, train=replace(cfg.train, **train) if train else cfg.train)
    except UserError:
        return
