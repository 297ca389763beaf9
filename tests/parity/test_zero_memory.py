"""What ZeRO saves, measured on real ranks: live bytes between steps, the peak within a step, elements sent."""

from __future__ import annotations

import gc
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

from megalite.core.mesh.grid import Grid
from megalite.core.options.compression import CODECS
from megalite.extras.plan.memory.ranks import memory_per_rank
from megalite.runtime.options.run import Config
from tests.codecs import specs_of
from tests.parity import jobs
from tests.workers import WorkerPool

pytestmark = pytest.mark.full  # two dozen engines of some size

MODEL = jobs.llama(hidden_size=256, num_heads=8, num_kv_heads=4, ffn_hidden_size=768, vocab_size=512, seq_len=8)
PARAMETERS = 3_410_176
# Norms: small units, which stay whole at stage 3.
SMALL = 9 * 256


# Of one rank: bytes live between steps, the peak of a step above that; elements gathered, reduced, and summed over the
# groups of a hybrid.
Measured = tuple[int, ...]


def measured(rank: int, cfgs: Sequence[Config], pp: int = 1) -> list[Measured]:
    from megalite.core.mesh.context import ParallelContext

    ctx = ParallelContext.create(Grid.of(4, pp=pp), torch.device("cpu"))
    gc.collect()
    gc.freeze()  # what torch itself consists of need not be searched each time
    return [measure(cfg, ctx) for cfg in cfgs]


def measure(cfg: Config, ctx: Any) -> Measured:
    from torch.profiler import ProfilerActivity, profile

    from megalite.core.build import build_engine
    from megalite.core.mesh import collectives
    from megalite.core.step import train_step

    before = live_bytes()
    engine = build_engine(cfg, ctx)
    engine.optimizer.init_parameters(1)
    samples = cfg.train.global_batch_size // ctx.dp.size
    batch = np.random.default_rng(1).integers(0, cfg.model.vocab, (samples, cfg.model.seq_len + 1))
    train_step(engine, batch, 1)
    engine.optimizer.wait_weights()
    live = live_bytes() - before
    counts: Counter[str] = Counter()
    real = {name: getattr(collectives, name) for name in ("all_gather", "reduce_scatter", "all_reduce")}

    def counting(name: str) -> Any:
        def call(*tensors_and_axis: Any) -> Any:
            *tensors, axis = tensors_and_axis
            if axis.size > 1 and (name != "all_reduce" or axis.name == "replicas"):
                counts[name] += max(x.numel() for x in tensors)
            return real[name](*tensors, axis)

        return call

    try:
        for name in real:
            setattr(collectives, name, counting(name))
        peaks = []
        for step in (2, 3):  # a thread of gloo may hold what has arrived a little longer
            counts.clear()
            with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as prof:
                train_step(engine, batch, step)
                engine.optimizer.wait_weights()
            events = [e for e in prof.profiler.kineto_results.events() if e.name() == "[memory]"]
            peaks.append(int(np.cumsum([e.nbytes() for e in sorted(events, key=lambda e: e.start_ns())]).max()))
    finally:
        for name, function in real.items():
            setattr(collectives, name, function)
    return live, min(peaks), *(counts[name] for name in real)


def live_bytes() -> int:
    """Bytes of all tensors that Python holds."""
    gc.collect()
    tensors = [x for x in gc.get_objects() if issubclass(type(x), torch.Tensor)]
    return sum({t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in tensors}.values())


def config(zero: int, num_microbatches: int = 2, compress: str = "none", **parallel: Any) -> Config:
    return jobs.make_config(
        MODEL,
        {"zero": zero, "vocab_divisible_by": 128, "bucket_size": 400_000, "device": "cpu", **parallel},
        precision="bf16",
        global_batch_size=4 * num_microbatches,
        compress=compress,
    )


def muon(cfg: Config) -> Config:
    return replace(cfg, optim=replace(cfg.optim, optimizer="muon"))


def in_bf16(cfg: Config) -> Config:
    return jobs.with_train(cfg, grad_dtype="bf16")


def states_in_bf16(cfg: Config, **others: Any) -> Config:
    return replace(cfg, optim=replace(cfg.optim, moments_dtype="bf16", **others))


