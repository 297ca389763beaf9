"""Ranks of one stage make the same buckets, whatever they own: else their sums meet unlike ones."""

from __future__ import annotations

import math
from collections import Counter, defaultdict
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from megalite.core.base.errors import UserError
from megalite.core.build import build_engine
from megalite.core.mesh.context import ParallelContext
from megalite.core.mesh.grid import Grid
from megalite.core.optim.check_buckets import describe
from megalite.core.options.model import ModelConfig
from megalite.core.parts.families import FAMILIES
from megalite.extras.estimate.record import recorded_world
from megalite.runtime.options.run import Config
from tests.parity import jobs
from tests.parity.families import tiny
from tests.parity.runs import losses, train
from tests.rows import always_run
from tests.workers import WorkerPool

# World and layout; "apart" stands for no sequence parallelism, where more parameters are copies without further sums.
Layout = tuple[int, dict[str, Any]]
APART = {"sequence_parallel": False}
STRONG: list[Layout] = [
    (4, {"tp": 2, "zero": 0, **APART}),
    (8, {"tp": 2, "pp": 2, "zero": 1, **APART}),
    (8, {"tp": 2, "cp": 2, "zero": 3}),
]
EXPERTS: list[Layout] = [(8, {"ep": 2, "tp": 2, "zero": 1, **APART}), (8, {"ep": 4, "tp": 2, "etp": "1", "zero": 0})]


def check_layout(model: ModelConfig, world: int, parallel: dict[str, Any]) -> None:
    """Build the engine of every rank, without peers, and compare the buckets over all axes."""
    cfg = jobs.make_config(model, {"zero_whole_below": 500, **parallel}, micro_batch_size=1)
    grid = Grid.from_config(cfg.parallel, world)
    of_stage, of_ends, owned = defaultdict(set), defaultdict(set), Counter[str]()
    sizes: dict[str, int] = {}
    for rank in range(world):
        with recorded_world(rank, grid):
            ctx = ParallelContext.create(grid, torch.device("cpu"))
            buckets = build_engine(cfg, ctx).optimizer.buckets
        all_of_them, ends = describe(buckets)
        of_stage[ctx.pp.rank].add(all_of_them)
        of_ends[ctx.axis("ends").ranks].add(ends)
        for bucket in buckets:
            for own in bucket.param_shares:
                shard = own.param.shard
                if shard.spec.tied_to is None:
                    cut = [shard.layout.grid[axis] for axis, _ in shard.spec.sharded_dims]
                    sizes[shard.spec.name] = own.param.numel() * math.prod(cut)
                owned[shard.spec.name] += own.numel * bucket.is_owner
    for what, groups in (("stage", of_stage), ("ends", of_ends)):
        for key, lists in groups.items():
            assert len(lists) == 1, f"{parallel}, {what} {key}: " + "\n--\n".join(sorted(lists))
    assert +owned == sizes, f"{parallel}: each element counts once"


@pytest.mark.parametrize("family", FAMILIES)
def test_same_buckets_on_every_rank(family: str) -> None:
    model = tiny(family)
    for world, parallel in STRONG + (EXPERTS if model.num_experts else []):
        check_layout(model, world, parallel)


DELTA_NETS = (
    "--linear-attention-freq 2 --linear-num-key-heads 2 --linear-num-value-heads 4 --linear-key-head-dim 8 "
    "--linear-value-head-dim 8 --attention-output-gate"
)
# What dies, hangs or saves nothing where the buckets of tp ranks 0 and 1 differ: (world, options).
LINES: dict[str, tuple[int, str]] = {
    "unlike sums over dp": (4, "--arch gpt2 --zero 0"),
    "unlike sums over cp": (4, "--arch gpt2 --zero 0 --cp 2"),
    "unlike norms over tp": (2, "--arch gpt2 --optimizer lamb"),
    "unlike norms of latents": (2, "--arch llama --kv-lora-rank 8 --optimizer lars"),
    "unlike copies": (2, "--arch llama --mtp-num-layers 1"),
    "unlike copies of delta nets": (2, f"--arch llama {DELTA_NETS} --mtp-num-layers 2"),
    "unlike copies of expert biases": (2, "--arch gpt_oss --num-experts 4 --sequence-parallel"),
    # Copies beside other elements are rounded in other blocks, or compete with other elements to be sent.
    "copies drift apart in codes": (4, "--arch mixtral --num-experts 4 --compress int8"),
    "copies drift apart in the largest": (4, "--arch gpt2 --compress topk:0.1"),
}
SHORT = ("unlike sums over dp", "unlike norms over tp", "unlike copies", "unlike copies of expert biases")
TINY = (
    "--device cpu --mock-data --num-layers 2 --hidden-size 32 --num-heads 4 --vocab-size 97 --seq-len 16 "
    "--global-batch-size 4 --tp 2"
)


