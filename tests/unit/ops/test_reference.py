"""The torch references: gradients by finite differences in float64, what they keep for backward, their conventions."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.autograd import gradcheck

from megalite.core.ops import Ops, resolve


@pytest.fixture(scope="module")
def ops() -> Ops:
    return resolve("torch", "cpu", torch.float32)


def _x(*shape: int, seed: int = 0) -> Tensor:
    g = torch.Generator().manual_seed(seed)
    return torch.randn(*shape, generator=g, dtype=torch.float64).requires_grad_()


_COS, _SIN = _x(3, 2, seed=8).detach(), _x(3, 2, seed=9).detach()

GRADCHECKS: dict[str, tuple[Callable[..., Any], tuple[Tensor, ...]]] = {
    "rmsnorm": (lambda o, x, w: o.rmsnorm(x, w, 1e-5), (_x(3, 2, 5), _x(5, seed=1))),
    "add_rmsnorm": (lambda o, x, r, w: o.add_rmsnorm(x, r, w, 1e-5), (_x(3, 5), _x(3, 5, seed=1), _x(5, seed=2))),
    "qk_rmsnorm": (
        lambda o, x, q, k: o.qk_rmsnorm(x, q, k, 1e-5, 4, 2),
        (_x(3, 2, 8, 6), _x(6, seed=1), _x(6, seed=2)),
    ),
    "layernorm": (lambda o, x, w, b: o.layernorm(x, w, b, 1e-5), (_x(3, 5), _x(5, seed=1), _x(5, seed=2))),
    "add_layernorm": (
        lambda o, x, r, w, b: o.add_layernorm(x, r, w, b, 1e-5),
        (_x(3, 5), _x(3, 5, seed=1), _x(5, seed=2), _x(5, seed=3)),
    ),
    "rope_qkv": (lambda o, x: o.rope_qkv(x.clone(), _COS, _SIN, 4, 2), (_x(3, 2, 8, 6),)),
    "rope": (lambda o, x: o.rope(x, _COS, _SIN), (_x(3, 2, 4, 6),)),
    "swiglu": (lambda o, x: o.swiglu(x), (_x(3, 8),)),
    "clamped_swiglu": (lambda o, x: o.clamped_swiglu(4 * x), (_x(3, 8),)),
    "geglu erf": (lambda o, x: o.geglu(x, "none"), (_x(3, 8),)),
    "geglu tanh": (lambda o, x: o.geglu(x, "tanh"), (_x(3, 8),)),
    "weighed swiglu": (lambda o, x, w: o.swiglu(x, w), (_x(3, 8), _x(3, seed=1))),
    "weighed gelu": (lambda o, x, w: o.gelu(x, weights=w), (_x(3, 4), _x(3, seed=1))),
    "gelu erf": (lambda o, x: o.gelu(x, "none"), (_x(3, 4),)),
    "gelu tanh": (lambda o, x: o.gelu(x, "tanh"), (_x(3, 4),)),
}


@pytest.mark.parametrize("name", list(GRADCHECKS))
def test_gradients_by_finite_differences(ops: Ops, name: str) -> None:
    run, inputs = GRADCHECKS[name]
    assert gradcheck(lambda *args: run(ops, *args), inputs)


@pytest.mark.parametrize(
    ("name", "limit"),
    [
        ("rmsnorm", 1.1),
        ("add_rmsnorm", 1.1),
        ("qk_rmsnorm", 1.1),
        ("swiglu", 2.0),
        ("weighed swiglu", 2.1),
        ("gelu", 1.1),
        ("rope_qkv", 0.4),
        ("rope", 0.4),
    ],
)
def test_little_is_kept_for_backward(ops: Ops, name: str, limit: float) -> None:
    """Elements saved by autograd, as a multiple of the op's output."""
    x = torch.randn(64, 4, 64, requires_grad=True)
    w = torch.ones(64)
    tables = torch.randn(2, 64, 8)
    runs: dict[str, Callable[[], Any]] = {
        "rmsnorm": lambda: ops.rmsnorm(x, w, 1e-5),
        "add_rmsnorm": lambda: ops.add_rmsnorm(x, x * 1.0, w, 1e-5)[0],
        "qk_rmsnorm": lambda: ops.qk_rmsnorm(x.view(64, 4, 4, 16), w[:16], w[:16], 1e-5, 2, 1),
        "swiglu": lambda: ops.swiglu(x),
        "weighed swiglu": lambda: ops.swiglu(x, torch.ones(64, 4, requires_grad=True)),
        "gelu": lambda: ops.gelu(x),
        "rope_qkv": lambda: ops.rope_qkv((x * 1.0).view(64, 4, 4, 16), tables[0], tables[1], 2, 1)[0],
        "rope": lambda: ops.rope(x.view(64, 4, 4, 16), tables[0], tables[1]),
    }
    runs[name]()
    saved: dict[int, int] = {}

    def pack(t: Tensor) -> Tensor:
        saved[t.data_ptr()] = t.numel()
        return t

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda t: t):
        out = runs[name]()
    # `x * 1.0` is torch's own and keeps nothing of size.
    assert sum(saved.values()) <= limit * out.numel() + 64


