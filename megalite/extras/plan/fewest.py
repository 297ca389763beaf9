"""The fewest GPUs that hold a model and train it on so many tokens within so many days."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any, NamedTuple

from megalite.core.base.errors import UserError
from megalite.core.options.names import dashed
from megalite.extras.plan.cluster import Cluster
from megalite.extras.plan.outlook import pace
from megalite.extras.plan.report import mfu
from megalite.extras.plan.search import Candidate, pick, search
from megalite.extras.plan.time.step import model_flops
from megalite.runtime.options.run import Config

DAY = 86400.0


class Fewest(NamedTuple):
    """An answer for one type of GPU.

    Attributes:
        cluster: the type, with the number found, or with the largest number tried.
        layout: the layout that fits and ends in time; None if no number up to that does.
    """

    cluster: Cluster
    layout: Candidate | None

    def as_json(self, tokens: float) -> dict[str, Any]:
        """Return the answer's figures by name."""
        told: dict[str, Any] = {"gpu": self.cluster.device.name, "gpus": self.cluster.gpus, "found": False}
        if self.layout is not None:
            days = tokens / pace(self.layout) / DAY
            told |= {"found": True, "days": days, "gpu_hours": days * 24 * self.cluster.gpus}
            told |= {"mem_gb": self.layout.worst.total / 1e9, "mfu": mfu(self.layout, self.cluster)}
            told |= {"dp": self.layout.grid["dp"], **self.layout.options}
        return told

    def text(self, tokens: float, days: float) -> str:
        """Return the answer in one line."""
        name, gpus = self.cluster.device.name, self.cluster.gpus
        if self.layout is None:
            return f"{name:<12} no number up to {gpus:,} fits and ends within {days:g} days"
        told = self.as_json(tokens)
        names = ("dp", "cp", "tp", "pp", "vp", "ep", "zero", "micro_batch_size", "recompute", "schedule")
        layout = " ".join(f"{dashed(name)} {told[name]}" for name in names) + " moe-overlap" * told["moe_overlap"]
        return (
            f"{name:<12}{gpus:>6,} GPUs {told['days']:>7.1f} days {told['gpu_hours']:>12,.0f} GPU hours "
            f"{told['mem_gb']:>6.1f} GB  MFU {told['mfu']:5.1%}  {layout}"
        )


def fewest(cfg: Config, cluster: Cluster, held: Iterable[str], tokens: float, days: float) -> Fewest:
    """Search growing numbers of one type of GPU, up to that of `cluster`, for the first that fits and ends in time.

    Args:
        held: names of options in `LAYOUT` that keep their values.
        tokens: length of the training.
        days: time for it.
    """
    in_time = tokens / (days * DAY)
    # No layout does more than the peak, which in FP8 is twice that of bf16.
    peak = cluster.device.peak * (2 if cfg.train.fp8 != "off" else 1)
    bound = model_flops(cfg) / (cfg.train.global_batch_size * cfg.model.seq_len) * in_time / peak
    for gpus in sizes(cluster):
        if gpus >= bound:
            where = cluster.with_gpus(gpus)
            try:
                found = search(cfg, where, held)
            except UserError:
                continue  # nothing divides the batch and this number
            best = pick([layout for layout in found if pace(layout) >= in_time])
            if best is not None:
                return Fewest(where, best)
    return Fewest(cluster, None)


def sizes(cluster: Cluster) -> Iterator[int]:
    """Yield the numbers that are tried: powers of two within an NVLink domain, and 1, 2, 3, 4, 6, 8, 12 … domains."""
    domain = min(cluster.domain, cluster.gpus)
    within = [2**i for i in range(domain.bit_length()) if 2**i < domain]
    domains = sorted({1, *(n for i in range(cluster.gpus.bit_length()) for n in (2 << i, 3 << i))})
    yield from (n for n in [*within, *(domain * n for n in domains)] if n <= cluster.gpus)
