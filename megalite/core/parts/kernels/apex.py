"""NVIDIA apex as a backend, where its CUDA extensions are installed (`amp_C`; PyPI's `apex` is another package)."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import torch
from torch import Tensor

from megalite.core.ops.op import TORCH, Backend, Op
from megalite.core.ops.rmsnorm import by_slices


def _backend(extension: str, load: Callable[[Op], Mapping[str, Callable[..., Any]]]) -> Backend:
    def why_not(device: torch.device, dtype: torch.dtype) -> str | None:
        if device.type != "cuda":
            return f"for CUDA tensors, not {device.type}"
        if importlib.util.find_spec(extension) is None:
            return f"apex is not installed with its CUDA extension {extension}"
        return None

    return Backend("apex", load, why_not)


def _norms(op: Op) -> dict[str, Callable[..., Any]]:
    from apex.normalization.fused_layer_norm import fused_layer_norm_affine, fused_rms_norm_affine

    def rmsnorm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
        return fused_rms_norm_affine(x, weight, x.shape[-1:], eps)

    def layernorm(x: Tensor, weight: Tensor, bias: Tensor, eps: float) -> Tensor:
        return fused_layer_norm_affine(x, weight, bias, x.shape[-1:], eps)

    norm = rmsnorm if op.name == "rmsnorm" else layernorm

    def add_norm(x: Tensor, residual: Tensor, *rest: Any) -> tuple[Tensor, Tensor]:
        total = x + residual
        return norm(total, *rest), total

    functions: dict[str, Callable[..., Any]] = {op.name: norm, f"add_{op.name}": add_norm}
    return functions | ({"qk_rmsnorm": partial(by_slices, rmsnorm)} if norm is rmsnorm else {})


def _l2_norm(op: Op) -> dict[str, Callable[..., Any]]:
    import amp_C
    from apex.multi_tensor_apply import multi_tensor_applier

    def l2_norm(flat: Tensor) -> Tensor:
        overflow = torch.zeros(1, dtype=torch.int32, device=flat.device)
        return multi_tensor_applier(amp_C.multi_tensor_l2norm, overflow, [[flat]], False)[0].view(())

    return {"l2_norm": l2_norm}


def _matmul(op: Op) -> dict[str, Callable[..., Any]]:
    from fused_weight_gradient_mlp_cuda import wgrad_gemm_accum_fp32

    plain = TORCH.load(op)

    def linear_wgrad(main_grad: Tensor, dy: Tensor, x: Tensor, accumulate: bool = True) -> None:
        if accumulate:
            wgrad_gemm_accum_fp32(x.flatten(0, -2), dy.flatten(0, -2), main_grad)
        else:
            plain["linear_wgrad"](main_grad, dy, x, accumulate)

    return {**plain, "linear_wgrad": linear_wgrad}


_EXTENSIONS = {
    "norms": _backend("fused_layer_norm_cuda", _norms),
    "l2_norm": _backend("amp_C", _l2_norm),
    "matmul": _backend("fused_weight_gradient_mlp_cuda", _matmul),
}
BACKENDS: dict[str, Callable[[str], Backend]] = {"apex": _EXTENSIONS.__getitem__}
