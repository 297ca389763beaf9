"""What a block keeps for its backward pass: one row per tensor that autograd saves, with its bytes on a rank.

Tensors on the residual stream are cut over the sequence with sequence parallelism; those inside attention and the MLP
are cut over heads and features (Korthikanti et al. 2022, section 4, with fused attention).
"""

from __future__ import annotations

from dataclasses import dataclass

from megalite.config.run import Config


@dataclass(frozen=True)
class Saved:
    """A tensor kept for backward: what it is, and its bytes on a rank per micro-batch."""

    name: str
    bytes: int


def element_size(cfg: Config) -> int:
    """Get the size of a weight or activation in bytes."""
    return 4 if cfg.train.precision == "fp32" else 2


def layer_activations(cfg: Config, recompute: str | None = None) -> int:
    """Compute the bytes that one block keeps per micro-batch until its backward; arguments of `saved_by_block`."""
    return sum(row.bytes for row in saved_by_block(cfg, recompute))


def recomputed_bytes(cfg: Config) -> int:
    """Compute the bytes that recomputing one layer brings back temporarily."""
    if cfg.train.recompute == "none":
        return 0
    # The attention core rotates a copy of its input, which is kept besides.
    return layer_activations(cfg, "none") if cfg.train.recompute == "full" else sum(r.bytes for r in _core(cfg))


def saved_by_block(cfg: Config, recompute: str | None = None) -> list[Saved]:
    """List what one block keeps per micro-batch until its backward.

    Args:
        recompute: overrides the mode of the config.
    """
    mode = recompute or cfg.train.recompute
    if mode == "full":
        return [_on_residual(cfg, "input of the block")]
    return [*_residual_stream(cfg), *(_core(cfg) if mode == "none" else [_packed(cfg)]), *_inside(cfg)]


