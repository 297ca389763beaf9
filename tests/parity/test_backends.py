"""Every kernel backend that runs on a CPU trains the same model: loss and gradient norm to 1e-5."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from megalite.core.ops import resolve
from megalite.core.options.model import ModelConfig
from tests.parity import jobs

ROOT = Path(__file__).resolve().parents[2]
MODELS = {"llama": jobs.llama(2), "gpt2": jobs.gpt2(2)}


def steps(model: ModelConfig, ops: str, count: int) -> list[tuple[float, float]]:
    return jobs.train(0, jobs.make_config(model, micro_batch_size=8, ops=ops), 1, count)


@pytest.mark.parametrize("model", MODELS)
def test_cpp(model: str) -> None:
    import torch

    listing = {c.op: c.rejected for c in resolve("auto", torch.device("cpu"), torch.float32).choices}
    rejected = dict(listing["adamw"])
    if "cpp" in rejected:
        pytest.skip(f"no C++ kernels: {rejected['cpp']}")
    np.testing.assert_allclose(steps(MODELS[model], "cpp", 6), steps(MODELS[model], "torch", 6), rtol=1e-5)


@pytest.mark.full
def test_triton_interpreted() -> None:
    pytest.importorskip("triton", reason="Triton is not installed")
    code = """
import json
from tests.parity.test_backends import MODELS, steps
print(json.dumps([steps(model, "triton", 2) for model in MODELS.values()]))
"""
    env = {**os.environ, "TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1"}
    done = subprocess.run([sys.executable, "-c", code], env=env, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    expected = [steps(model, "torch", 2) for model in MODELS.values()]
    np.testing.assert_allclose(json.loads(done.stdout.splitlines()[-1]), expected, rtol=1e-5)
