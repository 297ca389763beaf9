"""Optimizer state on the host or on disk: the same bits as without, over a stop and a resume too."""

from __future__ import annotations

import dataclasses
from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from megalite.core.base.errors import UserError
from megalite.core.build import build_engine
from megalite.core.mesh.context import ParallelContext
from megalite.core.mesh.grid import Grid
from megalite.core.step import train_step
from megalite.runtime.options.run import Config
from tests.parity import gradient_bits, jobs
from tests.parity.runs import MODEL, losses, train
from tests.rows import always_run
from tests.workers import WorkerPool


@pytest.mark.parametrize("optimizer", always_run(["adamw-bf16", "adamw-fp32", "lamb-fp32"], "adamw-bf16"))
def test_same_bits_where_ever_the_state_is(pool: WorkerPool, tmp_path: Path, optimizer: str) -> None:
    name, precision = optimizer.split("-")
    flags = [*MODEL, "--num-layers", "2", "--optimizer", name, "--precision", precision, "--bucket-size", "5000"]
    whole = pool.run(2, train, [*flags, "--train-steps", "4", "--run-dir", str(tmp_path / "none")], 2)
    host = ["--offload", "optimizer"]
    disk = [*host, "--offload-dir", str(tmp_path / "disk")]
    for first, second, run in ((host, disk, tmp_path / "a"), (disk, host, tmp_path / "b")):
        pool.run(2, train, [*flags, *first, "--train-steps", "2", "--run-dir", str(run)], 2)
        resumed = pool.run(2, train, [*flags, *second, "--train-steps", "4", "--run-dir", str(run)], 2)
        assert resumed == whole
        assert losses(run) == losses(tmp_path / "none")
        if precision == "fp32":
            break
    assert list((tmp_path / "disk").iterdir()) == []


def test_weights_come_from_the_host_before_each_use(pool: WorkerPool) -> None:
    """Bitwise ZeRO-3 without offload; on one rank, which has nobody to share with, what ZeRO-1 gives."""
    shape = {"zero": 3, "zero_whole_below": 0}
    layouts: list[tuple[dict[str, Any], dict[str, Any]]] = [
        (shape, {}),
        ({**shape, "zero_group": "2"}, {"recompute": "full", "precision": "bf16"}),
    ]
    cfgs = [jobs.make_config(jobs.gpt2(1), parallel, **more) for parallel, more in layouts]
    away = [jobs.with_train(cfg, offload="optimizer+params") for cfg in cfgs]
    for rank in pool.run(4, over_configs, [*cfgs, *away], 4):
        assert rank[2:] == rank[:2]
    alone, plain = (jobs.make_config(jobs.llama(2), {"zero": zero, "zero_whole_below": 0}) for zero in (3, 1))
    got = jobs.train(0, jobs.with_train(alone, offload="optimizer+params"), 1, 2)
    # Buckets differ, so that the norm is summed in another order.
    np.testing.assert_allclose(got, jobs.train(0, plain, 1, 2), rtol=1e-6)


def over_configs(rank: int, cfgs: list[Config], world: int) -> list[tuple[list[tuple[float, float]], list[bytes]]]:
    """Loss and gradient norm of two steps, and the final states, by config."""
    out = []
    ctx = ParallelContext.create(Grid.of(world), torch.device("cpu"))
    for cfg in cfgs:
        engine = build_engine(cfg, ctx)
        engine.optimizer.init_parameters(cfg.train.seed)
        for bucket in engine.optimizer.buckets:
            assert not bucket.store.gathered
            assert bucket.sharded.host == (cfg.train.offload != "none")
        out.append((jobs.run_steps(engine, 2), [s.flat.numpy().tobytes() for s in engine.optimizer.states()]))
        jobs.check_copies(engine)
    return out


def test_activations_return_as_they_left(pool: WorkerPool) -> None:
    model = jobs.llama(hidden_dropout=0.1)
    layouts: dict[str, dict[str, Any]] = {"1f1b": {}, "zb-h1": {}, "zb-v": {"vp": 2}}
    cfgs = [gradient_bits.config(model, {"pp": 2, **more}, name, recompute="full") for name, more in layouts.items()]
    away = [jobs.with_train(cfg, offload="activations") for cfg in cfgs]
    for rank in pool.run(2, gradient_bits.gradients, [*cfgs, *away], 2):
        here, there = (gradient_bits.as_bytes([[*chain(*runs)]]) for runs in (rank[:3], rank[3:]))
        assert here == there


