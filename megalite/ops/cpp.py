"""The C++ kernels (csrc/cpu) on CPU tensors: checks of the operands, results, calls. Contracts: the modules of the ops.

Each function has the signature of its schema in `native.KERNELS`, but gives None for a result that is not there. All
refuse operands that do not fit with a ValueError.
"""

from __future__ import annotations

import ctypes
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

from megalite.log import logger
from megalite.ops.entry import check_flat, load_entries

_CPU = torch.device("cpu")
# Number of an element type in the entry points.
_BF16 = {torch.float32: 0, torch.bfloat16: 1}
_SIGNATURES = {
    "use_threads": "vppp",
    "adamw_": "vppppppiiidddddii",
    "l2_norm": "vppiii",
    "norm": "vppppppiiiidi",
    "norm_backward": "vpppppppiiiii",
    "glu": "vppiiiii",
    "glu_backward": "vpppiiiii",
    "rope": "vpiiipppiiiiiiii",
    "rope_pack": "vpiiipiiipiiipppiiiiiiii",
    "cross_entropy_stats": "vpppiiiiii",
    "cross_entropy_grad_": "vppppiiiiiii",
}
_entries: Any = SimpleNamespace()


def use(library: Path) -> None:
    """Load the library, and give it the OpenMP runtime that torch itself is linked to.

    Raises:
        OSError: as `load_entries`.
    """
    vars(_entries).update(load_entries(library, _SIGNATURES))
    try:
        # Looked up from torch's module, dlsym searches what that is linked to, whatever the runtime's file is called.
        runtime = ctypes.CDLL(torch._C.__file__)
        functions = [runtime[name] for name in ("GOMP_parallel", "omp_get_thread_num", "omp_get_num_threads")]
    except (OSError, AttributeError) as e:
        logger.warning(f"the C++ kernels use one thread: this torch has no OpenMP that they could share ({e})")
        return
    _entries.use_threads(*(ctypes.cast(function, ctypes.c_void_p).value for function in functions))


def _element(t: Tensor, name: str) -> int:
    number = _BF16.get(t.dtype)
    if number is None or not t.is_cpu:
        raise ValueError(f"{name} must be fp32 or bf16 on the CPU, not {t.dtype} on {t.device}")
    return number


def _packed(t: Tensor, name: str, numel: int, dtype: torch.dtype) -> Tensor:
    """Return `t`, or a contiguous copy of it."""
    if t.numel() != numel or t.dtype is not dtype or not t.is_cpu:
        given = f"{t.numel()} elements of {t.dtype} on {t.device}"
        raise ValueError(f"{name} has {given}, must have {numel} of {dtype} on the CPU")
    return t.contiguous()


