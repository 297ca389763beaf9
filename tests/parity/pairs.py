"""Models, and rows of the grid, of the stages that train on pairs of documents: preferences and rewards."""

from __future__ import annotations

from typing import Any

from tests.parity import jobs
from tests.parity.harness import Shape, ranks_of

LLAMA, MUP = jobs.llama(init_std=0.15), jobs.llama(init_std=0.15, mup_base_width=8)
ROUNDED = ((LLAMA, "bf16", [{"tp": 2}, {"cp": 2}]),)


def rows_of_pairs(data: dict[str, Any]) -> dict[Shape, list[Any]]:
    """Rows that both stages have."""
    return {
        ranks_of(4, pp=2, vp=2): [(LLAMA, 2, {}, data)],
        ranks_of(4, tp=2, pp=2): [(LLAMA, 1, {"schedule": "zb-h1"}, data)],
        ranks_of(2, zero_whole_below=0): [
            (LLAMA, 1, {}, {**data, "offload": "optimizer"}),
            (LLAMA, 3, {}, {**data, "offload": "optimizer+params"}),
            (LLAMA, 1, {}, {**data, "offload": "activations", "recompute": "full"}),
        ],
        ranks_of(4, tp=2): [(MUP, 1, {}, data)],
    }