def deferred_bytes(cfg: Config) -> int:
    """Compute the bytes that one block keeps per micro-batch for weight gradients that a split backward defers.

    These are the inputs of its linear layers, and the gradients of their outputs.
    """
    m = cfg.model
    # With a parallel residual, attention and MLP have the same gradient.
    residual = (3 if m.parallel_residual else 4) * m.hidden_size * _rows(cfg)
    inside = 2 * (m.num_heads + m.kv_heads) * m.head_size + (3 if m.gated else 2) * m.ffn_size
    return element_size(cfg) * (residual + _tokens(cfg) * inside // cfg.parallel.tp)


def mask_bytes(cfg: Config) -> int:
    """Compute the bytes of a dropout mask on the residual stream: bytes on a GPU, the activations' type on a CPU."""
    element = element_size(cfg) if cfg.parallel.device == "cpu" else 1
    return element * _rows(cfg) * cfg.model.hidden_size if cfg.model.hidden_dropout else 0


def _tokens(cfg: Config) -> int:
    return cfg.train.micro_batch_size * cfg.model.seq_len


def _rows(cfg: Config) -> int:
    """Tokens of the residual stream on a rank."""
    return _tokens(cfg) // (cfg.parallel.tp if cfg.sequence_parallel else 1)


def _on_residual(cfg: Config, name: str) -> Saved:
    return Saved(name, element_size(cfg) * _rows(cfg) * cfg.model.hidden_size)


def _cut(cfg: Config, name: str, per_token: int) -> Saved:
    """A tensor with `per_token` bytes over all tensor-parallel ranks."""
    return Saved(name, _tokens(cfg) * per_token // cfg.parallel.tp)


def _residual_stream(cfg: Config) -> list[Saved]:
    """Inputs and outputs of the norms, their statistics, and dropout masks."""
    m = cfg.model
    if m.norm_position == "post":  # what a norm puts out is added to the residual and dropped
        names = ["input of the block", "input of the norm after attention"]
        names += ["residual before the MLP", "input of the norm after the MLP"]
    elif m.parallel_residual:  # both norms read the input of the block
        names = ["input of the block", "output of the norm before attention", "output of the norm before the MLP"]
    else:
        names = ["input of the block", "output of the norm before attention"]
        names += ["residual before the MLP", "output of the norm before the MLP"]
    if m.norm_position == "both":
        names += ["input of the norm after attention", "input of the norm after the MLP"]
    rows = [_on_residual(cfg, name) for name in names]
    norms = 4 if m.norm_position == "both" else 2
    # torch's LayerNorm on a CPU keeps them in the type of its input.
    of_input = m.norm == "layernorm" and cfg.parallel.device == "cpu"
    statistic = Saved("statistic of a norm", (element_size(cfg) if of_input else 4) * _rows(cfg))
    rows += [statistic] * (norms * m.norm_kind.statistics)
    if m.zero_centered_norm:
        rows += [Saved("1 + weight of a norm", 4 * m.hidden_size)] * norms
    return rows + ([Saved("dropout mask", mask_bytes(cfg))] * 2 if m.hidden_dropout else [])


def _inside(cfg: Config) -> list[Saved]:
    """What the output projection and the MLP keep."""
    m, e = cfg.model, element_size(cfg)
    return [
        _cut(cfg, "output of attention", e * m.num_heads * m.head_size),
        _cut(cfg, "MLP before its activation", e * (2 if m.gated else 1) * m.ffn_size),
        _cut(cfg, "MLP after its activation", e * m.ffn_size),
    ]


def _packed(cfg: Config, name: str = "queries, keys and values") -> Saved:
    m = cfg.model
    return _cut(cfg, name, element_size(cfg) * (m.num_heads + 2 * m.kv_heads) * m.head_size)


def _core(cfg: Config) -> list[Saved]:
    """What attention keeps besides its output: its input, the norms of queries and keys, and its statistics."""
    m, e, on_cpu = cfg.model, element_size(cfg), cfg.parallel.device == "cpu"
    q, kv, scores = m.num_heads * m.head_size, m.kv_heads * m.head_size, m.num_heads * m.seq_len
    # FlashAttention follows the lengths of documents; elsewhere each sample has a mask of its own.
    by_document = cfg.data.within_documents and (on_cpu or e == 4 or m.attention_dropout > 0)
    masks = cfg.train.micro_batch_size if cfg.data.within_documents else 1
    masked = by_document or (not cfg.data.within_documents and (m.window or m.seq_len) < m.seq_len)
    rows = []
    if m.qk_norm == "head":
        rows = [_packed(cfg, "queries, keys and values before their norms")]
        rows += [_cut(cfg, "statistics of query and key norms", 4 * (m.num_heads + m.kv_heads))]
    elif m.qk_norm == "full":
        # Over all heads it is plain torch in fp32.
        wide = [_cut(cfg, f"{name} in fp32", 4 * width) for name, width in (("queries", q), ("keys", kv))]
        rows = [_packed(cfg, "queries, keys and values before their norms")] if e == 4 else wide
        rows += [_cut(cfg, f"normalized {name}", e * width) for name, width in (("queries", q), ("keys", kv))]
        rows += [Saved("statistic of a query or key norm", 4 * _tokens(cfg))] * 2
    if m.attention_softcap is not None:  # no fused kernel
        rows += [_cut(cfg, name, e * width) for name, width in (("queries", q), ("keys", kv), ("values", kv))]
        rows += [_cut(cfg, "bounded scores", 4 * scores), _cut(cfg, "probabilities", 4 * scores)]
        rows += [_cut(cfg, "probabilities in the type of the values", e * scores)] if e == 2 else []
        return [*rows, Saved("mask", masks * m.seq_len**2)]
    if m.attention_dropout and on_cpu:  # neither, and torch's own works in fp32
        rows += [_cut(cfg, name, 4 * q) for name in ("scaled queries", "scaled keys", "values")]
        return rows + [_cut(cfg, name, 4 * scores) for name in ("probabilities", "kept probabilities", "dropout mask")]
    rows += [_packed(cfg), _cut(cfg, "log-sum-exp of the scores", 4 * m.num_heads)]
    if q > kv and not on_cpu and (e == 4 or masked):
        # No fused kernel takes grouped heads in fp32 or with a mask.
        rows += [_cut(cfg, "keys, one per query head", e * q), _cut(cfg, "values, one per query head", e * q)]
    return rows + ([Saved("summand of the scores", e * masks * m.seq_len**2)] if masked else [])
