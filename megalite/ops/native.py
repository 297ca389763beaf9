"""The compiled libraries (`setup.py`): torch.library schemas, loading, and why one is missing.

Schemas are defined here, in Python, whatever was built; `_native_cpu.so` and `_native_cuda.so` add implementations to
them through torch's stable ABI. Fake implementations make the ops traceable by torch.compile.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

_HERE = Path(__file__).parent


@dataclass(frozen=True)
class SharedOp:
    """What the implementations of one op have in common; `fake` makes empty results of the right shape and type."""

    schema: str
    fake: Callable[..., Any]


def _norm_fake(
    x: Tensor, residual: Tensor | None, weight: Tensor, bias: Tensor | None, eps: float
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    rows = x.numel() // x.shape[-1]
    total = x.new_empty(x.shape if residual is not None else 0)
    mean = x.new_empty(rows if bias is not None else 0, dtype=torch.float32)
    return x.new_empty(x.shape), total, mean, x.new_empty(rows, dtype=torch.float32)


def _norm_backward_fake(
    dy: Tensor, dtotal: Tensor | None, x: Tensor, weight: Tensor, mean: Tensor, rstd: Tensor, is_rms: bool
) -> tuple[Tensor, Tensor, Tensor]:
    return x.new_empty(x.shape), torch.empty_like(weight), weight.new_empty(0 if is_rms else len(weight))


# C++ implements `megalite::<name>`, Triton `megalite::triton_<name>`; `megalite.ops.fused` differentiates both.
SHARED = {
    op.schema.split("(", 1)[0]: op
    for op in (
        SharedOp(
            "norm(Tensor x, Tensor? residual, Tensor weight, Tensor? bias, float eps) "
            "-> (Tensor y, Tensor total, Tensor mean, Tensor rstd)",
            _norm_fake,
        ),
        SharedOp(
            "norm_backward(Tensor dy, Tensor? dtotal, Tensor x, Tensor weight, Tensor mean, Tensor rstd, bool is_rms) "
            "-> (Tensor dx, Tensor dweight, Tensor dbias)",
            _norm_backward_fake,
        ),
        # kind: 0 SiLU, 1 GELU (erf), 2 GELU (tanh).
        SharedOp(
            "glu(Tensor gate_up, int kind) -> Tensor",
            lambda gate_up, kind: gate_up.new_empty(*gate_up.shape[:-1], gate_up.shape[-1] // 2),
        ),
        SharedOp(
            "glu_backward(Tensor dy, Tensor gate_up, int kind) -> Tensor",
            lambda dy, gate_up, kind: gate_up.new_empty(gate_up.shape),
        ),
        SharedOp("rope_(Tensor(a!) qkv, Tensor cos, Tensor sin, int num_rotated) -> ()", lambda *args: None),
        SharedOp(
            "rope(Tensor x, Tensor cos, Tensor sin, bool inverse) -> Tensor",
            lambda x, cos, sin, inverse: x.new_empty(x.shape),
        ),
        SharedOp(
            "rope_pack(Tensor dq, Tensor dk, Tensor dv, Tensor cos, Tensor sin) -> Tensor",
            lambda dq, dk, dv, cos, sin: dq.new_empty(*dq.shape[:2], dq.shape[2] + 2 * dk.shape[2], dq.shape[3]),
        ),
        SharedOp(
            "cross_entropy_stats(Tensor logits, Tensor target, int vocab_start, int valid) -> Tensor",
            lambda logits, target, vocab_start, valid: logits.new_empty(logits.shape[0], 3, dtype=torch.float32),
        ),
        SharedOp(
            "cross_entropy_grad_(Tensor(a!) logits, Tensor target, int vocab_start, Tensor lse, Tensor scale, "
            "int valid) -> ()",
            lambda *args: None,
        ),
    )
}

_LIBRARY = torch.library.Library("megalite", "FRAGMENT")

_MOMENTS = "Tensor(a!) param, Tensor grad, Tensor(b!) exp_avg, Tensor(c!) exp_avg_sq"
SCHEMAS = (
    f"adamw_({_MOMENTS}, Tensor(d!)? out_param, Tensor? grad_multiplier, float lr, float beta1, float beta2, "
    "float eps, float weight_decay, int step) -> ()",
    "l2_norm(Tensor flat) -> Tensor",
    "segment_norms(Tensor flat, Tensor offsets) -> Tensor",
    "lamb_direction_(Tensor param, Tensor grad, Tensor(a!) exp_avg, Tensor(b!) exp_avg_sq, Tensor(c!) update, "
    "Tensor? grad_multiplier, float beta1, float beta2, float eps, float weight_decay, int step) -> ()",
    "lamb_apply_(Tensor(a!) param, Tensor update, Tensor(b!)? out_param, Tensor ratios, Tensor offsets, float lr) "
    "-> ()",
    *(op.schema for op in SHARED.values()),
)
CPU_OPS = ("adamw_", "l2_norm", *SHARED)
for _schema in SCHEMAS:
    _LIBRARY.define(_schema)


@torch.library.register_fake("megalite::l2_norm", lib=_LIBRARY)
def _(flat: Tensor) -> Tensor:
    return flat.new_empty((), dtype=torch.float32)


@torch.library.register_fake("megalite::segment_norms", lib=_LIBRARY)
def _(flat: Tensor, offsets: Tensor) -> Tensor:
    return flat.new_empty(offsets.shape[0] - 1, dtype=torch.float32)


for _name in ("adamw_", "lamb_direction_", "lamb_apply_"):
    torch.library.register_fake(f"megalite::{_name}", lambda *args, **kwargs: None, lib=_LIBRARY)
for _name, _op in SHARED.items():
    torch.library.register_fake(f"megalite::{_name}", _op.fake, lib=_LIBRARY)


@lru_cache
def _load(path: Path) -> str | None:
    if not path.exists():
        return "not built; `pip install --no-build-isolation -e .` builds it where a compiler is"
    try:
        torch.ops.load_library(str(path))
    except OSError as e:
        return f"{path.name} does not load: {e}"
    if path.name == "_native_cpu.so":
        missing = [n for n in CPU_OPS if not torch._C._dispatch_has_kernel_for_dispatch_key(f"megalite::{n}", "CPU")]
        if missing:
            return f"{path.name} was built from older sources, without {', '.join(missing)}; build it again"
    return None


def why_no_cpp(device: torch.device, dtype: torch.dtype) -> str | None:
    """Reason why the C++ library cannot serve (device, dtype), or None."""
    if device.type != "cpu":
        return f"for CPU tensors, not {device.type}"
    if dtype not in (torch.float32, torch.bfloat16):
        return f"for fp32 and bf16, not {dtype}"
    return _load(_HERE / "_native_cpu.so")


def why_no_cuda(device: torch.device, dtype: torch.dtype) -> str | None:
    """Reason why the CUDA library cannot serve (device, dtype), or None."""
    if device.type != "cuda":
        return f"for CUDA tensors, not {device.type}"
    if torch.version.cuda is None:
        return "this torch is built without CUDA"
    if dtype not in (torch.float32, torch.bfloat16, torch.float16):
        return f"for fp32, bf16 and fp16, not {dtype}"
    return _load(_HERE / "_native_cuda.so")
