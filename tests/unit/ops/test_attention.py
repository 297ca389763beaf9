"""Attention against plain float64 formulas: masks, soft cap, grouped heads, gradients."""

from __future__ import annotations

from typing import Any
from unittest import mock

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor
from torch.autograd import gradcheck
from torch.nn import functional as F
from torch.nn.attention import varlen
from torch.overrides import TorchFunctionMode

from megalite.core.batch import Documents, Mask
from megalite.core.ops import Ops, resolve
from megalite.core.ops import attention as op
from megalite.extras.estimate.fake_cuda import fake_cuda


@pytest.fixture(scope="module")
def ops() -> Ops:
    return resolve("auto", "cpu", torch.float32)


def reference(q: Tensor, k: Tensor, v: Tensor, window: int | None, scale: float, softcap: float | None) -> Tensor:
    """One query at a time, one head at a time: q [B, N, S, D], k and v [B, G, S, D]."""
    batch, heads, seq, _ = q.shape
    group = heads // k.shape[1]
    out = torch.empty_like(q)
    for b in range(batch):
        for n in range(heads):
            for i in range(seq):
                first = 0 if window is None else max(0, i - window + 1)
                scores = k[b, n // group, first : i + 1] @ q[b, n, i] * scale
                if softcap is not None:
                    scores = softcap * torch.tanh(scores / softcap)
                out[b, n, i] = scores.softmax(0) @ v[b, n // group, first : i + 1]
    return out


def draw(
    batch: int, heads: int, kv_heads: int, seq: int, width: int, dtype: torch.dtype = torch.float64
) -> list[Tensor]:
    g = torch.Generator().manual_seed(0)
    # As the model has them: heads inside, permuted views outside.
    shapes = [(seq, batch, n, width) for n in (heads, kv_heads, kv_heads, heads)]
    return [torch.randn(*shape, generator=g, dtype=dtype).permute(1, 2, 0, 3) for shape in shapes]


@given(
    st.integers(1, 2),
    st.integers(1, 3),
    st.integers(1, 3),
    st.integers(1, 9),
    st.integers(1, 8),
    st.one_of(st.none(), st.integers(1, 10)),
    st.sampled_from([None, 0.3]),
    st.sampled_from([None, 0.5, 50.0]),
)
def test_fp32_is_the_formula_both_ways(
    batch: int,
    kv_heads: int,
    group: int,
    seq: int,
    width: int,
    window: int | None,
    scale: float | None,
    softcap: float | None,
) -> None:
    ops = resolve("auto", "cpu", torch.float32)
    q, k, v, dy = draw(batch, kv_heads * group, kv_heads, seq, width)
    exact = [t.clone().requires_grad_() for t in (q, k, v)]
    want = reference(exact[0], exact[1], exact[2], window, scale or width**-0.5, softcap)
    leaves = [t.float().requires_grad_() for t in (q, k, v)]
    out = ops.attention(*leaves, Mask(window), scale=scale, softcap=softcap)
    assert out.shape == q.shape
    grads = zip(torch.autograd.grad(out, leaves, dy.float()), torch.autograd.grad(want, exact, dy))
    for got, expected in ((out, want), *grads):
        torch.testing.assert_close(got.double(), expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("softcap", [None, 5.0])
@pytest.mark.parametrize("window", [None, 7])
def test_low_precision(ops: Ops, dtype: torch.dtype, window: int | None, softcap: float | None) -> None:
    q, k, v, _ = (t.to(dtype) for t in draw(2, 4, 2, 32, 16))
    out = ops.attention(q, k, v, Mask(window), softcap=softcap)
    assert out.dtype == dtype
    want = reference(q.double(), k.double(), v.double(), window, 0.25, softcap)
    assert (out.double() - want).norm() / want.norm() < (8e-3 if dtype == torch.bfloat16 else 1e-3)


@pytest.mark.parametrize("softcap", [None, 0.7])
@pytest.mark.parametrize("window", [None, 2])
def test_gradients_by_finite_differences(ops: Ops, window: int | None, softcap: float | None) -> None:
    leaves = [t.clone().requires_grad_() for t in draw(1, 4, 2, 4, 3)[:3]]
    assert gradcheck(lambda *args: ops.attention(*args, Mask(window), softcap=softcap), leaves)


def test_plain_causal_is_torchs_fused_kernel_to_the_bit(ops: Ops) -> None:
    for heads in (4, 2):
        q, k, v, _ = draw(2, 4, heads, 16, 8, torch.float32)
        want = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=heads != 4)
        # A window that reaches the first token is no window.
        for mask in (Mask(), Mask(16), Mask(100)):
            assert torch.equal(ops.attention(q, k, v, mask), want)


def test_window_of_one_sees_only_itself(ops: Ops) -> None:
    q, k, v, _ = draw(1, 2, 2, 5, 4, torch.float32)
    for softcap in (None, 1.0):
        torch.testing.assert_close(ops.attention(q, k, v, Mask(1), softcap=softcap), v)


@pytest.mark.parametrize("softcap", [None, 5.0])
@pytest.mark.parametrize("window", [None, 3])
def test_torch_compile_traces_through(ops: Ops, window: int | None, softcap: float | None) -> None:
    def run(q: Tensor, k: Tensor, v: Tensor, documents: Documents | None) -> Tensor:
        return ops.attention(q, k, v, Mask(window), documents, softcap=softcap)

    q, k, v, _ = draw(1, 4, 2, 8, 4, torch.float32)
    compiled = torch.compile(run, fullgraph=True, backend="aot_eager")
    for documents in (None, Documents(torch.tensor([[0], [0], [2], [2], [2], [5], [5], [5]]))):
        torch.testing.assert_close(compiled(q, k, v, documents), run(q, k, v, documents))


@pytest.mark.parametrize("softcap", [None, 0.7])
@pytest.mark.parametrize("window", [None, 2])
def test_a_document_neither_sees_nor_moves_the_others(ops: Ops, window: int | None, softcap: float | None) -> None:
    starts = torch.tensor([0, 0, 0, 3, 3, 3, 3, 7]).repeat(2, 1).t()
    q, k, v, _ = (t.requires_grad_() for t in draw(2, 4, 2, 8, 4, torch.float32))
    out = ops.attention(q, k, v, Mask(window), Documents(starts), softcap=softcap)[:, :, 3:7]
    alone = ops.attention(q[:, :, 3:7], k[:, :, 3:7], v[:, :, 3:7], Mask(window), softcap=softcap)
    torch.testing.assert_close(out, alone)
    for grad in torch.autograd.grad(out.square().sum(), (q, k, v)):
        assert not grad[:, :, :3].any()
        assert not grad[:, :, 7:].any()


class Recorded(TorchFunctionMode):
    """Notes for each call of torch's attention the width of its values and the kernels that it may take."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: list[tuple[int, list[str]]] = []

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is not F.scaled_dot_product_attention:
            return func(*args, **(kwargs or {}))
        q, _, v, *_ = args
        names = ("flash", "mem_efficient", "math", "cudnn")
        enabled = [name for name in names if getattr(torch.backends.cuda, f"{name}_sdp_enabled")()]
        self.calls.append((v.shape[-1], enabled))
        return q.new_empty(*q.shape[:-1], v.shape[-1])


@pytest.mark.parametrize("takes", [True, False])
def test_cudnn_gets_values_as_wide_as_they_are_where_it_takes_them(takes: bool) -> None:
    """Latent attention: padded to the width of the keys, they cost a fifth more FLOPs and a copy that is kept."""
    answer = mock.Mock(return_value=takes)
    with fake_cuda() as device, mock.patch.object(torch.backends.cuda, "can_use_cudnn_attention", answer):
        q, k, v = (torch.empty(2, 4, 16, width, device=device, dtype=torch.bfloat16) for width in (24, 24, 16))
        with Recorded() as recorded:
            assert op.attention(q, k, v, Mask()).shape == v.shape
            assert op.attention(q, k, k, Mask()).shape == q.shape
    (width, kernels), (_, usual) = recorded.calls
    assert width == (16 if takes else 24)
    assert (kernels == ["cudnn"]) == takes
    assert len(usual) > 1
    assert answer.call_count == 1


@pytest.mark.parametrize("asks", [True, False])
def test_documents_with_groups_repeat_no_key(asks: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Before torch 2.13 `varlen_attn` has no `enable_gqa`, and its kernel takes groups all the same."""
    seen: list[tuple[int, Any]] = []

    def before_2_13(q: Tensor, k: Tensor, *args: Any, scale: Any = None, window_size: Any = None) -> Tensor:
        seen.append((k.shape[1], None))
        return torch.empty_like(q)

    def from_2_13_on(
        q: Tensor, k: Tensor, *args: Any, scale: Any = None, window_size: Any = None, enable_gqa: bool = False
    ) -> Tensor:
        seen.append((k.shape[1], enable_gqa))
        return torch.empty_like(q)

    monkeypatch.setattr(varlen, "varlen_attn", from_2_13_on if asks else before_2_13)
    op._varlen_asks_for_groups.cache_clear()
    with fake_cuda() as device:
        q, k, v = (torch.empty(2, heads, 16, 32, device=device, dtype=torch.bfloat16) for heads in (4, 2, 2))
        assert op.attention(q, k, v, Mask(5)).shape == q.shape
    op._varlen_asks_for_groups.cache_clear()
    assert seen == [(2, True if asks else None)]
