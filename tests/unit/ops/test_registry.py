"""Choosing backends: specs, errors, what is printed, and that the self-check can fail."""

from __future__ import annotations

import dataclasses
import shutil
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor

from megalite.core.base.errors import UserError
from megalite.core.ops import Ops, resolve
from megalite.core.ops.choose import OPS, choose, parse_spec
from megalite.core.ops.op import TORCH, Backend, Op
from megalite.core.parts.kernels.fused import triton_backend
from tests.ops_contract import check

CPU = torch.device("cpu")


def _why(device: str, dtype: torch.dtype, reason: str | None) -> str | None:
    return reason


def _op(**reasons: str | None) -> Op:
    """An op with a backend per keyword, each with its reason for not running."""
    backends = tuple(Backend(name, lambda op: {}, partial(_why, reason=why)) for name, why in reasons.items())
    return Op("op", (), backends)


def test_automatic_choice_is_the_first_that_can_run() -> None:
    choice, _ = choose(_op(cuda="no card", cpp=None, torch=None), "auto", CPU, torch.float32, None)
    assert choice.backend == "cpp"
    assert choice.rejected == (("cuda", "no card"),)


def test_named_backend_that_cannot_run_is_an_error_with_its_reason() -> None:
    with pytest.raises(UserError, match=r"op=cuda cannot run here \(no card\)"):
        choose(_op(cuda="no card", torch=None), "cuda", CPU, torch.float32, "op=cuda")


def test_default_backend_that_an_op_lacks_leaves_it_automatic_with_a_reason() -> None:
    choice, _ = choose(_op(torch=None), "triton", CPU, torch.float32, "triton")
    assert choice.backend == "torch"
    assert choice.reason == "this op has no triton backend"


def test_interpreter_is_never_an_automatic_choice() -> None:
    op = Op("op", (), (replace(triton_backend("norm"), why_not=lambda device, dtype: None), TORCH))
    choice, _ = choose(op, "auto", CPU, torch.float32, None)
    assert choice.backend == "torch"
    assert choice.rejected[0][0] == "triton"
    choice, _ = choose(op, "triton", CPU, torch.float32, None)
    assert choice.backend == "triton"


@pytest.mark.skipif(shutil.which("gcc") is None, reason="no gcc, which Triton requires")
@pytest.mark.parametrize(
    ("asked", "capability", "dtype", "backend"),
    [
        ("auto", (9, 0), torch.bfloat16, "cuda"),
        ("auto", (9, 0), torch.float16, "triton"),
        ("auto", (9, 0), torch.float32, "torch"),
        ("triton", (9, 0), torch.float32, "triton"),
        ("auto", (8, 0), torch.bfloat16, "triton"),
        ("auto", (7, 5), torch.float16, "torch"),
        ("triton", (7, 5), torch.float16, "triton"),
        ("auto", (12, 0), torch.bfloat16, "triton"),
    ],
)
def test_grouped_products_by_gpu(
    monkeypatch: pytest.MonkeyPatch, asked: str, capability: tuple[int, int], dtype: torch.dtype, backend: str
) -> None:
    pytest.importorskip("triton", reason="triton is not installed")
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)
    choice, _ = choose(OPS["grouped"], asked, torch.device("cuda"), dtype, None)
    assert choice.backend == backend


def test_spec_names_win_over_the_default_whatever_their_order() -> None:
    for spec in ("adamw=cpp,torch", "torch,adamw=cpp", " torch , adamw=cpp ,"):
        wanted = parse_spec(spec)
        assert wanted.pop("adamw") == "cpp"
        assert set(wanted.values()) == {"torch"}
    assert set(parse_spec(None).values()) == {"auto"}


@pytest.mark.parametrize(
    ("spec", "message"),
    [
        ("fast", "unknown backend 'fast'"),
        ("rmsnorm=fast", "unknown backend 'fast'"),
        ("softmax=torch", "unknown op 'softmax'; use one of rmsnorm"),
        ("matmul=triton", "matmul has no backend triton; use auto or one of torch, apex"),
        ("adamw=cuda", "adamw=cuda cannot run here"),
        ("rmsnorm=apex", "rmsnorm=apex cannot run here"),
    ],
)
def test_mistakes_in_the_spec(spec: str, message: str) -> None:
    with pytest.raises(UserError, match=message):
        resolve(spec, "cpu", torch.float32)


