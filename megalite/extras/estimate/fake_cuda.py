"""CUDA tensors without memory, values or a GPU, on which a whole training step runs."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from typing import Any
from unittest import mock

import torch
import torch.nn.functional as F
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.overrides import TorchFunctionMode

_ATEN = torch.ops.aten


def _address(x: torch.Tensor) -> int:
    """Return a number in place of a tensor's address: equal for equal memory."""
    return x.untyped_storage()._cdata + x.storage_offset() * x.element_size()


def _attention(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    attn_mask: torch.Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> torch.Tensor:
    """Run the kernel that torch chooses on GPUs of compute capability 8.0 or higher: flash if possible, else efficient.

    torch's own choice would query the GPU.
    """
    if q.dtype != torch.float32 and attn_mask is None:
        return _ATEN._scaled_dot_product_flash_attention(q, k, v, dropout_p, is_causal, scale=scale)[0]
    if attn_mask is not None and attn_mask.dtype == torch.bool:
        attn_mask = torch.zeros_like(attn_mask, dtype=q.dtype).masked_fill_(~attn_mask, float("-inf"))
        attn_mask = attn_mask.expand(*q.shape[:-1], k.shape[-2])
    return _ATEN._scaled_dot_product_efficient_attention(q, k, v, attn_mask, True, dropout_p, is_causal, scale=scale)[0]


_SUBSTITUTES: Mapping[Callable[..., Any], Callable[..., Any]] = {
    torch.Tensor.data_ptr: _address,
    torch.Tensor.pin_memory: lambda x: x,
    F.scaled_dot_product_attention: _attention,
}


class _Substitutes(TorchFunctionMode):
    """Replaces the few torch functions that require the memory of a tensor, or a GPU."""

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        return _SUBSTITUTES.get(func, func)(*args, **(kwargs or {}))


@contextmanager
def fake_cuda() -> Iterator[torch.device]:
    """Make all tensors created inside fake; yields the device of CUDA tensors.

    On a CPU build of torch, call `guard.install_guard` first.
    """
    with ExitStack() as modes:
        modes.enter_context(mock.patch.object(torch.cuda, "get_device_capability", return_value=(9, 0)))
        # torch 2.15 prefers cuDNN for documents and windows where it is; its products are FlashAttention's.
        modes.enter_context(mock.patch.object(torch.backends.cudnn, "version", return_value=None))
        modes.enter_context(mock.patch.object(torch.backends.cuda, "can_use_cudnn_attention", return_value=False))
        modes.enter_context(FakeTensorMode(allow_non_fake_inputs=True))
        modes.enter_context(_Substitutes())
        yield torch.device("cuda", 0)
