"""Below which speed of a disk or store `--save-code` makes saves shorter: it costs processor time and spares bytes."""

from __future__ import annotations

from megalite.extras.plan.cluster import Cluster
from megalite.runtime.options.run import Config

# Measured on one core of an AMD EPYC (docs/checkpoints.md): bytes/s that a rank codes, and the share that is left.
CODING, LEFT = 370e6, 0.81


def break_even(ranks: int) -> float:
    """Return the bytes/s of a host at which a coded save takes as long as a plain one.

    Each rank codes its bytes, then they are written: n / (ranks · CODING) + LEFT · n / speed = n / speed.

    Args:
        ranks: number of ranks on the host.
    """
    return (1 - LEFT) * ranks * CODING


def code_lines(cfg: Config, cluster: Cluster) -> list[str]:
    """Say where `--save-code` pays on a cluster; nothing without `--save-every`."""
    if not cfg.run.save_every:
        return []
    here = min(cluster.host, cluster.gpus)
    return [
        f"--save-code planes-zstd (about {LEFT:g} of the bytes) makes saves shorter where the {here} ranks of a host "
        f"write or upload less than {break_even(here) / 1e9:.2g} GB/s together; on a faster disk leave it off"
    ]
