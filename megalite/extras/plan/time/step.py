"""Time of a training step of one layout on a described cluster, in closed form; every term has a name.

A block's time is that of its matrix products, attention, elementwise kernels and tensor-parallel traffic (`block`).
A pipeline rank runs its blocks for every micro-batch; the slowest rank sets the pace, and the schedule adds its ramp
(`pipeline_ramp`, as simulated). Then come the traffic over dp that nothing hides, and the optimizer. Formulas and
errors against published runs: docs/plan.md. Sources of the parts: Narayanan et al. 2021 (pipeline, traffic),
Korthikanti et al. 2022 (sequence parallelism, recomputation), Rajbhandari et al. 2019 (ZeRO).

Notation: x tokens of a micro-batch on a rank, h hidden, t tp, e bytes of an activation, F and B forward and backward.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache

from megalite.core.mesh.grid import Grid
from megalite.core.model.flops import flops_per_token
from megalite.core.options.update_rule import RULES, MatrixRule
from megalite.core.parts.schedules.choose import USUAL_COSTS, name_of
from megalite.core.parts.schedules.steady import paired
from megalite.core.pipeline.schedule import placement_of
from megalite.extras.plan.cluster import Cluster
from megalite.extras.plan.memory.matrices import Placed, placed_matrices, transform_flops
from megalite.extras.plan.memory.stages import PlannedBlock, count_blocks, head_rows, planned_block, split, vocab_rows
from megalite.extras.plan.time.block import Block, Engine, Workload, block_time, embedding_time, head_time, mtp_time
from megalite.extras.plan.time.experts import experts_time
from megalite.extras.plan.time.rates import Rates
from megalite.extras.plan.time.replicas import Replicas, over_dp, replicas_of
from megalite.runtime.options.run import Config


@dataclass(frozen=True)
class StepTime:
    """Seconds of one step on the slowest pipeline rank, by cause; `total` is their sum.

    Attributes:
        gemm, attention, elementwise: kernels of all blocks and micro-batches, both passes.
        head: output layer and loss, and modules that predict further tokens, on the rank that holds them.
        recompute: forward passes that are run again.
        tp: tensor-parallel collectives that nothing hides.
        cp: messages of attention between ranks that share samples, where nothing hides them.
        ep: tokens on their way to experts and back, where no other micro-batch computes meanwhile.
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
    cp: float
    ep: float
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
        return sum(vars(self).values())

    @property
    def terms(self) -> dict[str, float]:
        """Name -> seconds, in the order of the fields."""
        return dict(vars(self))


