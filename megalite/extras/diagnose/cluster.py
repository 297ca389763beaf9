"""Check that a cluster is ready for a run, and locate faults: what each rank does, and the report."""

from __future__ import annotations

import argparse
import dataclasses
import json
import socket
import sys
from collections.abc import Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist

from megalite.core.base.log import env_rank
from megalite.core.mesh.collectives import gather_texts
from megalite.core.mesh.context import Axis, ParallelContext
from megalite.core.mesh.device import pick_device
from megalite.core.mesh.grid import Grid
from megalite.core.mesh.rendezvous import init_process_group, shutdown, world_size
from megalite.extras.diagnose import measure
from megalite.extras.diagnose.stuck import StuckWatch
from megalite.extras.diagnose.verdict import Problem, RankReport, find_problems, groups_of
from megalite.extras.launch import probe

_LOADING_S = 60.0
# Rows of the table of ranks.
_SHOWN = 16


def check(args: argparse.Namespace, environment: Mapping[str, str]) -> int:
    """Run the checks on this rank; rank 0 prints the results. The exit code is the same on every rank.

    Args:
        args: options of `megalite check`.
        environment: environment of the process: torchrun's LOCAL_WORLD_SIZE, and variables that affect communication.
    """
    grid = Grid.of(world_size(), tp=args.tp, pp=args.pp)
    device = pick_device(args.device, args.tp)
    watch = StuckWatch(env_rank(), socket.gethostname(), args.timeout)
    # Some ranks may still be loading torch.
    with watch.stage("rendezvous of all ranks", grace=_LOADING_S):
        init_process_group(device)
        watch.join(grid.world)
    try:
        return _check(args, grid, device, watch, environment)
    finally:
        shutdown()


def _check(
    args: argparse.Namespace, grid: Grid, device: torch.device, watch: StuckWatch, environment: Mapping[str, str]
) -> int:
    size, group = grid.world, dist.group.WORLD
    world = Axis("world", size, dist.get_rank(), tuple(range(size)), group) if size > 1 else Axis("world")

    def gather(report: RankReport) -> list[RankReport]:
        texts = gather_texts(report.to_json(), world, device)
        return [RankReport.from_json(*pair) for pair in zip(texts, groups_by_rank(grid))]

    with watch.stage("comparison of versions"):
        facts = measure.host_facts(device, environment)
        reports = gather(RankReport(facts))
    # Ranks of different code might not even take the same steps from here on.
    if problems := find_problems(reports):
        return _publish(args, grid, reports, problems)
    with watch.stage("creation of all process groups"):
        ctx = ParallelContext.create(grid, device)
    report = _measure(args, ctx, facts, watch)
    with watch.stage("collection of results"):
        reports = gather(report)
    return _publish(args, grid, reports, find_problems(reports, args.slow_factor))


def groups_by_rank(grid: Grid) -> list[dict[str, tuple[int, ...]]]:
    """The ranks of each rank's group on every axis that is measured."""
    everyone = tuple(range(grid.world))
    found: list[dict[str, tuple[int, ...]]] = [{"world": everyone} for _ in everyone]
    for name in ("tp", "pp", "dp"):
        for group in grid.groups(name):
            for rank in group:
                found[rank][name] = group
    return found


def _measure(args: argparse.Namespace, ctx: ParallelContext, facts: measure.HostFacts, watch: StuckWatch) -> RankReport:
    device, on_gpu = ctx.device, ctx.device.type == "cuda"
    size = int((args.size_mb or (256 if on_gpu else 4)) * 1e6)
    axes = []
    for axis in (ctx.tp, ctx.pp, ctx.dp, ctx.world):
        with watch.stage(f"all-reduce over {axis.name}, ranks {', '.join(map(str, axis.ranks))}"):
            measure.meet(ctx.world, device)
            if axis.size > 1:
                axes.append(measure.check_axis(axis, device, size))
    with watch.stage(f"messages along the pipeline of ranks {', '.join(map(str, ctx.pp.ranks))}"):
        links = measure.check_pipeline(ctx, size)
    with watch.stage("matrix product"):
        measure.meet(ctx.world, device)
        compute = measure.compute_time(device)
        measure.meet(ctx.world, device)
    with watch.stage("comparison of clocks"):
        clock = measure.clock_offset(ctx.world, device)
    unseen = None
    cannot_write = ""
    heat = None
    if args.run_dir is not None:
        with watch.stage("shared run directory"):
            unseen, cannot_write = measure.unseen_files(args.run_dir, ctx.world, device)
    if args.burn and on_gpu:
        with watch.stage("burn", grace=args.burn):
            heat = measure.burn(device, args.burn)
    return RankReport(facts, tuple(axes), links, compute, clock, unseen, cannot_write, heat)


