"""A training step on a GPU: the figures of a CPU with every backend, the same bits twice, save and resume, memory.

MEGALITE_TEST_DEVICE=cpu rehearses it where there is no GPU.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import megalite
from megalite.core.build import build_engine
from megalite.core.mesh.context import ParallelContext
from megalite.core.mesh.grid import Grid
from megalite.core.ops.choose import OPS
from megalite.extras.plan.memory.ranks import memory_per_rank
from megalite.extras.view.metrics import read_metrics
from tests.parity import jobs
from tests.ranks import run_ranks

DEVICE = os.environ.get("MEGALITE_TEST_DEVICE", "cuda")
pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(DEVICE == "cuda" and not torch.cuda.is_available(), reason="needs a CUDA device"),
]
STEPS = 20


def train(device: str, precision: str = "fp32", model: Any = None, **options: Any) -> np.ndarray:
    """(loss, gradient norm) of every step."""
    torch.backends.cuda.matmul.allow_tf32 = False
    cfg = jobs.make_config(model or jobs.llama(2), precision=precision, **options)
    engine = build_engine(cfg, ParallelContext.single(torch.device(device)))
    engine.optimizer.init_parameters(cfg.train.seed)
    return np.array(jobs.run_steps(engine, STEPS))


def backends() -> list[str]:
    """Every backend that some op has here, with the ops that it can compute."""
    device = torch.device(DEVICE)
    if DEVICE == "cuda" and not torch.cuda.is_available():
        return ["auto"]
    able: dict[str, list[str]] = {}
    for name, op in OPS.items():
        for backend in op.backends:
            if backend.why_not(device, torch.float32) is None:
                able.setdefault(backend.name, []).append(f"{name}={backend.name}")
    return ["auto", *(",".join(named) for named in able.values())]


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
@pytest.mark.parametrize("family", ["llama", "gpt2", "gemma2", "gemma3"])
def test_the_losses_of_a_cpu(family: str, precision: str) -> None:
    model = getattr(jobs, family)(2)
    expected = train("cpu", model=model)
    np.testing.assert_allclose(
        train(DEVICE, precision, model=model)[:, 0], expected[:, 0], rtol=1e-5 if precision == "fp32" else 1e-2
    )


@pytest.mark.parametrize("ops", backends(), ids=lambda ops: ops.rpartition("=")[2])
def test_every_backend(ops: str) -> None:
    np.testing.assert_allclose(train(DEVICE, ops=ops), train("cpu", ops="torch"), rtol=1e-4)


def test_deterministic_means_the_same_bits() -> None:
    torch.use_deterministic_algorithms(True)
    try:
        assert (train(DEVICE, "bf16") == train(DEVICE, "bf16")).all()
    finally:
        torch.use_deterministic_algorithms(False)


def test_save_and_resume(tmp_path: Path) -> None:
    def losses(folder: str, steps: int) -> list[float]:
        cfg = megalite.configure(
            num_layers=2,
            hidden_size=32,
            num_heads=4,
            vocab_size=96,
            seq_len=16,
            mock_data=True,
            device=DEVICE,
            precision="bf16",
            deterministic=True,
            train_steps=8,
            run_dir=str(tmp_path / folder),
        )
        with megalite.start(cfg) as run:
            seen = []
            for record in megalite.steps(run):
                seen.append(record["loss"])
                run.stop_asked = run.step == steps
            return seen

    whole = losses("whole", 8)
    assert losses("parts", 4) + losses("parts", 8) == whole


@pytest.mark.skipif(DEVICE != "cuda", reason="measures CUDA's allocator")
def test_peak_memory_is_the_planned_one() -> None:
    model = jobs.llama(4, hidden_size=1024, num_heads=16, ffn_hidden_size=2816, vocab_size=32000, seq_len=1024)
    cfg = jobs.make_config(model, {"bucket_size": 10**7}, precision="bf16", micro_batch_size=4)
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    engine = build_engine(cfg, ParallelContext.single(torch.device("cuda")))
    engine.optimizer.init_parameters(cfg.train.seed)
    from megalite.core.step import train_step

    batch = np.random.default_rng(0).integers(0, 32000, (jobs.BATCH, 1025))
    for step in (1, 2):
        train_step(engine, batch, step)
    planned = memory_per_rank(cfg, Grid.of(1))[0].total
    assert torch.cuda.max_memory_allocated() - before == pytest.approx(planned, rel=0.05)


@pytest.mark.skipif(DEVICE != "cuda", reason="names of CUDA kernels")
def test_attention_runs_a_fused_kernel() -> None:
    model = jobs.llama(2, hidden_size=256, num_heads=4, num_kv_heads=2)
    with torch.profiler.profile() as prof:
        train("cuda", "bf16", model=model)
    names = " ".join(event.key.lower() for event in prof.key_averages())
    assert "flash" in names or "cudnn" in names or "fmha" in names, names


@pytest.mark.skipif(DEVICE != "cuda", reason="CUDA's kernels")
@pytest.mark.parametrize(("attention", "kernel"), [("flash", "flash"), ("cudnn", "cudnn"), ("efficient", "fmha")])
def test_attention_is_the_one_asked_for(attention: str, kernel: str) -> None:
    model = jobs.llama(2, hidden_size=256, num_heads=4, num_kv_heads=2)
    try:
        with torch.profiler.profile() as prof:
            got = train("cuda", "bf16", model=model, attention=attention)
    except megalite.UserError as e:
        pytest.skip(str(e))
    names = " ".join(event.key.lower() for event in prof.key_averages())
    assert kernel in names, names
    np.testing.assert_allclose(got[:, 0], train("cpu", model=model)[:, 0], rtol=1e-2)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="NVTX ranges need a CUDA build of torch and a device")
def test_ranges_for_nsight_change_no_figure(tmp_path: Path) -> None:
    """Without nsys around it nobody reads them: that they begin and end is all that shows here."""
    size = ["--num-layers", "2", "--hidden-size", "64", "--num-heads", "4", "--seq-len", "32", "--vocab-size", "96"]
    flags = [*size, "--mock-data", "--train-steps", "3", "--global-batch-size", "2", "--device", "cuda"]
    plain, marked = (tmp_path / name for name in ("plain", "marked"))
    for folder, more in ((plain, []), (marked, ["--profile", "2:3", "--profiler", "nsight"])):
        (left,) = run_ranks([*flags, *more, "--run-dir", str(folder)])
        assert left.code == 0, left.err
    losses = [[line["loss"] for line in read_metrics(folder)[0]] for folder in (plain, marked)]
    assert losses[0] == pytest.approx(losses[1], rel=1e-6)
    assert not (marked / "profile").exists()
