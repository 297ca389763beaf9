"""The functions of the ops on C++, CUDA and Triton kernels, which share schemas (`native.KERNELS`).

`kernels` selects the kernels: "cpp", "cuda" or "triton". `group`: Triton's norms and gated activations also write the
FP8 codes of their results, one scale for so many elements of a row (`fp8_codes`, see `Fp8.noting`); 0: none. Contracts:
the modules of the ops.
"""

from __future__ import annotations

import importlib
import importlib.util
import shutil
from collections.abc import Callable, Sequence
from functools import lru_cache, partial
from typing import Any

import torch
from torch import Tensor
from torch._C import _len_torch_dispatch_stack as num_dispatch_modes
from torch.autograd.function import once_differentiable
from torch.autograd.graph import increment_version
from torch.compiler import is_compiling

from megalite.core.ops import delta_rule
from megalite.core.ops.delta_rule import Scan
from megalite.core.ops.grouped import ends_of
from megalite.core.ops.mixing import least_kept
from megalite.core.ops.op import Backend, Missing, Op
from megalite.core.ops.rmsnorm import by_slices
from megalite.core.ops.weigh import weighed
from megalite.core.parts.kernels import cpp, cuda, native
from megalite.core.parts.kernels.qk_norm import QKNorm
from megalite.core.sharding.parameter import ShardedParameter

# Numbers of activations in the kernels' schemas; only Triton has the clamped one.
KINDS = {"silu": 0, "none": 1, "tanh": 2, "clamped": 3}
_NATIVE: dict[str, dict[str, Callable[..., Any]]] = {"cpp": cpp.KERNELS, "cuda": cuda.KERNELS}


def _kernel(kernels: str, name: str) -> Callable[..., Any]:
    """Return a kernel. A compiled library's own function is faster to call than the op registered with torch, which is
    returned under torch.compile, fake tensors and dispatch modes: these must see the call.
    """
    if kernels == "triton":
        return getattr(torch.ops.megalite, "triton_" + name).default
    if is_compiling() or num_dispatch_modes():
        return getattr(torch.ops.megalite, name).default
    return _NATIVE[kernels][name]


def functions(op: Op, kernels: str) -> dict[str, Callable[..., Any]]:
    """Return the functions of an op, {name: callable}, on one kind of kernels."""
    return {name: partial(globals()[name], kernels=kernels) for name in op.functions}


def _why_no_triton(device: torch.device, dtype: torch.dtype) -> str | None:
    if device.type not in ("cpu", "cuda"):
        return f"for CUDA tensors, not {device.type}"
    if importlib.util.find_spec("triton") is None:
        missing = "triton is not installed"
        return Missing(f"{missing}; `pip install triton`") if device.type == "cuda" else missing
    if dtype not in (torch.float32, torch.bfloat16, torch.float16):
        return f"for fp32, bf16 and fp16, not {dtype}"
    from triton import knobs

    if device.type == "cpu" and not knobs.runtime.interpret:
        return "runs on CPU only in Triton's interpreter (TRITON_INTERPRET=1)"
    compiler = knobs.build.cc
    if device.type == "cuda" and not any(map(shutil.which, [compiler] if compiler else ["gcc", "clang"])):
        return Missing(
            f"Triton requires {compiler or 'gcc or clang'}, which is not on PATH, to compile its launchers; install gcc"
        )
    return None


def triton_backend(module: str) -> Backend:
    """Make the backend of the kernels in `core.parts.kernels.triton.<module>`, which is imported once chosen."""

    def load(op: Op) -> dict[str, Callable[..., Any]]:
        importlib.import_module(f"megalite.core.parts.kernels.triton.{module}")
        return functions(op, "triton")

    def why_not_auto(device: torch.device, dtype: torch.dtype) -> str | None:
        return "runs on CPU only in its interpreter, and only when requested by name" if device.type == "cpu" else None

    return Backend("triton", load, _why_no_triton, why_not_auto)


CPP = Backend("cpp", lambda op: functions(op, "cpp"), native.why_no_cpp)
CUDA = Backend("cuda", lambda op: functions(op, "cuda"), native.why_no_cuda)
BACKENDS: dict[str, Callable[[str], Backend]] = {"triton": triton_backend, "cpp": lambda _: CPP, "cuda": lambda _: CUDA}


