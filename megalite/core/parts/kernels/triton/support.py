"""Registration with torch.library, and launch shapes."""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache
from typing import Any

import torch
import triton
from torch import Tensor

from megalite.core.base.errors import UserError
from megalite.core.parts.kernels import native

# Rows up to this width are kept in the registers of one program; Llama 3 405B has 16384.
MAX_WIDTH = 16384
# Contract a * b + c in every version of Triton: from 3.10 on, the default is not to.
FUSE = {"enable_fp_fusion": True}


def register(name: str, implementation: Callable[..., Any]) -> None:
    """Define `megalite::triton_<name>` with one implementation for CUDA and for the interpreter (CPU)."""
    native.define(name, "triton_")
    for key in ("CUDA", "CPU"):
        native.LIBRARY.impl(f"triton_{name}", implementation, key)


def rows_of(x: Tensor) -> Tensor:
    """Return x [..., H] as contiguous rows [N, H], copied only if necessary."""
    return x.reshape(-1, x.shape[-1]).contiguous()


def row_launch(width: int) -> tuple[int, int]:
    """Return (BLOCK, num_warps) for a row of `width` elements, at most 16 per thread.

    Raises:
        UserError: the row does not fit into the registers.
    """
    if width > MAX_WIDTH:
        raise UserError(f"hidden size {width}", f"the Triton norms take at most {MAX_WIDTH}", "use --ops rmsnorm=torch")
    block = triton.next_power_of_2(max(width, 16))
    return block, min(32, max(1, block // 512))


@lru_cache
def num_multiprocessors(device: torch.device) -> int:
    """Return the number of multiprocessors of a GPU; 2 for the interpreter, so that its tests see several programs."""
    return torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else 2