def step_time(
    cfg: Config,
    grid: Grid,
    cluster: Cluster,
    schedule: str | None = None,
    engine: Engine | None = None,
    passes: Sequence[RankTime] | None = None,
) -> StepTime:
    """Predict the time of one step.

    Args:
        grid: axes pp, dp and tp, and cp if sequences are split.
        schedule: name of a schedule; default: that of the config.
        engine: what the software fuses and overlaps; default: as this project does with this config.
        passes: from `pass_times` of the same options, whatever ZeRO's are.

    Raises:
        UserError: the batch does not divide, or the schedule cannot run it.
    """
    p, m = cfg.parallel, cfg.num_microbatches(grid["dp"])
    name = schedule or name_of(cfg, grid["dp"])
    load = Workload.of(cfg, cluster, engine)
    layers = split(cfg)
    placement = placement_of(name, p.pp, p.vp)
    rates = load.rates
    ranks = passes or pass_times(cfg, cluster, name, engine)
    slow = max(range(p.pp), key=lambda rank: ranks[rank].total)
    own, mean = ranks[slow], sum(rank.total for rank in ranks) / p.pp
    message = _message(load, grid.world)
    replicas = replicas_of(cfg, grid, placement, layers, slow, rates.domain)
    gather, reduce = over_dp(cfg, m, load, replicas, own.units, own.total - own.backward, own.backward)
    parts = {
        "gemm": m * own.blocks.gemm,
        "attention": m * own.blocks.attention,
        "elementwise": m * own.blocks.elementwise,
        "head": m * own.head.total,
        "recompute": m * own.blocks.recompute,
        "tp": m * (own.blocks.tp + own.embedding),
        "cp": m * own.blocks.cp,
        "ep": m * _exposed_exchange(own, paired(name, p.pp, p.vp, m)[slow]),
        "host": m * own.blocks.host,
        "p2p": 0.0 if load.engine.overlap_pp or p.pp == 1 else 2 * m * p.vp * message,
        "bubble": pipeline_ramp(name, p.pp, p.vp, m) * (mean + (0.0 if p.pp == 1 else 2 * message * p.vp)),
        "gather": gather,
        "reduce": reduce,
        "tied": _tied(cfg, rates),
        "optimizer": _optimizer(cfg, rates, replicas, placed_matrices(cfg, grid, layers, placement.stages_of(slow))),
        "offload": m * own.offload,
        "fixed": cluster.constants.step,
    }
    hosts = -(-grid.world // cluster.domain)
    return StepTime(**parts, jitter=sum(parts.values()) * cluster.constants.jitter * math.log2(hosts))


@dataclass(frozen=True)
class RankTime:
    """Seconds of one micro-batch on a pipeline rank.

    Attributes:
        blocks: time of its blocks.
        head: time of the output layer, zero on other ranks.
        embedding: time of the embedding's traffic, zero on other ranks.
        offload: copies of activations that its blocks do not hide.
        units: number of blocks and ends of the model on it, which ZeRO-3 gathers and reduces one by one.
    """

    blocks: Block
    head: Block
    embedding: float
    offload: float
    units: int

    @property
    def total(self) -> float:
        return self.blocks.total + self.head.total + self.embedding

    @property
    def backward(self) -> float:
        return self.blocks.backward + self.head.backward


def pass_times(cfg: Config, cluster: Cluster, schedule: str, engine: Engine | None = None) -> list[RankTime]:
    """Compute the time of a micro-batch on every pipeline rank; arguments as for `step_time`."""
    load, layers = Workload.of(cfg, cluster, engine), split(cfg)
    placement = placement_of(schedule, cfg.parallel.pp, cfg.parallel.vp)

    @cache
    def time_of_block(block: PlannedBlock) -> Block:
        time = block_time(load, *block)
        return time + experts_time(cfg, load, block.recomputed) if block.kind.feed_forward == "moe" else time

    head = head_time(load, head_rows(cfg))
    embedding = embedding_time(load)
    counts = count_blocks(cfg.model, cfg.train.recompute, layers)
    offloads = cfg.train.offload == "activations"
    # A module that predicts further tokens: a block, and the embedding and the output layer again.
    further = [time_of_block(planned_block(cfg, i)) + mtp_time(load) + head for i in cfg.model.mtp_layers]
    head = sum(further, head)

    @cache
    def time_of(held: tuple[tuple[PlannedBlock, int], ...], first: bool, last: bool) -> RankTime:
        return RankTime(
            sum((n * time_of_block(block) for block, n in held), Block()),
            head if last else Block(),
            embedding if first else 0.0,
            sum(n * _offload(cfg, load.rates, time_of_block(block)) for block, n in held) if offloads else 0.0,
            sum(n for _, n in held) + first + last,
        )

    ends, out = (placement.rank_of(0), placement.rank_of(len(layers) - 1)), []
    for rank in range(cfg.parallel.pp):
        held: Counter[PlannedBlock] = Counter()
        for stage in placement.stages_of(rank):
            held.update(counts[stage])
        out.append(time_of(tuple(held.items()), rank == ends[0], rank == ends[1]))
    return out


def pipeline_ramp(name: str, pp: int, vp: int, m: int) -> float:
    """Return the bubble of a schedule in units of one micro-batch's time on one rank (both passes, all its chunks).

    For equal stages and `USUAL_COSTS` the closed forms equal the simulator's results, as the tests check; for zb-v with
    fewer than 2 pp micro-batches they are within 2 % of the step.
    """
    forward = USUAL_COSTS.forward
    inputs = USUAL_COSTS.input_grad
    weights = USUAL_COSTS.weight_grad
    whole = forward + inputs + weights
    if name == "naive":
        return float(m * (pp - 1))
    if name.startswith("interleaved"):
        return (pp - 1) / vp
    if name == "zb-h1":  # weight gradients fill what the first m - 1 micro-batches leave idle
        return ((pp - 1) * (forward + inputs) - min(m, pp) * weights + weights) / whole
    if name == "zb-v":
        filled = min(m - 1, pp - 1) * forward + (pp - 1) * inputs / 2 * min(1.0, 2 * max(0, m - pp) / pp)
        return ((pp - 1) * (forward + inputs) - filled) / whole
    return float(pp - 1)


def _exposed_exchange(own: RankTime, share: float) -> float:
    """Compute the seconds per micro-batch of the exchange of tokens that nothing hides.

    Args:
        own: a rank's pass.
        share: part of its passes that run beside another, whose computation hides as much.
    """
    exchange = own.blocks.ep
    return exchange - share * min(exchange, own.total - exchange)


def _message(load: Workload, world: int) -> float:
    """Compute the seconds of one message between neighbors in the pipeline."""
    rates = load.rates
    size = rates.element * load.tokens * load.model.hidden_size / load.tp
    return size / (rates.nvlink if world <= rates.domain else rates.network) + rates.latency


def _tied(cfg: Config, rates: Rates) -> float:
    if not (cfg.model.tie_embeddings or cfg.model.mtp_layers) or cfg.parallel.pp == 1:
        return 0.0
    return 2 * rates.ring(4 * vocab_rows(cfg) * cfg.model.embedding_width, 2, cfg.parallel.tp * rates.domain)


def _optimizer(cfg: Config, rates: Rates, replicas: list[Replicas], matrices: Sequence[Placed]) -> float:
    """Compute the seconds of the update: of its transforms, of 30 bytes per element of the share (12 more for each of
    its states in bf16, which is widened and rounded), and of 10 of every element for norm and casts.

    A rule of matrices sends them to their owners and back, over dp and over tp.
    """
    transforms, rule = 0.0, RULES[cfg.optim.optimizer]
    for placed in matrices:
        if isinstance(rule, MatrixRule) and (flops := transform_flops(cfg, placed)):
            peak = rates.device.peak if rule.transform_dtype(cfg.optim) == "bf16" else rates.device.fp32
            sent = 4 * placed.elements / placed.dp
            dp = placed.dp
            tp = placed.tp
            transforms += flops / (peak * rates.device.gemm) + 2 * (rates.ring(sent, dp, tp) + rates.ring(sent, tp, 1))
    return transforms + _update(cfg, rates, replicas)


def _update(cfg: Config, rates: Rates, replicas: list[Replicas]) -> float:
    elements = sum(r.elements for r in replicas)
    share = sum(r.elements / (r.ranks if cfg.parallel.zero else 1) for r in replicas)
    o = cfg.optim
    moved = 30 + 12 * (2 * (o.moments_dtype == "bf16") + (o.master_dtype == "bf16"))
    if cfg.train.offload.startswith("optimizer"):
        copies = share * (4 + rates.element) / rates.device.host_link
        return max(copies, moved * share / rates.device.host_bandwidth) + 10 * elements / rates.memory
    return (moved * share + 10 * elements) / rates.memory


def _offload(cfg: Config, rates: Rates, block: Block) -> float:
    """Compute the seconds per block and micro-batch of copies to the host and back that the block does not hide."""
    tokens = cfg.train.micro_batch_size * cfg.model.seq_len / cfg.parallel.cp
    sp = cfg.parallel.tp if cfg.sequence_parallel else 1
    copy = rates.element * tokens * cfg.model.hidden_size / sp / rates.device.host_link
    return max(0.0, copy - block.forward) + max(0.0, copy - block.backward)


def model_flops(cfg: Config) -> float:
    """Count the FLOPs of the model per step, with causal attention, for MFU."""
    return flops_per_token(cfg.model).causal * cfg.train.global_batch_size * cfg.model.seq_len
