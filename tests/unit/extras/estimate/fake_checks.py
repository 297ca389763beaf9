"""Runs a step of several models on fake CUDA tensors and checks what reaches torch's kernels, without pytest, which may
have imported torch too early.

Standard input: a JSON list of the options of a run a line. Output: for each line the JSON list of what torch would
refuse on a GPU.
"""

from __future__ import annotations

import json
import sys
from typing import Any
from unittest import mock

from megalite.extras.estimate.guard import install_guard

install_guard()

import torch  # noqa: E402

from megalite.core.mesh.grid import Grid  # noqa: E402
from megalite.extras.estimate import rank  # noqa: E402
from megalite.extras.estimate.tracker import Tracker, arguments  # noqa: E402
from megalite.extras.tool import run_tool  # noqa: E402
from megalite.runtime.options import cli  # noqa: E402

# What `torch.use_deterministic_algorithms` lists as raising on a GPU, whatever the arguments; others by theirs, below.
_UNDETERMINED = """
    avg_pool3d_backward adaptive_avg_pool2d_backward _adaptive_avg_pool2d_backward _adaptive_avg_pool3d_backward
    adaptive_max_pool2d_backward fractional_max_pool2d_backward fractional_max_pool3d_backward max_unpool2d max_unpool3d
    upsample_linear1d_backward upsample_bilinear2d_backward upsample_bicubic2d_backward upsample_trilinear3d_backward
    reflection_pad1d_backward reflection_pad2d_backward reflection_pad3d_backward nll_loss2d_forward _ctc_loss_backward
    _embedding_bag_dense_backward put put_ histc bincount median grid_sampler_2d_backward grid_sampler_3d_backward
"""
UNDETERMINED = frozenset(_UNDETERMINED.split())
_EFFICIENT = ("_scaled_dot_product_efficient_attention", "_scaled_dot_product_efficient_attention_backward")


class Checked(Tracker):
    """Lists what torch's kernels for GPUs refuse; its fake kernels do not."""

    faults: set[str]

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func.name().partition("::")[2].partition(".")[0]
        values = arguments(func, args, kwargs or {}) if func.namespace == "aten" else {}
        if torch.are_deterministic_algorithms_enabled() and (
            name in UNDETERMINED
            or (name in ("cumsum", "cumsum_") and values["self"].is_floating_point())
            or (name == "scatter_reduce" and values["reduce"] == "prod")
        ):
            self.faults.add(f"{name} has no deterministic kernel")
        if name in _EFFICIENT and values["attn_bias"] is not None:
            q, k, bias = values["query"], values["key"], values["attn_bias"]
            rows, by_16_bytes = (*q.shape[:3], k.shape[2]), 16 // bias.element_size()
            if bias.shape != rows:
                self.faults.add(f"{name}: bias {list(bias.shape)} instead of {list(rows)}")
            elif any(stride % by_16_bytes for stride in bias.stride()[:3]):
                self.faults.add(f"{name}: rows of a bias of {bias.dtype} {bias.stride()[2]} apart")
        return super().__torch_dispatch__(func, types, args, kwargs)


def main() -> None:
    for line in sys.stdin:
        Checked.faults = set()
        request = cli.parse(json.loads(line))
        torch.use_deterministic_algorithms(request.config.train.deterministic)
        grid = Grid.from_config(request.config.parallel, request.config.parallel.cp)
        with mock.patch.object(rank, "Tracker", Checked):
            rank.estimate(request.config, grid, grid.world - 1)
        print(json.dumps(sorted(Checked.faults)), flush=True)


if __name__ == "__main__":
    # Which ends the process without waiting for threads of the autograd engine.
    run_tool(main)