@pytest.mark.parametrize("line", always_run(LINES, *SHORT))
def test_command_lines_train_and_save(pool: WorkerPool, tmp_path: Path, line: str) -> None:
    """Two steps are those of one process, and the end of the run finds its copies equal."""
    world, options = LINES[line]
    apart = [] if "--sequence-parallel" in options else ["--no-sequence-parallel"]
    common = [*TINY.split(), *options.split(), *apart, "--train-steps", "2", "--run-dir"]
    pool.run(world, train, [*common, str(tmp_path / "ranks")], world)
    assert (tmp_path / "ranks" / "checkpoints" / "step_00000002").is_dir()
    if "--compress" not in options:
        train(0, [*common, str(tmp_path / "one"), "--tp", "1", "--cp", "1"], 1)
        np.testing.assert_allclose(losses(tmp_path / "ranks"), losses(tmp_path / "one"), rtol=1e-5)


@pytest.mark.full
def test_shares_of_experts_have_replicas_of_their_own(pool: WorkerPool) -> None:
    """In groups too small for experts every one of their ranks has its own copy, and other weights one of four."""
    layout = {"ep": 4, "zero": 3, "zero_group": "2", "zero_whole_below": 0}
    cfg = jobs.make_config(tiny("mixtral"), layout, micro_batch_size=1, offload="optimizer+params")
    pool.run(8, jobs.train, cfg, 8, 1)


def other_order(rank: int, arguments: list[str], ends: bool) -> str:
    """What the start of a run says where rank 1 has its buckets in another order; `ends`: on other ends alone."""
    from megalite.core import build
    from megalite.core.optim import check_buckets

    make, lines = build.make_buckets, check_buckets._lines

    def other_lines(buckets: Any, names: Any) -> str:
        return lines(buckets, names) + ("other" if all("ends" in bucket.kind.reduce for bucket in buckets) else "")

    with pytest.MonkeyPatch.context() as patch:
        if rank == 1 and ends:
            patch.setattr(check_buckets, "_lines", other_lines)
        elif rank == 1:
            patch.setattr(build, "make_buckets", lambda *args, **options: make(*args, **options)[::-1])
        try:
            train(rank, arguments, 2)
        except UserError as e:
            return str(e)
    return ""


@pytest.mark.parametrize("ends", [False, True], ids=["of a stage", "of the ends"])
def test_other_buckets_are_refused_at_the_start(pool: WorkerPool, tmp_path: Path, ends: bool) -> None:
    arguments = [*TINY.split(), "--arch", "gpt2", "--train-steps", "1", "--run-dir", str(tmp_path)]
    arguments += ["--tp", "1", "--pp", "2"] if ends else []
    first, second = pool.run(2, other_order, arguments, ends)
    assert first == second
    assert first.startswith("the parameters of rank 1: must lie in the same buckets as those of rank 0")
    assert "\n" not in first


def fewer_copies(rank: int, cfg: Config) -> str:
    """What the check of a save says where rank 1 has its copies in another order, then fewer of them."""
    from megalite.runtime.checkpoint.check_replicas import check_replicas
    from megalite.runtime.checkpoint.save import SaveError

    engine = jobs.start(rank, cfg, 2)
    optimizer = engine.optimizer
    if rank == 1:
        optimizer.buckets = optimizer.buckets[::-1]
    # By name: the order of buckets does not matter.
    check_replicas(optimizer.copies(), engine.ctx)
    if rank == 1:
        optimizer.buckets = [bucket for bucket in optimizer.buckets if bucket.kind.weight_decay]
    try:
        check_replicas(optimizer.copies(), engine.ctx)
    except SaveError as e:
        return str(e)
    return ""


def test_other_copies_are_refused_as_what_they_are(pool: WorkerPool) -> None:
    first, second = pool.run(2, fewer_copies, jobs.make_config(jobs.gpt2(2), {"tp": 2, **APART}))
    assert first == second
    assert "rank 1 lists other parameters than rank 0 as copies (tp)" in first
    assert "hardware" not in first
    assert "\n" not in first
