"""Kernels on a GPU: every backend against float64, more than 2^31 elements, bits from run to run, compiled graphs."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from megalite.core.ops import resolve
from megalite.core.parts.kernels import native
from tests.ops_contract import CONTRACT, check

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]
ROOT = Path(__file__).parents[2]


def _specs() -> list[str]:
    specs = ["auto", "torch", "triton"]
    if torch.version.cuda and native.why_no_cuda(torch.device("cuda"), torch.float32) is None:
        specs.append("adamw=cuda,l2_norm=cuda,lamb=cuda")
    return specs


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("spec", _specs() if torch.cuda.is_available() else ["auto"])
def test_every_op_against_float64(spec: str, dtype: torch.dtype) -> None:
    torch.backends.cuda.matmul.allow_tf32 = False
    assert [r for r in check(resolve(spec, "cuda", dtype), "cuda", dtype) if not r.ok] == []


@pytest.mark.parametrize("spec", ["triton", "adamw=cuda,l2_norm=cuda,lamb=cuda"])
def test_contract_file_on_the_gpu(spec: str) -> None:
    if "cuda" in spec and native.why_no_cuda(torch.device("cuda"), torch.float32) is not None:
        pytest.skip("the CUDA library is not built")
    env = {**os.environ, "MEGALITE_TEST_BACKEND": spec, "MEGALITE_TEST_DEVICE": "cuda"}
    command = [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", *CONTRACT]
    done = subprocess.run(command, cwd=ROOT, env=env, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout[-6000:]


def _memory(gib: float) -> None:
    free, _ = torch.cuda.mem_get_info()
    if free < gib * 2**30:
        pytest.skip(f"needs {gib} GiB of free GPU memory")


def test_norm_beyond_two_to_the_31() -> None:
    _memory(6)
    n = 2**31 + 4099
    flat = torch.zeros(n, device="cuda", dtype=torch.bfloat16)
    flat[-1] = 3.0
    flat[0] = 4.0
    assert resolve("auto", "cuda", torch.bfloat16).l2_norm(flat).item() == 5.0
    flat[-2] = float("nan")
    assert resolve("auto", "cuda", torch.bfloat16).l2_norm(flat).isnan()


@pytest.mark.parametrize("spec", ["auto", "adamw=triton"])
def test_adamw_beyond_two_to_the_31(spec: str) -> None:
    """The last elements of a 2.1 G buffer move as the first ones do."""
    _memory(40)
    n = 2**31 + 4099
    ops = resolve(spec, "cuda", torch.bfloat16)
    param, m, v = (torch.ones(n, device="cuda") for _ in range(3))
    grad = torch.ones(n, device="cuda", dtype=torch.bfloat16)
    out = torch.empty_like(grad)
    ops.adamw(
        param, grad, m, v, out, lr=0.1, beta1=0.9, beta2=0.95, eps=1e-8, weight_decay=0.1, step=3, grad_multiplier=None
    )
    assert (param == param[0]).all()
    assert param[0] != 1
    assert torch.equal(out, param.bfloat16())


def test_swiglu_beyond_two_to_the_31() -> None:
    _memory(16)
    ops = resolve("glu=triton,torch", "cuda", torch.bfloat16)
    gate_up = torch.ones(2**17 + 1, 16384, device="cuda", dtype=torch.bfloat16)
    y = ops.swiglu(gate_up)
    assert (y == y[0, 0]).all()
    assert y[0, 0].item() == pytest.approx(0.731, rel=1e-2)


def test_wgrad_writes_fp32_without_a_buffer() -> None:
    """addmm with out_dtype adds into main_grad itself: no allocation of its size."""
    ops = resolve("auto", "cuda", torch.bfloat16)
    dy, x = (torch.randn(512, 4096, device="cuda", dtype=torch.bfloat16) for _ in range(2))
    main_grad = torch.ones(4096, 4096, device="cuda")
    ops.linear_wgrad(main_grad, dy, x)
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    ops.linear_wgrad(main_grad, dy, x)
    assert torch.cuda.max_memory_allocated() - before < main_grad.nbytes / 2
    want = 1 + 2 * (dy.double().t() @ x.double())
    assert (main_grad - want).norm() / want.norm() < 1e-5


def test_adamw_reads_its_multiplier_without_waiting() -> None:
    """No synchronization of the host with the device in a step."""
    ops = resolve("auto", "cuda", torch.bfloat16)
    state = [torch.ones(4096, device="cuda") for _ in range(4)]
    multiplier = torch.tensor(0.5, device="cuda")
    hyper = {"lr": 0.1, "beta1": 0.9, "beta2": 0.95, "eps": 1e-8, "weight_decay": 0.1, "step": 3}
    ops.adamw(*state, None, grad_multiplier=multiplier, **hyper)
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        ops.adamw(*state, None, grad_multiplier=ops.l2_norm(state[0]), **hyper)
    finally:
        torch.cuda.set_sync_debug_mode("default")
