"""The CUDA kernels (csrc/cuda): operand checks, results, launches. Contracts: the modules of the ops.

Each function has the signature of its schema in `native.KERNELS`, launches on the current stream, and raises a
ValueError for invalid operands.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

from megalite.core.parts.kernels.entry import check_flat, load_entries

_LIBRARY = Path(__file__).with_name("_native_cuda.so")
# Numbers of element types in the entry points.
_TYPES = {torch.float32: 0, torch.bfloat16: 1, torch.float16: 2}
_SIGNATURES = {
    "error_string": "pi",
    "adamw_": "ippppppiiidddddip",
    "norms": "ippppiiiip",
    "lamb_direction_": "ippppppiiddddip",
    "lamb_apply_": "ipppppiidp",
}
# Blocks of a norm's first stage: of a full buffer (several per multiprocessor of any GPU), of a segment.
_FLAT_BLOCKS, _SEGMENT_BLOCKS = 1024, 128
_MAX_SEGMENTS = 65535
_entries: Any = SimpleNamespace()


def use() -> None:
    """Load the library.

    Raises:
        FileNotFoundError: the library was not built.
        OSError: as `load_entries`.
    """
    if not _LIBRARY.exists():
        raise FileNotFoundError(_LIBRARY)
    vars(_entries).update(load_entries(_LIBRARY, _SIGNATURES))


def _launch(entry: Callable[..., int], device: torch.device, *args: Any) -> None:
    with torch.cuda.device(device):
        error = entry(*args, torch.cuda.current_stream(device).cuda_stream)
    if error:
        raise RuntimeError(f"CUDA error: {ctypes.string_at(_entries.error_string(error)).decode()}")


def _element(t: Tensor | None, name: str) -> int:
    number = 0 if t is None else _TYPES.get(t.dtype)
    if number is None:
        raise ValueError(f"{name} must be fp32, bf16 or fp16")
    return number


def _optional(t: Tensor | None, name: str, numel: int, device: torch.device) -> int:
    return 0 if t is None else check_flat(t, name, numel, device, t.dtype)


def _multiplier(t: Tensor | None, device: torch.device) -> int:
    return 0 if t is None else check_flat(t, "grad_multiplier", 1, device)


def _state(param: Tensor, grad: Tensor, exp_avg: Tensor, exp_avg_sq: Tensor) -> list[int]:
    """Check the operands that AdamW and LAMB share, and return their addresses."""
    n, device = param.numel(), param.device
    return [
        check_flat(param, "param", n, device),
        check_flat(grad, "grad", n, device, grad.dtype),
        check_flat(exp_avg, "exp_avg", n, device),
        check_flat(exp_avg_sq, "exp_avg_sq", n, device),
    ]


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
    n, device = param.numel(), param.device
    operands = [
        *_state(param, grad, exp_avg, exp_avg_sq),
        _optional(out_param, "out_param", n, device),
        _multiplier(grad_multiplier, device),
    ]
    types = _element(grad, "grad"), _element(out_param, "out_param")
    _launch(_entries.adamw_, device, *operands, n, *types, lr, beta1, beta2, eps, weight_decay, step)


def _norms(flat: Tensor, offsets: int, segments: int, blocks: int, norms: Tensor) -> Tensor:
    address = check_flat(flat, "flat", flat.numel(), flat.device, flat.dtype)
    partials = flat.new_empty(segments * blocks, dtype=torch.float64)
    _launch(
        _entries.norms,
        flat.device,
        address,
        offsets,
        partials.data_ptr(),
        norms.data_ptr(),
        flat.numel(),
        segments,
        blocks,
        _element(flat, "flat"),
    )
    return norms


def l2_norm(flat: Tensor) -> Tensor:
    """Compute the fp32 norm, 0-dim."""
    return _norms(flat, 0, 1, _FLAT_BLOCKS, flat.new_empty((), dtype=torch.float32))


def _segments(offsets: Tensor, device: torch.device) -> tuple[int, int]:
    """Return (address of the offsets, number of segments)."""
    segments = offsets.numel() - 1
    if segments > _MAX_SEGMENTS:
        raise ValueError(f"at most {_MAX_SEGMENTS} segments, not {segments}")
    return check_flat(offsets, "offsets", segments + 1, device, torch.int64), segments


def segment_norms(flat: Tensor, offsets: Tensor) -> Tensor:
    """Compute the fp32 norm of each segment."""
    at, segments = _segments(offsets, flat.device)
    return _norms(flat, at, segments, _SEGMENT_BLOCKS, flat.new_empty(segments, dtype=torch.float32))


def lamb_direction_(
    param: Tensor,
    grad: Tensor,
    exp_avg: Tensor,
    exp_avg_sq: Tensor,
    update: Tensor,
    grad_multiplier: Tensor | None,
    beta1: float,
    beta2: float,
    eps: float,
    weight_decay: float,
    step: int,
) -> None:
    """Update the moments, and write the direction to `update`."""
    n, device = param.numel(), param.device
    operands = [
        *_state(param, grad, exp_avg, exp_avg_sq),
        check_flat(update, "update", n, device),
        _multiplier(grad_multiplier, device),
    ]
    numbers = (beta1, beta2, eps, weight_decay, step)
    _launch(_entries.lamb_direction_, device, *operands, n, _element(grad, "grad"), *numbers)


def lamb_apply_(
    param: Tensor, update: Tensor, out_param: Tensor | None, ratios: Tensor, offsets: Tensor, lr: float
) -> None:
    """Subtract lr * ratio * update from each segment of param."""
    n, device = param.numel(), param.device
    at, segments = _segments(offsets, device)
    operands = [
        check_flat(param, "param", n, device),
        check_flat(update, "update", n, device),
        _optional(out_param, "out_param", n, device),
        check_flat(ratios, "ratios", segments, device),
    ]
    _launch(_entries.lamb_apply_, device, *operands, at, segments, _element(out_param, "out_param"), lr)


KERNELS = {function.__name__: function for function in (adamw_, l2_norm, segment_norms, lamb_direction_, lamb_apply_)}
