"""NVIDIA apex as a backend, where its CUDA extensions are installed (`amp_C`; PyPI's `apex` is another package)."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from megalite.ops.registry import Backend


def _why_not(extension: str) -> Callable[[torch.device, torch.dtype], str | None]:
    def why_not(device: torch.device, dtype: torch.dtype) -> str | None:
        if device.type != "cuda":
            return f"for CUDA tensors, not {device.type}"
        if importlib.util.find_spec(extension) is None:
            return f"apex is not installed with its CUDA extension {extension}"
        return None

    return why_not


def _load_norms() -> dict[str, Callable[..., Any]]:
    from apex.normalization.fused_layer_norm import fused_layer_norm_affine, fused_rms_norm_affine

    def rmsnorm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
        return fused_rms_norm_affine(x, weight, x.shape[-1:], eps)

    def add_rmsnorm(x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
        total = x + residual
        return rmsnorm(total, weight, eps), total

    def layernorm(x: Tensor, weight: Tensor, bias: Tensor, eps: float) -> Tensor:
        return fused_layer_norm_affine(x, weight, bias, x.shape[-1:], eps)

    def add_layernorm(x: Tensor, residual: Tensor, weight: Tensor, bias: Tensor, eps: float) -> tuple[Tensor, Tensor]:
        total = x + residual
        return layernorm(total, weight, bias, eps), total

    functions = (rmsnorm, add_rmsnorm, layernorm, add_layernorm)
    return {function.__name__: function for function in functions}


def _load_l2_norm() -> dict[str, Callable[..., Any]]:
    import amp_C
    from apex.multi_tensor_apply import multi_tensor_applier

    def l2_norm(flat: Tensor) -> Tensor:
        overflow = torch.zeros(1, dtype=torch.int32, device=flat.device)
        return multi_tensor_applier(amp_C.multi_tensor_l2norm, overflow, [[flat]], False)[0].view(())

    return {"l2_norm": l2_norm}


def _load_wgrad() -> dict[str, Callable[..., Any]]:
    from fused_weight_gradient_mlp_cuda import wgrad_gemm_accum_fp32

    def wgrad_accumulate(main_grad: Tensor, dy: Tensor, x: Tensor) -> None:
        wgrad_gemm_accum_fp32(x, dy, main_grad)

    return {"wgrad_accumulate": wgrad_accumulate}


NORMS = Backend("apex", _load_norms, _why_not("fused_layer_norm_cuda"))
L2_NORM = Backend("apex", _load_l2_norm, _why_not("amp_C"))
WGRAD = Backend("apex", _load_wgrad, _why_not("fused_weight_gradient_mlp_cuda"))