CONFIGS = {
    "0": config(0),
    "0-powersgd": config(0, compress="powersgd:64"),
    "1": config(1),
    **{f"1-{name}": config(1, compress=specs_of(name)[0]) for name in CODECS},
    "2": config(2, bucket_size=40_000_000),  # the default; units share no bucket all the same
    "2-step": config(2, zero_reduce="step"),
    "3": config(3),
    "3-m8": config(3, 8),
    "3-alone": config(3, overlap_param_gather=False),
    "3-hybrid": config(3, zero_group="2"),
    "1-muon": muon(config(1)),
    "3-muon": muon(config(3)),
    "1-bf16": in_bf16(config(1)),
    "2-bf16": in_bf16(config(2)),
    "3-bf16": in_bf16(config(3)),
    "0-states": states_in_bf16(config(0), master_dtype="bf16"),
    "1-moments": states_in_bf16(config(1)),
    "1-muon-states": states_in_bf16(muon(config(1)), master_dtype="bf16"),
    "3-states": states_in_bf16(config(3), master_dtype="bf16"),
}


@pytest.fixture(scope="module")
def results(pool: WorkerPool) -> dict[str, Measured]:
    ranks = pool.run(4, measured, list(CONFIGS.values()))
    # The same for all ranks, but for what gloo holds.
    least = [tuple(min(numbers) for numbers in zip(*(rank[i] for rank in ranks))) for i in range(len(CONFIGS))]
    return dict(zip(CONFIGS, least))


def test_bytes_per_parameter_between_steps(results: dict[str, Measured]) -> None:
    expected = {"0": 18, "1": 6 + 12 / 4, "2": 2 + 16 / 4, "3": 18 / 4, "3-hybrid": 18 / 2}
    # Gradients of bf16, and their sum in fp32 on the rank that updates.
    expected |= {"1-bf16": 4 + 16 / 4, "2-bf16": 2 + 16 / 4, "3-bf16": 18 / 4}
    # Moments of bf16; with masters of bf16, the weights themselves.
    expected |= {"0-states": 2 + 4 + 4, "1-moments": 6 + 8 / 4, "3-states": 10 / 4}
    assert {zero: results[zero][0] / PARAMETERS for zero in expected} == pytest.approx(expected, rel=0.01)


def test_peak_within_a_step(results: dict[str, Measured]) -> None:
    assert results["3"][1] < 9.9e6
    assert results["3-alone"][1] < 8.3e6
    assert results["2"][1] < 6.8e6
    assert results["3-m8"][1] == pytest.approx(results["3"][1], rel=0.01)


@pytest.mark.parametrize("name", CONFIGS)
def test_the_plan_is_what_was_measured(results: dict[str, Measured], name: str) -> None:
    live, peak, *_ = results[name]
    (plan,) = memory_per_rank(CONFIGS[name], Grid.of(4))
    states = plan.weights + plan.main_grad + plan.optimizer
    assert states == pytest.approx(live, rel=0.01)
    assert plan.total == pytest.approx(live + peak, rel=0.1)


def test_elements_sent(results: dict[str, Measured]) -> None:
    _, _, gathered, reduced, across = results["3"]
    embedding, m = 512 * 256, 2
    cut = PARAMETERS - SMALL
    # Forward and backward gather, but for the backward pass of the embedding; what is small is gathered once.
    assert gathered == 2 * m * cut - m * embedding + padded(SMALL)
    assert (reduced, across) == (m * cut + padded(SMALL), 0)
    # A hybrid sends as much within each group; between them its shares go around once, whatever m is.
    assert results["3-hybrid"][2:] == (gathered, reduced, (cut + padded(SMALL)) // 2)


def padded(elements: int) -> int:
    """Elements of a bucket that is cut into four shares."""
    return -(-elements // 128) * 128


def test_the_plan_of_a_split_backward_is_what_was_measured(pool: WorkerPool) -> None:
    """Recomputed blocks keep inputs and output gradients of their linear layers from I to W."""
    model = jobs.llama(8, hidden_size=64, ffn_hidden_size=128, vocab_size=64, seq_len=128)
    layout = {"pp": 2, "schedule": "zb-h1", "device": "cpu"}
    cfg = jobs.make_config(model, layout, recompute="full", micro_batch_size=4, global_batch_size=32)
    ranks = [rank[0] for rank in pool.run(4, measured, [cfg], 2)]
    for plan, (live, peak, *_) in zip(memory_per_rank(cfg, Grid.of(4, pp=2)), (min(ranks[:2]), min(ranks[2:]))):
        assert plan.total == pytest.approx(live + peak, rel=0.1)
