"""Memory of every pipeline rank, predicted: states from the parameter table, activations in closed form.

States are exact except for the alignment of buckets (at most 128 dp elements each). Activations are what the layers of
this project keep for backward, times the micro-batches that the schedule holds at once. Not counted: the allocator's
slack, the device's context, communication buffers, workspace of single kernels.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, replace

from megalite.config.run import Config
from megalite.dist.grid import Grid
from megalite.model.parameters import param_map
from megalite.model.partition import layer_split
from megalite.ops.choose import parse_spec
from megalite.optim.shares import pinned_bytes
from megalite.pipeline.choose import extend, name_of, names_of, sample_sizes
from megalite.pipeline.executor import MAX_SENDS
from megalite.pipeline.schedule import Op, Placement, compute_orders, placement_of
from megalite.plan.activations import deferred_bytes, element_size, layer_activations, mask_bytes, recomputed_bytes
from megalite.plan.zero_memory import sides_of, states_of, units_of
from megalite.sharding import Layout, Shard

# Temporary fp32 copies of the logits in the torch reference of the loss, bytes per logit; kernels work in place.
_LOSS_WORK = 8


@dataclass(frozen=True)
class RankMemory:
    """Peak memory of the ranks at one pipeline position, bytes (`parameters`: elements).

    Attributes:
        parameters: local elements, vocabulary padding included.
        weights: in the precision of the run.
        main_grad: fp32 gradients; the copy that is sent if gradients are reduced in bf16; what compression has not sent
            yet.
        optimizer: this dp rank's share of fp32 masters (none with fp32 weights) and moments; 0 if they are offloaded.
        activations: kept for backward at the peak, the layer being recomputed, and on a GPU the workspace of backward.
        logits: of the output layer at that moment, with the workspace of the loss.
        host: offloaded to the host, or to disk; not in `total`.
        temporary: weights that ZeRO gathers, gradients that it has not reduced yet or that are being compressed.
    """

    parameters: int
    weights: int
    main_grad: int
    optimizer: int
    activations: int
    logits: int
    host: int = 0
    temporary: int = 0

    def with_kept(self, activations: int, logits: int, host: int) -> RankMemory:
        """Add what is kept for the backward pass (bytes), `host` of it offloaded."""
        return replace(self, activations=activations, logits=logits, host=self.host + host)

    @property
    def total(self) -> int:
        return self.weights + self.main_grad + self.optimizer + self.activations + self.logits + self.temporary


def memory_per_rank(cfg: Config, topology: Grid, schedule: str | None = None) -> list[RankMemory]:
    """Predict memory by pipeline rank; all dp and tp ranks of a pipeline rank hold the same.

    Args:
        schedule: name of a schedule; default: that of the config.

    Raises:
        UserError: the batch does not divide, or the schedule cannot run it.
    """
    name = schedule or name_of(cfg, topology["dp"])
    states, kept = states_per_rank(cfg, topology, name), kept_per_rank(cfg, topology, name)
    return [rank.with_kept(*peak) for rank, peak in zip(states, kept)]


def states_per_rank(cfg: Config, topology: Grid, schedule: str) -> list[RankMemory]:
    """Predict the part of `memory_per_rank` that depends neither on the micro-batch nor on recomputation."""
    p, m = cfg.parallel, cfg.num_microbatches(topology["dp"])
    layers, placement = layer_split(cfg.model, p.pp * p.vp), placement_of(schedule, p.pp, p.vp)
    out = []
    for rank, order in enumerate(compute_orders(schedule, p.pp, p.vp, sample_sizes(p.pp, m)[0])):
        split = any(op.kind == "W" for op in order)
        units = units_of(cfg, topology["tp"], layers, placement.stages_of(rank))
        sides = sides_of(cfg, topology["tp"], layers, placement.stages_of(rank))
        states = states_of(cfg, units, topology["dp"], element_size(cfg), split, sides)
        parameters = sum(sum(unit) for stage in units for unit in stage)
        out.append(
            RankMemory(
                parameters,
                states.weights,
                states.main_grad,
                states.optimizer,
                activations=0,
                logits=0,
                host=states.host,
                temporary=states.temporary,
            )
        )
    return out


def kept_per_rank(cfg: Config, topology: Grid, schedule: str) -> list[tuple[int, int, int]]:
    """Predict (activations, logits, offloaded activations) of every pipeline rank at the peak, whatever ZeRO shards."""
    p, m = cfg.parallel, cfg.num_microbatches(topology["dp"])
    layers, sizes = layer_split(cfg.model, p.pp * p.vp), sample_sizes(p.pp, m)
    samples = [compute_orders(schedule, p.pp, p.vp, size) for size in sizes]
    ranks = range(topology["pp"])
    work = _gpu_workspace(cfg, m)
    peaks = [zip(*(_peak_bytes(cfg, orders[rank], layers, work) for orders in samples)) for rank in ranks]
    return [
        (round(extend(m, sizes, kept)), round(extend(m, sizes, logits)), round(extend(m, sizes, host)))
        for kept, logits, host in peaks
    ]


def least_memory(cfg: Config, topology: Grid) -> int:
    """Bound the peak memory of the worst rank from below, in bytes, without simulating the schedules of `auto`.

    Raises:
        UserError: as `memory_per_rank`.
    """
    names = names_of(cfg, topology["dp"])
    return min(max(memory.total for memory in memory_per_rank(cfg, topology, name)) for name in names)


def parameters_on_rank(cfg: Config, tp: int, placement: Placement, layers: list[range], rank: int) -> int:
    """Count the elements on each tensor-parallel rank of pipeline rank `rank`, vocabulary padding included.

    Args:
        layers: of each stage.
    """
    stages = units_of(cfg, tp, layers, placement.stages_of(rank))
    return sum(sum(unit) for units in stages for unit in units)


def vocab_rows(cfg: Config) -> int:
    """Count the rows of the vocabulary on one tensor-parallel rank, padding included."""
    layout = Layout(Grid.of(cfg.parallel.tp, cfg.parallel.tp), multiple=cfg.parallel.vocab_divisible_by)
    return Shard(param_map(cfg.model)["lm_head.weight"], layout).shape[0]


def _gpu_workspace(cfg: Config, num_microbatches: int) -> int:
    """Compute the bytes that the backward pass of a block takes on a GPU besides what it frees, as estimates show."""
    m, p = cfg.model, cfg.parallel
    if p.device == "cpu":
        return 0
    width = element_size(cfg) * cfg.train.micro_batch_size * m.seq_len
    cut = p.tp if cfg.sequence_parallel else 1
    sends = min(MAX_SENDS, num_microbatches * p.vp) * width * m.hidden_size // cut if p.pp > 1 else 0
    if cut == 1:
        return sends
    # A gathered input or gradient, the input gradient before it is scattered, and the gradient inside the MLP.
    inside = (2 if m.gated else 1) * m.ffn_size // p.tp
    return sends + width * (2 * m.hidden_size + inside)


def _peak_bytes(cfg: Config, order: Sequence[Op], layers: list[range], workspace: int) -> tuple[int, int, int]:
    """Compute (activations, logits) at the peak of their sum, for a rank that runs operations in this order.

    The third number is the peak of what is offloaded meanwhile; `workspace` is that of backward passes.
    """
    m, e, tokens = cfg.model, element_size(cfg), cfg.train.micro_batch_size * cfg.model.seq_len
    sp = cfg.parallel.tp if cfg.sequence_parallel else 1
    vocab = vocab_rows(cfg)
    per_layer, last = layer_activations(cfg), len(layers) - 1
    # The final norm keeps its input and its output, the embedding the mask of its dropout.
    ends = defaultdict(int, {0: mask_bytes(cfg)})
    ends[last] += 2 * e * tokens * m.hidden_size // sp
    recomputed = recomputed_bytes(cfg)
    # With chunks, no logits are kept, and those of one chunk exist temporarily in both passes.
    rows = min(cfg.train.loss_chunk, tokens) or tokens
    logits_kept = 0 if cfg.train.loss_chunk else e * tokens * vocab
    loss_work = e * rows * vocab if cfg.train.loss_chunk else 0
    # On a GPU `auto` is Triton, which comes with torch there; on CPU the reference works in small pieces.
    asked = parse_spec(cfg.train.ops)["cross_entropy"]
    if asked == "torch" and cfg.parallel.device != "cpu":
        loss_work += _LOSS_WORK * rows * vocab
    if m.logit_softcap is not None:
        loss_work += e * rows * vocab  # its slope, in backward
    kept = [len(held) * per_layer + ends[stage] for stage, held in enumerate(layers)]
    sent = [0] * len(layers)
    if cfg.train.offload == "activations":
        # What arrives from another stage stays; two of the others are here while one block is recomputed.
        sent = [(len(held) - (stage > 0)) * per_layer for stage, held in enumerate(layers)]
        recomputed += 2 * per_layer
    # A split backward frees as much at I as it keeps for W, unless blocks kept their input alone.
    later = deferred_bytes(cfg) - per_layer if cfg.train.recompute == "full" else 0
    back = [len(held) * later + gone for held, gone in zip(layers, sent)]
    away = most_away = 0
    alive = logits = most = 0
    peak = (0, 0)
    for kind, _, stage, _ in order:
        of_loss = logits_kept if stage == last else 0
        if kind == "F":
            alive, logits = alive + kept[stage] - sent[stage], logits + of_loss
            away += sent[stage]
            most_away = max(most_away, away)
        # Workspace of the operation comes on top of what is kept.
        extra = (recomputed if kind in "BI" else 0) + (workspace if kind in "BIW" else 0)
        extra += max(0, back[stage] - later) if kind == "I" else 0
        work = loss_work if stage == last and kind != "W" else 0
        if alive + extra + logits + work > most:
            peak = alive + extra, logits + work
            most = sum(peak)
        if kind in "BW":  # a split backward frees a chunk when its weight gradients are done
            alive, logits = alive - kept[stage] + sent[stage], logits - of_loss
        if kind in "BI":
            away -= sent[stage]
        if kind in "IW":
            alive += back[stage] if kind == "I" else -back[stage]
    buffer = per_layer if cfg.parallel.device == "cpu" else pinned_bytes(per_layer)
    return *peak, most_away // per_layer * buffer
