"""Schemas of the C++, CUDA and Triton kernels, and the compiled libraries (`setup.py`).

Kernels are registered with torch for everything that inspects operations instead of running them: torch.compile, fake
tensors, dispatch modes. Schemas and fake implementations are defined here, whatever was built; `_cpu_kernels` and
`_native_cuda.so` add implementations once they are loaded (cpp.py, cuda.py), and the modules in triton/ register
theirs as `triton_<name>`.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache, partial
from typing import Any

import torch
from torch import Tensor

from megalite.core.ops.op import Missing
from megalite.core.parts.kernels import cpp, cuda

LIBRARY = torch.library.Library("megalite", "FRAGMENT")


def _norm(
    x: Tensor, residual: Tensor | None, weight: Tensor, bias: Tensor | None, eps: float
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    rows = x.numel() // x.shape[-1]
    total = x.new_empty(x.shape if residual is not None else 0)
    mean = x.new_empty(rows if bias is not None else 0, dtype=torch.float32)
    return x.new_empty(x.shape), total, mean, x.new_empty(rows, dtype=torch.float32)


def _codes(x: Tensor, width: int, group: int) -> tuple[Tensor, Tensor]:
    rows = x.numel() // x.shape[-1]
    codes = x.new_empty(rows, width, dtype=torch.float8_e4m3fn)
    return codes, x.new_empty(rows, -(-width // group), dtype=torch.float32)


def _norm_backward(
    dy: Tensor, dtotal: Tensor | None, x: Tensor, weight: Tensor, mean: Tensor, rstd: Tensor, *into: Any
) -> Tensor:
    return x.new_empty(x.shape)


def _in_place(*args: Any, **kwargs: Any) -> None:
    pass


# name -> (schema without the name, function that returns empty results of the right shape and dtype).
_FLOATS = "float beta1, float beta2, float eps, float weight_decay, int step"
KERNELS: dict[str, tuple[str, Callable[..., Any]]] = {
    "norm": (
        "(Tensor x, Tensor? residual, Tensor weight, Tensor? bias, float eps) "
        "-> (Tensor y, Tensor total, Tensor mean, Tensor rstd)",
        _norm,
    ),
    # Also the codes and scales of y for FP8 products, `group` elements of a row to a scale.
    "norm_codes": (
        "(Tensor x, Tensor? residual, Tensor weight, Tensor? bias, float eps, int group) "
        "-> (Tensor y, Tensor total, Tensor mean, Tensor rstd, Tensor codes, Tensor scale)",
        lambda *args: (*_norm(*args[:5]), *_codes(args[0], args[0].shape[-1], args[5])),
    ),
    # dweight and dbias are overwritten, or added to with add_weight and add_bias. Without dbias: RMSNorm.
    "norm_backward": (
        "(Tensor dy, Tensor? dtotal, Tensor x, Tensor weight, Tensor mean, Tensor rstd, Tensor(a!) dweight, "
        "Tensor(b!)? dbias, bool add_weight, bool add_bias) -> Tensor dx",
        _norm_backward,
    ),
    "qk_norm": (
        "(Tensor qkv, Tensor q_weight, Tensor k_weight, float eps, int num_heads, int num_kv_heads) "
        "-> (Tensor y, Tensor rstd)",
        lambda qkv, q, k, eps, heads, kv: (
            qkv.new_empty(qkv.shape),
            qkv.new_empty(qkv.numel() // qkv.shape[-1] // (heads + 2 * kv) * (heads + kv), dtype=torch.float32),
        ),
    ),
    "qk_norm_backward": (
        "(Tensor dy, Tensor qkv, Tensor q_weight, Tensor k_weight, Tensor rstd, Tensor(a!) dq_weight, "
        "Tensor(b!) dk_weight, int num_heads, int num_kv_heads, bool add_q, bool add_k) -> Tensor dqkv",
        lambda dy, qkv, *rest: qkv.new_empty(qkv.shape),
    ),
    # kind: as in `fused.KINDS`.
    "glu": (
        "(Tensor gate_up, int kind) -> Tensor",
        lambda gate_up, kind: gate_up.new_empty(*gate_up.shape[:-1], gate_up.shape[-1] // 2),
    ),
    "glu_codes": (
        "(Tensor gate_up, int kind, int group) -> (Tensor, Tensor, Tensor)",
        lambda x, kind, group: (
            x.new_empty(*x.shape[:-1], x.shape[-1] // 2),
            *_codes(x, x.shape[-1] // 2, group),
        ),
    ),
    "glu_backward": ("(Tensor dy, Tensor gate_up, int kind) -> Tensor", lambda dy, x, kind: x.new_empty(x.shape)),
    "weighed_glu": (
        "(Tensor gate_up, Tensor weights, int kind) -> Tensor",
        lambda gate_up, weights, kind: gate_up.new_empty(*gate_up.shape[:-1], gate_up.shape[-1] // 2),
    ),
    "weighed_glu_backward": (
        "(Tensor dy, Tensor gate_up, Tensor weights, int kind) -> (Tensor, Tensor)",
        lambda dy, x, weights, kind: (x.new_empty(x.shape), weights.new_empty(weights.shape)),
    ),
    "gelu": ("(Tensor x, int kind) -> Tensor", lambda x, kind: x.new_empty(x.shape)),
    "gelu_backward": ("(Tensor dy, Tensor x, int kind) -> Tensor", lambda dy, x, kind: x.new_empty(x.shape)),
    "rope_": ("(Tensor(a!) qkv, Tensor cos, Tensor sin, int num_rotated) -> ()", _in_place),
    "rope": (
        "(Tensor x, Tensor cos, Tensor sin, bool inverse) -> Tensor",
        lambda x, cos, sin, inverse: x.new_empty(x.shape),
    ),
    "rope_pack": (
        "(Tensor dq, Tensor dk, Tensor dv, Tensor cos, Tensor sin) -> Tensor",
        lambda dq, dk, dv, cos, sin: dq.new_empty(*dq.shape[:2], dq.shape[2] + 2 * dk.shape[2], dq.shape[3]),
    ),
    "cross_entropy_stats": (
        "(Tensor logits, Tensor target, int vocab_start, int valid) -> Tensor",
        lambda logits, target, vocab_start, valid: logits.new_empty(logits.shape[0], 3, dtype=torch.float32),
    ),
    "cross_entropy_grad_": (
        "(Tensor(a!) logits, Tensor target, int vocab_start, Tensor lse, Tensor scale, int valid) -> ()",
        _in_place,
    ),
    "adamw_": (
        "(Tensor(a!) param, Tensor grad, Tensor(b!) exp_avg, Tensor(c!) exp_avg_sq, Tensor(d!)? out_param, "
        f"Tensor? grad_multiplier, float lr, {_FLOATS}) -> ()",
        _in_place,
    ),
    "l2_norm": ("(Tensor flat) -> Tensor", lambda flat: flat.new_empty((), dtype=torch.float32)),
    "segment_norms": (
        "(Tensor flat, Tensor offsets) -> Tensor",
        lambda flat, offsets: flat.new_empty(offsets.shape[0] - 1, dtype=torch.float32),
    ),
    "lamb_direction_": (
        "(Tensor param, Tensor grad, Tensor(a!) exp_avg, Tensor(b!) exp_avg_sq, Tensor(c!) update, "
        f"Tensor? grad_multiplier, {_FLOATS}) -> ()",
        _in_place,
    ),
    "lamb_apply_": (
        "(Tensor(a!) param, Tensor update, Tensor(b!)? out_param, Tensor ratios, Tensor offsets, float lr) -> ()",
        _in_place,
    ),
    "stochastic_round_": (
        "(Tensor x, Tensor(a!) out, int key, int second_key, int row, int inner, int jump, int column, int width) "
        "-> ()",
        _in_place,
    ),
    "keep_mask": (
        "(Tensor words, int key, int second_key, int column, int width, int least) -> Tensor",
        lambda words, key, second_key, column, width, least: words.new_empty(*words.shape[1:], width, dtype=torch.bool),
    ),
    "quantize": (
        "(Tensor x, int rows, int columns) -> (Tensor, Tensor)",
        lambda x, rows, columns: (
            x.new_empty(x.shape, dtype=torch.float8_e4m3fn),
            x.new_empty(-(-x.shape[0] // rows), -(-x.shape[1] // columns), dtype=torch.float32),
        ),
    ),
    "block_product": (
        "(Tensor codes, Tensor scale, Tensor second, Tensor second_scale, int second_rows, ScalarType dtype) -> Tensor",
        lambda codes, scale, second, second_scale, second_rows, dtype: codes.new_empty(
            len(codes), len(second), dtype=dtype
        ),
    ),
    "grouped_product": (
        "(Tensor x, Tensor w, int[] sizes, bool transposed) -> Tensor",
        lambda x, w, sizes, transposed: x.new_empty(len(x), w.shape[1 if transposed else 2]),
    ),
    "grouped_wgrad_": (
        "(Tensor(a!) main_grad, Tensor dy, Tensor x, Tensor ends, bool accumulated) -> ()",
        _in_place,
    ),
    "delta_states": (
        "(Tensor written, Tensor reads, Tensor kept, Tensor left, Tensor held, bool exact) -> (Tensor, Tensor, Tensor)",
        lambda written, reads, kept, left, held, exact: (
            written.new_empty(*written.shape[:3], *held.shape[2:]),
            written.new_empty(written.shape),
            written.new_empty(held.shape),
        ),
    ),
    "delta_states_backward": (
        "(Tensor? dstates, Tensor? dnew, Tensor dlast, Tensor reads, Tensor kept, Tensor left, bool exact) "
        "-> (Tensor, Tensor, Tensor)",
        lambda dstates, dnew, dlast, reads, *rest: (
            dlast.new_empty(*reads.shape[:3], *dlast.shape[2:]),
            dlast.new_empty(*reads.shape[:4], dlast.shape[3]),
            dlast.new_empty(dlast.shape),
        ),
    ),
    "causal_conv": (
        "(Tensor x, Tensor weight, Tensor? starts) -> Tensor",
        lambda x, weight, starts: x.new_empty(x.shape),
    ),
    "causal_conv_backward": (
        "(Tensor dy, Tensor x, Tensor weight, Tensor? starts) -> (Tensor, Tensor)",
        lambda dy, x, weight, starts: (x.new_empty(x.shape), weight.new_empty(weight.shape)),
    ),
    "spread_rows": (
        "(Tensor x, Tensor order, Tensor? weights, int k) -> Tensor",
        lambda x, order, weights, k: x.new_empty(len(order), x.shape[1]),
    ),
    "combine_rows": (
        "(Tensor rows, Tensor inverse, Tensor? weights, int k) -> Tensor",
        lambda rows, inverse, weights, k: rows.new_empty(len(inverse) // k, rows.shape[1]),
    ),
    "expert_weights_grad": (
        "(Tensor rows, Tensor x, Tensor inverse, int k) -> Tensor",
        lambda rows, x, inverse, k: x.new_empty(len(x), k, dtype=torch.float32),
    ),
    "cast_fp8": (
        "(Tensor x, Tensor scale, ScalarType dtype) -> Tensor",
        lambda x, scale, dtype: x.new_empty(x.shape, dtype=dtype),
    ),
}


def define(name: str, prefix: str = "") -> None:
    """Define `megalite::<prefix><name>` and its fake implementation."""
    schema, fake = KERNELS[name]
    LIBRARY.define(f"{prefix}{name}{schema}")
    torch.library.register_fake(f"megalite::{prefix}{name}", fake, lib=LIBRARY)


for _name in dict.fromkeys((*cpp.NAMES, *cuda.KERNELS)):
    define(_name)


def _register(name: str, kernel: Callable[..., Any], key: str) -> None:
    """Register `kernel` as the implementation of `megalite::<name>`; for None it returns an empty tensor to torch."""

    def run(*args: Any) -> Any:
        results = kernel(*args)
        if not isinstance(results, tuple):
            return results
        return tuple(empty if x is None else x for x, empty in zip(results, KERNELS[name][1](*args)))

    LIBRARY.impl(name, run, key)


@lru_cache
def _why_not_loaded(key: str) -> str | None:
    schemas = {name: schema for name, (schema, _) in KERNELS.items()}
    on_cpu = partial(cpp.use, schemas), cpp.KERNELS, "g++"
    use, kernels, tool = on_cpu if key == "CPU" else (cuda.use, cuda.KERNELS, "nvcc")
    try:
        use()
    except (ModuleNotFoundError, FileNotFoundError):
        return Missing(f"it was not built; with {tool} on PATH, `pip install` megalite again")
    except (ImportError, OSError) as e:
        return Missing(f"it cannot be loaded ({e}); `pip install` megalite again")
    for name, kernel in kernels.items():
        _register(name, kernel, key)
    return None


def why_no_cpp(device: torch.device, dtype: torch.dtype) -> str | None:
    """Return why the C++ library cannot run on (device, dtype), or None."""
    if device.type != "cpu":
        return f"for CPU tensors, not {device.type}"
    if dtype not in (torch.float32, torch.bfloat16):
        return f"for fp32 and bf16, not {dtype}"
    return _why_not_loaded("CPU")


def why_no_cuda(device: torch.device, dtype: torch.dtype) -> str | None:
    """Return why the CUDA library cannot run on (device, dtype), or None."""
    if device.type != "cuda":
        return f"for CUDA tensors, not {device.type}"
    if torch.version.cuda is None:
        return "this torch is built without CUDA"
    if dtype not in (torch.float32, torch.bfloat16, torch.float16):
        return f"for fp32, bf16 and fp16, not {dtype}"
    if (capability := torch.cuda.get_device_capability(device)) < (8, 0):
        return "for compute capability 8.0 and above, not {}.{}".format(*capability)
    return _why_not_loaded("CUDA")
