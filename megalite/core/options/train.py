"""Options of batch, time, precision and memory."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Literal

from megalite.core.base.errors import UserError, in_range, require
from megalite.core.options.batch_sizes import BatchSizes
from megalite.core.options.choices import PREFERENCES
from megalite.core.options.compression import CODECS, Compression, read_compression
from megalite.core.options.names import Choices, Described, check_names
from megalite.core.options.recipe import RECIPES
from megalite.core.options.recompute import MODES


@dataclass(frozen=True)
class TrainConfig:
    """Batch, time, precision and memory."""

    micro_batch_size: int = 1
    """Samples per forward pass and data-parallel rank."""
    global_batch_size: int = 8
    """Samples per optimizer step, over all data-parallel ranks, which share its micro-batches as evenly as they can."""
    batch_size_schedule: str | None = None
    """Global batch size by step, "0:16 400:32": 16 samples in steps 1 to 400, then 32. --global-batch-size is the
    largest."""
    train_steps: int = 100
    """Number of optimizer steps of the whole run."""
    seed: int = 1234
    """Seed for initial weights, data order and dropout."""
    deterministic: bool = False
    """Use only deterministic kernels (slower on CUDA)."""
    precision: Literal["fp32", "bf16", "fp16"] = "fp32"
    """Data type of weights and activations; master weights and main gradients are fp32."""
    fp8: Annotated[str, Choices(RECIPES, ("off",))] = "off"
    """Products of the blocks' linear layers in FP8, forward and backward. What shares a scale: {each}."""
    fp8_emulate: bool = False
    """Compute what --fp8 would on any device, slower than bf16: codes as on a GPU, multiplied in fp32."""
    fp8_keep_bf16: int = 0
    """Number of first, and of last, blocks that --fp8 leaves alone."""
    recompute: Annotated[str, Choices(MODES)] = "none"
    """What to recompute in the backward pass: {each}; with a share, in that part of the blocks, spread over the model
    (full:0.5, full:1/3)."""
    ops: str = "auto"
    """Kernels: one backend for all ops (auto, torch, triton, cuda, cpp, onednn, apex), or OP=BACKEND pairs separated by
    commas."""
    attention: Literal["auto", "flash", "cudnn", "efficient", "math"] = "auto"
    """Kernel of torch's attention; auto: the first in torch's order of preference that can run."""
    compile: bool = False
    """Compile each block, except for the parallel linear layers. Requires dropout 0."""
    loss_chunk: int = 0
    """Compute output layer and loss for this many tokens at a time, which saves memory for logits; 0: all at once."""
    label_smoothing: float = 0.0
    """Label smoothing: weight of the uniform distribution in the targets."""
    z_loss: float = 0.0
    """Weight of the squared log-sum-exp of the logits in the gradients (z-loss; 1e-4 is usual). `loss` in the metrics
    stays the cross-entropy."""
    mtp_loss_scaling_factor: float = 0.1
    """Weight of the mean loss of the --mtp-num-layers modules in the gradients; `loss` in the metrics is without it."""
    stage: Literal["lm", "dpo", "reward"] = "lm"
    """What to learn: each next token (lm), which of two answers is preferred (dpo), or rewards that tell them apart
    (reward); docs/alignment.md has both."""
    dpo_loss: Annotated[str, Choices(PREFERENCES)] = "sigmoid"
    """With --stage dpo: the loss of a pair; sigmoid is DPO's own. docs/alignment.md has the others."""
    dpo_beta: float = 0.1
    """With --stage dpo: how closely the model stays with the reference; higher is closer. SimPO takes 2 to 10."""
    dpo_smoothing: float = 0.0
    """With --stage dpo: share of the pairs whose answers are taken to be the wrong way round."""
    simpo_gamma: float = 0.5
    """With --dpo-loss simpo: margin by which the preferred answer's reward is to be the higher one."""
    reward_center: float = 0.0
    """With --stage reward: weight of the squared sum of a pair's rewards in its loss, which keeps them near 0 (TRL's
    center_rewards_coefficient; 0.01 is usual)."""
    grad_reduce_dtype: Literal["fp32", "bf16"] = "fp32"
    """Data type in which gradients are sent over dp; with ZeRO they are summed in fp32."""
    grad_dtype: Literal["fp32", "bf16"] = "fp32"
    """Data type in which gradients are accumulated over micro-batches; bf16 (also reduced in bf16) saves 2 bytes per
    parameter and loses digits."""
    compress: Annotated[str, Described(CODECS, ("none",))] = "none"
    """Compress gradients over dp: {each}."""

    offload: Literal["none", "optimizer", "optimizer+params", "activations"] = "none"
    """What to keep in host memory: nothing, optimizer state (updated on the CPU), optimizer state and weights, or
    activations (the inputs of recomputed blocks)."""
    offload_dir: str | None = None
    """With --offload optimizer: keep the optimizer state in scratch files in this directory instead of host memory."""

    def __post_init__(self) -> None:
        check_names(self)
        in_range(self, "micro_batch_size", 1, 100_000)
        self._check_batches()
        in_range(self, "train_steps", 1, 10**10)
        in_range(self, "seed", 0, 2**63)
        in_range(self, "label_smoothing z_loss", 0, 1)
        in_range(self, "mtp_loss_scaling_factor dpo_beta", 0, 100, above=True)
        in_range(self, "dpo_smoothing", 0, 0.5)
        in_range(self, "simpo_gamma reward_center", 0, 100)
        in_range(self, "loss_chunk", 0, 10**9)
        in_range(self, "fp8_keep_bf16", 0, 10**6)
        require(
            not (self.loss_chunk and self.label_smoothing),
            f"--loss-chunk {self.loss_chunk} with --label-smoothing {self.label_smoothing}",
            "the chunked loss does not support label smoothing",
            "drop one of the two",
        )
        read_compression(self.compress)
        require(
            self.offload_dir is None or self.offload.startswith("optimizer"),
            f"--offload-dir {self.offload_dir} with --offload {self.offload}",
            "applies to optimizer states",
            "give --offload optimizer, or drop --offload-dir",
        )
        require(
            self.offload != "activations" or self.recompute == "full",
            f"--offload activations with --recompute {self.recompute}",
            "offloading pays off only for the inputs of recomputed blocks",
            "give --recompute full, or drop --offload",
        )
        require(
            self.grad_dtype == "fp32" or self.precision == "bf16",
            f"--grad-dtype {self.grad_dtype} with --precision {self.precision}",
            "gradients are at least as precise as the weights",
            "give --precision bf16, or drop --grad-dtype",
        )
        require(
            self.compress == "none" or self.grad_dtype == "fp32",
            f"--compress {self.compress} with --grad-dtype {self.grad_dtype}",
            "compression works on fp32 gradients",
            "drop one of the two",
        )
        require(
            self.compress == "none" or self.grad_reduce_dtype == "fp32",
            f"--compress {self.compress} with --grad-reduce-dtype {self.grad_reduce_dtype}",
            "compressed gradients have a format of their own",
            "drop one of the two",
        )

    @property
    def of_pairs(self) -> bool:
        """Whether it learns from pairs of answers."""
        return self.stage != "lm"

    @property
    def compression(self) -> Compression | None:
        """The compression of gradients; None: none."""
        return read_compression(self.compress)

    @property
    def batches(self) -> BatchSizes:
        """The global batch size of every step."""
        if self.batch_size_schedule is None:
            return BatchSizes(((0, self.global_batch_size),))
        return BatchSizes.read(self.batch_size_schedule)

    def _check_batches(self) -> None:
        in_range(self, "global_batch_size", 1, 10**7)
        flag = f"--batch-size-schedule {self.batch_size_schedule}"
        try:
            phases, largest = self.batches.phases, self.batches.sizes[-1]
        except ValueError as e:
            raise UserError(flag, str(e), "write it as '0:16 400:32'") from None
        require(
            all(0 < size < 10**7 and step < 10**10 for step, size in phases),
            flag,
            f"must have sizes from 1 to {10**7 - 1} and steps below {10**10}",
            "correct it",
        )
        require(
            self.global_batch_size == largest,
            f"--global-batch-size {self.global_batch_size}",
            f"must be the largest of --batch-size-schedule {self.batch_size_schedule}",
            f"give {largest}, or drop it, also from the files of --config",
        )
