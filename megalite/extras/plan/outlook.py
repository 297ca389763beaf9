"""What a plan means for a training of many tokens: its pace, days, GPU hours and cost, and how sure the figures are."""

from __future__ import annotations

import math

from megalite.base.errors import require
from megalite.extras.plan.cluster import Cluster
from megalite.extras.plan.search import Candidate

# Mean absolute error of the step times in docs/plan.md; a test computes it again.
PUBLISHED_ERROR = 0.039
_UNITS = {"K": 1e3, "M": 1e6, "B": 1e9, "T": 1e12}


def read_tokens(text: str) -> float:
    """Read a number of tokens: 1e12, 300B, 1.5T.

    Raises:
        UserError: it is no positive number.
    """
    unit = _UNITS.get(text[-1:].upper(), 1.0)
    try:
        tokens = float(text[:-1] if unit > 1 else text) * unit
    except ValueError:
        tokens = math.nan
    require(
        0 < tokens < 1e18, f"--tokens {text}", "must be a number of tokens, more than 0", "write 1e12, 300B or 1.5T"
    )
    return tokens


def outlook(best: Candidate, cluster: Cluster, tokens: float | None, price: float | None) -> list[str]:
    """Describe what a layout does in a second and, for a number of tokens, in days, GPU hours and money.

    Args:
        tokens: length of the training; None: its pace only.
        price: of a GPU hour, in any currency; None: no cost.

    Raises:
        UserError: a price without tokens, or a negative one.
    """
    if price is not None:
        require(tokens is not None, f"--price {price}", "requires the length of the training", "give --tokens 1e12")
        require(0 <= price < math.inf, f"--price {price}", "must be at least 0", "give the price of a GPU hour")
    pace = best.cfg.train.global_batch_size * best.cfg.model.seq_len / best.time.total
    lines = [f"{pace:,.0f} tokens/s"]
    if tokens is not None:
        hours = tokens / pace / 3600 * cluster.gpus
        cost = "" if price is None else f", {hours * price:,.0f} at {price:g} per GPU hour"
        lines[0] += f": {tokens:.4g} tokens take {tokens / pace / 86400:,.1f} days, {hours:,.0f} GPU hours{cost}"
    return lines


def batch_note(samples: int) -> str:
    """Say that nobody gave the batch size, on which the whole plan depends."""
    return f"note: --global-batch-size is not given; {samples} samples per step is only the default, give your own"


def reliability(measured: bool) -> str:
    """Say what the figures are; `measured`: by a calibration of this machine."""
    if measured:
        return "predicted from the measurements of --calibration, without failures, evaluations and checkpoints"
    return (
        f"predicted, not measured: {PUBLISHED_ERROR:.1%} mean error on published runs of other stacks, none of them "
        "megalite's; without failures, evaluations and checkpoints"
    )
