"""Options of the layout: axes, schedule, ZeRO and the overlap of communication."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Annotated, Any, Literal

from megalite.core.base.errors import UserError, in_range, require
from megalite.core.base.table import Table
from megalite.core.options.names import Choices, check_names
from megalite.core.options.stages import read_stages

SCHEDULES: Table[Any] = Table("megalite.core.parts.schedules", "SCHEDULE")
"""Name (`--schedule`) -> schedule, a `core.pipeline.order.PipelineSchedule`."""


@dataclass(frozen=True)
class ParallelConfig:
    """Layout. The number of ranks is dp x pp x cp x tp, so dp = ranks / (pp x cp x tp)."""

    tp: int = 1
    """Tensor-parallel size: number of ranks that each layer is sharded over."""
    pp: int = 1
    """Pipeline-parallel size: number of ranks that the layers are distributed over."""
    vp: int = 1
    """Virtual pipeline stages per rank, for the interleaved and zb-v schedules."""
    pipeline_layout: str | None = None
    """Layers of every pipeline stage: 7,8*14,7, or Megatron's form Et*7|(t*8|)*14t*7L. Default: balanced by cost."""
    cp: int = 1
    """Context-parallel size: number of ranks that the tokens of each sample are distributed over."""
    cp_comm: Literal["auto", "gather", "a2a", "ring", "a2a+gather", "a2a+ring"] = "auto"
    """With --cp: how attention reaches the tokens of other ranks. gather: gather all keys and values; ring: pass them
    on, a block at a time; a2a: exchange tokens for heads (Ulysses); a2a+...: exchange among as many neighbors as there
    are heads for, gather or pass on beyond them; auto: by the bytes that each sends."""
    ep: int = 1
    """Expert-parallel size: number of neighbors among the ranks of dp x cp (with --etp 1, of dp x cp x tp) that the
    experts of each layer are distributed over."""
    etp: Literal["1", "tp"] = "tp"
    """Ranks that each expert is sharded over: those of tp, or 1 for whole experts (requires sequence parallelism)."""
    moe_dispatch: Literal["alltoall", "allgather", "auto"] = "alltoall"
    """How tokens reach experts of other ranks. alltoall: each is sent to its experts; allgather: all tokens go to
    all ranks of --ep; auto: what is estimated to take less time, allgather where --ep is at most --moe-topk."""
    moe_overlap: bool = False
    """Run a forward pass beside the backward pass of another micro-batch, so that tokens travel to experts and back
    while the other pass computes; a rank then holds the activations of more micro-batches. Takes a schedule that
    pairs them: 1f1b-overlap, or interleaved-overlap with --vp."""
    moe_memory_factor: float = 1.5
    """Rows that a rank's experts get, over those that it sends, up to which memory is planned: where a layer gets more,
    it keeps only the inputs of its experts, and computes them again in backward."""
    sequence_parallel: bool = True
    """With --tp above 1: also shard norms, dropout and the residual stream over the sequence."""
    schedule: Annotated[str, Choices(SCHEDULES, ("auto",))] = "auto"
    """Pipeline schedule."""
    zero: Literal[0, 1, 2, 3] = 1
    """ZeRO stage. 1: shard optimizer state and fp32 master weights over dp; 2: also gradients; 3: also weights; 0:
    nothing."""
    zero_group: str = "full"
    """ZeRO 2 and 3: ranks to shard over: all of dp (full), those of one host (node), N neighbors on dp, or dp/K for
    K groups."""
    zero_keep: Literal["none", "backward", "step"] = "none"
    """ZeRO 3: keep gathered weights only while their layer runs (none), until its backward pass, or for the whole
    step."""
    zero_reduce: Literal["microbatch", "step"] = "microbatch"
    """ZeRO 2 and 3: reduce gradients after each micro-batch (least memory) or once per step (least traffic)."""
    zero_whole_below: int = 100_000
    """ZeRO 3: keep layers with fewer weights per rank than this unsharded, as gathering them would be pure latency.
    ZeRO 2: reduce the gradients of such layers together."""
    debug_zero: bool = False
    """ZeRO 3: make reading a weight that is not gathered an error (slow)."""
    device: Literal["auto", "cpu", "cuda"] = "auto"
    """Device to train on; auto: CUDA if available."""
    bucket_size: int | None = None
    """Size of a gradient bucket in elements. A bucket is reduced as soon as all its gradients are ready; with --zero
    2 it holds at most one large layer. Default: 40 million, or one million per rank of dp where that is more."""
    overlap_grad_reduce: bool = True
    """Overlap the reduction of gradients over dp with the backward pass."""
    overlap_tp_reduce: bool = True
    """Overlap the reduction of input gradients over tp with the computation of weight gradients."""
    tp_chunks: int = 1
    """With sequence parallelism: compute each linear layer's forward product in this many chunks of the sequence, one
    while the next is gathered or the one before is summed. Pays where the products of a chunk still fill the GPU."""
    overlap_param_gather: bool = True
    """ZeRO 1: overlap gathering the updated weights with the next forward pass."""
    vocab_divisible_by: int = 128
    """Pad the vocabulary to a multiple of this times tp; padding never counts in the loss."""

    def __post_init__(self) -> None:
        check_names(self)
        in_range(self, "tp_chunks tp pp vp cp ep moe_memory_factor", 1, 100_000)
        self._check_pipeline_layout()
        in_range(self, "bucket_size", 1, 2**40)
        in_range(self, "vocab_divisible_by", 1, 1_000_000)
        usable = self.tp_chunks == 1 or (self.tp > 1 and self.sequence_parallel)
        require(usable, f"--tp-chunks {self.tp_chunks}", "requires --tp above 1 with sequence parallelism", "drop it")
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

    def bucket_elements(self, ranks: int) -> int:
        """Return the size of a bucket that `ranks` ranks reduce: the share that each sends must not become small."""
        return max(40_000_000, 1_000_000 * ranks) if self.bucket_size is None else self.bucket_size

    @property
    def stage_layers(self) -> tuple[int, ...] | None:
        """The number of layers of every stage by `--pipeline-layout`; None: balanced by cost."""
        return None if self.pipeline_layout is None else read_stages(self.pipeline_layout)

    def zero_stage(self, dp: int, offloads_weights: bool) -> int:
        """Return the ZeRO stage in effect: on one rank, stages 2 and 3 shard nothing, but can offload weights.

        Args:
            dp: number of ranks that see different tokens of a batch (`Grid.batch_ranks`).
        """
        return self.zero if dp > 1 or offloads_weights else min(self.zero, 1)

    def zero_group_size(self, dp: int, local_ranks: int) -> int | None:
        """Return the number of data-parallel ranks that ZeRO shards over; None: all of them.

        Args:
            dp: number of ranks that see different tokens of a batch (`Grid.batch_ranks`).
            local_ranks: ranks on one host.

        Raises:
            UserError: `--zero-group` does not divide dp, or leaves one rank per group.
        """
        asked = self.zero_group
        if asked == "full":
            return None
        if asked == "node":
            size = min(max(1, local_ranks // self.tp), dp)
        else:
            size = dp // int(asked[3:]) if asked.startswith("dp/") else int(asked)
        exact = not asked.startswith("dp/") or dp % int(asked[3:]) == 0
        divisors = ", ".join(str(n) for n in range(2, dp + 1) if dp % n == 0)
        require(
            size > 1 and exact and dp % size == 0,
            f"--zero-group {asked}",
            f"must make groups of at least two ranks that divide dp {dp}",
            f"use full, or one of {divisors}" if divisors else "use full",
        )
        return size

    def _check_pipeline_layout(self) -> None:
        given = f"--pipeline-layout {self.pipeline_layout}"
        try:
            counts = self.stage_layers
        except ValueError as e:
            raise UserError(given, str(e), "write it as 7,8*14,7 or Et*7|(t*8|)*14t*7L") from None
        stages = self.pp * self.vp
        require(
            counts is None or len(counts) == stages,
            given,
            f"has {len(counts or ())} stages, but --pp {self.pp} --vp {self.vp} makes {stages}",
            "give a number of layers for each stage",
        )
