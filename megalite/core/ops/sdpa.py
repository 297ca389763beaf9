"""`--attention`: the kernel of torch's `scaled_dot_product_attention`, selected by name instead of by torch.

==========  ===========================================================================================================
auto        torch's own order: on sm_90 and above cuDNN, then FlashAttention 2, efficient, math; below, flash first
cudnn       fastest on Hopper and Blackwell; the order of additions in its backward pass may vary between runs
flash       FlashAttention 2, or 3 (`flash_version`); on CPU torch's own kernel of that name
efficient   memory-efficient (xFormers); the only fused kernel for fp32 and for masks
math        matrix products with the scores in memory: slow, the reference
==========  ===========================================================================================================
"""

from __future__ import annotations

import functools
import importlib.util
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel

from megalite.core.base.errors import UserError
from megalite.core.base.log import logger

KERNELS = {
    "cudnn": SDPBackend.CUDNN_ATTENTION,
    "flash": SDPBackend.FLASH_ATTENTION,
    "efficient": SDPBackend.EFFICIENT_ATTENTION,
    "math": SDPBackend.MATH,
}
_LOW = (torch.bfloat16, torch.float16)


@dataclass(frozen=True)
class AttentionCase:
    """What a run requires of the attention kernel.

    Attributes:
        device, dtype: device and dtype of q, k and v.
        head_dim: size of a head.
        masked: whether a layer has a window shorter than the sequence.
        softcap: whether scores are soft-capped.
        deterministic: whether results must have the same bits on every run.
    """

    device: torch.device
    dtype: torch.dtype
    head_dim: int
    masked: bool = False
    softcap: bool = False
    deterministic: bool = False


def why_not(name: str, case: AttentionCase) -> str | None:
    """Return why a kernel cannot serve this case, or None."""
    if name in ("auto", "math"):
        return None
    cuda = case.device.type == "cuda"
    if case.softcap:
        return "soft-capped scores (--attention-softcap) are computed in plain torch"
    if not cuda and name != "flash":
        return f"it runs on CUDA GPUs, not on {case.device.type}"
    if cuda and name != "efficient" and case.dtype not in _LOW:
        return "it supports bf16 and fp16, not fp32"
    if cuda and case.masked and (name == "cudnn" or (name == "flash" and case.head_dim % 8)):
        return "layers with a window need a mask, which it does not support"
    if cuda and name == "flash" and case.head_dim > 256:
        return f"it supports head sizes up to 256, not {case.head_dim}"
    if name == "cudnn" and case.deterministic:
        return "its backward pass is not deterministic (--deterministic)"
    if cuda:
        least = (9, 0) if name == "cudnn" else (8, 0) if name == "flash" else (5, 0)
        capability = torch.cuda.get_device_capability(case.device)
        if capability < least:
            return "it requires compute capability {}.{} or above, not {}.{}".format(*least, *capability)
    return None


def flash_version(case: AttentionCase) -> int:
    """Return the version of FlashAttention that torch's operators run on a GPU, here and in `attend`.

    It is 3 on Hopper where the package flash_attn_3 is installed: torch then puts its kernels in place of its own, for
    the whole process. Not where results must have the same bits on every run: it does not promise that for all heads.
    """
    if torch.cuda.get_device_capability(case.device) != (9, 0) or case.deterministic:
        return 2
    if importlib.util.find_spec("flash_attn_interface") is None:
        return 2
    try:
        if nn.attention.current_flash_attention_impl() == "FA3":
            return 3
        nn.attention.activate_flash_attention_impl("FA3")
    except (AttributeError, ImportError, RuntimeError) as e:  # an older torch has no such functions
        logger.warning(f"flash_attn_3 cannot be used: {e}")
        return 2
    return 3


def select(name: str, attention: Callable[..., Any], case: AttentionCase) -> Callable[..., Any]:
    """Return the op `attention` with its kernel fixed to `name`, or unchanged for auto.

    Raises:
        UserError: the kernel cannot serve this case.
    """
    if reason := why_not(name, case):
        able = [other for other in KERNELS if why_not(other, case) is None]
        raise UserError(f"--attention {name}", reason, f"use auto or {' or '.join(able)}")
    if name == "auto":
        return attention
    kernel = KERNELS[name]

    @functools.wraps(attention)
    def with_kernel(q: Tensor, k: Tensor, v: Tensor | None, *args: Any, **options: Any) -> Any:
        if name == "efficient" and v is not None:
            # It knows no grouped heads: torch would find no kernel at all.
            k, v = (x.repeat_interleave(q.shape[1] // x.shape[1], 1) for x in (k, v))
        with sdpa_kernel(kernel):
            return attention(q, k, v, *args, **options)

    return with_kernel
