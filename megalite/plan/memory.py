"""Memory of every pipeline rank, predicted: states from the parameter table, activations in closed form.

States are exact except for the alignment of buckets (at most 128 dp elements each). Activations are what the layers of
this project keep for backward, times the micro-batches that the schedule holds at once. Not counted: the allocator's
slack, the device's context, communication buffers, workspace of single kernels.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from operator import mul

from megalite.config.model import ModelConfig
from megalite.config.run import Config
from megalite.dist.grid import Grid
from megalite.model.parameters import param_map
from megalite.model.partition import layer_split
from megalite.optim.shares import pinned_bytes
from megalite.pipeline.choose import extend, name_of, names_of, sample_sizes
from megalite.pipeline.schedule import MAX_SENDS, Placement, placement_of
from megalite.plan.activations import deferred_bytes, element_size, layer_activations, mask_bytes, recomputed_bytes
from megalite.plan.in_flight import Held, held_by_rank, splits_backward
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
    layers, placement = split(cfg.model, p.pp * p.vp), placement_of(schedule, p.pp, p.vp)
    out = []
    for rank, apart in enumerate(splits_backward(schedule, p.pp, p.vp, sample_sizes(p.pp, m)[0])):
        units = units_of(cfg, topology["tp"], layers, placement.stages_of(rank))
        sides = sides_of(cfg, topology["tp"], layers, placement.stages_of(rank))
        states = states_of(cfg, units, topology["dp"], element_size(cfg), apart, sides)
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
    layers, sizes = split(cfg.model, p.pp * p.vp), sample_sizes(p.pp, m)
    samples = [held_by_rank(schedule, p.pp, p.vp, size) for size in sizes]
    placement, weights = placement_of(schedule, p.pp, p.vp), _weights(cfg, m)
    out = []
    for rank in range(topology["pp"]):
        stages = placement.stages_of(rank)
        peaks = (_peak_bytes(weights, held[rank], stages, layers) for held in samples)
        kept, logits, host = (round(extend(m, sizes, figures)) for figures in zip(*peaks))
        out.append((kept, logits, host))
    return out


def least_memory(cfg: Config, topology: Grid) -> int:
    """Bound the peak memory of the worst rank from below, in bytes, without simulating the schedules of `auto`.

    Raises:
        UserError: as `memory_per_rank`.
    """
    names = names_of(cfg, topology["dp"])
    return min(max(memory.total for memory in memory_per_rank(cfg, topology, name)) for name in names)


def parameters_on_rank(cfg: Config, tp: int, placement: Placement, layers: Sequence[range], rank: int) -> int:
    """Count the elements on each tensor-parallel rank of pipeline rank `rank`, vocabulary padding included.

    Args:
        layers: of each stage.
    """
    stages = units_of(cfg, tp, layers, placement.stages_of(rank))
    return sum(sum(unit) for units in stages for unit in units)


def vocab_rows(cfg: Config) -> int:
    """Count the rows of the vocabulary on one tensor-parallel rank, padding included."""
    return _vocab_rows(cfg.model, cfg.parallel.tp, cfg.parallel.vocab_divisible_by)


@lru_cache(maxsize=256)
def _vocab_rows(model: ModelConfig, tp: int, multiple: int) -> int:
    return Shard(param_map(model)["lm_head.weight"], Layout(Grid.of(tp, tp), multiple=multiple)).shape[0]


@lru_cache(maxsize=256)
def split(model: ModelConfig, stages: int) -> tuple[range, ...]:
    """Return `layer_split` (cached)."""
    return tuple(layer_split(model, stages))


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


@dataclass(frozen=True)
class _Weights:
    """What one micro-batch weighs on a rank, bytes.

    Attributes:
        layer: kept by a block.
        first, last: kept by the ends of the model besides.
        recomputed: what recomputing a block brings back.
        deferred: what a block keeps for deferred weight gradients, more than before.
        logits: kept.
        loss: workspace of the loss.
        work: workspace of a backward pass.
        sent: activations are offloaded.
        buffer: in which those of a block are offloaded.
    """

    layer: int
    first: int
    last: int
    recomputed: int
    deferred: int
    logits: int
    loss: int
    work: int
    sent: bool
    buffer: int


def _weights(cfg: Config, num_microbatches: int) -> _Weights:
    m, e, tokens = cfg.model, element_size(cfg), cfg.train.micro_batch_size * cfg.model.seq_len
    vocab, on_cpu = vocab_rows(cfg), cfg.parallel.device == "cpu"
    layer, chunked, sent = layer_activations(cfg), cfg.train.loss_chunk > 0, cfg.train.offload == "activations"
    # With chunks, no logits are kept, and those of one chunk exist temporarily in the forward pass.
    rows = min(cfg.train.loss_chunk, tokens) or tokens
    loss = e * rows * vocab if chunked else 0
    if not on_cpu and _torch_loss(cfg.train.ops):
        loss += _LOSS_WORK * rows * vocab
    if m.logit_softcap is not None:
        loss += e * rows * vocab  # its slope, in backward
    return _Weights(
        layer=layer,
        first=mask_bytes(cfg),  # of the embedding's dropout
        # The final norm keeps its input and its output.
        last=2 * e * tokens * m.hidden_size // (cfg.parallel.tp if cfg.sequence_parallel else 1),
        # Two offloaded blocks are here while one is recomputed.
        recomputed=recomputed_bytes(cfg) + 2 * layer * sent,
        # A split backward frees as much at I as it keeps for W, unless blocks kept their input alone.
        deferred=deferred_bytes(cfg) - layer if cfg.train.recompute == "full" else 0,
        logits=0 if chunked else e * tokens * vocab,
        loss=loss,
        work=_gpu_workspace(cfg, num_microbatches),
        sent=sent,
        buffer=layer if on_cpu else pinned_bytes(layer),
    )


@lru_cache(maxsize=16)
def _torch_loss(spec: str) -> bool:
    """Whether the loss is torch's. On a GPU `auto` is Triton; on a CPU the reference works in small pieces."""
    if spec == "auto":
        return False
    from megalite.ops.choose import parse_spec  # with torch, which a search does without

    return parse_spec(spec)["cross_entropy"] == "torch"