class _Norm(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        residual: Tensor | None,
        weight: Tensor,
        bias: Tensor | None,
        eps: float,
        kernels: str,
        group: int,
    ) -> Tensor | tuple[Tensor, Tensor]:
        if group:
            y, total, mean, rstd, *codes = _kernel(kernels, "norm_codes")(x, residual, weight, bias, eps, group)
            y.fp8_codes = codes
        else:
            y, total, mean, rstd = _kernel(kernels, "norm")(x, residual, weight, bias, eps)
        ctx.save_for_backward(x if residual is None else total, weight, mean, rstd)
        ctx.has_bias, ctx.kernels = bias is not None, kernels
        # Only parameters are kept on ctx: recomputation could not free a computed weight.
        direct = isinstance(weight, ShardedParameter) and weight.requires_grad and not is_compiling()
        ctx.params = (weight, bias) if direct else None
        return y if residual is None else (y, total)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy: Tensor, dtotal: Tensor | None = None) -> tuple[Tensor | None, ...]:
        norm_backward, saved = _kernel(ctx.kernels, "norm_backward"), ctx.saved_tensors
        dweight = dbias = None
        if ctx.params is None:
            dweight = torch.empty_like(saved[1])
            dbias = torch.empty_like(dweight) if ctx.has_bias else None
            dx = norm_backward(dy, dtotal, *saved, dweight, dbias, False, False)
        else:
            weight, bias = ctx.params
            into = weight.main_grad, bias.main_grad if ctx.has_bias else None
            dx = norm_backward(dy, dtotal, *saved, *into, weight.has_grad, ctx.has_bias and bias.has_grad)
            weight.grad_added()
            if ctx.has_bias:
                bias.grad_added()
        return dx, None if dtotal is None else dx, dweight, dbias, None, None, None


