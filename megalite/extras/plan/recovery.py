"""What `--recover` takes in memory and traffic, and how much of the time a run that fails now and then makes progress.

Copies: Wang et al., "Gemini: Fast Failure Recovery in Distributed Training with In-Memory Checkpoints" (2023).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace

from megalite.core.base.errors import require
from megalite.core.mesh.grid import Grid
from megalite.extras.plan.cluster import Cluster
from megalite.extras.plan.lost_hosts import grid_without
from megalite.extras.plan.memory.ranks import RankMemory, memory_per_rank
from megalite.extras.plan.memory.states import copies_of
from megalite.runtime.options.run import Config
from megalite.runtime.recover.interval import steps_between

# Assumed, on GPUs: from a failure to the next step out of copies in memory, and out of a checkpoint on disk.
RECOVERY_S, RESTART_S = 10.0, 60.0
# Assumed with --elastic: until a lost host is back.
RETURN_S = 3600.0
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
    every = cfg.run.recover_every
    when = {0: "as many steps as they take", 1: "each step"}.get(every, f"every {every} steps")
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


def waits_for(near: float, cluster: Cluster, step: float) -> float:
    """Compute the seconds that a run waits for a copy to the host, which a GPU makes beside the next step."""
    return near if cluster.device.name == "cpu" else max(0.0, near - step)


def steps_per_copy(cfg: Config, waited: float, step: float) -> int:
    """Return `--recover-every`, or what a run would choose that waits so many seconds for a copy."""
    return cfg.run.recover_every or steps_between(waited / step)


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
    line = f"--recover {cfg.run.recover}: at most {copies * here / 1e9:.1f} GB of host memory for the copies of {here} "
    waited = waits_for(near, cluster, step)
    line += f"ranks; one takes {near:.2g} s to the host, for which each step waits "
    every = steps_per_copy(cfg, waited, step)
    line += f"{waited / every:.2g} s"
    if cfg.run.recover == "host":
        least = max(1, math.ceil((far - waited) / step))
        waits = "no step waits for it" if every >= least else f"steps wait: use --recover-every {least}"
        line += f"; it takes {far:.2g} s to another one: {waits}"
    return [line]


def check_failures(cfg: Config, cluster: Cluster, mtbf: float | None) -> None:
    """Refuse what no run can do.

    Raises:
        UserError: copies for another host, where there is one; or no time between failures.
    """
    alone = cfg.run.recover == "host" and cluster.gpus <= cluster.host
    require(not alone, "--recover host", "needs ranks on several hosts", "use --recover process")
    if mtbf is not None:
        require(0 < mtbf < math.inf, f"--mtbf {mtbf}", "must be above 0", "give the hours from one failure to the next")


def effective(cfg: Config, step: float, mtbf: float, waited: float = 0.0, far: float = 0.0) -> tuple[float, float]:
    """Compute the share of the time that is progress, with copies in memory and with restarts from disk.

    A failure costs what the run needs to go on, and the work since the last copy (at most: --recover-every steps) or
    checkpoint (on average: half the time between two).

    Args:
        cfg: the run.
        step: seconds of a step.
        mtbf: seconds between two failures anywhere in the run, on average.
        waited, far: seconds that steps wait for a copy to the host, and that it takes to another one.
    """
    saves, steps = cfg.run.save_every * step or SAVES_S, steps_per_copy(cfg, waited, step) * step
    cycle = max(steps + waited, far)
    recovers, restarts = (max(0.0, 1 - lost / mtbf) for lost in (RECOVERY_S + cycle, RESTART_S + saves / 2))
    return recovers * steps / cycle, restarts


def fewer(cfg: Config, grid: Grid, cluster: Cluster, mtbf: float) -> tuple[int, float]:
    """Compute what is left of a run with `--elastic` while a host is lost, which it is for `RETURN_S`.

    A step takes as long as the pipeline's passes: those of the replica with most micro-batches, and pp - 1 to fill it.

    Args:
        cfg: the run.
        grid: its layout.
        cluster: the hosts.
        mtbf: seconds between two failures anywhere in the run, on average.

    Returns:
        Number of replicas without a host, and which share of the undisturbed run's steps is done, on average: of none
        where too few ranks for another replica, or for `--min-ranks`, are left.
    """
    smaller = grid_without(cfg, grid, cluster.host)
    if smaller is None:
        return 0, max(0.0, 1 - RETURN_S / mtbf)
    size, pp, dp = cfg.train.global_batch_size, cfg.parallel.pp, smaller["dp"]
    whole, left = (cfg.passes(size, replicas) + pp - 1 for replicas in (grid["dp"], dp))
    return dp, 1 - min(1.0, RETURN_S / mtbf) * (1 - whole / left)


def failure_figures(
    cfg: Config, grid: Grid, ranks: Sequence[RankMemory], cluster: Cluster, step: float, mtbf: float | None
) -> dict[str, float]:
    """Return what `--recover` takes, and for an `mtbf` in hours what share of the time is progress, as JSON content.

    Without `--recover`, the share with copies is that of `--recover process`.
    """
    asked = cfg.run.recover != "none"
    if not asked:
        cfg = replace(cfg, run=replace(cfg.run, recover="process"))
        ranks = memory_per_rank(cfg, grid) if mtbf is not None else ranks
    copies = max(rank.copies for rank in ranks)
    near, far = copy_seconds(copies / copies_of(cfg), cluster)
    far = far if cfg.run.recover == "host" else 0.0
    out: dict[str, float] = {}
    if asked:
        out = {"host_bytes_at_most": copies * min(cluster.host, cluster.gpus), "copy_s": near, "copy_sent_s": far}
    if mtbf is not None:
        recovers, restarts = effective(cfg, step, mtbf * 3600, waits_for(near, cluster, step), far)
        out |= {"steps_per_copy": steps_per_copy(cfg, waits_for(near, cluster, step), step)}
        out |= {"mtbf_hours": mtbf, "progress_with_copies": recovers, "progress_with_restarts": restarts}
        if cfg.run.elastic:
            dp, share = fewer(cfg, grid, cluster, mtbf * 3600)
            out |= {"dp_without_a_host": dp, "progress_with_fewer": recovers * share}
    return out


def effective_text(cfg: Config, step: float, figures: dict[str, float]) -> str:
    """Describe `effective` in a line, from `failure_figures`."""
    every, mtbf = int(figures["steps_per_copy"]), figures["mtbf_hours"]
    recovers, restarts = figures["progress_with_copies"], figures["progress_with_restarts"]
    mode = "process" if cfg.run.recover == "none" else cfg.run.recover
    elastic = ""
    if "progress_with_fewer" in figures:
        elastic = (
            f", {figures['progress_with_fewer']:.1%} with --elastic where each failure takes a host for "
            f"{RETURN_S / 3600:g} hour (dp {figures['dp_without_a_host']:.0f} meanwhile)"
        )
    saves = f"--save-every {cfg.run.save_every}" if cfg.run.save_every else f"a save every {SAVES_S / 60:.0f} min"
    return (
        f"a failure every {mtbf:g} hours: {recovers:.1%} of the time is progress with --recover {mode} "
        f"({RECOVERY_S:.0f} s and {every} step{'s' * (every > 1)} of {step:.3g} s each, and copies){elastic}, "
        f"{restarts:.1%} with restarts "
        f"({RESTART_S:.0f} s, {saves}); seconds are assumed"
    )
