"""Options of the optimizer and of the learning-rate schedule."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Annotated, Literal

from megalite.core.base.errors import in_range, require
from megalite.core.options.all_parts import OptimParts, optim_parts
from megalite.core.options.lr import LR_DECAYS
from megalite.core.options.names import Choices, check_names
from megalite.core.options.part import put_in_order
from megalite.core.options.update_rule import RULES, MatrixRule


@dataclass(frozen=True, kw_only=True)
class OptimConfig(OptimParts):
    """Optimizer and learning-rate schedule."""

    optimizer: Annotated[str, Choices(RULES)] = "adamw"
    """Optimizer: {each}."""
    lr: float = 3e-4
    """Peak learning rate."""
    min_lr: float = 0.0
    """Learning rate at the end of the decay."""
    warmup_steps: int = 0
    """Steps of linear warmup from --init-lr."""
    init_lr: float = 0.0
    """Learning rate at step 0 of the warmup."""
    lr_by: Literal["steps", "samples"] = "steps"
    """With --batch-size-schedule: advance learning-rate and weight-decay schedules per step, or per
    --lr-batch-size samples."""
    lr_batch_size: int | None = None
    """With --lr-by samples: number of samples that count as one step of the schedules. Default: --global-batch-size."""
    decoupled_lr: float | None = None
    """Peak learning rate of the embedding and output layers, on the same schedule. Default: --lr."""
    decoupled_min_lr: float | None = None
    """Learning rate of the embedding and output layers at the end of the decay. Default: --min-lr."""
    scale_lr: Literal["linear", "sqrt"] | None = None
    """Scale learning rates by --global-batch-size / --base-batch-size (linear, for SGD) or its square root (sqrt,
    for Adam)."""
    base_batch_size: int | None = None
    """Global batch size that the learning rates were chosen for (see --scale-lr)."""
    warmup_shape: Literal["linear", "deepspeed-linear", "deepspeed-log"] = "linear"
    """Shape of the warmup. DeepSpeed's shapes start two steps late, and so does the decay (constant, linear or
    cosine)."""
    lr_decay: Annotated[str, Choices(LR_DECAYS)] = "cosine"
    """Shape of the decay after warmup."""
    lr_decay_steps: int | None = None
    """Step at which the decay ends. Default: --train-steps."""
    weight_decay: float = 0.1
    """Decoupled weight decay, not applied to norms and biases."""
    start_weight_decay: float | None = None
    """Weight decay at step 0, reaching --weight-decay at the last step. Default: --weight-decay."""
    weight_decay_ramp: Literal["constant", "linear", "cosine"] | None = None
    """Shape of the ramp from --start-weight-decay to --weight-decay. Default: linear if --start-weight-decay is
    given."""
    beta1: float = 0.9
    """Adam's beta1, the decay rate of the first moment; without a second moment, the momentum."""
    beta2: float = 0.95
    """Adam's beta2, the decay rate of the second moment."""
    eps: float = 1e-8
    """Adam's epsilon."""
    moments_dtype: Literal["fp32", "bf16"] = "fp32"
    """Data type in which the optimizer's states are kept besides the master weights; bf16 (stochastically rounded)
    saves 4 bytes per parameter with adamw."""
    master_dtype: Literal["fp32", "bf16"] = "fp32"
    """With --precision bf16, data type of the master weights; bf16 (stochastically rounded): the weights themselves are
    the masters, which saves 4 bytes per parameter."""
    clip_grad: float = 1.0
    """Maximum global gradient norm; 0: no clipping."""
    loss_scale: float | None = None
    """fp16: constant loss scale. Default: dynamic."""
    initial_loss_scale: float | None = None
    """fp16: first dynamic loss scale. Default: 65,536 times --global-batch-size, rounded up to a power of two."""
    loss_scale_window: int = 1000
    """fp16: steps without overflow before the loss scale doubles."""
    hysteresis: int = 2
    """fp16: overflows before the loss scale is halved, counted since it last doubled."""
    consecutive_hysteresis: bool = False
    """fp16: count only overflows since the last step without one."""
    min_loss_scale: float = 1.0
    """fp16: smallest dynamic loss scale; three steps in a row that overflow at it end the run."""

    def rule_of(self, matrix: bool) -> str:
        """Return the name of the update rule of a parameter; `matrix`: it is a matrix of a block."""
        rule = RULES[self.optimizer]
        return self.optimizer if matrix or not isinstance(rule, MatrixRule) else rule.others

    def states_of(self, matrix: bool) -> tuple[str, ...]:
        """Return the names of such a parameter's states, master weights not included."""
        return RULES[self.rule_of(matrix)].states

    def states_unlike(self, other: str) -> set[str]:
        """Return the names of states that mean something else in the optimizer `other`."""
        names = {self.optimizer, other} & RULES.keys() if other != self.optimizer else ()
        return {state for name in names for state in RULES[name].own}

    def __post_init__(self) -> None:
        check_names(self)
        # No upper limit: weights that overflow are detected during training, and never saved.
        in_range(self, "lr decoupled_lr", 0, math.inf, above=True)
        in_range(self, "init_lr decoupled_min_lr", 0, math.inf)
        # The square of a gradient below 1e-19 is zero in fp32: the update m / (sqrt(v) + eps) would have no limit.
        in_range(self, "eps", 1e-20, 100)
        in_range(self, "weight_decay start_weight_decay", 0, 1000)
        # fp32 ends at 3.4e38.
        in_range(self, "clip_grad", 0, 1e38)
        # Scaled gradients stay far below the largest fp32 number.
        in_range(self, "loss_scale initial_loss_scale min_loss_scale", 0, 2.0**65, above=True)
        in_range(self, "warmup_steps", 0, 10**10)
        in_range(self, "lr_decay_steps loss_scale_window hysteresis", 1, 10**10)
        in_range(self, "beta1 beta2", 0, 1)
        in_range(self, "base_batch_size lr_batch_size", 1, 10**7)
        for part in optim_parts():
            part.check_optim(self)
        require(
            0 <= self.min_lr <= self.lr,
            f"--min-lr {self.min_lr}",
            f"must be between 0 and --lr {self.lr}",
            "lower --min-lr or raise --lr",
        )
        require(
            self.warmup_shape == "linear"
            or (self.warmup_steps > 1 and self.lr_decay in ("constant", "linear", "cosine")),
            f"--warmup-shape {self.warmup_shape}",
            "requires --warmup-steps 2 or more, and --lr-decay constant, linear or cosine",
            f"change --warmup-steps {self.warmup_steps} or --lr-decay {self.lr_decay}",
        )
        require(
            self.lr_decay_steps is None or self.lr_decay_steps >= self.warmup_steps,
            f"--lr-decay-steps {self.lr_decay_steps}",
            f"the decay would end before the --warmup-steps {self.warmup_steps} are over",
            "raise it (it counts from the start of the run) or lower --warmup-steps",
        )
        require(
            self.lr_batch_size is None or self.lr_by == "samples",
            f"--lr-batch-size {self.lr_batch_size}",
            f"has no effect with --lr-by {self.lr_by}",
            "give --lr-by samples, or drop it",
        )
        self._check_scale()
        self._check_decoupled()
        start, ramp = self.start_weight_decay, self.weight_decay_ramp
        require(
            start is not None or ramp in (None, "constant"),
            f"--weight-decay-ramp {ramp}",
            "requires the weight decay to start from",
            "give --start-weight-decay, or drop it",
        )
        require(
            start is None or ramp != "constant",
            f"--start-weight-decay {start}",
            "conflicts with --weight-decay-ramp constant",
            "give --weight-decay-ramp linear or cosine, or drop one of the two",
        )

    def _check_decoupled(self) -> None:
        peak, low = self.decoupled_lr, self.decoupled_min_lr
        require(
            low is None or peak is not None,
            f"--decoupled-min-lr {low}",
            "has no effect without --decoupled-lr",
            "give --decoupled-lr too, or drop it",
        )
        name, low = ("--min-lr", self.min_lr) if low is None else ("--decoupled-min-lr", low)
        require(
            peak is None or low <= peak,
            f"--decoupled-lr {peak}",
            f"must be at least {name} {low}, its learning rate at the end",
            "raise it, or give a lower --decoupled-min-lr",
        )

    def _check_scale(self) -> None:
        require(
            self.scale_lr is None or self.base_batch_size is not None,
            f"--scale-lr {self.scale_lr}",
            "requires the batch size that --lr was chosen for",
            "give --base-batch-size",
        )
        require(
            self.base_batch_size is None or self.scale_lr is not None,
            f"--base-batch-size {self.base_batch_size}",
            "has no effect without --scale-lr",
            "give --scale-lr sqrt (adamw) or linear (sgd), or drop it",
        )

    def scaled(self, batch: int) -> OptimConfig:
        """Return the options with the learning rates of a global batch of `batch` samples, as `scale_lr` asks.

        Sources: linear, Goyal et al. 2017, section 2.1; sqrt, Malladi et al. 2022, definition 5.2.
        """
        if self.scale_lr is None or self.base_batch_size is None:
            return self
        ratio = batch / self.base_batch_size
        factor = ratio if self.scale_lr == "linear" else math.sqrt(ratio)
        names = ("lr", "min_lr", "init_lr", "decoupled_lr", "decoupled_min_lr")
        rates = {name: rate * factor for name in names if (rate := getattr(self, name)) is not None}
        return replace(self, **rates, scale_lr=None, base_batch_size=None)

    @property
    def decoupled(self) -> OptimConfig:
        """The options of the embedding and output layers, with their own learning rates."""
        if self.decoupled_lr is None:
            return self
        low = self.min_lr if self.decoupled_min_lr is None else self.decoupled_min_lr
        return replace(self, lr=self.decoupled_lr, min_lr=low, decoupled_lr=None, decoupled_min_lr=None)


put_in_order(OptimConfig, OptimConfig, optim_parts())