class _Activation(torch.autograd.Function):
    """A kernel of one input, the only tensor kept for backward."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, name: str, kind: str, kernels: str, group: int) -> Tensor:
        ctx.save_for_backward(x)
        ctx.name = name
        ctx.kind = KINDS[kind]
        ctx.kernels = kernels
        if not group:
            return _kernel(kernels, name)(x, ctx.kind)
        y, *codes = _kernel(kernels, name + "_codes")(x, ctx.kind, group)
        y.fp8_codes = codes
        return y

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
        dx = _kernel(ctx.kernels, ctx.name + "_backward")(dy, *ctx.saved_tensors, ctx.kind)
        return dx, None, None, None, None


class _WeighedGLU(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, gate_up: Tensor, weights: Tensor, kind: str, kernels: str) -> Tensor:
        ctx.save_for_backward(gate_up, weights)
        ctx.kind, ctx.kernels = KINDS[kind], kernels
        return _kernel(kernels, "weighed_glu")(gate_up, weights, ctx.kind)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
        return *_kernel(ctx.kernels, "weighed_glu_backward")(dy, *ctx.saved_tensors, ctx.kind), None, None


class _RopeQKV(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, qkv: Tensor, cos: Tensor, sin: Tensor, num_heads: int, num_kv_heads: int, kernels: str
    ) -> tuple[Tensor, Tensor, Tensor]:
        ctx.save_for_backward(cos, sin)
        ctx.kernels = kernels
        packed = qkv.detach() if qkv.stride(-1) == 1 else qkv.detach().contiguous()
        _kernel(kernels, "rope_")(packed, cos, sin, num_heads + num_kv_heads)
        # Autograd does not see in-place writes of our kernels.
        increment_version(packed)
        q, k, v = packed.split((num_heads, num_kv_heads, num_kv_heads), dim=2)
        return q, k, v

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dq: Tensor, dk: Tensor, dv: Tensor) -> tuple[Tensor | None, ...]:
        return _kernel(ctx.kernels, "rope_pack")(dq, dk, dv, *ctx.saved_tensors), None, None, None, None, None


class _Rope(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, cos: Tensor, sin: Tensor, kernels: str) -> Tensor:
        ctx.save_for_backward(cos, sin)
        ctx.kernels = kernels
        return _kernel(kernels, "rope")(x, cos, sin, False)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
        return _kernel(ctx.kernels, "rope")(dy, *ctx.saved_tensors, True), None, None, None


class _Scan(torch.autograd.Function):
    """`delta_rule.Scan`."""

    @staticmethod
    def forward(
        ctx: Any, written: Tensor, reads: Tensor, kept: Tensor, left: Tensor, held: Tensor, exact: bool, kernels: str
    ) -> tuple[Tensor, Tensor, Tensor]:
        states, new, last = _kernel(kernels, "delta_states")(written, reads, kept, left, held, exact)
        ctx.save_for_backward(reads, kept, left, states, new)
        ctx.set_materialize_grads(False)  # a rule asks for the first two, a transition for the last
        ctx.exact, ctx.kernels = exact, kernels
        return states, new, last

    @staticmethod
    @once_differentiable
    def backward(
        ctx: Any, dstates: Tensor | None, dnew: Tensor | None, dlast: Tensor | None
    ) -> tuple[Tensor | None, ...]:
        reads, kept, left, states, new = ctx.saved_tensors
        dlast = torch.zeros_like(states[:, :, 0]) if dlast is None else dlast
        run = _kernel(ctx.kernels, "delta_states_backward")
        after, dwritten, dheld = run(dstates, dnew, dlast, reads, kept, left, ctx.exact)
        # A product and its sum, without a tensor of the states' size between them.
        dkept = after.flatten(3).unsqueeze(-2) @ states.flatten(3).unsqueeze(-1)
        return dwritten, (dwritten @ states.mT).neg_(), dkept, after @ new.mT, dheld, None, None


class _SpreadRows(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, x: Tensor, order: Tensor, inverse: Tensor, k: int, weights: Tensor | None, kernels: str
    ) -> Tensor:
        ctx.save_for_backward(inverse, weights, None if weights is None else x)
        ctx.k, ctx.kernels = k, kernels
        return _kernel(kernels, "spread_rows")(x, order, weights, k)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, drows: Tensor) -> tuple[Tensor | None, ...]:
        inverse, weights, x = ctx.saved_tensors
        dx = _kernel(ctx.kernels, "combine_rows")(drows, inverse, weights, ctx.k)
        if weights is None:
            return dx, None, None, None, None, None
        return dx, None, None, None, _kernel(ctx.kernels, "expert_weights_grad")(drows, x, inverse, ctx.k), None


class _CombineRows(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, rows: Tensor, order: Tensor, inverse: Tensor, k: int, kernels: str) -> Tensor:
        ctx.save_for_backward(order)
        ctx.k, ctx.kernels = k, kernels
        return _kernel(kernels, "combine_rows")(rows, inverse, None, k)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
        return _kernel(ctx.kernels, "spread_rows")(dy, *ctx.saved_tensors, None, ctx.k), None, None, None, None


class _CausalConv(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, starts: Tensor | None, kernels: str) -> Tensor:
        ctx.save_for_backward(x, weight, starts)
        ctx.kernels = kernels
        return _kernel(kernels, "causal_conv")(x, weight, starts)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
        dx, dweight = _kernel(ctx.kernels, "causal_conv_backward")(dy, *ctx.saved_tensors)
        return dx, dweight, None, None


def spread_rows(
    x: Tensor, order: Tensor, inverse: Tensor, k: int, weights: Tensor | None = None, *, kernels: str
) -> Tensor:
    """Run `spread_rows` in one pass each way."""
    return _SpreadRows.apply(x, order, inverse, k, weights, kernels)


def combine_rows(rows: Tensor, order: Tensor, inverse: Tensor, k: int, *, kernels: str) -> Tensor:
    """Run `combine_rows` in one pass each way."""
    return _CombineRows.apply(rows, order, inverse, k, kernels)


def _scan(v: Tensor, kernels: str) -> Scan:
    exact = v.dtype == torch.float32  # the scan lives until backward, and must not keep v where it is made again
    return lambda *args: _Scan.apply(*args, exact, kernels)


def causal_conv(x: Tensor, weight: Tensor, starts: Tensor | None = None, *, kernels: str) -> Tensor:
    """Run `causal_conv` in one kernel, and its backward in two."""
    return _CausalConv.apply(x, weight, starts, kernels)


def gated_delta_rule(q: Tensor, k: Tensor, v: Tensor, *args: Any, kernels: str) -> Tensor:
    """Run `gated_delta_rule` with one kernel each way for the states of all chunks."""
    return delta_rule.gated_delta_rule(q, k, v, *args, scan=_scan(v, kernels))


def gated_delta_transition(k: Tensor, v: Tensor, *args: Any, kernels: str) -> Tensor:
    """Run `gated_delta_transition` with one kernel each way for the states of all chunks."""
    return delta_rule.gated_delta_transition(k, v, *args, scan=_scan(v, kernels))


def rmsnorm(x: Tensor, weight: Tensor, eps: float, *, kernels: str, group: int = 0) -> Tensor:
    """Run `rmsnorm` in one kernel each way."""
    return _Norm.apply(x, None, weight, None, eps, kernels, group)


def add_rmsnorm(
    x: Tensor, residual: Tensor, weight: Tensor, eps: float, *, kernels: str, group: int = 0
) -> tuple[Tensor, Tensor]:
    """Run `add_rmsnorm` in one kernel each way."""
    return _Norm.apply(x, residual, weight, None, eps, kernels, group)


def qk_rmsnorm(
    qkv: Tensor, q_weight: Tensor, k_weight: Tensor, eps: float, num_heads: int, num_kv_heads: int, *, kernels: str
) -> Tensor:
    """Run `qk_rmsnorm` in one kernel each way, in Triton; elsewhere queries and keys apart."""
    if kernels == "triton":
        return QKNorm.apply(qkv, q_weight, k_weight, eps, num_heads, num_kv_heads)
    norm = partial(rmsnorm, kernels=kernels)
    return by_slices(norm, qkv, q_weight, k_weight, eps, num_heads, num_kv_heads)


def layernorm(x: Tensor, weight: Tensor, bias: Tensor, eps: float, *, kernels: str, group: int = 0) -> Tensor:
    """Run `layernorm` in one kernel each way."""
    return _Norm.apply(x, None, weight, bias, eps, kernels, group)


def add_layernorm(
    x: Tensor, residual: Tensor, weight: Tensor, bias: Tensor, eps: float, *, kernels: str, group: int = 0
) -> tuple[Tensor, Tensor]:
    """Run `add_layernorm` in one kernel each way."""
    return _Norm.apply(x, residual, weight, bias, eps, kernels, group)


def _glu(gate_up: Tensor, weights: Tensor | None, kind: str, kernels: str, group: int = 0) -> Tensor:
    if weights is not None and kernels == "triton":
        return _WeighedGLU.apply(gate_up, weights, kind, kernels)
    return weighed(lambda x: _Activation.apply(x, "glu", kind, kernels, group), gate_up, weights)


def swiglu(gate_up: Tensor, weights: Tensor | None = None, *, kernels: str, group: int = 0) -> Tensor:
    """Run `swiglu` in one kernel each way."""
    return _glu(gate_up, weights, "silu", kernels, group)


def geglu(
    gate_up: Tensor, approximate: str = "none", weights: Tensor | None = None, *, kernels: str, group: int = 0
) -> Tensor:
    """Run `geglu` in one kernel each way."""
    return _glu(gate_up, weights, approximate, kernels, group)


def clamped_swiglu(gate_up: Tensor, weights: Tensor | None = None, *, kernels: str) -> Tensor:
    """Run `clamped_swiglu` in one kernel each way."""
    return _glu(gate_up, weights, "clamped", kernels)


def gelu(x: Tensor, approximate: str = "none", weights: Tensor | None = None, *, kernels: str) -> Tensor:
    """Run `gelu` in one kernel each way."""
    return weighed(lambda x: _Activation.apply(x, "gelu", approximate, kernels, 0), x, weights)


def rope_qkv(
    qkv: Tensor, cos: Tensor, sin: Tensor, num_heads: int, num_kv_heads: int, *, kernels: str
) -> tuple[Tensor, Tensor, Tensor]:
    """Run `rope_qkv` in place; backward writes the packed gradient in one pass."""
    return _RopeQKV.apply(qkv, cos, sin, num_heads, num_kv_heads, kernels)


def rope(x: Tensor, cos: Tensor, sin: Tensor, *, kernels: str) -> Tensor:
    """Run `rope` in one kernel each way."""
    return _Rope.apply(x, cos, sin, kernels)


def cross_entropy_stats(
    logits: Tensor, target: Tensor, vocab_start: int, valid: int | None = None, *, kernels: str
) -> Tensor:
    """Compute `cross_entropy_stats` in one read."""
    columns = logits.shape[1] if valid is None else valid
    return _kernel(kernels, "cross_entropy_stats")(logits, target, vocab_start, columns)


def cross_entropy_grad_(
    logits: Tensor,
    target: Tensor,
    vocab_start: int,
    lse: Tensor,
    scale: Tensor,
    valid: int | None = None,
    *,
    kernels: str,
) -> Tensor:
    """Compute `cross_entropy_grad_` in one pass."""
    columns = logits.shape[1] if valid is None else valid
    _kernel(kernels, "cross_entropy_grad_")(logits, target, vocab_start, lse, scale, columns)
    increment_version(logits)
    return logits


def adamw(*buffers: Tensor | None, kernels: str, **options: Any) -> None:
    """Run `adamw` in one pass over memory; grad is only read."""
    _kernel(kernels, "adamw_")(*buffers, **options)


def l2_norm(flat: Tensor, *, kernels: str) -> Tensor:
    """Compute `l2_norm` in two stages."""
    return _kernel(kernels, "l2_norm")(flat)


@lru_cache
def _offsets_on(device: torch.device, offsets: tuple[int, ...]) -> Tensor:
    return torch.tensor(offsets, dtype=torch.int64, device=device)


def lamb_direction(*buffers: Tensor, kernels: str, **options: Any) -> None:
    """Run `lamb_direction` in one pass."""
    _kernel(kernels, "lamb_direction_")(*buffers, **options)


def segment_norms(flat: Tensor, offsets: tuple[int, ...], *, kernels: str) -> Tensor:
    """Compute `segment_norms` of all segments in two launches."""
    return _kernel(kernels, "segment_norms")(flat, _offsets_on(flat.device, offsets))


def lamb_apply(
    param: Tensor,
    update: Tensor,
    out_param: Tensor | None,
    ratios: Tensor,
    offsets: tuple[int, ...],
    lr: float,
    *,
    kernels: str,
) -> None:
    """Run `lamb_apply` on all segments in one launch."""
    _kernel(kernels, "lamb_apply_")(param, update, out_param, ratios, _offsets_on(param.device, offsets), lr)


def grouped_linear(x: Tensor, w: Tensor, sizes: Sequence[int], *, kernels: str) -> Tensor:
    """Run `grouped_linear` in one launch."""
    return _kernel(kernels, "grouped_product")(x, w, list(sizes), True)


def grouped_dgrad(dy: Tensor, w: Tensor, sizes: Sequence[int], *, kernels: str) -> Tensor:
    """Run `grouped_dgrad` in one launch."""
    return _kernel(kernels, "grouped_product")(dy, w, list(sizes), False)


def grouped_wgrad(
    main_grad: Tensor, dy: Tensor, x: Tensor, sizes: Sequence[int], accumulate: bool = True, *, kernels: str
) -> None:
    """Run `grouped_wgrad` in one launch."""
    _kernel(kernels, "grouped_wgrad_")(main_grad, dy, x, ends_of(sizes, x), accumulate)


def keep_mask(words: Tensor, key: tuple[int, int], columns: range, rate: float, *, kernels: str) -> Tensor:
    """Run `keep_mask` in one pass."""
    return _kernel(kernels, "keep_mask")(words, *key, columns.start, len(columns), least_kept(rate))


def stochastic_round(
    x: Tensor, out: Tensor, key: tuple[int, int], place: tuple[int, int, int, int, int], *, kernels: str
) -> None:
    """Run `stochastic_round` in one pass."""
    _kernel(kernels, "stochastic_round_")(x, out, *key, *place)
