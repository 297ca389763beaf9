"""Grouped-query attention (Ainslie et al. 2023), heads split over tensor-parallel ranks."""

from __future__ import annotations

from typing import TYPE_CHECKING

from megalite.core.model.kinds import Mixer
from megalite.core.model.saved import SavedTensor, element_size, inside, tokens
from megalite.core.model.specs import linear, norm_init, out_std
from megalite.core.options.model import ModelConfig
from megalite.core.options.step import StepConfig
from megalite.core.parts.options.context_parallel import LONG_ON_CPU, choose_comm, head_ranks
from megalite.core.sharding import ParamSpec

if TYPE_CHECKING:
    from torch import nn

    from megalite.core.model.layers import Layers


class GroupedQueryAttention(Mixer):
    """qkv_proj -> q/k norm -> rope -> scaled dot product -> o_proj, with an optional window and cap of scores."""

    feeds_one_product = True

    def specs(self, cfg: ModelConfig, name: str) -> list[ParamSpec]:
        hidden = cfg.hidden_size
        q = cfg.num_heads * cfg.head_size
        kv = cfg.kv_heads * cfg.head_size
        gated = cfg.attention_output_gate
        parts = (q * (1 + gated), kv, kv)
        # Of each head, its gate follows its query.
        turns = ((cfg.head_size, cfg.head_size), (), ()) if gated else ()
        qkv = linear(
            f"{name}.qkv_proj", sum(parts), hidden, 0, bias=cfg.qkv_bias, std=cfg.init_std, parts=parts, turns=turns
        )
        norms = [] if cfg.qk_norm in ("none", "l2") else _qk_norms(cfg, name, q, kv)
        if cfg.attention_sinks:
            norms.append(
                ParamSpec(f"{name}.sinks", (cfg.num_heads,), (("tp", 0),), std=cfg.init_std, weight_decay=False)
            )
        return [*qkv, *norms, *linear(f"{name}.o_proj", hidden, q, 1, bias=cfg.o_bias, std=out_std(cfg))]

    def module(self, layers: Layers, index: int, recompute_core: bool) -> nn.Module:
        from megalite.core.parts.mixers.gqa.attention import Attention

        return Attention(layers, index, recompute_core)

    def saved(self, cfg: StepConfig) -> list[SavedTensor]:
        return [inside(cfg, "output of attention", element_size(cfg) * cfg.model.num_heads * cfg.model.head_size)]

    def core(self, cfg: StepConfig) -> list[SavedTensor]:
        """List what attention keeps besides its output: its input, the norms of queries and keys, its statistics."""
        m = cfg.model
        e = element_size(cfg)
        on_cpu = cfg.parallel.device == "cpu"
        q = m.num_heads * m.head_size
        kv = m.kv_heads * m.head_size
        scores = m.num_heads * m.seq_len
        # FlashAttention follows windows and the lengths of documents; elsewhere each sample has a mask of its own.
        documents = cfg.within_documents or any(map(m.chunk_of, range(m.num_layers)))
        masks = cfg.train.micro_batch_size if documents else 1
        masked = (on_cpu or e == 4) and (documents or (m.window or m.seq_len) < m.seq_len)
        gated = ["gates", "output before the gate"] if m.attention_output_gate else []
        rows = [inside(cfg, name, e * q) for name in gated]
        if m.qk_norm == "head":
            rows += [_packed(cfg, "queries, keys and values before their norms")]
            rows += [inside(cfg, "statistics of query and key norms", 4 * (m.num_heads + m.kv_heads))]
        elif m.qk_norm == "full":
            # Over all heads it is plain torch in fp32.
            wide = [inside(cfg, f"{name} in fp32", 4 * width) for name, width in (("queries", q), ("keys", kv))]
            rows += [_packed(cfg, "queries, keys and values before their norms")] if e == 4 else wide
            rows += [inside(cfg, f"normalized {name}", e * width) for name, width in (("queries", q), ("keys", kv))]
            rows += [SavedTensor("statistic of a query or key norm", 4 * tokens(cfg))] * 2
        elif m.qk_norm == "l2":
            for name, heads in (("queries", m.num_heads), ("keys", m.kv_heads)):
                rows.append(inside(cfg, f"normalized {name}", e * heads * m.head_size))
                rows.append(inside(cfg, f"statistics of the norm of {name}", 4 * heads))
                rows.append(SavedTensor("ones for its weight", e * m.head_size))
        comm, _ = choose_comm(m, cfg.parallel, cfg.within_documents)
        spread = cfg.parallel.cp // (head_ranks(m, cfg.parallel) if "a2a" in comm else 1)
        long = masked and on_cpu and m.seq_len >= LONG_ON_CPU and m.attention_softcap is None
        # Block by block, masks and scores are made again.
        if spread > 1 or m.attention_sinks or m.attention_dropout or long:
            return [*rows, *_read(cfg), inside(cfg, "log-sum-exp of the scores", 4 * m.num_heads)]
        if m.attention_softcap is not None:  # no fused kernel
            rows += [inside(cfg, name, e * width) for name, width in (("queries", q), ("keys", kv), ("values", kv))]
            rows += [inside(cfg, "bounded scores", 4 * scores), inside(cfg, "probabilities", 4 * scores)]
            rows += [inside(cfg, "probabilities in the type of the values", e * scores)] if e == 2 else []
            return [*rows, SavedTensor("mask", masks * m.seq_len**2)]
        rows += [*_read(cfg), inside(cfg, "log-sum-exp of the scores", 4 * m.num_heads)]
        if q > kv and not on_cpu and (e == 4 or masked):
            # No fused kernel takes grouped heads in fp32 or with a mask.
            each = e * m.num_heads * m.key_size
            rows += [inside(cfg, f"{name}, one per query head", each) for name in ("keys", "values")]
        return rows + ([SavedTensor("summand of the scores", e * masks * m.seq_len**2)] if masked else [])

    def core_input(self, cfg: StepConfig) -> list[SavedTensor]:
        m = cfg.model
        gates = inside(cfg, "gates", element_size(cfg) * m.num_heads * m.head_size)
        return [SavedTensor("input of the core", _packed(cfg).bytes + gates.bytes * m.attention_output_gate)]

    def touched(self, cfg: ModelConfig) -> int:
        return 4 * ((1 + cfg.attention_output_gate) * cfg.num_heads + cfg.kv_heads) * cfg.head_size

    def token_work(self, cfg: ModelConfig, layer: int) -> tuple[float, float]:
        per_key = 2 * cfg.num_heads * cfg.head_size
        if (chunk := cfg.chunk_of(layer)) is not None:
            chunks, rest = divmod(cfg.seq_len, chunk)
            keys = (chunks * chunk**2 + rest**2) / cfg.seq_len
            return per_key * keys, per_key * keys / 2
        keys = min(cfg.window_of(layer) or cfg.seq_len, cfg.seq_len)
        # The first positions of a sequence see less than a window: w^2 / 2 of s w pairs are missing.
        causal = keys - keys * keys / (2 * cfg.seq_len)
        return per_key * keys, per_key * causal