def _peak_bytes(w: _Weights, held: Held, stages: Sequence[int], layers: Sequence[range]) -> tuple[int, int, int]:
    """Compute (activations, logits) at the peak of their sum, for a rank that holds this; third, what is offloaded.

    Args:
        stages: of the rank.
        layers: of every stage.
    """
    end = len(layers) - 1
    blocks = [len(layers[stage]) for stage in stages]
    # What arrives from another stage is not sent away.
    sent = [(n - (stage > 0)) * w.layer * w.sent for n, stage in zip(blocks, stages)]
    kept = [
        n * w.layer + w.first * (stage == 0) + w.last * (stage == end) - gone
        for n, stage, gone in zip(blocks, stages, sent)
    ]
    back = [n * w.deferred + gone for n, gone in zip(blocks, sent)]
    final = stages.index(end) if end in stages else None
    most, peak = 0, (0, 0)
    for kind, chunk, alive, deferred in held.moments:
        activations = sum(map(mul, alive, kept)) + sum(map(mul, deferred, back))
        # Workspace of the operation comes on top of what is kept.
        activations += (w.recomputed if kind in "BI" else 0) + (w.work if kind in "BIW" else 0)
        activations += max(0, back[chunk] - w.deferred) if kind == "I" else 0
        logits = 0 if final is None else alive[final] * w.logits
        logits += w.loss if chunk == final and kind in ("FBI" if w.logits else "F") else 0
        if activations + logits > most:
            most, peak = activations + logits, (activations, logits)
    away = max((sum(map(mul, counts, sent)) for counts in held.away), default=0)
    return *peak, away // w.layer * w.buffer
