"""What a block keeps for its backward pass: the residual stream here, the rest as its kind declares."""

from __future__ import annotations

from megalite.core.model.kinds import FEED_FORWARDS, MIXERS
from megalite.core.model.saved import SavedTensor, element_size, inside, residual_bytes, residual_rows, tokens
from megalite.core.options.choices import BlockKind
from megalite.core.options.recompute import MODES, Extent
from megalite.core.parts.options.context_parallel import choose_comm, head_ranks
from megalite.extras.plan.memory.stages import planned_block
from megalite.runtime.options.run import Config


def block_activations(cfg: Config, kind: BlockKind, recomputed: Extent | None = None) -> int:
    """Compute the bytes that one block keeps per micro-batch for backward; arguments as for `saved_by_block`."""
    return sum(row.bytes for row in saved_by_block(cfg, kind, recomputed))


def mtp_bytes(cfg: Config) -> int:
    """Compute the bytes that a module that predicts further tokens keeps per micro-batch, but for the logits.

    Its projection reads two hidden sizes, its norms the hidden states that the output layer keeps, embeddings, and what
    the block puts out. Recomputed, it keeps its two inputs; either way its output is kept.
    """
    m, block = cfg.model, planned_block(cfg, cfg.model.mtp_layers.start)
    kept = block_activations(cfg, *block)
    if block.recomputed is Extent.BLOCK:
        return kept + residual_bytes(cfg)
    statistics = 3 * m.norm_kind.statistics * 4 * residual_rows(cfg)
    return kept + 5 * residual_bytes(cfg) + statistics + mask_bytes(cfg)


def recomputed_bytes(cfg: Config, kind: BlockKind, recomputed: Extent) -> int:
    """Compute the bytes that backward of one block takes: what recomputing brings back, and the work of its mixer."""
    mixer, feed_forward = MIXERS[kind.mixer], FEED_FORWARDS[kind.feed_forward]
    # Backward of the feed-forward layer is over by then.
    work = max(0, mixer.work(cfg) - sum(row.bytes for row in feed_forward.saved(cfg)))
    if recomputed is Extent.NOTHING:
        return work
    if recomputed is Extent.BLOCK:
        return work + block_activations(cfg, kind, Extent.NOTHING)
    # The core works on a copy of its input, which is kept too.
    return work + sum(row.bytes for row in mixer.core(cfg))


def saved_by_block(cfg: Config, kind: BlockKind, recomputed: Extent | None = None) -> list[SavedTensor]:
    """List what one block keeps per micro-batch until its backward.

    Args:
        recomputed: what it recomputes; None: as the first block.
    """
    extent = MODES[cfg.train.recompute].extent(0) if recomputed is None else recomputed
    mixer, feed_forward = MIXERS[kind.mixer], FEED_FORWARDS[kind.feed_forward]
    if extent is Extent.BLOCK:
        return [_on_residual(cfg, "input of the block"), *feed_forward.remembered(cfg)]
    core = mixer.core(cfg) if extent is Extent.NOTHING else mixer.core_input(cfg)
    return [*_residual_stream(cfg), *core, *mixer.saved(cfg), *feed_forward.saved(cfg)]


def deferred_bytes(cfg: Config, kind: BlockKind) -> int:
    """Compute the bytes that one block keeps per micro-batch for weight gradients that a split backward defers.

    These are the inputs of its linear layers, and the gradients of their outputs.
    """
    m = cfg.model
    # With a parallel residual, both sub-layers have the same gradient.
    residual = -m.hidden_size if m.parallel_residual else 0
    residual -= m.hidden_size if m.norm_position == "shared" else 0  # and the same input
    inner = 0
    apart = 0
    for part in (MIXERS[kind.mixer], FEED_FORWARDS[kind.feed_forward]):
        inputs = set()
        for matrix in part.matrices(m):
            dims = {dim for _, dim in matrix.sharded_dims}
            residual += 0 if 0 in dims else matrix.shape[0]
            inner += sum(matrix.shape[dim] for dim in dims)
            inputs |= set() if 1 in dims else {matrix.shape[1]}
        residual += sum(inputs)  # layers that read the same input keep it once
        apart += part.deferred(cfg)
    return apart + element_size(cfg) * (residual * residual_rows(cfg) + tokens(cfg) * inner // cfg.parallel.tp)


def gathered_bytes(cfg: Config) -> int:
    """Compute the bytes of gathered keys and values in backward, with their gradients in fp32 in two orders."""
    m, p = cfg.model, cfg.parallel
    comm, _ = choose_comm(m, p, cfg.data.within_documents)
    if p.cp == 1 or "gather" not in comm:
        return 0
    neighbors = head_ranks(m, p) if "a2a" in comm else 1
    return inside(cfg, "", (element_size(cfg) + 8) * 2 * m.kv_heads * m.key_size).bytes * p.cp // neighbors


def mask_bytes(cfg: Config) -> int:
    """Compute the bytes of a dropout mask on the residual stream."""
    return residual_rows(cfg) * cfg.model.hidden_size if cfg.model.hidden_dropout else 0


def embedding_bytes(cfg: Config) -> int:
    """Compute the bytes that the first stage keeps per micro-batch before its blocks: a dropout mask, embeddings that
    are projected, what a norm of embeddings reads, and its statistics.
    """
    normed = residual_bytes(cfg) + _statistic(cfg).bytes * cfg.model.norm_kind.statistics
    return mask_bytes(cfg) + narrow_bytes(cfg) + normed * cfg.model.embedding_norm


def narrow_bytes(cfg: Config) -> int:
    """Compute the bytes of a micro-batch at the narrow side of a projection of embeddings; 0 without one."""
    return element_size(cfg) * residual_rows(cfg) * (cfg.model.embedding_size or 0)


def _statistic(cfg: Config) -> SavedTensor:
    # On a CPU, torch's LayerNorm keeps statistics in the data type of its input.
    like_input = cfg.model.norm == "layernorm" and cfg.parallel.device == "cpu"
    return SavedTensor("statistic of a norm", (element_size(cfg) if like_input else 4) * residual_rows(cfg))


def _on_residual(cfg: Config, name: str) -> SavedTensor:
    return SavedTensor(name, residual_bytes(cfg))


def _residual_stream(cfg: Config) -> list[SavedTensor]:
    """List inputs and outputs of the norms, their statistics, and dropout masks."""
    m = cfg.model
    # What a norm of outputs puts out is added to the residual and dropped; that of a sum is the next input.
    if m.norm_position in ("post", "sum"):
        names = ["input of the block", "input of the norm after attention"]
        names += ["residual before the MLP", "input of the norm after the MLP"]
    elif m.norm_position == "shared":
        names = ["input of the block", "output of the norm before both"]
    elif m.parallel_residual:  # both norms read the input of the block
        names = ["input of the block", "output of the norm before attention", "output of the norm before the MLP"]
    else:
        names = ["input of the block", "output of the norm before attention"]
        names += ["residual before the MLP", "output of the norm before the MLP"]
    if m.norm_position == "both":
        names += ["input of the norm after attention", "input of the norm after the MLP"]
    rows = [_on_residual(cfg, name) for name in names]
    norms = {"both": 4, "shared": 1}.get(m.norm_position, 2)
    rows += [_statistic(cfg)] * (norms * m.norm_kind.statistics)
    if m.zero_centered_norm:
        rows += [SavedTensor("1 + weight of a norm", 4 * m.hidden_size)] * norms
    return rows + ([SavedTensor("dropout mask", mask_bytes(cfg))] * 2 if m.hidden_dropout else [])