def _publish(args: argparse.Namespace, grid: Grid, reports: list[RankReport], problems: list[Problem]) -> int:
    """Print the report and write the JSON file, on rank 0; returns the exit code."""
    if env_rank() == 0:
        skipped = "burn: skipped, there is no GPU (device cpu)" if args.burn and not reports[0].burn else ""
        hardware = probe.hardware()
        print(table(grid, reports, problems, skipped, hardware), flush=True)
        if args.json is not None:
            results = as_json(grid, reports, problems, hardware)
            try:
                args.json.write_text(json.dumps(results, indent=1) + "\n")
            except OSError as e:
                print(f"--json {args.json} cannot be written ({e.strerror})", file=sys.stderr)
                return 1
    return 1 if problems else 0


def as_json(grid: Grid, reports: Sequence[RankReport], problems: Sequence[Problem], hardware: str) -> dict[str, Any]:
    """Return everything measured."""
    return {
        "ok": not problems,
        "problems": [dataclasses.asdict(p) for p in problems],
        "layout": grid.as_dict(),
        "groups": [dataclasses.asdict(g) for g in groups_of(reports)],
        "ranks": [dataclasses.asdict(r) for r in reports],
        "topology": hardware,
    }


def table(grid: Grid, reports: Sequence[RankReport], problems: Sequence[Problem], skipped: str, hardware: str) -> str:
    """Format the report as text."""
    facts = [r.facts for r in reports]
    hosts = list(dict.fromkeys(f.host for f in facts))
    versions = ", ".join(f"{name} {version}" for name, version in facts[0].versions.items())
    sizes = " x ".join(f"{name} {grid[name]}" for name in ("dp", "pp", "tp"))
    lines = [
        f"{grid.world} ranks on {len(hosts)} host{'s' * (len(hosts) > 1)}: {sizes}",
        f"rank 0: {facts[0].device[0]} ({facts[0].device[1]}); {versions}",
    ]
    different = {k for f in facts for k in f.variables if {g.variables.get(k) for g in facts} != {f.variables[k]}}
    if different - {"CUDA_VISIBLE_DEVICES"}:
        lines.append(f"not the same on all ranks: {', '.join(sorted(different - {'CUDA_VISIBLE_DEVICES'}))}")
    if any(r.compute_s for r in reports):
        lines += ["", *_axis_rows(reports), "", *_rank_rows(reports)]
    if reports[0].unseen is not None and not any(p.check == "run dir" for p in problems):
        lines.append("run directory: seen by all ranks")
    lines += [skipped] * bool(skipped)
    lines += ["", f"host of rank 0, {hosts[0]}:", hardware, ""]
    for p in problems:
        ranks = f"rank{'s' * (len(p.ranks) > 1)} {', '.join(map(str, p.ranks))}"
        lines.append(f"PROBLEM {p.check}: {ranks} on {', '.join(p.hosts)}: {p.text}")
    return "\n".join([*lines, "all is well" if not problems else f"problems: {len(problems)}"])


def _axis_rows(reports: Sequence[RankReport]) -> list[str]:
    head = f"{'axis':<9}{'groups':>7}{'ranks each':>12}{'hosts':>7}{'sums':>8}{'latency':>12}{'bandwidth':>13}"
    rows = [f"{head}{'should give':>13}   (worst group)"]
    groups = groups_of(reports)
    for axis in dict.fromkeys(g.axis for g in groups):
        members = [g for g in groups if g.axis == axis]
        worst = min(members, key=lambda g: g.bandwidth_bps)
        expected = f"{worst.expected_bps / 1e9:.4g} GB/s" if worst.expected_bps else "?"
        right = "wrong" if any(g.wrong for g in members) else "right"
        rows.append(
            f"{axis:<9}{len(members):>7}{len(worst.ranks):>12}{len(worst.hosts):>7}{right:>8}"
            f"{max(g.latency_s for g in members) * 1e6:>9.0f} us{worst.bandwidth_bps / 1e9:>8.2f} GB/s{expected:>13}"
        )
    readings = [link for r in reports for link in r.links]
    for name in dict.fromkeys(link.group for link in readings):
        links = [link for link in readings if link.group == name]
        lowest = min(link.bandwidth_bps for link in links)
        right = "right" if all(link.right for link in links) else "wrong"
        label = f"p2p {'down' if name == 'pp' else 'up'}"
        rows.append(f"{label:<9}{len(links):>7}{2:>12}{'':>7}{right:>8}{'':>12}{lowest / 1e9:>8.2f} GB/s")
    return rows


def _rank_rows(reports: Sequence[RankReport]) -> list[str]:
    slowest = sorted(range(len(reports)), key=lambda r: -reports[r].compute_s)[:_SHOWN]
    note = f"   (the {_SHOWN} slowest of {len(reports)})" if len(reports) > _SHOWN else ""
    rows = [f"{'rank':<6}{'host':<24}{'matrix product':>15}{'clock':>12}{'burn':>24}{note}"]
    for rank in sorted(slowest):
        r = reports[rank]
        heat = f"{r.burn.tflops:.0f} TFLOP/s, {r.burn.wrong} wrong" if r.burn else "-"
        clock = f"{r.clock_s * 1e3:+.1f} ms"
        rows.append(f"{rank:<6}{r.facts.host:<24}{r.compute_s * 1e3:>12.3f} ms{clock:>12}{heat:>24}")
    return rows
