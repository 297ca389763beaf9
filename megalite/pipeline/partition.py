"""Which layers each pipeline stage holds: every layer exactly once, balanced by cost."""

from __future__ import annotations

from megalite.errors import UserError


def split_layers(num_layers: int, num_stages: int, first: float = 0.0, last: float = 0.0) -> list[range]:
    """Contiguous layer ranges, one a stage, that minimise the cost of the dearest stage.

    Args:
        num_layers: transformer blocks; each costs 1.
        num_stages: pp x vp.
        first, last: extra cost, in layers, of the first stage (embedding) and the last (output layer and loss).

    Returns:
        `num_stages` ranges that cover 0 .. num_layers - 1 in order; every stage has a layer.
    """
    if num_stages > num_layers:
        raise UserError(
            f"{num_stages} pipeline stages for {num_layers} layers",
            "every stage needs a layer",
            "lower --pp or --vp, or raise --num-layers",
        )
    counts = [1] * num_stages
    extra = [0.0] * num_stages
    extra[0] += first
    extra[-1] += last
    for _ in range(num_layers - num_stages):
        # Layers are alike, so giving each to the stage that is cheapest with it is optimal. Ties: the earliest.
        cheapest = min(range(num_stages), key=lambda s: counts[s] + extra[s])
        counts[cheapest] += 1
    starts = [sum(counts[:s]) for s in range(num_stages)]
    return [range(a, a + n) for a, n in zip(starts, counts)]
