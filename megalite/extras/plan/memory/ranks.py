"""Memory of every pipeline rank, predicted: states from the parameter table, activations in closed form.

States are exact except for the alignment of buckets (at most 128 dp elements each). Activations are what the layers of
this project keep for backward, times the micro-batches that the schedule holds at once. Not counted: the allocator's
slack, the device's context, communication buffers, workspace of single kernels.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cache, lru_cache, partial
from operator import add, mul

from megalite.core.mesh.grid import Grid
from megalite.core.model.kinds import FEED_FORWARDS, HEADS
from megalite.core.model.partition import blocks_by_kind
from megalite.core.model.saved import element_size, residual_bytes, tokens
from megalite.core.options.recompute import Extent
from megalite.core.parts.ffn.experts import experts_tp, rows_combined, rows_received
from megalite.core.parts.memory.offload_memory import offloaded_bytes, sent_blocks
from megalite.core.parts.options.expert_options import choose_dispatch
from megalite.core.parts.schedules.choose import name_of
from megalite.core.parts.schedules.steady import extend, sample_sizes
from megalite.core.pipeline.schedule import MAX_SENDS, placement_of
from megalite.extras.plan.memory.activations import (
    block_activations,
    deferred_bytes,
    embedding_bytes,
    gathered_bytes,
    mtp_bytes,
    narrow_bytes,
    recomputed_bytes,
)
from megalite.extras.plan.memory.fp8 import code_bytes, coded_units
from megalite.extras.plan.memory.in_flight import InFlight, in_flight_by_rank, splits_backward
from megalite.extras.plan.memory.matrices import placed_matrices, update_bytes
from megalite.extras.plan.memory.stages import (
    PlannedBlock,
    count_blocks,
    head_rows,
    parameters_on_rank,
    planned_block,
    split,
)
from megalite.extras.plan.memory.states import group_of, states_of, widened_bytes
from megalite.extras.plan.memory.units import shapes_of, units_of
from megalite.runtime.options.run import Config

# Bytes per logit of temporary fp32 copies in the torch reference of the loss; kernels work in place.
_LOSS_WORK = 8


@dataclass(frozen=True)
class RankMemory:
    """Peak memory of the ranks at one pipeline position, in bytes (`parameters`: elements).

    Attributes:
        parameters: number of local elements, vocabulary padding included.
        weights: parameters in the precision of the run, and their FP8 codes.
        main_grad: gradients, fp32 shares apart from them, a copy sent in bf16, and the residual of compression.
        optimizer: this dp rank's share of masters (none if weights are masters) and moments; 0 if they are offloaded.
        activations: tensors kept for backward at the peak, the layer being recomputed, a GPU's workspace of backward.
        logits: logits of the output layer at the peak, and the workspace of the loss.
        host: bytes offloaded to the host or to disk, and `copies` that a guard keeps (`--recover`); not in `total`.
        temporary: weights that ZeRO gathers, and gradients not reduced yet or being compressed.
        update: what the update takes, after activations and temporary memory are free.
    """

    parameters: int
    weights: int
    main_grad: int
    optimizer: int
    activations: int
    logits: int
    host: int = 0
    temporary: int = 0
    update: int = 0
    copies: int = 0

    def with_kept(self, activations: int, logits: int, host: int) -> RankMemory:
        """Add what is kept for the backward pass, in bytes; `host` is the part that is offloaded."""
        return replace(self, activations=activations, logits=logits, host=self.host + host)

    @property
    def total(self) -> int:
        passes = self.activations + self.logits + self.temporary
        return self.weights + self.main_grad + self.optimizer + max(passes, self.update)


def memory_per_rank(cfg: Config, grid: Grid, schedule: str | None = None) -> list[RankMemory]:
    """Predict memory by pipeline rank; all dp and tp ranks at one pipeline position hold the same.

    Args:
        schedule: name of a schedule; default: that of the config.

    Raises:
        UserError: the batch does not divide, or the schedule cannot run it.
    """
    name = schedule or name_of(cfg, grid["dp"])
    states, kept = states_per_rank(cfg, grid, name), kept_per_rank(cfg, grid, name)
    return [rank.with_kept(*peak) for rank, peak in zip(states, kept)]


def states_per_rank(cfg: Config, grid: Grid, schedule: str) -> list[RankMemory]:
    """Predict the part of `memory_per_rank` that depends neither on the micro-batch nor on recomputation."""
    p, m = cfg.parallel, cfg.num_microbatches(grid["dp"])
    layers, placement = split(cfg), placement_of(schedule, p.pp, p.vp)
    out = []
    for rank, apart in enumerate(splits_backward(schedule, p.pp, p.vp, sample_sizes(p.pp, m)[0])):
        of_rank = cfg, grid["tp"], layers, (held := placement.stages_of(rank))
        (matrices, of_experts), ranks = placed_matrices(cfg, grid, layers, held), grid.batch_ranks
        group = group_of(cfg, ranks, ranks)
        units = units_of(*of_rank, False)
        shapes = shapes_of(*of_rank, False)
        coded = coded_units(*of_rank, group, False)
        states = states_of(cfg, units, coded, ranks, element_size(cfg), apart, shapes, matrices.elements)
        update = widened_bytes(cfg, units, ranks, ranks)
        codes, made = code_bytes(*of_rank, group, experts=False)
        own = list(filter(None, units_of(*of_rank, experts=True)))
        if grid.experts is not None and own:
            copies, group = grid.experts.batch_ranks, group_of(cfg, grid.experts.batch_ranks, ranks)
            shapes, coded = shapes_of(*of_rank, True), list(filter(None, coded_units(*of_rank, group, True)))
            states += states_of(cfg, own, coded, copies, element_size(cfg), apart, shapes, of_experts.elements, ranks)
            update = max(update, widened_bytes(cfg, own, copies, ranks))
            codes, made = map(add, (codes, made), code_bytes(*of_rank, group, experts=True))
        out.append(
            RankMemory(
                parameters_on_rank(cfg, grid["tp"], placement, layers, rank),
                states.weights + codes,
                states.main_grad,
                states.optimizer,
                activations=0,
                logits=0,
                host=states.host + states.copies,
                temporary=states.temporary + made,
                update=max(update, update_bytes(cfg, matrices), update_bytes(cfg, of_experts)),
                copies=states.copies,
            )
        )
    return out


def kept_per_rank(cfg: Config, grid: Grid, schedule: str) -> list[tuple[int, int, int]]:
    """Predict (activations, logits, offloaded activations) of every pipeline rank at the peak, at any ZeRO stage."""
    p, m = cfg.parallel, cfg.num_microbatches(grid["dp"])
    layers, sizes = split(cfg), sample_sizes(p.pp, m)
    samples = [in_flight_by_rank(schedule, p.pp, p.vp, size) for size in sizes]
    placement, head = placement_of(schedule, p.pp, p.vp), _head_bytes(cfg, m)
    taken, host = _stages_bytes(cfg, layers), [0] * p.pp
    if cfg.train.offload == "activations":
        host = offloaded_bytes(cfg, grid["dp"], schedule, layers, pinned=p.device != "cpu")
    out = []
    for rank in range(grid["pp"]):
        stages = placement.stages_of(rank)
        chunks, end = [taken[stage] for stage in stages], len(layers) - 1
        final = stages.index(end) if end in stages else None
        peaks = (_peak_bytes(held[rank], chunks, head, final) for held in samples)
        kept, logits = (round(extend(m, sizes, figures)) for figures in zip(*peaks))
        out.append((kept, logits, host[rank]))
    return out


def _gpu_workspace(cfg: Config, num_microbatches: int) -> int:
    """Compute the bytes that a block's backward pass takes on a GPU beyond what it frees, fitted to estimates."""
    m, p = cfg.model, cfg.parallel
    if p.device == "cpu":
        return 0
    width = element_size(cfg) * tokens(cfg)
    shards = p.tp if cfg.sequence_parallel else 1
    combined = _combined_bytes(cfg)
    sends = min(MAX_SENDS, num_microbatches * p.vp) * width * m.hidden_size // shards if p.pp > 1 else 0
    if shards == 1:
        return sends + combined
    # A gathered input or gradient, the input gradient before it is scattered, and the gradient inside the MLP.
    inner = {FEED_FORWARDS[kind.feed_forward] for kind in blocks_by_kind(m)}
    matrices = (matrix for feed_forward in inner for matrix in feed_forward.matrices(m))
    widest = max((matrix.shape[0] for matrix in matrices if ("tp", 0) in matrix.sharded_dims), default=0)
    return sends + combined + width * (2 * m.hidden_size + widest // p.tp)


def _combined_bytes(cfg: Config) -> int:
    """Compute the bytes of outputs of experts, and of what is made of them: as many in an exchange, or their sums."""
    m, p = cfg.model, cfg.parallel
    if m.num_experts is None:
        return 0
    rows = rows_received(cfg)
    exchanged = p.ep > 1 and choose_dispatch(m, p)[0] == "alltoall"
    return element_size(cfg) * m.hidden_size * (rows + (rows if exchanged else rows_combined(cfg) // m.moe_topk))


def _pair_bytes(cfg: Config) -> int:
    """Compute the bytes that a forward pass takes on a GPU beside a backward pass, beyond a block that it keeps.

    While tokens of one travel, the other works with as many. At the experts' places either that block or the one that
    the backward pass is in keeps nothing of them, but what weight gradients that wait for traffic over tp need.
    """
    m, p = cfg.model, cfg.parallel
    if not p.moe_overlap or p.device == "cpu":
        return 0
    first, gated = rows_received(cfg) * element_size(cfg), 1 + m.gated
    width = m.expert_ffn_size // experts_tp(p)
    waiting = first * (m.hidden_size + gated * width) if cfg.sequence_parallel and p.overlap_tp_reduce else 0
    repeated = any(planned_block(cfg, i).recomputed is Extent.BLOCK for i in range(m.num_layers) if m.is_moe(i))
    kept = 0 if repeated else first * (m.hidden_size + (gated + 1) * width)
    return _combined_bytes(cfg) + waiting - kept


@dataclass(frozen=True)
class _BlockBytes:
    """Bytes of one micro-batch in a block.

    Attributes:
        kept: bytes kept for its backward pass.
        recomputed: bytes that recomputing it brings back, and that its mixer works with in backward.
        deferred: bytes beyond `kept` that it keeps for deferred weight gradients.
    """

    kept: int
    recomputed: int
    deferred: int

    @classmethod
    def of(cls, cfg: Config, block: PlannedBlock) -> _BlockBytes:
        kept = block_activations(cfg, *block)
        return cls(
            kept,
            # Two offloaded blocks are on the device while one is recomputed.
            recomputed_bytes(cfg, *block) + 2 * kept * (cfg.train.offload == "activations"),
            # A split backward frees as much at I as it keeps for W, unless blocks keep only their input.
            deferred_bytes(cfg, block.kind) - kept if block.recomputed is Extent.BLOCK else 0,
        )


@dataclass(frozen=True)
class _StageBytes:
    """Bytes of one micro-batch in a stage.

    Attributes:
        kept: bytes kept for its backward pass.
        block: largest part of that which a block keeps.
        recomputed: largest number of bytes that backward of one of its blocks brings back and works with; where blocks
            recompute unlike amounts, an upper bound: those behind that one are free by then.
        deferred: bytes beyond `kept` for deferred weight gradients, and what comes back from the host.
        deferred_before: part of `deferred` that is in memory when the last block of a backward pass runs.
    """

    kept: int
    block: int
    recomputed: int
    deferred: int
    deferred_before: int


def _stages_bytes(cfg: Config, layers: tuple[range, ...]) -> list[_StageBytes]:
    """Compute what every stage takes, from the blocks of each."""
    m = cfg.model
    end = len(layers) - 1
    offloads = cfg.train.offload == "activations"
    # The final norm keeps its input; what reads its output that, and the output layer its own input.
    last = (1 + m.last_norm) * residual_bytes(cfg) + narrow_bytes(cfg) + m.mtp_num_layers * mtp_bytes(cfg)
    of = cache(partial(_BlockBytes.of, cfg))
    out = []
    for stage, counts in enumerate(count_blocks(m, cfg.train.recompute, layers)):
        # What modules that predict further tokens keep is in `last`.
        further = {planned_block(cfg, i): 0 for i in m.mtp_layers if stage == end}
        held = [(n, of(block)) for block, n in {**further, **counts}.items()]
        # Blocks whose input is offloaded keep nothing else.
        away = sent_blocks(stage, layers[stage]) * residual_bytes(cfg) * offloads
        ends = embedding_bytes(cfg) * (stage == 0) + last * (stage == end)
        deferred = sum(n * block.deferred for n, block in held) + away
        out.append(
            _StageBytes(
                kept=sum(n * block.kept for n, block in held) + ends - away,
                block=max((block.kept for _, block in held), default=0),
                recomputed=max((block.recomputed for _, block in held), default=0),
                deferred=deferred,
                deferred_before=max(0, deferred - min((block.deferred for n, block in held if n), default=0)),
            )
        )
    return out


@dataclass(frozen=True)
class _HeadBytes:
    """What one micro-batch takes in the output layer, and a backward pass anywhere, bytes.

    Attributes:
        logits: bytes kept of them.
        loss: workspace of the loss.
        work: workspace of a backward pass.
        beside: what a forward pass beside it takes, beyond a block that it keeps.
    """

    logits: int
    loss: int
    work: int
    beside: int


def _head_bytes(cfg: Config, num_microbatches: int) -> _HeadBytes:
    m = cfg.model
    e = element_size(cfg)
    held = tokens(cfg)
    vocab = head_rows(cfg)
    chunked = cfg.train.loss_chunk > 0
    rows = min(cfg.train.loss_chunk, held) or held
    # With chunks, no logits are kept, and those of one chunk exist temporarily in the forward pass.
    loss = e * rows * vocab if chunked else 0
    if cfg.parallel.device != "cpu" and _torch_loss(cfg.train.ops):
        loss += _LOSS_WORK * rows * vocab
    if m.logit_softcap is not None:
        loss += e * rows * vocab  # its slope, in backward
    work = max(_gpu_workspace(cfg, num_microbatches), gathered_bytes(cfg))
    logits = 0 if chunked else (1 + m.mtp_num_layers) * e * held * vocab
    return _HeadBytes(logits + HEADS[m.head].copied(cfg), loss, work, _pair_bytes(cfg))


@lru_cache(maxsize=16)
def _torch_loss(spec: str) -> bool:
    """Whether the loss is torch's. On a GPU `auto` is Triton; on a CPU the reference works in small pieces."""
    if spec == "auto":
        return False
    from megalite.core.ops.choose import parse_spec  # with torch, which a search does without

    return parse_spec(spec)["cross_entropy"] == "torch"


def _peak_bytes(
    states: InFlight, chunks: Sequence[_StageBytes], head: _HeadBytes, final: int | None
) -> tuple[int, int]:
    """Compute (activations, logits) at the peak of their sum, for a rank that holds this.

    Args:
        chunks: the rank's stages.
        final: the last stage's place among them, if it is there.
    """
    kept, back = [chunk.kept for chunk in chunks], [chunk.deferred for chunk in chunks]
    most, peak = 0, (0, 0)
    for kind, chunk, alive, deferred, growing in states:
        activations = sum(map(mul, alive, kept)) + sum(map(mul, deferred, back))
        activations += 0 if growing is None else chunks[growing].block + head.beside
        # The workspace of the operation comes on top of what is kept.
        activations += (chunks[chunk].recomputed if kind in "BI" else 0) + (head.work if kind in "BIW" else 0)
        activations += chunks[chunk].deferred_before if kind == "I" else 0
        logits = 0 if final is None else alive[final] * head.logits
        logits += head.loss if chunk == final and kind in ("FBI" if head.logits else "F") else 0
        if activations + logits > most:
            most, peak = activations + logits, (activations, logits)
    return peak