def _rows(x: Tensor) -> tuple[int, int]:
    """Return (rows, width); no rows if they have no width."""
    width = x.shape[-1]
    return (x.numel() // width if width else 0), width


def norm(
    x: Tensor, residual: Tensor | None, weight: Tensor, bias: Tensor | None, eps: float
) -> tuple[Tensor, Tensor | None, None, Tensor]:
    """Compute RMSNorm of x, or of total = x + residual, and the fp32 rstd of each row -> (y, total, None, rstd)."""
    if bias is not None:
        raise ValueError("LayerNorm has no C++ kernel")
    bf16, bf16_weight = _element(x, "x"), _element(weight, "weight")
    rows, width = _rows(x)
    x, weight = x.contiguous(), _packed(weight, "weight", width, weight.dtype)
    y, total, rstd = torch.empty_like(x), None, x.new_empty(rows, dtype=torch.float32)
    from_residual = to_total = 0
    if residual is not None:
        residual, total = _packed(residual, "residual", x.numel(), x.dtype), torch.empty_like(x)
        from_residual, to_total = residual.data_ptr(), total.data_ptr()
    _entries.norm(
        x.data_ptr(), from_residual, weight.data_ptr(), y.data_ptr(), to_total, rstd.data_ptr(),
        rows, width, bf16, bf16_weight, eps, torch.get_num_threads(),
    )  # fmt: skip
    return y, total, None, rstd


def norm_backward(
    dy: Tensor,
    dtotal: Tensor | None,
    x: Tensor,
    weight: Tensor,
    mean: Tensor | None,
    rstd: Tensor,
    dweight: Tensor,
    dbias: Tensor | None,
    add_weight: bool,
    add_bias: bool,
) -> Tensor:
    """Compute the gradients of RMSNorm -> dx, with dtotal added; that of the weight goes into dweight."""
    if dbias is not None:
        raise ValueError("LayerNorm has no C++ kernel")
    bf16, bf16_weight = _element(x, "x"), _element(weight, "weight")
    rows, width = _rows(x)
    x, dy, weight = (
        x.contiguous(),
        _packed(dy, "dy", x.numel(), x.dtype),
        _packed(weight, "weight", width, weight.dtype),
    )
    rstd = _packed(rstd, "rstd", rows, torch.float32)
    if dtotal is not None:
        dtotal = _packed(dtotal, "dtotal", x.numel(), x.dtype)
    dx, direct = torch.empty_like(x), dweight.dtype is weight.dtype and not add_weight
    summed = dweight if direct else torch.empty_like(weight)
    _entries.norm_backward(
        dy.data_ptr(), 0 if dtotal is None else dtotal.data_ptr(), x.data_ptr(), weight.data_ptr(), rstd.data_ptr(),
        dx.data_ptr(), summed.data_ptr(), rows, width, bf16, bf16_weight, torch.get_num_threads(),
    )  # fmt: skip
    if not direct:
        (dweight.add_ if add_weight else dweight.copy_)(summed)
    return dx


def _halves(gate_up: Tensor, kind: int) -> tuple[int, int]:
    """Return (rows, width of one half)."""
    rows, width = _rows(gate_up)
    if width % 2 or not 0 <= kind <= 2:
        raise ValueError(f"gate_up of width {width} and activation {kind}: must have two halves, and be 0, 1 or 2")
    return rows, width // 2


def glu(gate_up: Tensor, kind: int) -> Tensor:
    """Compute act(gate) * up."""
    bf16 = _element(gate_up, "gate_up")
    rows, width = _halves(gate_up, kind)
    gate_up = gate_up.contiguous()
    *outer, _ = gate_up.shape
    out = gate_up.new_empty(*outer, width)
    _entries.glu(gate_up.data_ptr(), out.data_ptr(), rows, width, kind, bf16, torch.get_num_threads())
    return out


def glu_backward(dy: Tensor, gate_up: Tensor, kind: int) -> Tensor:
    """Compute the gradient of gate_up."""
    bf16 = _element(gate_up, "gate_up")
    rows, width = _halves(gate_up, kind)
    gate_up, dy = gate_up.contiguous(), _packed(dy, "dy", rows * width, gate_up.dtype)
    grad = torch.empty_like(gate_up)
    _entries.glu_backward(
        dy.data_ptr(), gate_up.data_ptr(), grad.data_ptr(), rows, width, kind, bf16, torch.get_num_threads()
    )
    return grad


def _tables(cos: Tensor, sin: Tensor, seq: int, width: int) -> tuple[Tensor, Tensor, int]:
    """Return (cos, sin, half the rotated width)."""
    rows, half = cos.shape
    if rows != seq or 2 * half > width:
        raise ValueError(f"tables [{rows}, {half}] do not fit {seq} positions of width {width}")
    numel = seq * half
    return _packed(cos, "cos", numel, torch.float32), _packed(sin, "sin", numel, torch.float32), half


def rope_(qkv: Tensor, cos: Tensor, sin: Tensor, num_rotated: int) -> None:
    """Rotate the first heads of qkv in place."""
    bf16 = _element(qkv, "qkv")
    (seq, batch, heads, width), (stride_s, stride_b, stride_h, unit) = qkv.shape, qkv.stride()
    if unit != 1 or num_rotated > heads:
        raise ValueError(f"qkv must have unit stride, not {unit}, and {num_rotated} heads or more, not {heads}")
    cos, sin, half = _tables(cos, sin, seq, width)
    at = qkv.data_ptr()
    _entries.rope(
        at, stride_s, stride_b, stride_h, at, cos.data_ptr(), sin.data_ptr(),
        seq, batch, num_rotated, width, half, 1, bf16, torch.get_num_threads(),
    )  # fmt: skip


def rope(x: Tensor, cos: Tensor, sin: Tensor, inverse: bool) -> Tensor:
    """Rotate x into a new tensor; back, if inverse."""
    bf16 = _element(x, "x")
    x = _unit_stride(x)
    (seq, batch, heads, width), (stride_s, stride_b, stride_h, _) = x.shape, x.stride()
    cos, sin, half = _tables(cos, sin, seq, width)
    y = x.new_empty(seq, batch, heads, width)
    _entries.rope(
        x.data_ptr(), stride_s, stride_b, stride_h, y.data_ptr(), cos.data_ptr(), sin.data_ptr(),
        seq, batch, heads, width, half, -1 if inverse else 1, bf16, torch.get_num_threads(),
    )  # fmt: skip
    return y


def _unit_stride(heads: Tensor) -> Tensor:
    return heads if heads.stride()[-1] == 1 else heads.contiguous()


def rope_pack(dq: Tensor, dk: Tensor, dv: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Turn dq and dk back, and pack them with dv."""
    bf16 = _element(dq, "dq")
    dq, dk, dv = _unit_stride(dq), _unit_stride(dk), _unit_stride(dv)
    (seq, batch, num_heads, width), (_, _, num_kv_heads, _) = dq.shape, dk.shape
    for t in (dk, dv):
        if t.shape != (seq, batch, num_kv_heads, width) or t.dtype is not dq.dtype or not t.is_cpu:
            raise ValueError(f"dq {list(dq.shape)}, dk {list(dk.shape)} and dv {list(dv.shape)} do not fit together")
    cos, sin, half = _tables(cos, sin, seq, width)
    out = dq.new_empty(seq, batch, num_heads + 2 * num_kv_heads, width)
    _entries.rope_pack(
        dq.data_ptr(), *dq.stride()[:3], dk.data_ptr(), *dk.stride()[:3], dv.data_ptr(), *dv.stride()[:3],
        out.data_ptr(), cos.data_ptr(), sin.data_ptr(),
        seq, batch, num_heads, num_kv_heads, width, half, bf16, torch.get_num_threads(),
    )  # fmt: skip
    return out


def _logits(logits: Tensor, valid: int) -> tuple[int, int, int, int]:
    """Return (element type, rows, their distance, their width)."""
    bf16 = _element(logits, "logits")
    (rows, width), (stride, unit) = logits.shape, logits.stride()
    if (unit != 1 and width > 1) or not 0 <= valid <= width:
        raise ValueError(f"logits must be rows of unit stride, not {unit}, and valid columns 0 to {width}, not {valid}")
    return bf16, rows, stride, width


def cross_entropy_stats(logits: Tensor, target: Tensor, vocab_start: int, valid: int) -> Tensor:
    """Compute fp32 [rows, 3]: maximum, sum of exponentials, logit of the target."""
    bf16, rows, stride, _ = _logits(logits, valid)
    target = _packed(target, "target", rows, torch.int64)
    stats = logits.new_empty(rows, 3, dtype=torch.float32)
    _entries.cross_entropy_stats(
        logits.data_ptr(), target.data_ptr(), stats.data_ptr(),
        rows, stride, valid, vocab_start, bf16, torch.get_num_threads(),
    )  # fmt: skip
    return stats


def cross_entropy_grad_(
    logits: Tensor, target: Tensor, vocab_start: int, lse: Tensor, scale: Tensor, valid: int
) -> None:
    """Overwrite logits with their gradient."""
    bf16, rows, stride, width = _logits(logits, valid)
    target = _packed(target, "target", rows, torch.int64)
    lse, scale = _packed(lse, "lse", rows, torch.float32), _packed(scale, "scale", rows, torch.float32)
    _entries.cross_entropy_grad_(
        logits.data_ptr(), target.data_ptr(), lse.data_ptr(), scale.data_ptr(),
        rows, stride, valid, width, vocab_start, bf16, torch.get_num_threads(),
    )  # fmt: skip


def adamw_(
    param: Tensor,
    grad: Tensor,
    exp_avg: Tensor,
    exp_avg_sq: Tensor,
    out_param: Tensor | None,
    grad_multiplier: Tensor | None,
    lr: float,
    beta1: float,
    beta2: float,
    eps: float,
    weight_decay: float,
    step: int,
) -> None:
    """Update param, its moments and out_param."""
    n = param.numel()
    operands = [
        check_flat(param, "param", n, _CPU),
        check_flat(grad, "grad", n, _CPU, grad.dtype),
        check_flat(exp_avg, "exp_avg", n, _CPU),
        check_flat(exp_avg_sq, "exp_avg_sq", n, _CPU),
        0 if out_param is None else check_flat(out_param, "out_param", n, _CPU, out_param.dtype),
        0 if grad_multiplier is None else check_flat(grad_multiplier, "grad_multiplier", 1, _CPU),
    ]
    out_type = 0 if out_param is None else _element(out_param, "out_param")
    _entries.adamw_(
        *operands, n, _element(grad, "grad"), out_type, lr, beta1, beta2, eps, weight_decay, step,
        torch.get_num_threads(),
    )  # fmt: skip


def l2_norm(flat: Tensor) -> Tensor:
    """Compute the fp32 norm, 0-dim."""
    bf16, n = _element(flat, "flat"), flat.numel()
    norm = flat.new_empty((), dtype=torch.float32)
    _entries.l2_norm(check_flat(flat, "flat", n, _CPU, flat.dtype), norm.data_ptr(), n, bf16, torch.get_num_threads())
    return norm


KERNELS = {
    function.__name__: function
    for function in (
        adamw_, l2_norm, norm, norm_backward, glu, glu_backward, rope_, rope, rope_pack,
        cross_entropy_stats, cross_entropy_grad_,
    )
}  # fmt: skip
