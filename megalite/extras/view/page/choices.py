"""What other choices would do to a run, predicted: memory without each saving, one GPU, the plan's best layouts."""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

from megalite.core.base.errors import UserError
from megalite.core.mesh.grid import Grid
from megalite.core.model.saved import residual_bytes
from megalite.core.parts.memory.offload_memory import sent_blocks
from megalite.core.parts.schedules.choose import name_of
from megalite.core.pipeline.schedule import placement_of
from megalite.extras.plan.cluster import Cluster
from megalite.extras.plan.memory.ranks import memory_per_rank
from megalite.extras.plan.memory.stages import split
from megalite.extras.plan.report import as_json, best_layouts, describe
from megalite.extras.plan.search import SHARE, Candidate, pick, search
from megalite.extras.plan.time.step import step_time
from megalite.runtime.options.fields import with_options
from megalite.runtime.options.run import Config

# Options that save memory, and the values compared, from none to most.
_SAVINGS: dict[str, tuple[Any, ...]] = {
    "zero": (0, 1, 2, 3),
    "recompute": ("none", "selective", "full"),
    "offload": ("none", "activations", "optimizer", "optimizer+params"),
}
_ALONE = {"tp": 1, "pp": 1, "vp": 1, "cp": 1, "ep": 1, "etp": "tp", "zero": 0, "offload": "none", "schedule": "auto"}
_TOP = 10


def collect_memory(cfg: Config, grid: Grid) -> dict[str, Any]:
    """Return the predicted bytes of every pipeline rank by kind, as the run is and with each saving changed.

    Returns:
        own: by pipeline rank. changed: [{option, value, own (whether the run has it), ranks or problem}]. inputs: by
        pipeline rank, bytes of the blocks' inputs that `--offload activations` sends to the host in a step. alone: one
        rank with the whole model, micro-batch and nothing saved, or problem.
    """
    rows = []
    for option, values in _SAVINGS.items():
        own = getattr(cfg.parallel if option == "zero" else cfg.train, option)
        for value in dict.fromkeys((*values, own)):
            rows.append({"option": option, "value": value, "own": value == own, **_bytes(cfg, grid, {option: value})})
    alone = {**_ALONE, "pipeline_layout": None, "sequence_parallel": False, "zero_group": "full"}
    alone_bytes = _bytes(cfg, Grid.of(1), alone)
    return {"own": _bytes(cfg, grid, {}), "changed": rows, "inputs": _inputs(cfg, grid), "alone": alone_bytes}


def _inputs(cfg: Config, grid: Grid) -> list[int]:
    placement = placement_of(name_of(cfg, grid["dp"]), cfg.parallel.pp, cfg.parallel.vp)
    layers, of_block = split(cfg), residual_bytes(cfg) * cfg.num_microbatches(grid["dp"])
    blocks = [sum(sent_blocks(s, layers[s]) for s in placement.stages_of(rank)) for rank in range(grid["pp"])]
    return [of_block * n for n in blocks]


def _bytes(cfg: Config, grid: Grid, options: dict[str, Any]) -> dict[str, Any]:
    try:
        ranks = memory_per_rank(with_options(cfg, options), grid)
    except UserError as e:
        return {"problem": str(e)}
    return {"ranks": [{**asdict(rank), "total": rank.total} for rank in ranks]}


def collect_plan(cfg: Config, grid: Grid, cluster_text: str | None) -> dict[str, Any]:
    """Return the ten best layouts of the run's model and batch on a cluster, and the run's own.

    Args:
        cluster_text: as for `megalite plan --cluster`; None: as many H100s as the run has ranks.
    """
    cluster = Cluster.parse(cluster_text or f"h100:{grid.world}")
    layouts = search(with_options(cfg, {"device": "cuda"}), cluster)
    best, chosen = best_layouts(layouts, _TOP), pick(layouts)
    rows = [{**row, "words": " ".join(describe(f))} for f, row in zip(best, as_json(best, cluster))]
    return {
        "cluster": f"{cluster.gpus} x {cluster.device.name}",
        "assumed": cluster_text is None,
        "gpu_bytes": cluster.device.memory,
        "layouts": len(layouts),
        "fit": sum(f.fits for f in layouts),
        "best": rows,
        "picked": " ".join(describe(chosen)) if chosen else None,
        "own": _own(cfg, cluster) if cluster.gpus == grid.world else None,
    }


def _own(cfg: Config, cluster: Cluster) -> dict[str, Any]:
    cfg = with_options(cfg, {"device": "cuda"})
    grid = Grid.from_config(cfg.parallel, cluster.gpus)
    time, ranks = step_time(cfg, grid, cluster), memory_per_rank(cfg, grid)
    own = Candidate(cfg, grid, ranks, time, SHARE * cluster.device.memory, SHARE * cluster.device.host_memory)
    return {**as_json([own], cluster)[0], "words": " ".join(describe(own))}
