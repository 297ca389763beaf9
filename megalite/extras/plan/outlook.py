"""What a plan means for a training of many tokens: its pace, days, GPU hours and cost, and how sure the figures are."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence

from megalite.core.base.errors import require
from megalite.extras.plan.cluster import Cluster
from megalite.extras.plan.search import Candidate, pick, search
from megalite.runtime.data import texts_of
from megalite.runtime.options.fields import with_options
from megalite.runtime.options.run import Config

# Mean absolute errors of the step times in docs/plan.md; a test computes them again.
PUBLISHED_ERROR, PUBLISHED_ERROR_OF_EXPERTS = 0.039, 0.400
# Hugging Face's tokenizers with a BPE of some thousand entries; see docs/data.md.
TOKENS_PER_CORE = 300_000
_WORTH_A_NOTE = 0.03
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
        price: price of a GPU hour, in any currency; None: no cost.

    Raises:
        UserError: a price without tokens, or a negative one.
    """
    if price is not None:
        require(tokens is not None, f"--price {price}", "requires the length of the training", "give --tokens 1e12")
        require(0 <= price < math.inf, f"--price {price}", "must be at least 0", "give the price of a GPU hour")
    lines = [f"{pace(best):,.0f} tokens/s"]
    if tokens is not None:
        hours = tokens / pace(best) / 3600 * cluster.gpus
        cost = "" if price is None else f", {hours * price:,.0f} at {price:g} per GPU hour"
        lines[0] += f": {tokens:.4g} tokens take {tokens / pace(best) / 86400:,.1f} days, {hours:,.0f} GPU hours{cost}"
    return lines


def cores_of_text(best: Candidate, cluster: Cluster, words: Sequence[str]) -> list[str]:
    """Say how many cores tokenize text as fast as a layout trains on it; nothing where `--data` names none."""
    if not texts_of(words):
        return []
    cores = pace(best) / TOKENS_PER_CORE
    alone = f", {cores:.1f} without a --cache-dir that the hosts share" if cluster.hosts > 1 else ""
    rate = f"a core makes some {TOKENS_PER_CORE:,} tokens/s"
    return [f"text as data: tokenizing takes {cores / cluster.hosts:.1f} cores of each host{alone} ({rate})"]


def batch_note(samples: int) -> str:
    """Say that nobody gave the batch size, on which the whole plan depends."""
    return f"note: --global-batch-size is not given; {samples} samples per step is only the default, give your own"


def pace(layout: Candidate) -> float:
    """Return the tokens per second of a layout."""
    return layout.cfg.train.global_batch_size * layout.cfg.model.seq_len / layout.time.total


def rounder_batch(best: Candidate, cfg: Config, cluster: Cluster, fixed: Iterable[str]) -> list[str]:
    """Name a batch size within 5 % that more layouts divide, if its pick does more tokens per second than `best`."""
    samples = cfg.train.global_batch_size
    near = range(math.ceil(0.95 * samples), math.floor(1.05 * samples) + 1)
    other = max(near, key=lambda n: (math.gcd(n, cluster.gpus), -abs(n - samples)))
    if cfg.train.batch_size_schedule or math.gcd(other, cluster.gpus) == math.gcd(samples, cluster.gpus):
        return []
    faster = pick(search(with_options(cfg, {"global_batch_size": other}), cluster, fixed))
    gain = 0.0 if faster is None else pace(faster) / pace(best) - 1
    rule = f"{samples} samples divide badly over {cluster.gpus} GPUs"
    return [f"note: {rule}: with {other}, {gain:.0%} more tokens/s"] if gain >= _WORTH_A_NOTE else []


def reliability(cfg: Config) -> str:
    """Say how sure the figures are."""
    if cfg.run.calibration is not None:
        return "predicted from the measurements of --calibration, without failures, evaluations and checkpoints"
    error, kind = (
        (PUBLISHED_ERROR, "") if cfg.model.num_experts is None else (PUBLISHED_ERROR_OF_EXPERTS, "with experts ")
    )
    return (
        f"predicted, not measured: {error:.1%} mean error on published runs {kind}of other stacks, none of them "
        "megalite's; without failures, evaluations and checkpoints"
    )
