"""Offload on a GPU: pinned buffers and streams must change nothing but the last bits of the host's AdamW."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from megalite.core.build import build_engine
from megalite.core.mesh.context import ParallelContext
from tests.parity import jobs

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]
STEPS = 6


def train(parallel: dict[str, Any] | None = None, **options: Any) -> list[tuple[float, float]]:
    """Steps of a model with many small buckets, so that both buffers of each way are used again and again."""
    cfg = jobs.make_config(jobs.llama(), parallel, precision="bf16", **options)
    engine = build_engine(cfg, ParallelContext.single(torch.device("cuda")))
    engine.optimizer.init_parameters(cfg.train.seed)
    return jobs.run_steps(engine, STEPS)


def test_states_on_host_and_disk(tmp_path: Path) -> None:
    expected = train()
    host = train(offload="optimizer")
    np.testing.assert_allclose(host, expected, rtol=1e-3)  # bf16 weights of two kernels
    assert train(offload="optimizer", offload_dir=str(tmp_path)) == host


def test_weights_from_the_host() -> None:
    shape = {"zero": 3, "zero_whole_below": 0}
    np.testing.assert_allclose(train(shape, offload="optimizer+params"), train(offload="optimizer"), rtol=1e-5)


def test_activations_to_the_bit() -> None:
    assert train(recompute="full", offload="activations") == train(recompute="full")
