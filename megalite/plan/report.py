"""What `tools/plan.py` prints: the result of a search, and every term of one layout."""

from __future__ import annotations

import shlex
from collections import Counter
from collections.abc import Sequence
from typing import Any

import yaml

from megalite.config.options import GROUP_OF
from megalite.config.run import Config
from megalite.dist.grid import Grid
from megalite.model.parameters import param_map
from megalite.plan.changes import Changes
from megalite.plan.cluster import Cluster
from megalite.plan.dry_run import dry_run_report
from megalite.plan.search import SAME_TIME, SHARE, Found, flags, pick
from megalite.plan.time import StepTime, model_flops
from megalite.sharding import count_parameters

# GPUs of a host, where an NVLink domain spans several.
_HOST = 8


def mfu(layout: Found, cluster: Cluster) -> float:
    """Share of the dense bf16 peak, of model FLOPs with causal attention."""
    return model_flops(layout.cfg) / (layout.time.total * cluster.gpus * cluster.device.peak)


def as_json(found: Sequence[Found], cluster: Cluster) -> list[dict[str, Any]]:
    """Describe layouts, in their order: options by their flags' names, and what is predicted."""
    changes = Changes(list(found))
    return [
        {
            **f.options,
            "dp": f.grid["dp"],
            "step_time_s": f.time.total,
            "mem_gb": f.worst.total / 1e9,
            "host_gb": max(rank.host for rank in f.ranks) / 1e9,
            "mfu": mfu(f, cluster),
            "fits": f.fits,
            "why_not": changes.why_not(f),
        }
        for f in found
    ]


def search_text(found: list[Found], cluster: Cluster, asked: Sequence[str], top: int = 10) -> str:
    """Format a search: what does not fit and why, the best layouts, and the pick as a command line and as YAML.

    Args:
        asked: the flags of the run that was planned.
    """
    cfg, fits, changes = found[0].cfg, [f for f in found if f.fits], Changes(found)
    m, device = cfg.model, cluster.device
    lines = [
        f"{count_parameters(param_map(m)):,} parameters on {cluster.gpus} x {device.name} ({cluster.domain} share "
        f"NVLink, {cluster.network / 1e9:g} GB/s of network each); {cfg.train.global_batch_size:,} samples of "
        f"{m.seq_len:,} tokens, {cfg.train.precision}",
        f"{len(found):,} layouts, {len(fits):,} fit into {found[0].limit / 1e9:.1f} GB ({SHARE:.0%} of the device)",
    ]
    causes = Counter(f.cause for f in found if not f.fits)
    for cause, count in causes.most_common():
        failing = [f for f in found if f.cause == cause]
        example = next((f for f in failing if changes.cheapest(f) is not None), failing[0])
        lines += [f"  {count:,} do not for their {cause}, as: {' '.join(_short(example))}"]
        lines += [f"    {changes.why_not(example)}"]
    best = pick(found)
    if best is None:
        return "\n".join([*lines, "nothing fits: use more GPUs, a smaller model or --seq-len"])
    lines += [
        "",
        *_table(fits, best, cluster, top),
        "",
        f"* picked, the simplest within {SAME_TIME - 1:.0%} of the fastest: {best.time.total:.4g} s per step, "
        f"{best.worst.total / 1e9:.1f} GB",
    ]
    return "\n".join([*lines, f"  {command(best, cluster, asked)}", "or as YAML (--config):", to_yaml(best).rstrip()])


def best_layouts(found: Sequence[Found], top: int) -> list[Found]:
    """Return the fastest that fit, of those that differ in vp alone only the fastest."""
    kept: dict[Any, Found] = {}
    for layout in found:
        if layout.fits and len(kept) < top:
            kept.setdefault(str({**layout.options, "vp": None}), layout)
    return list(kept.values())


def _table(fits: Sequence[Found], best: Found, cluster: Cluster, top: int) -> list[str]:
    """List the fastest, and mark the one that is picked, which comes last if it is slower than these."""
    shown = {str(place): f for place, f in enumerate(best_layouts(fits, top), 1)}
    if all(f is not best for f in shown.values()):
        shown[""] = best
    rows = [f"{'':>4}{'step, s':>10}{'MFU':>7}{'GB':>7}  layout"]
    for place, f in shown.items():
        mark, words = "*" if f is best else " ", " ".join(_short(f))
        rows += [f"{place:>3}{mark}{f.time.total:>10.4g}{mfu(f, cluster):>7.1%}{f.worst.total / 1e9:>7.1f}  {words}"]
    return rows


def _short(layout: Found) -> list[str]:
    """The layout in few words: what is at its default is left out."""
    o = layout.options
    words = [f"dp {layout.grid['dp']}", f"tp {o['tp']}", f"pp {o['pp']}"]
    words += [f"vp {o['vp']}"] * (o["vp"] > 1) + [str(o["schedule"])] * (o["pp"] > 1)
    words += [f"micro-batch {o['micro_batch_size']}", f"zero {o['zero']}"]
    words += [f"group {o['zero_group']}"] * (o["zero_group"] != "full")
    words += [f"recompute {o['recompute']}"] * (o["recompute"] != "none")
    return words + [f"offload {o['offload']}"] * (o["offload"] != "none")


def command(layout: Found, cluster: Cluster, asked: Sequence[str]) -> str:
    """Write the command line of a layout, for each host."""
    here = next(n for n in range(min(cluster.gpus, cluster.domain, _HOST), 0, -1) if cluster.gpus % n == 0)
    hosts = f"--nnodes {cluster.gpus // here} " if cluster.gpus > here else ""
    given = {word.split("=")[0] for word in asked}
    chosen = {name: value for name, value in layout.options.items() if "--" + name.replace("_", "-") not in given}
    return f"torchrun {hosts}--nproc-per-node {here} pretrain_gpt.py {shlex.join([*asked, *flags(chosen)])}"


def to_yaml(layout: Found) -> str:
    """Write the options of a layout as a file for --config."""
    tree: dict[str, dict[str, Any]] = {}
    for name, value in layout.options.items():
        tree.setdefault(GROUP_OF[name], {})[name] = value
    return yaml.safe_dump(tree, sort_keys=False)


def explain_text(cfg: Config, grid: Grid, cluster: Cluster, time: StepTime) -> str:
    """Format every term of one layout: the page of --dry-run, then seconds by cause."""
    total = time.total
    share = model_flops(cfg) / (total * cluster.gpus * cluster.device.peak)
    lines = [dry_run_report(cfg, grid), "", f"predicted step on {cluster.gpus} x {cluster.device.name}: {total:.4g} s"]
    for name, seconds in sorted(time.terms.items(), key=lambda term: -term[1]):
        lines += [f"  {name:<12}{seconds:>12.4g} s{seconds / total:>8.1%}"]
    tokens = cfg.train.global_batch_size * cfg.model.seq_len
    return "\n".join([*lines, f"{tokens / total:,.0f} tokens/s, MFU {share:.1%} (causal attention)"])
