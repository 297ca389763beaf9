"""The layouts that a search tries: axes, schedules, batches and sharding that go together."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import replace
from typing import Any

from megalite.core.base.errors import UserError
from megalite.core.mesh.grid import Grid
from megalite.core.model.partition import blocks_by_kind
from megalite.core.options.recompute import MODES, Extent
from megalite.extras.plan.cluster import Cluster
from megalite.extras.plan.memory.activations import block_activations
from megalite.runtime.options.run import Config

_MICRO_BATCHES = (1, 2, 4, 8, 16)
_MOST_PP = 64
_MOST_CP = 64
_MOST_EP = 64
_MANY_TOKENS = 8192
"""Tokens on a rank below which sharing samples is slower than other axes: it is tried only if nothing else fits."""


def shapes(cfg: Config, cluster: Cluster, fixed: frozenset[str], few_tokens: bool) -> Iterator[Config]:
    """Yield axes, vp and schedule; `few_tokens`: the sizes of cp that leave a rank few tokens, and only these."""
    p, world = cfg.parallel, cluster.gpus
    for tp in _held(fixed, "tp", p.tp, [n for n in range(1, cluster.domain + 1) if world % n == 0]):
        for cp in _held(fixed, "cp", p.cp, _contexts(cfg.model.seq_len, world // tp, few_tokens)):
            parts = tp * (2 * cp if cp > 1 else 1)
            sp = p.sequence_parallel and ("sequence_parallel" in fixed or cfg.model.seq_len % parts == 0)
            for pipeline in () if world % (tp * cp) else _pipelines(cfg, world // (tp * cp), fixed):
                for ep, etp in _experts(cfg, tp, world // (tp * pipeline["pp"]), fixed):
                    axes = {"tp": tp, "cp": cp, "ep": ep, "etp": etp, "sequence_parallel": sp, **pipeline}
                    yield from _valid(cfg, axes, {})


def _experts(cfg: Config, tp: int, ranks: int, fixed: frozenset[str]) -> Iterator[tuple[int, str]]:
    """Yield ep and etp, with as many ranks of dp x cp; whole experts are spread over tp too."""
    m, p = cfg.model, cfg.parallel
    for etp in _held(fixed, "etp", p.etp, ("tp", "1") if m.num_experts and tp > 1 else ("tp",)):
        shared = ranks * (tp if etp == "1" else 1)
        sizes = [
            n
            for n in range(1, min(shared, m.num_experts or 1, _MOST_EP) + 1)
            if shared % n == 0 and (m.num_experts or 1) % n == 0
        ]
        for ep in _held(fixed, "ep", p.ep, sizes):
            if shared % ep == 0:
                yield ep, etp


def _contexts(tokens: int, ranks: int, few_tokens: bool) -> list[int]:
    """List sizes of cp for samples of some tokens."""
    sizes = [n for n in range(1, min(ranks, _MOST_CP) + 1) if ranks % n == 0 and tokens % (2 * n) == 0]
    return [n for n in sizes if (n > 1 and tokens // n < _MANY_TOKENS) == few_tokens]


def _pipelines(cfg: Config, ranks: int, fixed: frozenset[str]) -> Iterator[dict[str, Any]]:
    """Yield pp, vp, schedule, and whether it runs pairs, which layouts without ep cannot."""
    p, layers = cfg.parallel, cfg.model.num_layers
    for pp in _held(fixed, "pp", p.pp, [n for n in range(1, min(ranks, layers, _MOST_PP) + 1) if ranks % n == 0]):
        # A --pp that is kept may not go with every tp and cp.
        for vp in () if ranks % pp else _held(fixed, "vp", p.vp, _chunks(layers, pp)):
            for pairs in _held(
                fixed, "moe_overlap", p.moe_overlap, (False, True) if cfg.model.num_experts else (False,)
            ):
                for schedule in _held(fixed, "schedule", p.schedule, _schedules(pp, vp, pairs)):
                    yield {"pp": pp, "vp": vp, "schedule": schedule, "moe_overlap": pairs}


def _chunks(layers: int, pp: int) -> list[int]:
    """List the values of vp worth trying: the fewest chunks for each number of layers per chunk."""
    if pp == 1:
        return [1]
    sizes: dict[int, int] = {}
    for vp in range(1, layers // pp + 1):
        sizes.setdefault(-(-layers // (pp * vp)), vp)
    return sorted(sizes.values())


def _schedules(pp: int, vp: int, pairs: bool) -> list[str]:
    if pairs:
        return ["interleaved-overlap" if vp > 1 else "1f1b-overlap"]
    if pp == 1:
        return ["1f1b"]
    if vp == 1:
        return ["1f1b", "zb-h1"]
    return ["interleaved", "zb-v"] if vp == 2 else ["interleaved"]


def batches(cfg: Config, grid: Grid, fixed: frozenset[str], offloads: tuple[str, ...]) -> Iterator[Config]:
    """Yield micro-batch size, recomputation and offload."""
    t = cfg.train
    for samples in _held(fixed, "micro_batch_size", t.micro_batch_size, _MICRO_BATCHES):
        if t.global_batch_size % samples or t.global_batch_size < samples * grid["dp"]:
            continue
        for recompute in _held(fixed, "recompute", t.recompute, MODES):
            most = MODES[recompute].most
            if most is Extent.CORE and "recompute" not in fixed and not _core_saves(cfg):
                continue
            if most is Extent.BLOCK and cfg.parallel.schedule.startswith("zb") and "schedule" not in fixed:
                continue  # a split backward keeps what recomputation brings back
            for offload in _held(fixed, "offload", t.offload, offloads):
                asked = {"micro_batch_size": samples, "recompute": recompute, "offload": offload}
                asked_zero = {"zero": 3} if offload == "optimizer+params" and "zero" not in fixed else {}
                yield from _valid(cfg, asked_zero, asked)


def _core_saves(cfg: Config) -> bool:
    """Whether recomputing the attention core saves a twentieth of a block's activations: not with fused attention."""
    return any(
        block_activations(cfg, kind, Extent.CORE) < 0.95 * block_activations(cfg, kind, Extent.NOTHING)
        for kind in blocks_by_kind(cfg.model)
    )


def sharded(cfg: Config, cluster: Cluster, dp: int, fixed: frozenset[str]) -> Iterator[Config]:
    """Yield ZeRO stages and groups."""
    p = cfg.parallel
    stages = (3,) if cfg.train.offload == "optimizer+params" else (1,) if dp == 1 else (1, 0, 2, 3)
    for zero in _held(fixed, "zero", p.zero, stages):
        near = cluster.domain // p.tp
        whole = p.ep == 1 and p.etp == "tp"  # experts have other ranks of their own
        split = zero >= 2 and 1 < near < dp and dp % near == 0 and whole
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