def _qk_norms(cfg: ModelConfig, name: str, q: int, kv: int) -> list[ParamSpec]:
    """Norms of queries and keys. Per head, a rank sees its own heads only: a partial gradient, always."""
    if cfg.qk_norm == "head":
        shape = (cfg.head_size,)
        return [
            ParamSpec(f"{name}.{n}.weight", shape, init=norm_init(cfg), weight_decay=False, partial=("tp",))
            for n in ("q_norm", "k_norm")
        ]
    return [
        ParamSpec(f"{name}.{n}.weight", (size,), (("tp", 0),), init=norm_init(cfg), weight_decay=False)
        for n, size in (("q_norm", q), ("k_norm", kv))
    ]


def _read(cfg: StepConfig) -> list[SavedTensor]:
    """List what kernels of attention keep of their input, and with columns of positions of an output that is cut."""
    m = cfg.model
    if m.key_size == m.head_size:
        return [_packed(cfg)]
    heads = {"queries": m.num_heads, "keys": m.kv_heads, "values": m.kv_heads, "output before the cut": m.num_heads}
    return [inside(cfg, name, element_size(cfg) * n * m.key_size) for name, n in heads.items()]


def _packed(cfg: StepConfig, name: str = "queries, keys and values") -> SavedTensor:
    m = cfg.model
    return inside(cfg, name, element_size(cfg) * (m.num_heads + 2 * m.kv_heads) * m.head_size)


MIXER = GroupedQueryAttention()