def test_rope_is_the_rotation_of_complex_numbers(ops: Ops) -> None:
    """Element i and i + R/2 are one complex number times exp(i angle); the rest of the head is left alone."""
    x = torch.randn(5, 2, 3, 16)
    angle = torch.randn(5, 4)
    y = ops.rope(x, angle.cos(), angle.sin())
    want = torch.complex(x[..., :4], x[..., 4:8]) * torch.polar(torch.ones_like(angle), angle)[:, None, None]
    torch.testing.assert_close(torch.complex(y[..., :4], y[..., 4:8]), want)
    assert torch.equal(y[..., 8:], x[..., 8:])


def test_rope_keeps_scores_a_function_of_distance(ops: Ops) -> None:
    """q_m . k_n after rotation depends on m - n alone: the point of the embedding."""
    q, k = torch.randn(8, dtype=torch.float64), torch.randn(8, dtype=torch.float64)
    angle = torch.arange(10.0, dtype=torch.float64)[:, None] * torch.tensor([1.0, 0.1, 0.01, 0.001])
    rotate = [ops.rope(t.expand(10, 1, 1, 8).clone(), angle.cos(), angle.sin())[:, 0, 0] for t in (q, k)]
    scores = rotate[0] @ rotate[1].t()
    torch.testing.assert_close(scores[3, 1], scores[9, 7])
    torch.testing.assert_close(scores[0, 4], scores[5, 9])


def test_second_derivatives_are_refused_not_wrong(ops: Ops) -> None:
    x = torch.randn(2, 8, requires_grad=True)
    (dx,) = torch.autograd.grad(ops.swiglu(x).square().sum(), x, create_graph=True)
    with pytest.raises(RuntimeError, match="once_differentiable"):
        dx.sum().backward()


@pytest.mark.parametrize("spec", ["torch", "auto"])
def test_autograd_knows_that_rope_writes_in_place(spec: str) -> None:
    """A backward pass that saved the values must not get the rotated ones."""
    ops = resolve(spec, "cpu", torch.float32)
    qkv = torch.randn(3, 1, 4, 8, requires_grad=True) * 1.0
    squares = qkv.square()
    angle = torch.randn(3, 4)
    ops.rope_qkv(qkv, angle.cos(), angle.sin(), 2, 1)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        squares.sum().backward()


def test_wgrad_sums_micro_batches_in_fp32(ops: Ops) -> None:
    """Adding 2^-9 to 1 vanishes in bf16 (8 bits); over micro-batches, in main_grad, it must not."""
    main_grad = torch.zeros(1, 1)
    dy = torch.tensor([[1.0], [2.0**-9]], dtype=torch.bfloat16)
    for row in dy:
        ops.linear_wgrad(main_grad, row.view(1, 1), torch.ones(1, 1, dtype=torch.bfloat16))
    assert main_grad.item() == 1 + 2.0**-9
    low = torch.zeros(1, 1, dtype=torch.bfloat16)
    ops.linear_wgrad(low, dy, torch.ones(2, 1, dtype=torch.bfloat16))
    assert low.item() == 1.0


def test_lamb_segments_do_not_mix(ops: Ops) -> None:
    """Each segment moves by its own ratio; an empty segment and the edges are respected."""
    param, update = torch.zeros(10), torch.ones(10)
    offsets = (0, 3, 3, 10)
    out = torch.empty(10, dtype=torch.bfloat16)
    ops.lamb_apply(param, update, out, torch.tensor([1.0, 50.0, 2.0]), offsets, 0.5)
    assert param.tolist() == [-0.5] * 3 + [-1.0] * 7
    assert torch.equal(out.float(), param)
    assert ops.segment_norms(torch.arange(10.0), offsets).tolist() == pytest.approx([5**0.5, 0.0, 280**0.5])
