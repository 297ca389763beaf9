"""Time of a training step of one layout on a described cluster, in closed form; every term has a name.

A block's time is that of its matrix products, attention, elementwise kernels and tensor-parallel traffic (`block`).
A pipeline rank runs its blocks for every micro-batch; the slowest rank sets the pace, and the schedule adds its ramp
(`pipeline_ramp`, as simulated). Then come the traffic over dp that nothing hides, and the optimizer. Formulas and
errors against published runs: docs/plan.md. Sources of the parts: Narayanan et al. 2021 (pipeline, traffic),
Korthikanti et al. 2022 (sequence parallelism, recomputation), Rajbhandari et al. 2019 (ZeRO).

Notation: x tokens of a micro-batch on a rank, h hidden, t tp, e bytes of an activation, F and B forward and backward.
"""

from __future__ import annotations

import dataclasses
import math
from dataclasses import dataclass

from megalite.config.run import Config
from megalite.dist.grid import Grid
from megalite.extras.plan.cluster import Cluster
from megalite.extras.plan.memory.matrices import Shape, matrices_of, transform_flops
from megalite.extras.plan.memory.stages import count_kinds, parameters_on_rank, split, vocab_rows
from megalite.extras.plan.time.block import Block, Engine, Rates, block_time, embedding_time, engine_of, head_time
from megalite.model.flops import flops_per_token
from megalite.model.partition import blocks_by_kind
from megalite.pipeline.choose import USUAL_COSTS, name_of
from megalite.pipeline.schedule import placement_of


@dataclass(frozen=True)
class StepTime:
    """Seconds of one step on the slowest pipeline rank, by cause; `total` is their sum.

    Attributes:
        gemm, attention, elementwise: kernels of all blocks and micro-batches, both passes.
        head: output layer and loss, on the rank that holds them.
        recompute: forward passes that are run again.
        tp: tensor-parallel collectives that nothing hides.
        host: time of the host that the device waits for.
        p2p: messages between pipeline ranks, except in the ramp.
        bubble: ramp of the pipeline: waiting for the first and the last micro-batch.
        gather, reduce: weights and gradients over dp that nothing hides.
        tied: sum of a tied embedding's gradient over its two ranks.
        optimizer: update of masters and moments, on the device or on the host.
        offload: copies of activations that nothing hides.
        fixed: the norm's sum over all ranks, launches and logging, once per step.
        jitter: waiting for the slowest of many hosts.
    """

    gemm: float
    attention: float
    elementwise: float
    head: float
    recompute: float
    tp: float
    host: float
    p2p: float
    bubble: float
    gather: float
    reduce: float
    tied: float
    optimizer: float
    offload: float
    fixed: float
    jitter: float

    @property
    def total(self) -> float:
        return sum(self.terms.values())

    @property
    def terms(self) -> dict[str, float]:
        """Name -> seconds, in the order of the fields."""
        return {f.name: getattr(self, f.name) for f in dataclasses.fields(self)}


