"""The contract of every op, on whatever backend the environment names (conftest.py); torch by default."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode

from megalite.core.ops import Ops, grouped, resolve
from megalite.core.ops.cross_entropy import combine_stats
from megalite.core.ops.linear_cross_entropy import LinearCrossEntropy
from megalite.core.sharding import Layout, ParamSpec, Shard
from megalite.core.sharding.parameter import ShardedParameter
from tests.ops_contract import LIMITS, check

DTYPES = [torch.float32, torch.bfloat16, torch.float16]


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_every_op_against_float64(backend: str, device: str, dtype: torch.dtype) -> None:
    if "cpp" in backend and dtype == torch.float16:
        pytest.skip("the C++ kernels serve fp32 and bf16")
    results = check(resolve(backend, device, dtype), device, dtype)
    assert len(results) > 70
    assert [r for r in results if not r.ok] == []


def _row_ops(ops: Ops) -> dict[str, Any]:
    """Ops whose rows do not mix: x [rows, 32] -> [rows, …]."""
    w, b = torch.linspace(0.5, 2, 32), torch.linspace(-1, 1, 32)
    return {
        "rmsnorm": lambda x: ops.rmsnorm(x, w.to(x), 1e-5),
        "add_rmsnorm": lambda x: ops.add_rmsnorm(x, x, w.to(x), 1e-5)[0],
        "layernorm": lambda x: ops.layernorm(x, w.to(x), b.to(x), 1e-5),
        "add_layernorm": lambda x: ops.add_layernorm(x, x, w.to(x), b.to(x), 1e-5)[0],
        "swiglu": ops.swiglu,
        "clamped_swiglu": ops.clamped_swiglu,
        "geglu": lambda x: ops.geglu(x, "tanh"),
        "gelu": ops.gelu,
        "rope": lambda x: ops.rope(x.view(-1, 1, 2, 16), torch.ones(len(x), 8).to(x), torch.ones(len(x), 8).to(x)),
        "cross_entropy": lambda x: ops.cross_entropy_stats(x, torch.zeros(len(x), dtype=torch.int64).to(x.device), 0),
    }


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), float("-inf")])
@pytest.mark.parametrize("name", list(_row_ops(resolve("torch", "cpu", torch.float32))))
def test_a_bad_number_shows_in_its_row_and_in_no_other(ops: Ops, device: str, name: str, bad: float) -> None:
    run = _row_ops(ops)[name]
    x = torch.randn(4, 32, generator=torch.Generator().manual_seed(0)).to(device)
    clean = run(x.clone())
    x[2, 0] = bad
    spoiled = run(x)
    others = [0, 1, 3]
    assert torch.equal(spoiled[others], clean[others])
    # Silu, gelu and a softmax over -inf have finite values there, and a clamped gate beyond its limit; everything else
    # must show the bad number.
    finite = {float("-inf"): ("swiglu", "geglu", "gelu", "cross_entropy"), float("inf"): ("clamped_swiglu",)}
    if name not in finite.get(bad, ()):
        assert not spoiled[2].isfinite().all()


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_the_clamped_gate_at_its_limits(ops: Ops, device: str, dtype: torch.dtype) -> None:
    """At a limit the gradient is that of the inside, beyond it 0, as of `torch.clamp`."""
    sides = torch.tensor([-8, -7.0625, -7, -6.9375, -1, 6.9375, 7, 7.0625, 8], dtype=torch.float64)
    packed = torch.cat(torch.meshgrid(sides, sides, indexing="ij"), dim=1).to(device)
    x, exact = packed.to(dtype).requires_grad_(), packed.requires_grad_()
    gate, up = exact.chunk(2, dim=1)
    (want,) = torch.autograd.grad(
        (gate.clamp(max=7) * (1.702 * gate.clamp(max=7)).sigmoid() * (up.clamp(-7, 7) + 1)).sum(), exact
    )
    (got,) = torch.autograd.grad(ops.clamped_swiglu(x).sum(), x)
    # Half of LIMITS, or of 1e-6, by one machine's exp.
    torch.testing.assert_close(got.double(), want, rtol=2 * LIMITS[dtype], atol=2e-6)
    assert torch.equal(got == 0, want == 0)


@pytest.mark.parametrize("width", [12288, 16384])
def test_norms_of_wide_rows(ops: Ops, device: str, width: int) -> None:
    """GPT-3 175B has 12288 columns, Llama 3 405B 16384: kernels may cut such a row into parts."""
    g = torch.Generator().manual_seed(0)
    x, residual, dy, dtotal = torch.randn(4, 5, width, generator=g).to(device)
    weight, bias = torch.randn(2, width, generator=g).to(device)

    def both_ways(run: Any, *inputs: Tensor) -> list[Tensor]:
        leaves = [t.detach().requires_grad_() for t in inputs]
        y, total = run(*leaves)
        return [y, total, *torch.autograd.grad((y, total), leaves, (dy.to(y), dtotal.to(y)))]

    def rms(x: Tensor, r: Tensor, w: Tensor) -> tuple[Tensor, Tensor]:
        return torch.nn.functional.rms_norm(x + r, (width,), w, 1e-5), x + r

    def layer(x: Tensor, r: Tensor, w: Tensor, b: Tensor) -> tuple[Tensor, Tensor]:
        return torch.nn.functional.layer_norm(x + r, (width,), w, b, 1e-5), x + r

    for run, reference, inputs in (
        (lambda *t: ops.add_rmsnorm(*t, 1e-5), rms, (x, residual, weight)),
        (lambda *t: ops.add_layernorm(*t, 1e-5), layer, (x, residual, weight, bias)),
    ):
        for got, want in zip(both_ways(run, *inputs), both_ways(reference, *(t.double() for t in inputs))):
            assert ((got.double() - want).norm() / want.norm()).item() < 1e-6


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_norms_add_to_the_gradients_of_parameters(ops: Ops, device: str, dtype: torch.dtype) -> None:
    """The first contribution overwrites, the second is added; the backends with kernels need no autograd for that."""
    g = torch.Generator().manual_seed(0)
    x, dy = torch.randn(2, 5, 3, 80, generator=g).to(device, dtype)

    def parameter(name: str) -> ShardedParameter:
        param = ShardedParameter.empty(Shard(ParamSpec(name, (80,)), Layout()), dtype, torch.device(device))
        param.data.copy_(torch.randn(80, generator=g))
        param.main_grad = torch.full((80,), torch.nan, device=device)
        return param

    chosen = {choice.op: choice.backend for choice in ops.choices}
    for op, run, names in (("rmsnorm", ops.add_rmsnorm, ("w",)), ("layernorm", ops.add_layernorm, ("w", "b"))):
        params = [parameter(name) for name in names]
        plain = [param.detach().clone().requires_grad_() for param in params]
        for _ in range(2):
            for weights in (params, plain):
                run(x, x, *weights, 1e-5)[0].backward(dy)
        for param, same in zip(params, plain):
            assert same.grad is not None
            assert (param.grad is None) == param.has_grad == (chosen[op] in ("triton", "cpp"))
            if param.has_grad:
                # The sum is rounded to bf16 in one of them.
                torch.testing.assert_close(param.main_grad, same.grad.float(), rtol=1e-2, atol=1e-5)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("bad", [float("nan"), float("inf"), float("-inf")])
@pytest.mark.parametrize("at", [0, 4097, 9999])
def test_norm_is_the_overflow_flag(ops: Ops, device: str, dtype: torch.dtype, bad: float, at: int) -> None:
    flat = torch.ones(10_000, dtype=dtype, device=device)
    assert ops.l2_norm(flat).item() == pytest.approx(100.0)
    flat[at] = bad
    norm = ops.l2_norm(flat)
    assert norm.shape == ()
    assert norm.dtype == torch.float32
    assert not norm.isfinite()


def test_norm_keeps_its_digits_over_many_elements(ops: Ops, device: str) -> None:
    """A running fp32 sum over 4M equal numbers is off by more than 1e-5; two stages are not."""
    n = 1 << 22
    assert ops.l2_norm(torch.full((n,), 0.1, device=device)).item() == pytest.approx(0.1 * 2**11, rel=1e-6)


def test_adamw_is_torchs_adamw(ops: Ops, device: str) -> None:
    """Five steps against torch.optim.AdamW (for-loop implementation) with the gradient scaled beforehand."""
    g = torch.Generator().manual_seed(0)
    start = torch.randn(1003, generator=g)
    reference = torch.nn.Parameter(start.double())
    optimizer = torch.optim.AdamW([reference], lr=0.02, betas=(0.8, 0.9), eps=1e-6, weight_decay=0.3, foreach=False)
    param = start.to(device)
    m, v = torch.zeros_like(param), torch.zeros_like(param)
    out = torch.empty_like(param, dtype=torch.bfloat16)
    multiplier = torch.tensor(0.25, device=device)
    for step in range(1, 6):
        grad = torch.randn(1003, generator=g)
        reference.grad = grad.double() * 0.25
        optimizer.step()
        ops.adamw(
            param,
            grad.to(device),
            m,
            v,
            out,
            lr=0.02,
            beta1=0.8,
            beta2=0.9,
            eps=1e-6,
            weight_decay=0.3,
            step=step,
            grad_multiplier=multiplier,
        )
        torch.testing.assert_close(param.double().cpu(), reference.detach(), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("n", [1, 15, 16, 1000])
def test_low_precision_copy_is_rounded_to_nearest_even(ops: Ops, backend: str, device: str, n: int) -> None:
    if backend == "triton" and device == "cpu":
        pytest.skip("Triton's interpreter truncates where the GPU rounds")
    param = torch.randn(n, generator=torch.Generator().manual_seed(0)).to(device)
    param[0] = 1.00390625  # half way between two bf16 numbers: to even is 1.0
    state = torch.zeros_like(param)
    out = torch.empty_like(param, dtype=torch.bfloat16)
    hyper = {"lr": 0.0, "beta1": 0.9, "beta2": 0.9, "eps": 1e-8, "weight_decay": 0.0, "step": 1}
    ops.adamw(param, torch.zeros_like(param), state, state.clone(), out, grad_multiplier=None, **hyper)
    assert out[0] == 1.0
    assert torch.equal(out, param.to(torch.bfloat16))


def test_cross_entropy_edges(ops: Ops, device: str) -> None:
    """A rank of nothing but padding, an ignored target, and logits of -inf all take part without a NaN."""
    logits = torch.randn(3, 16, generator=torch.Generator().manual_seed(0)).to(device)
    logits[1, 1:8] = float("-inf")
    target = torch.tensor([3, 0, -100], device=device)
    scale = torch.tensor([1.0, 2.0, 0.0], device=device)
    want = logits.double().requires_grad_()
    losses = torch.nn.functional.cross_entropy(want, target, reduction="none", ignore_index=-100)
    (want_grad,) = torch.autograd.grad(losses, want, scale.double())
    padding = torch.randn(3, 8, device=device)
    stats = torch.stack(
        [
            ops.cross_entropy_stats(logits, target, 0),
            ops.cross_entropy_stats(padding, target, 16, 0),
        ]
    )
    lse, target_logit = combine_stats(stats)
    torch.testing.assert_close((lse - target_logit)[:2].double(), losses[:2].detach(), rtol=1e-5, atol=1e-6)
    ops.cross_entropy_grad_(logits, target, 0, lse, scale)
    ops.cross_entropy_grad_(padding, target, 16, lse, scale, 0)
    torch.testing.assert_close(logits.double(), want_grad, rtol=1e-5, atol=1e-6)
    assert (padding == 0).all()


def test_rope_consumes_the_packed_projection(ops: Ops, device: str) -> None:
    qkv = torch.randn(3, 2, 8, 16, generator=torch.Generator().manual_seed(0)).to(device)
    v_before = qkv[:, :, 6:].clone()
    tables = torch.ones(3, 8, device=device)
    q, k, v = ops.rope_qkv(qkv, tables, tables, 4, 2)
    storage = qkv.untyped_storage().data_ptr()
    assert [t.untyped_storage().data_ptr() for t in (q, k, v)] == [storage] * 3
    assert [t.shape[2] for t in (q, k, v)] == [4, 2, 2]
    assert torch.equal(v, v_before)


class _LargestTensor(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()
        self.numel = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        for t in out if isinstance(out, tuple) else (out,):
            if isinstance(t, Tensor):
                self.numel = max(self.numel, t.numel())
        return out


@pytest.mark.parametrize("chunk", [1, 7, 64])
def test_linear_cross_entropy_is_cross_entropy_without_the_logits(ops: Ops, device: str, chunk: int) -> None:
    """Two ranks in turn, the second with padding; loss, dx and dweight against autograd in float64."""
    g = torch.Generator().manual_seed(0)
    n, hidden, half, real = 20, 8, 48, 90
    x, weight = torch.randn(n, hidden, generator=g).to(device), torch.randn(2 * half, hidden, generator=g).to(device)
    target = torch.randint(real, (n,), generator=g).to(device)
    scale = torch.rand(n, generator=g).to(device)
    want_x, want_w = x.double().requires_grad_(), weight[:real].double().requires_grad_()
    want = torch.nn.functional.cross_entropy(want_x @ want_w.t(), target, reduction="none")
    want_dx, want_dw = torch.autograd.grad(want, (want_x, want_w), scale.double())

    shards = [(weight[:half], 0, half), (weight[half:], half, real - half)]
    every = torch.stack([ops.cross_entropy_stats(x @ w.t(), target, first, valid) for w, first, valid in shards])
    dx, main_grads = torch.zeros_like(x), []
    for rank, (w, first, valid) in enumerate(shards):
        starts = iter(range(0, n, chunk))

        def gather(stats: Tensor, rank: int = rank, starts: Any = starts) -> Tensor:
            rows = slice(start := next(starts), start + chunk)
            torch.testing.assert_close(stats, every[rank, rows])
            return every[:, rows]

        main_grads.append(torch.full_like(w, 1.0 if rank else torch.nan))
        with _LargestTensor() as largest:
            output = LinearCrossEntropy(ops, w, target, first, valid, chunk)
            # The first rank's memory holds nothing yet.
            loss, its_dx = output.losses_and_grads(x, gather, scale, main_grads[-1], accumulate=rank > 0)
            dx += its_dx
        assert largest.numel <= max(min(chunk, n) * half, half * hidden, n * hidden)
        torch.testing.assert_close(loss.double(), want.detach(), rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(dx.double(), want_dx, rtol=1e-4, atol=1e-5)
    dweight = torch.cat((main_grads[0], main_grads[1] - 1))
    torch.testing.assert_close(dweight[:real].double(), want_dw, rtol=1e-4, atol=1e-5)
    assert not dweight[real:].any()


def _block(ops: Ops, x: Tensor, w: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    normed, total = ops.add_rmsnorm(x, x * 0.5, w, 1e-5)
    q, k, v = ops.rope_qkv(normed.view(3, 2, 4, 8) * 1.0, cos, sin, 2, 1)
    inner = ops.swiglu(torch.cat((q, k, v), dim=2).flatten(2)) + ops.geglu(total, "none")
    return ops.layernorm(ops.gelu(inner + w[:16], "tanh"), w[:16], w[16:], 1e-5)


def test_fake_tensors_pass_through(ops: Ops, device: str) -> None:
    """Shapes and dtypes without memory, as for an estimate of a step: no kernel may take an address."""
    with FakeTensorMode():
        x, w = torch.empty(3, 2, 32, device=device).requires_grad_(), torch.empty(32, device=device).requires_grad_()
        y = _block(ops, x, w, *torch.empty(2, 3, 4, device=device))
        assert (y.shape, y.dtype) == ((3, 2, 16), torch.float32)
        assert [g.shape for g in torch.autograd.grad(y.sum(), (x, w))] == [x.shape, w.shape]
        stats = ops.cross_entropy_stats(x.detach().view(6, 32), torch.empty(6, dtype=torch.int64, device=device), 0)
        assert (stats.shape, ops.l2_norm(w).shape) == ((6, 3), ())


def test_torch_compile_traces_through(ops: Ops, device: str) -> None:
    """One graph without a break, forward and backward, the same numbers as eager."""
    g = torch.Generator().manual_seed(0)
    x, w = torch.randn(3, 2, 32, generator=g).to(device), torch.randn(32, generator=g).to(device)
    tables = torch.randn(2, 3, 4, generator=g).to(device)
    results = []
    for run in (_block, torch.compile(_block, fullgraph=True, backend="aot_eager")):
        leaves = [x.clone().requires_grad_(), w.clone().requires_grad_()]
        y = run(ops, *leaves, *tables)
        results.append([y.detach(), *torch.autograd.grad(y.square().sum(), leaves)])
    for eager, compiled in zip(*results):
        torch.testing.assert_close(compiled, eager)


def test_a_rank_without_rows_starts_no_grouped_gemm(monkeypatch: pytest.MonkeyPatch) -> None:
    def grouped_mm(x: torch.Tensor, w: torch.Tensor, offs: torch.Tensor) -> torch.Tensor:
        assert len(x)
        return x @ w[0]

    monkeypatch.setattr(torch, "_grouped_mm", grouped_mm)
    gpu, w = grouped._load(grouped.OP), torch.ones(2, 8, 16)
    for rows in (0, 3):
        sizes = [rows, 0]
        assert gpu["grouped_linear"](torch.ones(rows, 16), w, sizes).shape == (rows, 8)
        assert gpu["grouped_dgrad"](torch.ones(rows, 8), w, sizes).shape == (rows, 16)
