"""Options of the layout: axes, schedule, ZeRO and the overlap of communication."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Annotated, Literal

from megalite.config.names import NamedIn, check_names
from megalite.errors import in_range, require
from megalite.schedules.pipeline import SCHEDULES


@dataclass(frozen=True)
class ParallelConfig:
    """Layout: world = dp x pp x tp; dp = world / (pp x tp)."""

    tp: int = 1
    """Tensor-parallel size: ranks that each layer is split over."""
    pp: int = 1
    """Pipeline-parallel size: ranks that the layers are distributed over."""
    vp: int = 1
    """Virtual pipeline stages per rank (interleaved and zb-v schedules)."""
    sequence_parallel: bool = True
    """Shard norms, dropout and residual stream over the sequence when tp > 1."""
    schedule: Annotated[str, NamedIn(SCHEDULES, ("auto",))] = "auto"
    """Pipeline schedule."""
    zero: Literal[0, 1, 2, 3] = 1
    """ZeRO stage: 1 shards optimizer states and fp32 masters over dp, 2 gradients too, 3 weights too; 0 nothing."""
    zero_group: str = "full"
    """ZeRO-2, 3: ranks that share: full (all of dp), node (of one host), N neighbors on dp, or dp/K (K groups)."""
    zero_keep: Literal["none", "backward", "step"] = "none"
    """ZeRO-3: how long gathered weights stay: while their layer runs, until its backward pass, or the whole step."""
    zero_reduce: Literal["microbatch", "step"] = "microbatch"
    """ZeRO-2, 3: reduce gradients after each micro-batch (least memory) or once per step (least traffic)."""
    zero_whole_below: int = 100_000
    """ZeRO-3: layers with fewer weights per rank stay whole; gathering them would be pure latency. ZeRO-2: gradients of
    such layers are reduced together."""
    debug_zero: bool = False
    """ZeRO-3: make any read of a weight that is not gathered an error (slow)."""
    device: Literal["auto", "cpu", "cuda"] = "auto"
    """Where to run; auto uses CUDA if available."""
    bucket_size: int = 40_000_000
    """Gradient bucket size in elements. A bucket is reduced as soon as all its gradients are ready; with --zero 2 it
    holds one large layer at most."""
    overlap_grad_reduce: bool = True
    """Reduce gradients over dp while backward is still running."""
    overlap_tp_reduce: bool = True
    """Compute weight gradients while the gradient of the input is reduced over tp."""
    overlap_param_gather: bool = True
    """ZeRO-1: gather updated weights while the next forward pass is already running."""
    vocab_divisible_by: int = 128
    """Pad the vocabulary to a multiple of this times tp; padding never counts in the loss."""

    def __post_init__(self) -> None:
        check_names(self)
        in_range(self, "tp pp vp", 1, 100_000)
        in_range(self, "bucket_size", 1, 2**40)
        in_range(self, "vocab_divisible_by", 1, 1_000_000)
        in_range(self, "zero_whole_below", 0, 2**40)
        require(
            re.fullmatch(r"full|node|(dp/)?[1-9]\d*", self.zero_group) is not None,
            f"--zero-group {self.zero_group}",
            "must be full, node, a number of ranks, or dp/K for K groups",
            "correct the value",
        )
        for stage, flag, value, default in (
            (2, "--zero-group", self.zero_group, "full"),
            (2, "--zero-reduce", self.zero_reduce, "microbatch"),
            (3, "--zero-keep", self.zero_keep, "none"),
        ):
            require(
                self.zero >= stage or value == default,
                f"{flag} {value} with --zero {self.zero}",
                f"applies from --zero {stage} on",
                f"raise --zero, or drop {flag}",
            )
