"""Kernels that a backend registers with torch.library. Not collected for the torch backend, which registers none."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor
from torch.library import opcheck

from megalite.core.ops import Ops
from megalite.core.parts.kernels import cpp, cuda
from megalite.core.sharding import Layout, ParamSpec, Shard
from megalite.core.sharding.parameter import ShardedParameter
from tests.unit.ops.conftest import BACKEND


def _registered(device: str) -> dict[str, tuple[Any, ...]]:
    """Arguments for every op that is registered with torch.library."""
    g = torch.Generator().manual_seed(0)

    def r(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=g).to(device)

    x, w, table, heads = r(3, 2, 16), r(16), r(3, 4), r(3, 2, 6, 8)
    stats = (r(5, 32), torch.arange(5).to(device), 0)
    flat = (r(100), r(100), r(100), r(100).square())
    offsets, numbers = torch.tensor([0, 30, 100]).to(device), (0.9, 0.95, 1e-8, 0.1, 3)
    multiplier = torch.tensor(0.5, device=device)
    mean, rstd = r(6), r(6)
    ends = torch.tensor([0, 0, 3], dtype=torch.int32, device=device)
    slots = torch.tensor([2, 0, 1, 3], device=device)  # of which the last has no row
    written, reads, kept, left = r(1, 2, 3, 64, 8), r(1, 2, 3, 64, 16), r(1, 2, 3, 1, 1), r(1, 2, 3, 16, 64)
    return {
        "norm": (x, x.clone(), w, None, 1e-5),
        "norm_backward": (x, x.clone(), x.clone(), w, r(0), rstd, r(16), None, False, False),
        "triton_norm": (x, x.clone(), w, w.clone(), 1e-5),
        "triton_norm_backward": (x, x.clone(), x.clone(), w, mean, rstd, r(16), r(16), True, False),
        "triton_qk_norm": (heads, r(8), r(8), 1e-5, 4, 1),
        "triton_qk_norm_backward": (heads, heads.clone(), r(8), r(8), r(30), r(8), r(8), 4, 1, True, False),
        "rope_": (heads, table, table.clone(), 4),
        "rope": (heads, table, table.clone(), False),
        "rope_pack": (r(3, 2, 4, 8), r(3, 2, 1, 8), r(3, 2, 1, 8), table, table.clone()),
        "triton_rope_": (heads, table, table.clone(), 4),
        "triton_rope": (heads, table, table.clone(), False),
        "triton_rope_pack": (r(3, 2, 4, 8), r(3, 2, 1, 8), r(3, 2, 1, 8), table, table.clone()),
        "triton_quantize": (r(3, 128), 1, 128),
        "triton_cast_fp8": (r(3, 128), r(3, 1).abs(), torch.float8_e4m3fn),
        "triton_grouped_product": (r(3, 16), r(2, 8, 16), [1, 2], True),
        "triton_grouped_wgrad_": (r(2, 8, 16), r(3, 8), r(3, 16), ends, True),
        "triton_spread_rows": (r(2, 16), slots[:3], r(2, 2), 2),
        "triton_combine_rows": (r(3, 16), slots, None, 2),
        "triton_expert_weights_grad": (r(3, 16), r(2, 16), slots, 2),
        "triton_causal_conv": (r(5, 2, 8), r(8, 4), None),
        "triton_causal_conv_backward": (r(5, 2, 8), r(5, 2, 8), r(8, 4), None),
        "triton_delta_states": (written, reads, kept, left, r(1, 2, 16, 8), True),
        "triton_delta_states_backward": (r(1, 2, 3, 16, 8), written, r(1, 2, 16, 8), reads, kept, left, True),
        "triton_norm_codes": (x, x.clone(), w, None, 1e-5, 8),
        "triton_glu_codes": (x, 0, 8),
        "glu": (x, 0),
        "glu_backward": (r(3, 2, 8), x, 1),
        "triton_glu": (x, 0),
        "triton_glu_backward": (r(3, 2, 8), x, 1),
        "triton_weighed_glu": (x, r(3, 2), 0),
        "triton_weighed_glu_backward": (r(3, 2, 8), x, r(3, 2), 1),
        "triton_gelu": (x, 2),
        "triton_gelu_backward": (x, x.clone(), 1),
        "cross_entropy_stats": (*stats, 30),
        "cross_entropy_grad_": (*stats, r(5), r(5), 30),
        "triton_cross_entropy_stats": (*stats, 30),
        "triton_cross_entropy_grad_": (*stats, r(5), r(5), 30),
        "triton_adamw_": (*flat, r(100).bfloat16(), multiplier, 0.01, *numbers),
        "triton_l2_norm": (r(100),),
        "adamw_": (*flat, r(100).bfloat16(), multiplier, 0.01, *numbers),
        "l2_norm": (r(100),),
        "segment_norms": (r(100), offsets),
        "lamb_direction_": (*flat, r(100), multiplier, *numbers),
        "triton_stochastic_round_": (r(100), r(100).bfloat16(), -5, 7, 3, 2, 6, 1, 10),
        "triton_keep_mask": (torch.ones(2, 3, 4, dtype=torch.int32, device=device), -5, 7, 3, 10, -9),
        "lamb_apply_": (r(100), r(100), None, r(2), offsets, 0.01),
    }


def test_opcheck(ops: Ops, device: str) -> None:
    ours = {
        "triton": [n for n in _registered(device) if n.startswith("triton")],
        "cuda": cuda.KERNELS,
        "cpp": cpp.KERNELS,
    }
    names = [name for name in _registered(device) if any(kind in BACKEND and name in ours[kind] for kind in ours)]
    assert names
    for name in names:
        opcheck(getattr(torch.ops.megalite, name).default, _registered(device)[name])


def test_table_of_registered_ops_is_complete(ops: Ops, backend: str, device: str) -> None:
    if "triton" not in backend:
        pytest.skip("only the Triton backend registers all of its ops")
    registered = {
        s.split("::")[1].split(".")[0] for s in torch._C._dispatch_get_all_op_names() if s.startswith("megalite::")
    }
    assert registered == set(_registered(device))


class _Counted:
    """A Triton kernel that notes its launches."""

    def __init__(self, kernel: Any, name: str, launches: list[str]) -> None:
        self.kernel, self.name, self.launches = kernel, name, launches

    def __getitem__(self, grid: Any) -> Any:
        self.launches.append(self.name)
        return self.kernel[grid]


def test_launches_of_backward(ops: Ops, backend: str, device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing is filled, summed, cast, added or copied besides."""
    if "triton" not in backend:
        pytest.skip("kernels of the Triton backend")
    from megalite.core.parts.kernels.triton import norm, qk_norm, rope

    launches: list[str] = []
    for module in (norm, qk_norm, rope):
        for name in [name for name in vars(module) if name.endswith("_kernel")]:
            monkeypatch.setattr(module, name, _Counted(getattr(module, name), name, launches))
    weights = []
    for name in ("w", "q", "k"):
        weight = ShardedParameter.empty(Shard(ParamSpec(name, (16,)), Layout()), torch.float32, torch.device(device))
        weight.data.fill_(1.0)
        weight.main_grad = torch.zeros(16, device=device)
        weights.append(weight)
    x, dy = torch.randn(2, 3, 2, 4, 16, device=device)
    cos = torch.randn(3, 8, device=device)
    runs = {
        "norm": (lambda x: ops.rmsnorm(x, weights[0], 1e-5), ["norm_backward_kernel", "norm_finish_kernel"]),
        "norms of heads": (
            lambda x: ops.qk_rmsnorm(x, *weights[1:], 1e-5, 2, 1),
            ["qk_norm_backward_kernel", *2 * ["norm_finish_kernel"]],
        ),
        "rope": (lambda x: ops.rope_qkv(x * 1.0, cos, cos, 2, 1)[0], ["rope_pack_kernel"]),
    }
    for run, expected in runs.values():
        launches.clear()
        y = run(x.clone().requires_grad_())
        assert len(launches) == 1
        launches.clear()
        with torch.autograd.profiler.profile() as profile:
            y.backward(dy[:, :, : y.shape[2]])
        assert launches == expected
        seen = {event.name for event in profile.function_events or ()}
        if run is not runs["rope"][0]:
            assert not seen & {"aten::fill_", "aten::zero_", "aten::sum", "aten::add_", "aten::_to_copy", "aten::cat"}