def step_time(
    cfg: Config,
    grid: Grid,
    cluster: Cluster,
    schedule: str | None = None,
    engine: Engine | None = None,
) -> StepTime:
    """Predict the time of one step.

    Args:
        grid: axes pp, dp and tp, and cp if sequences are split.
        schedule: name of a schedule; default: that of the config.
        engine: what the software fuses and overlaps; default: as this project does with this config.

    Raises:
        UserError: the batch does not divide, or the schedule cannot run it.
    """
    p, m = cfg.parallel, cfg.num_microbatches(grid["dp"])
    name = schedule or name_of(cfg, grid["dp"])
    engine = engine or engine_of(cfg)
    layers = split(cfg)
    rates = Rates.of(cfg, cluster)
    blocks = {
        kind: block_time(cfg.model, kind, cfg.train.micro_batch_size, p.tp, grid["cp"], cfg.sequence_parallel,
                         cfg.train.recompute, rates, engine)
        for kind in blocks_by_kind(cfg.model)
    }  # fmt: skip
    head = head_time(cfg.model, cfg.train.micro_batch_size, vocab_rows(cfg), p.tp, grid["cp"], cfg.sequence_parallel,
                     rates, engine)  # fmt: skip
    embedding = embedding_time(cfg.model, cfg.train.micro_batch_size, p.tp, grid["cp"], rates)
    placement = placement_of(name, p.pp, p.vp)
    counts = count_kinds(cfg.model, layers)
    held = [
        sum((n * blocks[kind] for s in placement.stages_of(rank) for kind, n in counts[s].items()), Block())
        for rank in range(p.pp)
    ]
    first, last = placement.rank_of(0), placement.rank_of(len(layers) - 1)
    times = [
        own.total + (head.total if rank == last else 0.0) + (embedding if rank == first else 0.0)
        for rank, own in enumerate(held)
    ]
    slow = max(range(p.pp), key=lambda rank: times[rank])
    own, pace, mean = held[slow], times[slow], sum(times) / p.pp
    owned = [(n, kind) for s in placement.stages_of(slow) for kind, n in counts[s].items()]
    message = _message(cfg, grid, cluster, rates)
    exposed = 0.0 if engine.overlap_pp or p.pp == 1 else 2 * m * p.vp * message
    ramp = pipeline_ramp(name, p.pp, p.vp, m)
    elements = parameters_on_rank(cfg, p.tp, placement, layers, slow)
    backward = own.backward + (head.backward if slow == last else 0.0)
    units = sum(n for n, _ in owned) + (slow == first) + (slow == last)
    gather, reduce = _over_dp(cfg, grid, rates, engine, elements, units, pace - backward, backward)
    copies = sum(n * _offload(cfg, grid, rates, blocks[kind]) for n, kind in owned)
    offload = m * copies if cfg.train.offload == "activations" else 0.0
    parts = {
        "gemm": m * own.gemm,
        "attention": m * own.attention,
        "elementwise": m * own.elementwise,
        "head": m * head.total if slow == last else 0.0,
        "recompute": m * own.recompute,
        "tp": m * (own.tp + (embedding if slow == first else 0.0)),
        "host": m * own.host,
        "p2p": exposed,
        "bubble": ramp * (mean + (0.0 if p.pp == 1 else 2 * message * p.vp)),
        "gather": gather,
        "reduce": reduce,
        "tied": _tied(cfg, rates),
        "optimizer": _optimizer(cfg, grid, rates, elements, matrices_of(cfg, layers, placement.stages_of(slow))),
        "offload": offload,
        "fixed": cluster.constants.step,
    }
    hosts = -(-grid.world // cluster.domain)
    return StepTime(**parts, jitter=sum(parts.values()) * cluster.constants.jitter * math.log2(hosts))


def pipeline_ramp(name: str, pp: int, vp: int, m: int) -> float:
    """Return the bubble of a schedule in units of one micro-batch's time on one rank (both passes, all its chunks).

    For equal stages and `USUAL_COSTS` the closed forms equal the simulator's results, as the tests check; for zb-v with
    fewer than 2 pp micro-batches they are within 2 % of the step.
    """
    forward, inputs, weights = USUAL_COSTS.forward, USUAL_COSTS.input_grad, USUAL_COSTS.weight_grad
    whole = forward + inputs + weights
    if name == "naive":
        return float(m * (pp - 1))
    if name == "interleaved":
        return (pp - 1) / vp
    if name == "zb-h1":  # weight gradients fill what the first m - 1 micro-batches leave idle
        return ((pp - 1) * (forward + inputs) - min(m, pp) * weights + weights) / whole
    if name == "zb-v":
        filled = min(m - 1, pp - 1) * forward + (pp - 1) * inputs / 2 * min(1.0, 2 * max(0, m - pp) / pp)
        return ((pp - 1) * (forward + inputs) - filled) / whole
    return float(pp - 1)


def _message(cfg: Config, grid: Grid, cluster: Cluster, rates: Rates) -> float:
    """Compute the seconds of one message between neighbors in the pipeline."""
    size = (
        rates.element * cfg.train.micro_batch_size * cfg.model.seq_len / grid["cp"] * cfg.model.hidden_size / grid["tp"]
    )
    near = grid.world <= cluster.domain
    return size / (rates.nvlink if near else rates.network) + rates.latency


def _over_dp(
    cfg: Config, grid: Grid, rates: Rates, engine: Engine, elements: int, units: int, forward: float, backward: float
) -> tuple[float, float]:
    """Compute the exposed seconds of gathering weights and of reducing gradients over dp.

    Args:
        elements: number of parameters on the rank.
        units: number of blocks and ends of the model on the rank, which ZeRO-3 gathers and reduces one by one.
        forward, backward: seconds of one micro-batch on the rank.
    """
    p, m = cfg.parallel, cfg.num_microbatches(grid["dp"])
    ranks = grid.batch_ranks
    if ranks == 1:
        return 0.0, 0.0
    group = cfg.zero_group_size(ranks, rates.domain) or ranks
    weights, grads = rates.element * elements, engine.grad_bytes * elements
    inner = p.tp
    if p.zero == 3:
        gather, reduce = (rates.ring(size, group, inner, units) for size in (weights, grads))
        passes = {"none": 2, "backward": 1, "step": 1 / m}[p.zero_keep]
        times = m if p.zero_reduce == "microbatch" else 1
        first, second = gather * min(passes, 1), gather * max(passes - 1, 0)
        if not engine.overlap_gather:
            forward = backward = 0.0
        exposed_gather = m * (_hidden(first, forward) + _hidden(second, backward))
        room = max(backward - second, 0.0)
        exposed_reduce = times * _hidden(reduce, room)
        return exposed_gather, exposed_reduce + _across(rates, ranks, group, inner, grads)
    window = rates.constants.window * max(1.0, p.pp * (p.vp - 1) / p.vp)
    gather, reduce = (rates.ring(size, ranks, inner) for size in (weights, grads))
    if p.zero == 0:  # an all-reduce
        return 0.0, _exposed(2 * reduce, window * backward, engine.overlap_dp)
    if p.zero == 2 and p.zero_reduce == "microbatch":
        reduce = rates.ring(grads, group, inner)
        each = _exposed(reduce, rates.constants.window * backward, engine.overlap_dp)
        return _exposed(gather, window * forward, engine.overlap_dp), m * each + _across(
            rates, ranks, group, inner, grads
        )
    return (
        _exposed(gather, window * forward, engine.overlap_gather),
        _exposed(reduce, window * backward, engine.overlap_dp),
    )


def _across(rates: Rates, ranks: int, group: int, inner: int, grads: float) -> float:
    """Compute the seconds of the sum over the groups of hybrid sharding, once per step."""
    return 0.0 if group >= ranks else 2 * rates.ring(grads / group, ranks // group, inner * group)


def _exposed(time: float, window: float, overlapped: bool) -> float:
    """Compute the part of a transfer that computation cannot hide: at least a tenth, its ends."""
    return max(0.1 * time, time - window) if overlapped else time


def _hidden(transfer: float, compute: float) -> float:
    """Compute what a transfer adds to the computation beside which it runs, layer by layer."""
    return max(compute, transfer) + 0.1 * min(compute, transfer) - compute


def _tied(cfg: Config, rates: Rates) -> float:
    if not cfg.model.tie_embeddings or cfg.parallel.pp == 1:
        return 0.0
    return 2 * rates.ring(4 * vocab_rows(cfg) * cfg.model.hidden_size, 2, cfg.parallel.tp * rates.domain)


def _optimizer(cfg: Config, grid: Grid, rates: Rates, elements: int, matrices: list[Shape]) -> float:
    """Compute the seconds of the update: of its transforms, of 30 bytes per element of the share, and of 10 of every
    element for norm and casts.

    A rule of matrices sends them to their owners and back, over dp and over tp.
    """
    dp, tp = grid.batch_ranks, grid["tp"]
    transforms = transform_flops(cfg, matrices, tp, dp)
    if transforms:
        peak = rates.device.peak if cfg.optim.muon_ns == "bf16" else rates.device.fp32
        sent = 4 * sum(map(math.prod, matrices)) / tp
        ways = 2 * (rates.ring(sent / dp, dp, tp) + rates.ring(sent / dp, tp, 1))
        transforms = transforms / (peak * rates.device.gemm) + ways
    return transforms + _update(cfg, grid, rates, elements)


def _update(cfg: Config, grid: Grid, rates: Rates, elements: int) -> float:
    share = elements / (grid.batch_ranks if cfg.parallel.zero else 1)
    if cfg.train.offload.startswith("optimizer"):
        copies = share * (4 + rates.element) / rates.device.host_link
        return max(copies, 30 * share / rates.device.host_bandwidth) + 10 * elements / rates.memory
    return (30 * share + 10 * elements) / rates.memory


def _offload(cfg: Config, grid: Grid, rates: Rates, block: Block) -> float:
    """Compute the seconds per block and micro-batch of copies to the host and back that the block does not hide."""
    tokens = cfg.train.micro_batch_size * cfg.model.seq_len / grid["cp"]
    sp = cfg.parallel.tp if cfg.sequence_parallel else 1
    copy = rates.element * tokens * cfg.model.hidden_size / sp / rates.device.host_link
    return max(0.0, copy - block.forward) + max(0.0, copy - block.backward)


def model_flops(cfg: Config) -> float:
    """Count the FLOPs of the model per step, with causal attention, for MFU."""
    return flops_per_token(cfg.model).causal * cfg.train.global_batch_size * cfg.model.seq_len
