"""How attention reaches the tokens of other ranks: what fits a model, and what `--cp-comm auto` chooses."""

from __future__ import annotations

from typing import TYPE_CHECKING

from megalite.core.base.errors import require
from megalite.core.options.part import PartRules

if TYPE_CHECKING:
    from megalite.core.options.model import ModelConfig
    from megalite.core.options.parallel import ParallelConfig
    from megalite.core.options.step import StepConfig

_TOKENS_TO_HIDE = 20_000
"""Tokens on a rank, times key heads per query head, from which a hop of a ring hides behind a block's products.

That is element size x rate of products / bandwidth, for 2 bytes, 500 TFLOP/s and 50 GB/s.
"""

LONG_ON_CPU = 8192
"""Tokens of a sample from which attention with a mask goes block by block on a CPU."""


def head_ranks(m: ModelConfig, p: ParallelConfig) -> int:
    """Return the largest number of neighbors on cp that can exchange tokens for heads."""
    heads, kv_heads = m.num_heads // p.tp, m.kv_heads // p.tp

    def fits(ranks: int) -> bool:
        # With more ranks than key heads, each has a copy of one.
        return heads % ranks == 0 and (kv_heads % ranks == 0 or ranks % kv_heads == 0)

    return max(n for n in range(1, p.cp + 1) if p.cp % n == 0 and fits(n))


def choose_comm(m: ModelConfig, p: ParallelConfig, documents: bool) -> tuple[str, str]:
    """Return the value of `--cp-comm` in effect, and why; `documents`: whether attention stays within documents."""
    if p.cp_comm != "auto":
        return p.cp_comm, "as requested"
    if m.kv_lora_rank is not None:
        return "gather", "latents are narrower than keys and values"
    group = m.num_heads / m.kv_heads
    if head_ranks(m, p) == p.cp and p.cp > group + 1:
        return (
            "a2a",
            f"fewer bytes than keys and values: cp {p.cp} is more than {group:g} query heads per key head + 1",
        )
    masked = documents or any(m.window_of(layer) or m.chunk_of(layer) for layer in range(m.num_layers))
    tokens = m.seq_len // p.cp
    if not masked and tokens * group >= _TOKENS_TO_HIDE:
        return "ring", f"the {tokens} tokens of a rank are enough work to hide a message behind"
    return "gather", "documents and windows leave blocks out" if masked else f"{tokens} tokens on a rank are few"


class ContextParallelRules(PartRules["ModelConfig", "StepConfig"]):
    """Ranks that share samples."""

    def check(self, cfg: StepConfig) -> None:
        m, p, documents = cfg.model, cfg.parallel, cfg.within_documents
        if p.cp == 1:
            return
        sharded = p.sequence_parallel and p.tp > 1
        parts = 2 * p.cp * (p.tp if sharded else 1)
        words = f"2 x cp {p.cp}" + f" x tp {p.tp}" * sharded
        require(
            m.seq_len % parts == 0,
            f"--seq-len {m.seq_len}",
            f"must be divisible by {words} = {parts}: a rank holds a part of the head and one of the tail",
            f"use {max(1, round(m.seq_len / parts)) * parts}, or lower --cp",
        )
        comm, _ = choose_comm(m, p, documents)
        heads, kv_heads = m.num_heads // p.tp, m.kv_heads // p.tp
        require(
            comm != "a2a" or head_ranks(m, p) == p.cp,
            f"--cp-comm a2a with --cp {p.cp}",
            f"cannot deal out the {heads} query heads and {kv_heads} key heads of a tensor-parallel rank evenly",
            "use --cp-comm a2a+gather, or gather",
        )


PART = ContextParallelRules()
