"""Weights and gradients on their way over the ranks that hold the same parameters, and what nothing hides of it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from megalite.core.mesh.grid import Grid
from megalite.core.optim.shares import group_among
from megalite.core.pipeline.schedule import Placement
from megalite.extras.plan.memory.fp8 import coded_units
from megalite.extras.plan.memory.stages import parameters_on_rank, vocab_rows
from megalite.extras.plan.time.block import Workload
from megalite.extras.plan.time.rates import Rates
from megalite.runtime.options.run import Config


class Replicas(NamedTuple):
    """Parameters of a rank that the same ranks hold.

    Attributes:
        elements: number of them.
        ranks: number of ranks.
        inner: ranks between one of these and the next.
        group: number of ranks that ZeRO shards over.
        coded: number of elements that ZeRO-3 gathers as FP8 codes.
        again: numbers of elements of embedding and output layer that it gathers more than once in the forward and in
            the backward pass; below 0: that it does not gather.
    """

    elements: int
    ranks: int
    inner: int
    group: int
    coded: int = 0
    again: tuple[int, int] = (0, 0)

    def ring(self, rates: Rates, per_element: float, messages: int = 1) -> float:
        """Compute the seconds of gathering or reducing them among all ranks."""
        return rates.ring(per_element * self.elements, self.ranks, self.inner, messages)

    def near(self, rates: Rates, per_element: float, messages: int = 1) -> float:
        """Compute the seconds of gathering or reducing them within a group."""
        return rates.ring(per_element * self.elements, self.group, self.inner, messages)

    def gathered(self, rates: Rates, messages: int, again: int = 0) -> float:
        """Compute the seconds of gathering weights, and `again` elements, within a group; codes have one byte each."""
        size = rates.element * (self.elements + again) - (rates.element - 1) * self.coded
        return rates.ring(size, self.group, self.inner, messages)

    def across(self, rates: Rates, per_element: float) -> float:
        """Compute the seconds of the sum over the groups of hybrid sharding, once per step."""
        share, groups = per_element * self.elements / self.group, self.ranks // self.group
        return 0.0 if groups < 2 else 2 * rates.ring(share, groups, self.inner * self.group)


def replicas_of(
    cfg: Config, grid: Grid, placement: Placement, layers: Sequence[range], rank: int, domain: int
) -> list[Replicas]:
    """List the parameters of pipeline rank `rank`, those of experts apart."""
    p, out = cfg.parallel, []
    for own, experts in ((grid, False), (grid.experts, True)):
        if own is not None:
            elements = parameters_on_rank(cfg, p.tp, placement, layers, rank, experts)
            ranks, inner = own.batch_ranks, own["tp"] * own["ep"]
            asked = p.zero_group_size(grid.batch_ranks, domain) if grid.batch_ranks > 1 else None
            group = group_among(asked, ranks, grid.batch_ranks) if asked else ranks
            held = placement.stages_of(rank)
            coded = sum(map(sum, coded_units(cfg, p.tp, layers, held, group, experts)))
            again = (0, 0) if experts else _again(cfg, 0 in held, len(layers) - 1 in held)
            out.append(Replicas(elements, ranks, inner, group, coded, again))
    return out


def _again(cfg: Config, first: bool, last: bool) -> tuple[int, int]:
    """Count what a rank with the `first` or `last` stage gathers of embedding and output layer in each pass, beyond
    each parameter once.

    An embedding is gathered in the forward pass alone, for the model and for each module that predicts further tokens.
    Where weights stay until backward, these find a tied one as the output layer left it.
    """
    modules, tied = cfg.model.mtp_num_layers * last, cfg.model.tie_embeddings
    heads = last + modules
    embeddings = first + modules * (not tied or cfg.parallel.zero_keep == "none")
    own = max(embeddings > 0, heads > 0) if tied else (embeddings > 0) + (heads > 0)
    table = vocab_rows(cfg) * cfg.model.embedding_width
    return (embeddings + heads - own) * table, (heads - own) * table


def over_dp(
    cfg: Config, m: int, load: Workload, replicas: Sequence[Replicas], units: int, forward: float, backward: float
) -> tuple[float, float]:
    """Compute the exposed seconds of gathering weights and of reducing gradients.

    Args:
        m: number of micro-batches.
        units: number of blocks and ends of the model on the rank, which ZeRO-3 gathers and reduces one by one.
        forward, backward: seconds of one micro-batch on the rank.
    """
    rates, engine = load.rates, load.engine
    p, sizes = cfg.parallel, (rates.element, engine.grad_bytes)
    if all(r.ranks == 1 for r in replicas):
        return 0.0, 0.0
    across = sum(r.across(rates, engine.grad_bytes) for r in replicas)
    if p.zero == 3:
        if p.zero_keep == "step":
            passes = [sum(r.gathered(rates, units) for r in replicas) / m, 0.0]
        else:
            passes = [sum(r.gathered(rates, units, r.again[i]) for r in replicas) for i in range(2)]
        first, second = passes[0], passes[1] * (p.zero_keep == "none")
        reduce = sum(r.near(rates, engine.grad_bytes, units) for r in replicas)
        times = m if p.zero_reduce == "microbatch" else 1
        if not engine.overlap_gather:
            forward = backward = 0.0
        exposed_gather = m * (_hidden(first, forward) + _hidden(second, backward))
        room = max(backward - second, 0.0)
        return exposed_gather, times * _hidden(reduce, room) + across
    window = rates.constants.window * max(1.0, p.pp * (p.vp - 1) / p.vp)
    gather, reduce = (sum(r.ring(rates, size) for r in replicas) for size in sizes)
    if p.zero == 0:  # an all-reduce
        return 0.0, _exposed(2 * reduce, window * backward, engine.overlap_dp)
    if p.zero == 2 and p.zero_reduce == "microbatch":
        reduce = sum(r.near(rates, engine.grad_bytes) for r in replicas)
        each = _exposed(reduce, rates.constants.window * backward, engine.overlap_dp)
        return _exposed(gather, window * forward, engine.overlap_dp), m * each + across
    return (
        _exposed(gather, window * forward, engine.overlap_gather),
        _exposed(reduce, window * backward, engine.overlap_dp),
    )


def _exposed(time: float, window: float, overlapped: bool) -> float:
    """Compute the part of a transfer that computation cannot hide: at least a tenth, its ends."""
    return max(0.1 * time, time - window) if overlapped else time


def _hidden(transfer: float, compute: float) -> float:
    """Compute what a transfer adds to the computation beside which it runs, layer by layer."""
    return max(compute, transfer) + 0.1 * min(compute, transfer) - compute
