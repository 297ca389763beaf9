"""What follows from a run's config: `python -m` this, a JSON line for each part on stdout.

A process of its own, because a config may ask for anything: it ends where its processor time does.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

from megalite.core.mesh.grid import Grid
from megalite.extras.compat.dialect import DIALECT
from megalite.extras.view.page.choices import collect_memory, collect_plan
from megalite.extras.view.page.part import limit_processor_time, part
from megalite.extras.view.page.placement import collect_grid
from megalite.extras.view.page.timing import collect_schedule
from megalite.runtime.options import cli
from megalite.runtime.options.run import Config

PARTS = ("layout", "grid", "schedule", "memory", "plan")
"""The slowest last: those before it are there if it takes too long."""


def main(run_dir: Path, world: int, earlier: list[int], cluster: str | None) -> None:
    """Print {part: content} of each of `PARTS`, or of a config that is wrong {"layout": {"problem": why}} alone.

    Args:
        run_dir: the run's folder.
        world: number of its ranks.
        earlier: other numbers of ranks that it had; `grid` has the grids of these as `earlier`.
        cluster: as for `megalite plan --cluster`, or None.
    """
    made: list[tuple[Config, Grid]] = []

    def layout() -> dict[str, Any]:
        cfg = cli.parse(["--config", str(run_dir / "config.yaml")], world=world, dialect=DIALECT).config
        made.append((cfg, Grid.from_config(cfg.parallel, world)))
        return {"ranks": world, **_described(cfg)}

    _print(layout=part(layout))
    if not made:
        return
    cfg, grid = made[0]
    grids = [Grid.from_config(cfg.parallel, n) for n in earlier]
    _print(grid=part(lambda: {**collect_grid(cfg, grid), "earlier": [collect_grid(cfg, other) for other in grids]}))
    _print(schedule=part(lambda: collect_schedule(run_dir, cfg, grid)))
    _print(memory=part(lambda: collect_memory(cfg, grid)))
    _print(plan=part(lambda: collect_plan(cfg, grid, cluster)))


def _print(**told: dict[str, Any]) -> None:
    print(json.dumps(told), flush=True)


def _described(cfg: Config) -> dict[str, Any]:
    m, p, t = cfg.model, cfg.parallel, cfg.train
    return {
        "model": {name: getattr(m, name) for name in ("arch", "num_layers", "hidden_size", "num_experts", "moe_topk")},
        "parallel": {name: getattr(p, name) for name in ("tp", "pp", "vp", "cp", "ep", "zero", "device")},
        "train": {"precision": t.precision},
    }


if __name__ == "__main__":
    limit_processor_time(int(sys.argv[1]))
    main(Path(sys.argv[2]), int(sys.argv[3]), [int(n) for n in sys.argv[4].split()], sys.argv[5] or None)
