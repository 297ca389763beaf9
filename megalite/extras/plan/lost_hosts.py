"""What is left of a run with `--elastic` while hosts are lost: the table of `--dry-run --lost K`."""

from __future__ import annotations

from pathlib import Path

from megalite.core.base.errors import require
from megalite.core.mesh.grid import Grid
from megalite.core.model.partition import block_costs, stage_layers
from megalite.core.parts.schedules.choose import schedule_of
from megalite.core.parts.schedules.simulate import Simulation, simulate
from megalite.core.pipeline.schedule import Costs, Schedule
from megalite.extras.plan.cluster import Cluster, read_calibration
from megalite.extras.plan.memory.ranks import memory_per_rank
from megalite.extras.plan.memory.states import copies_of
from megalite.extras.plan.time.step import step_time
from megalite.runtime.options.run import Config


def grid_without(cfg: Config, grid: Grid, lost: int) -> Grid | None:
    """Return the grid on which a run with `--elastic` goes on, as its hub decides.

    Ranks in reserve fill places first; then whole replicas go, and with experts as many as keep `--ep`.

    Args:
        cfg: the run.
        grid: its grid when nothing is lost.
        lost: number of lost ranks.

    Returns:
        The grid; None where fewer ranks are left than one replica, or `--min-ranks`, takes.
    """
    unit = Grid.from_config(cfg.parallel).world
    left = max(0, grid.world + cfg.run.spare_ranks - lost)
    world = min(left // unit * unit, grid.world)
    return Grid.from_config(cfg.parallel, world) if world >= max(unit, cfg.run.min_ranks) else None


def simulate_stages(cfg: Config, schedule: Schedule) -> Simulation:
    """Simulate a step whose stages take as long as their layers, in FLOPs."""
    layers = stage_layers(cfg)
    costs, head_cost = block_costs(cfg.model)
    scale = tuple(sum(costs[r.start : r.stop]) + (head_cost if r is layers[-1] else 0.0) for r in layers)
    return simulate(schedule, Costs(stage_scale=scale))


def lost_hosts_table(cfg: Config, grid: Grid, most: int, host: int) -> list[str]:
    """List, for 0 to `most` lost hosts, ranks, passes, step time, memory, and what each rank loads from copies.

    The step time is that of the pipeline's passes, 1 with all hosts; with `--calibration` also predicted, in seconds.

    Args:
        cfg: the run.
        grid: its grid when nothing is lost.
        most: number of lost hosts.
        host: number of ranks of each host.

    Raises:
        UserError: the run keeps its number of ranks, has no more hosts than that, or cannot share out a batch.
    """
    require(cfg.run.elastic, f"--lost {most}", "applies to runs that go on with fewer hosts", "use --elastic")
    started = grid.world + cfg.run.spare_ranks
    hosts = -(-started // host)
    rule = f"leaves none of {hosts} host{'s' * (hosts > 1)} with {host} of {started} ranks each"
    require(most < hosts, f"--lost {most}", rule, "lower it, or give --ranks-per-host N")
    whole = simulate_stages(cfg, schedule_of(cfg, grid["dp"])).makespan
    rows: list[tuple[str, ...]] = [("lost", "used", "idle", "dp", "passes", "step", "memory", "loaded", "by a host")]
    for lost in range(most + 1):
        left = grid_without(cfg, grid, lost * host)
        if left is None:
            rows += [(str(lost), "too few: the last state is saved, and the run ends with code 75")]
            continue
        idle, ranks = max(0, started - lost * host) - left.world, memory_per_rank(cfg, left)
        step = f"{simulate_stages(cfg, schedule_of(cfg, left['dp'])).makespan / whole:.2f}"
        if cfg.run.calibration is not None:
            step += f" ({_seconds(cfg, left, host):.3g} s)"
        # Where no rank is fewer, those that take lost places alone load a copy.
        copy = max(rank.copies for rank in ranks) / copies_of(cfg) / 2**30
        loaded = (f"{copy:.3f}", f"{copy * min(host, left.world):.3f}") if lost else ("-", "-")
        passes, memory = cfg.num_microbatches(left["dp"]), max(rank.total for rank in ranks) / 2**30
        counts = (lost, left.world, idle, left["dp"], passes)
        rows += [(*map(str, counts), step, f"{memory:.2f}", *loaded)]
    widths = [max(len(row[i]) for row in rows if len(row) > 2) for i in range(len(rows[0]))]
    lines = ["  ".join(f"{cell:>{width}}" for cell, width in zip(row, widths)) for row in rows]
    return [
        "",
        f"hosts lost, of {hosts} with {host} rank{'s' * (host > 1)} each; GiB per rank, and loaded by a host:",
        *lines,
    ]


def _seconds(cfg: Config, grid: Grid, host: int) -> float:
    device, constants = read_calibration(Path(str(cfg.run.calibration)))
    cluster = Cluster(device, grid.world, min(host, grid.world), device.network, constants, host)
    return step_time(cfg, grid, cluster).total