def test_every_function_of_ops_belongs_to_exactly_one_op() -> None:
    functions = [function for op in OPS.values() for function in op.functions]
    fields = [field.name for field in dataclasses.fields(Ops) if field.name != "choices"]
    assert sorted(functions) == sorted(fields)


def test_every_op_states_its_contract_and_ends_with_a_backend_for_any_machine() -> None:
    for name, op in OPS.items():
        module = sys.modules[f"megalite.core.ops.{name}"]
        for function in op.functions:
            assert f"{function}(" in (module.__doc__ or ""), f"{name} has no contract for {function}"
        assert any(b.name == "torch" and b.why_not(CPU, torch.float32) is None for b in op.backends)


def _listing(*args: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, "-m", "megalite.core.ops", *args], capture_output=True, text=True)


def test_listing_shows_every_op_with_choice_and_reasons() -> None:
    done = _listing("--device", "cpu", "--ops", "torch")
    assert done.returncode == 0, done.stderr
    for name in OPS:
        assert f"\n{name:14} torch    requested" in done.stdout
    assert "cuda: for CUDA tensors, not cpu" in done.stdout


def test_listing_of_a_missing_backend_is_one_error_line_and_exit_2() -> None:
    done = _listing("--device", "cpu", "--ops", "adamw=cuda")
    assert done.returncode == 2
    assert done.stderr.startswith("error: --ops adamw=cuda")
    assert done.stderr.count("\n") == 1


def test_description_groups_ops_by_backend() -> None:
    assert resolve("torch", "cpu", torch.float32).describe().startswith("ops: torch: rmsnorm, layernorm")


def _off(ops: Ops) -> dict[str, Callable[..., Any]]:
    return {"rmsnorm": lambda x, w, eps: ops.rmsnorm(x, w, eps) * (1 + 1e-4)}


def _unwritten(ops: Ops) -> dict[str, Callable[..., Any]]:
    def swiglu(x: Tensor, *weights: Tensor) -> Tensor:
        y = ops.swiglu(x, *weights)
        kept = torch.empty_like(y)
        kept[..., 1:] = y[..., 1:]
        return kept

    return {"swiglu": swiglu}


def _past_the_end(ops: Ops) -> dict[str, Callable[..., Any]]:
    def adamw(param: Tensor, *args: Any, **kwargs: Any) -> None:
        ops.adamw(param, *args, **kwargs)
        param.as_strided((1,), (1,), param.storage_offset() + len(param)).zero_()

    return {"adamw": adamw}


def _unsteady(ops: Ops) -> dict[str, Callable[..., Any]]:
    calls = iter(range(10**6))
    return {"l2_norm": lambda flat: ops.l2_norm(flat) * (1 + 1e-7 * (next(calls) % 2))}


def _wrong_gradient(ops: Ops) -> dict[str, Callable[..., Any]]:
    return {"geglu": lambda x, *rest: ops.geglu(x, *rest) + (x - x.detach()).sum(-1, keepdim=True)}


@pytest.mark.parametrize(
    ("break_op", "case", "fault"),
    [
        (_off, "rmsnorm", ""),
        (_unwritten, "swiglu", "NaN"),
        (_past_the_end, "adamw", "wrote outside its buffer"),
        (_unsteady, "l2_norm", "two runs differ"),
        (_wrong_gradient, "geglu", ""),
    ],
)
def test_self_check_finds_a_broken_op(break_op: Callable[[Ops], dict[str, Any]], case: str, fault: str) -> None:
    ops = resolve("torch", "cpu", torch.float32)
    results = check(dataclasses.replace(ops, **break_op(ops)), "cpu", torch.float32)
    failed = [r for r in results if not r.ok]
    assert any(r.case.startswith(case) for r in failed)
    assert all(r.case.startswith((case, "weighed activations")) for r in failed)
    assert any(fault in r.fault for r in failed)
