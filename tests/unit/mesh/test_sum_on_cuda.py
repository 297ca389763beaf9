"""What ranks send in bf16 is summed in one pass on a GPU, whatever their number."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from megalite.core.mesh.by_messages import sum_parts
from megalite.extras.estimate.fake_cuda import fake_cuda
from megalite.extras.estimate.tracker import launches


class Launches(TorchDispatchMode):
    """Notes operators that do more than make or reinterpret memory."""

    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        if isinstance(out, torch.Tensor) and launches(func):
            self.names.append(func.name())
        return out


def test_launches_of_a_sum() -> None:
    with fake_cuda() as device, Launches() as noted:
        parts = torch.empty(8, 40, device=device, dtype=torch.bfloat16)
        sum_parts(parts, torch.empty(40, device=device))
    assert noted.names == ["aten::sum.IntList_out"]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_sum_is_rounded_once(dtype: torch.dtype) -> None:
    """1 + 64 * 2^-9, each of which bf16 would round away."""
    parts, out = torch.full((65, 8), 2.0**-9, dtype=torch.bfloat16), torch.empty(8, dtype=dtype)
    parts[0] = 1.0
    sum_parts(parts, out)
    assert out.tolist() == [1.125] * 8
