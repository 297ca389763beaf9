"""Trains every layout of `ROWS` that the ranks can hold, and compares them with one CPU process; torchrun starts it.

Arguments: folder with `<model>.npz`, to which each rank writes `rank_R.json`; "nccl", or "staged" to share the GPUs.
MEGALITE_TEST_DEVICE=cpu rehearses it.
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

from megalite.core.build import build_engine
from megalite.core.mesh.context import ParallelContext
from megalite.core.mesh.device import pick_device
from megalite.core.mesh.grid import Grid
from megalite.core.mesh.rendezvous import init_process_group
from megalite.runtime.options.run import Config
from tests.gpu import staged
from tests.parity import jobs
from tests.parity.harness import Gradients, boxes_of, config, put_together
from tests.parity.models import MIXTRAL

STEPS = 3
MODELS = {"dense": jobs.llama(), "experts": MIXTRAL}
_CUT = {"tp": 2, "pp": 2}
_RECOMPUTE = {"recompute": "full"}
# name: (ranks that it needs, ZeRO stage, further layout, training options); all other ranks are data-parallel ones.
ROWS: dict[str, tuple[int, int, dict[str, Any], dict[str, Any]]] = {
    "dp-zero0": (1, 0, {}, {}),
    "dp-zero2": (1, 2, {}, {}),
    "tp2-no-sp": (2, 1, {"tp": 2, "sequence_parallel": False}, {}),
    "tp2-zero3": (2, 3, {"tp": 2}, {}),
    "pp2-zero1": (2, 1, {"pp": 2}, {}),
    "pp2-zb-v-zero2": (2, 2, {"pp": 2, "vp": 2, "schedule": "zb-v"}, {}),
    "pp2-vp2-zero3": (2, 3, {"pp": 2, "vp": 2}, _RECOMPUTE),
    "zero3-groups": (1, 3, {"zero_group": "2"}, {"loss_chunk": 5}),
    "zero3-offload": (1, 3, {}, {"offload": "optimizer+params"}),
    "pp2-offload": (2, 1, {"pp": 2}, {**_RECOMPUTE, "offload": "activations"}),
    "tp2-pp2-zb-h1-zero3": (4, 3, {**_CUT, "schedule": "zb-h1"}, {}),
    "tp2-pp2-topk": (4, 1, _CUT, {"compress": "topk:1"}),
    "cp2-ring": (2, 1, {"cp": 2, "cp_comm": "ring"}, {}),
    "cp2-gather-zero3": (2, 3, {"cp": 2, "cp_comm": "gather"}, _RECOMPUTE),
    "cp2-a2a-pp2": (4, 2, {"cp": 2, "cp_comm": "a2a", "pp": 2}, {}),
    "ep2-zero1": (2, 1, {"ep": 2}, {}),
    "ep4-tp2-allgather-zero3": (4, 3, {"ep": 4, "tp": 2, "etp": "1", "moe_dispatch": "allgather"}, _RECOMPUTE),
}


def model_of(row: str) -> str:
    """The name of a row's model: that of experts where they are distributed."""
    return "experts" if "ep" in ROWS[row][2] else "dense"


def config_of(row: str) -> Config:
    """The configuration of a row, in fp32."""
    _, zero, parallel, train = ROWS[row]
    return config(MODELS[model_of(row)], zero, parallel, **train)


def write_expected(folder: Path) -> None:
    """Train each model on one CPU process; write its figures and gradients to `<model>.npz`."""
    for name, model in MODELS.items():
        steps, boxes = _train(config(model, 1, {}), ParallelContext.single())
        arrays: dict[str, Any] = put_together([boxes])
        np.savez(folder / f"{name}.npz", **arrays, steps=np.array(steps))


def _train(cfg: Config, ctx: ParallelContext) -> tuple[list[tuple[float, float]], Gradients]:
    """(loss, gradient norm) of all steps, and this rank's boxes of the first one's gradients."""
    engine = build_engine(cfg, ctx)
    engine.optimizer.init_parameters(cfg.train.seed)
    jobs.spoil_gradients(engine)
    steps = jobs.run_steps(engine, 1)
    boxes = boxes_of(engine)
    return steps + jobs.run_steps(engine, STEPS - 1, first=2), boxes


def check_rows(folder: Path, rows: list[str], device: torch.device) -> dict[str, dict[str, Any]]:
    """Train the rows that the world can hold: the worst relative errors of each, and the number of gradients held."""
    known = {name: dict(np.load(folder / f"{name}.npz")) for name in MODELS}
    contexts: dict[Grid, ParallelContext] = {}
    found = {}
    for row in rows:
        if dist.get_world_size() % ROWS[row][0] or (row == "zero3-groups" and dist.get_world_size() < 4):
            continue
        expected = dict(known[model_of(row)])
        steps = expected.pop("steps")
        if dist.get_rank() == 0:
            print(row, flush=True)
        cfg = config_of(row)
        grid = Grid.from_config(cfg.parallel, dist.get_world_size())
        if grid not in contexts:
            contexts[grid] = ParallelContext.create(grid, device)
        got, boxes = _train(cfg, contexts[grid])
        errors = [
            float(np.abs(part - expected[name][index]).max(initial=0) / np.abs(expected[name]).max())
            for name, (_, held) in boxes.items()
            for index, part in held
        ]
        found[row] = {
            "figures": float(np.abs(np.array(got) / steps - 1).max()),
            "gradients": max(errors, default=0.0),
            "held": sum(part.size for _, held in boxes.values() for _, part in held),
            "all": sum(grad.size for grad in expected.values()),
        }
    return found


def assert_equal(found: list[dict[str, dict[str, float]]], rows: list[str]) -> None:
    """Every rank has one process's figures and gradients, and each gradient is held once."""
    for row in rows:
        ranks_of_row = [rank[row] for rank in found]
        assert max(rank["figures"] for rank in ranks_of_row) < 1e-5, row
        assert max(rank["gradients"] for rank in ranks_of_row) < 1e-5, row
        assert sum(rank["held"] for rank in ranks_of_row) == ranks_of_row[0]["all"], row


def main() -> None:
    torch.backends.cuda.matmul.allow_tf32 = False
    folder, backend = Path(sys.argv[1]), sys.argv[2]
    rank, world = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    name = os.environ.get("MEGALITE_TEST_DEVICE", "cuda")
    if backend == "nccl":
        device = pick_device(name)
        init_process_group(device)
    else:
        device = torch.device(name)
        if name == "cuda":
            device = torch.device(name, rank % torch.cuda.device_count())
            torch.cuda.set_device(device)
        staged.init_process_group(dist.FileStore(str(folder / "store"), world), rank, world)
    found = check_rows(folder, list(ROWS), device)
    (folder / f"rank_{rank}.json").write_text(json.dumps(found))
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
