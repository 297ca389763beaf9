"""Time of a layer of experts for one micro-batch, beside what every block takes: their products, and the tokens' way.

Tokens go to their experts and their outputs come back, forward and backward: a rank sends 4 e k x h (ep - 1) / ep bytes
for its x tokens, each sent to k experts, or 4 e x h (ep - 1) where all tokens are gathered. What is sent lies source
after source on arrival: rows are sorted by expert there and back, in both passes. The busiest rank sets the pace
(`parts.ffn.experts.imbalance`).
"""

from __future__ import annotations

from megalite.core.options.recompute import Extent
from megalite.core.parts.ffn.experts import experts_tp, rows_received, rows_sent
from megalite.core.parts.options.expert_options import choose_dispatch
from megalite.extras.plan.time.block import Block, Workload
from megalite.runtime.options.run import Config


def experts_time(cfg: Config, load: Workload, recomputed: Extent) -> Block:
    """Compute the time of the experts of one layer, in a block that recomputes so much."""
    m = cfg.model
    p = cfg.parallel
    rates = load.rates
    assert m.num_experts is not None
    local, width = m.num_experts // p.ep, m.expert_ffn_size // experts_tp(p)
    rows = rows_received(cfg)
    each = max(1, round(rows / local))
    shapes = [((2 if m.gated else 1) * width, m.hidden_size), (m.hidden_size, width)]
    products, products_back = map(sum, zip(*(rates.products(each, n, k, local) for n, k in shapes)))
    gathers = choose_dispatch(m, p)[0] == "allgather"
    sorts = 0.0 if gathers or p.ep == 1 else 2 * 2 * rates.element * rows * m.hidden_size / rates.memory
    rows = rows_sent(cfg) * p.ep // m.moe_topk if gathers else rows
    sent = rates.element * rows * m.hidden_size * (p.ep - 1) / p.ep
    way = 2 * rates.transfer(sent, p.ep, experts_tp(p), 1, exchange=not gathers)
    # Whole experts take shards of the sequence as they are: half of the block's traffic over tp is not needed.
    spares = experts_tp(p) < p.tp and not m.moe_shared_ffn_size
    spared, spared_back = (traffic / 2 if spares else 0.0 for traffic in load.tp_traffic())
    forward = products + sorts + way - spared
    again = forward if recomputed is Extent.BLOCK else 0.0
    return Block(
        gemm=products + products_back,
        elementwise=2 * sorts,
        recompute=again,
        tp=-spared - spared_back,
        ep=2 * way,
        forward=forward,
        backward=products_back + sorts + way - spared_back + again,
    )
