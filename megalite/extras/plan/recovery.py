"""What `--recover` takes in memory and traffic, and how much of the time a run that fails now and then makes progress.

Copies: Wang et al., "Gemini: Fast Failure Recovery in Distributed Training with In-Memory Checkpoints" (2023).
"""

from __future__ import annotations

import math
from collections.abc import Sequence

from megalite.config.run import Config
from megalite.extras.plan.cluster import Cluster
from megalite.extras.plan.memory.ranks import RankMemory
from megalite.extras.plan.memory.states import copies_of
from megalite.extras.plan.time.step import StepTime

# Assumed, on GPUs: from a failure to the next step out of copies in memory, and out of a checkpoint on disk.
RECOVERY_S, RESTART_S = 10.0, 60.0
# Between checkpoints, where --save-every says nothing.
SAVES_S = 900.0


def recovery_rows(cfg: Config, ranks: Sequence[RankMemory]) -> list[tuple[str, str]]:
    """Say in the page of `--dry-run` what copies take; nothing without `--recover`."""
    count = copies_of(cfg)
    if not count:
        return []
    copies = max(rank.copies for rank in ranks)
    size, unit = (2**30, "GiB") if copies >= 2**30 else (2**20, "MiB")
    onward = " and on to another host's" if cfg.run.recover == "host" else ""
    when = "each step" if cfg.run.recover_every == 1 else f"every {cfg.run.recover_every} steps"
    text = (
        f"{cfg.run.recover}: after {when} a copy of {copies / count / size:.2f} {unit} per rank to the host's memory"
        f"{onward}; {copies / size:.2f} {unit} per rank for {count} of them"
    )
    return [("recovery", text)]


def copy_seconds(copy: float, cluster: Cluster) -> tuple[float, float]:
    """Compute the seconds that a rank's copy of so many bytes takes to the host, and from there to another host.

    The ranks of a host send at once, and share its links.
    """
    return copy / cluster.device.host_link, copy / cluster.network


def traffic(cfg: Config, ranks: Sequence[RankMemory], cluster: Cluster, step: float) -> list[str]:
    """Describe memory and traffic of copies on a cluster; nothing without `--recover`.

    Args:
        cfg: the run.
        ranks: memory by pipeline rank.
        cluster: the hosts.
        step: seconds of a step.
    """
    count = copies_of(cfg)
    if not count:
        return []
    copies = max(rank.copies for rank in ranks)
    here = min(cluster.host, cluster.gpus)
    near, far = copy_seconds(copies / count, cluster)
    line = f"--recover {cfg.run.recover}: {copies * here / 1e9:.1f} GB of host memory for the copies of {here} ranks; "
    line += f"one takes {near:.2g} s to the host"
    if cfg.run.recover == "host":
        least = max(1, math.ceil(far / step))
        waits = "no step waits for it" if cfg.run.recover_every >= least else f"steps wait: use --recover-every {least}"
        line += f" and {far:.2g} s to another one: {waits}"
    return [line]


def effective(cfg: Config, step: float, mtbf: float) -> tuple[float, float]:
    """Compute the share of the time that is progress, with copies in memory and with restarts from disk.

    A failure costs what the run needs to go on, and the work since the last copy (at most: --recover-every steps) or
    checkpoint (on average: half the time between two).

    Args:
        cfg: the run.
        step: seconds of a step.
        mtbf: seconds between two failures anywhere in the run, on average.
    """
    saves = cfg.run.save_every * step or SAVES_S
    lost = RECOVERY_S + cfg.run.recover_every * step, RESTART_S + saves / 2
    recovers, restarts = (max(0.0, 1 - seconds / mtbf) for seconds in lost)
    return recovers, restarts


def effective_text(cfg: Config, time: StepTime, mtbf: float) -> str:
    """Describe `effective` in a line; `mtbf` in hours."""
    step, every = time.total, cfg.run.recover_every
    recovers, restarts = effective(cfg, step, mtbf * 3600)
    mode = "process" if cfg.run.recover == "none" else cfg.run.recover
    saves = f"--save-every {cfg.run.save_every}" if cfg.run.save_every else f"a save every {SAVES_S / 60:.0f} min"
    return (
        f"a failure every {mtbf:g} hours: {recovers:.1%} of the time is progress with --recover {mode} "
        f"({RECOVERY_S:.0f} s and {every} step{'s' * (every > 1)} of {step:.3g} s each), {restarts:.1%} with restarts "
        f"({RESTART_S:.0f} s, {saves}); seconds are assumed"
    )
