"""What mixers send where ranks share samples (`--cp`): bytes of each variant, and the seconds that nothing hides.

Bytes are those of the table in docs/long_sequences.md; what a real step sends is the same (`megalite estimate`).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, NamedTuple

from megalite.core.model.kinds import MIXERS
from megalite.core.model.partition import block_work
from megalite.core.options.choices import BlockKind
from megalite.core.options.model import ModelConfig
from megalite.core.options.recompute import MODES, Extent
from megalite.core.parts.options.context_parallel import choose_comm, head_ranks
from megalite.extras.plan.time.rates import Rates
from megalite.runtime.options.run import Config


@dataclass(frozen=True)
class Context:
    """How samples are shared.

    Attributes:
        ranks: size of cp.
        comm: value of `--cp-comm` in effect.
        neighbors: number of ranks that exchange tokens for heads; 1 without a2a.
        again: whether backward exchanges outputs again, and copied keys; see `HeadExchange`.
    """

    ranks: int = 1
    comm: str = "ring"
    neighbors: int = 1
    again: bool = True

    @classmethod
    def of(cls, cfg: Config) -> Context:
        """Describe cp of a run."""
        m, p = cfg.model, cfg.parallel
        comm, _ = choose_comm(m, p, cfg.data.within_documents)
        again = MODES[cfg.train.recompute].most is Extent.NOTHING
        return cls(p.cp, comm, head_ranks(m, p) if "a2a" in comm else 1, again)


class Message(NamedTuple):
    """Messages of one pass through a block.

    Attributes:
        kind: how they travel: a hop to the next rank is under way beside attention.
        sent: bytes that a rank sends in all of them.
        number: number of them.
        ranks: number of ranks that take part.
        inner: cp ranks between one of these and the next.
    """

    kind: Literal["exchange", "gather", "hop"]
    sent: float
    number: int
    ranks: int
    inner: int


def messages(
    model: ModelConfig, kind: BlockKind, context: Context, tp: int, tokens: int, element: int
) -> tuple[list[Message], list[Message]]:
    """List what a block sends per micro-batch, forward and backward.

    Args:
        tokens: those of a micro-batch on a rank.
        element: bytes of an activation; gradients of gathered keys and values have 4.
    """
    ranks, mixer = context.ranks, MIXERS[kind.mixer]
    if mixer.passes_states:
        passed = mixer.passed(model, tokens * ranks // model.seq_len, ranks, tp, element)
        before = Message("gather", passed[0], 1, ranks, 1)
        there, back = (Message("exchange", size, 1, ranks, 1) for size in passed[1:])
        return [before, there, back], [back, there, before]
    near, far = context.neighbors, ranks // context.neighbors
    heads, kv_heads = model.num_heads / tp, model.kv_heads / tp
    groups = max(kv_heads, near)
    width = tokens * model.key_size
    forward, backward = list[Message](), list[Message]()
    if near > 1:
        # q and out, k and v; in backward all of their gradients.
        there_and_back = 2 * (heads + groups)
        again = heads + (heads + 2 * groups if near > kv_heads else 0) if context.again else 0
        forward, backward = (
            [Message("exchange", element * width * each * (near - 1) / near, 2, near, 1)]
            for each in (there_and_back, there_and_back + again)
        )
    if far > 1:
        # In the neighbors' hands, one rank's keys are those of all neighbors and of a share of the heads.
        sent = 2 * width * groups
        if model.kv_lora_rank is not None:
            sent = tokens * (model.kv_lora_rank + model.rotary_dim)
        keys, gradients = (size * sent for size in (element, 4))
        way: Literal["hop", "gather"] = "hop" if "ring" in context.comm else "gather"
        forward += [Message(way, keys * (far - 1), far - 1 if way == "hop" else 1, far, near)]
        home = far if way == "hop" else far - 1  # gradients go round the whole ring
        backward += [forward[-1]._replace(), Message(way, gradients * home, home if way == "hop" else 1, far, near)]
    return forward, backward


def waiting(
    model: ModelConfig,
    kind: BlockKind,
    context: Context,
    tp: int,
    tokens: int,
    compute: tuple[float, float],
    rates: Rates,
    overlap: bool,
) -> tuple[float, float]:
    """Compute the seconds that a block waits for messages, forward and backward.

    Args:
        compute: seconds of attention in both passes, beside which a ring passes on.
        overlap: whether messages run beside computation.
    """
    if context.ranks == 1 or not block_work(model, kind).attention:
        return 0.0, 0.0
    passes = messages(model, kind, context, tp, tokens, rates.element)
    out = []
    for sent, beside in zip(passes, compute):
        times = {m.kind: 0.0 for m in sent}
        for m in sent:
            times[m.kind] += rates.transfer(m.sent, m.ranks, m.inner * tp, m.number, m.kind == "exchange")
        hops = times.pop("hop", 0.0)
        ring = context.ranks // context.neighbors
        # A hop hides behind the block of keys before it; the last block hides nothing.
        hidden = beside * (ring - 1) / ring if overlap else 0.0
        out.append(sum(times.values()) + max(0.1 * hops, hops - hidden))
    return out[0], out[1]