def test_the_input_of_each_block_is_on_the_host_and_its_memory_is_reused() -> None:
    cfg = jobs.make_config(jobs.llama(), recompute="full", offload="activations", micro_batch_size=1)
    engine = build_engine(cfg, ParallelContext.single())
    engine.optimizer.init_parameters(1)
    jobs.run_steps(engine, 2)
    saving: Any = engine.stages[0]._saving
    offload = saving.__self__
    # Four blocks of one micro-batch at a time, fp32.
    assert offload.host_bytes == 4 * jobs.SEQ * 32 * 4
    assert sum(map(len, offload._free.values())) == 4


def config(folder: Path | None = None) -> Config:
    where = None if folder is None else str(folder)
    return jobs.make_config(jobs.llama(), offload="optimizer", offload_dir=where, micro_batch_size=1)


def skipped(rank: int, cfgs: list[Config]) -> list[bool]:
    """Whether a step with NaN gradients on rank 1 alone is skipped and leaves all states as they were, by config."""
    ctx = ParallelContext.create(Grid.of(2), torch.device("cpu"))
    out = []
    for cfg in cfgs:
        engine = build_engine(cfg, ctx)
        engine.optimizer.init_parameters(1)
        jobs.run_steps(engine, 1)
        engine.optimizer.wait_weights()
        before = [s.flat.clone() for s in engine.optimizer.states()]
        assert all(x.any() for x in before if x.numel())
        # A norm's weight that rank 0 owns and rank 1 has a copy of.
        norms = next(b for b in engine.optimizer.buckets if not b.sharded.weights)
        if rank == 1:
            norms.weights[0] = torch.nan
        result = train_step(engine, np.split(jobs.batches(1)[0], 2)[rank], 2)
        out.append(result.skipped and all(torch.equal(x, s.flat) for x, s in zip(before, engine.optimizer.states())))
    return out


def test_a_step_that_is_not_finite_changes_no_state(pool: WorkerPool, tmp_path: Path) -> None:
    shape = {"zero": 3, "zero_whole_below": 1000}
    cfgs = [
        jobs.make_config(jobs.llama(1), shape),
        jobs.make_config(jobs.llama(1), shape, offload="optimizer+params"),
        jobs.make_config(jobs.llama(1), shape, offload="optimizer", offload_dir=str(tmp_path)),
    ]
    assert pool.run(2, skipped, cfgs) == [[True] * 3] * 2


def test_too_little_host_memory_is_said_with_both_figures(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("megalite.core.parts.memory.offload.available_memory", lambda: 100_000)
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "4")
    cfg = config()
    engine = build_engine(
        dataclasses.replace(cfg, train=dataclasses.replace(cfg.train, offload="none")),
        single := ParallelContext.single(),
    )
    needed = 12 * sum(b.numel for b in engine.optimizer.buckets)
    with pytest.raises(UserError, match=rf"needs {4 * needed:,} bytes of memory \({needed:,} for .* has 100,000 avail"):
        build_engine(cfg, single)
    away = dataclasses.replace(cfg, train=dataclasses.replace(cfg.train, offload="activations", recompute="full"))
    monkeypatch.setattr("megalite.core.parts.memory.offload.available_memory", lambda: 10_000)
    with pytest.raises(
        UserError, match=r"--offload activations: the host needs 32,768 bytes of memory \(8,192 for each"
    ):
        build_engine(away, single)


@pytest.mark.root
def test_a_disk_that_is_too_small_is_refused_at_the_start(tiny_disk: Path) -> None:
    cfg = jobs.make_config(jobs.llama(hidden_size=128), offload="optimizer", offload_dir=str(tiny_disk / "new"))
    with pytest.raises(UserError, match=r"\d,\d{3},\d{3} bytes are needed there and 2,\d{3},\d{3} are free; choose"):
        build_engine(cfg, ParallelContext.single())
    assert list((tiny_disk / "new").iterdir()) == []
    # What fits trains, on a file system that may have no direct transfers.
    engine = build_engine(config(tiny_disk), ParallelContext.single())
    engine.optimizer.init_parameters(engine.cfg.train.seed)
    expected = jobs.train(
        0, dataclasses.replace(config(), train=dataclasses.replace(config().train, offload="none")), 1, 2
    )
    assert np.array_equal(jobs.run_steps(engine, 2), expected)
