"""Options of the optimizer and of the learning-rate schedule."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Annotated, Literal

from megalite.config.names import NamedIn, check_names
from megalite.errors import in_range, require
from megalite.schedules.lr import LR_DECAYS


@dataclass(frozen=True)
class OptimConfig:
    """Optimizer and learning-rate schedule."""

    optimizer: Literal["adamw", "lamb", "lars", "sgd"] = "adamw"
    """adamw (decoupled weight decay), lamb or lars (with trust ratios), or sgd (momentum beta1)."""
    lr: float = 3e-4
    """Peak learning rate."""
    min_lr: float = 0.0
    """Learning rate at the end of the decay."""
    warmup_steps: int = 0
    """Steps of linear warmup from init_lr."""
    init_lr: float = 0.0
    """Learning rate at step 0 of the warmup."""
    lr_by: Literal["steps", "samples"] = "steps"
    """With a batch_size_schedule: count the schedules of rates in steps, or in samples (global_batch_size make one)."""
    decoupled_lr: float | None = None
    """Peak learning rate of the embedding and the output layer, which follows the same schedule. Default: lr."""
    decoupled_min_lr: float | None = None
    """Their learning rate at the end of the decay. Default: min_lr."""
    scale_lr: Literal["linear", "sqrt"] | None = None
    """Multiply learning rates by global_batch_size / base_batch_size (linear: SGD) or its root (sqrt: Adam)."""
    base_batch_size: int | None = None
    """Global batch size that the learning rates were chosen for (see scale_lr)."""
    warmup_shape: Literal["linear", "deepspeed-linear", "deepspeed-log"] = "linear"
    """Shape of the warmup. DeepSpeed's start two steps late, and so does the decay (constant, linear, cosine)."""
    lr_decay: Annotated[str, NamedIn(LR_DECAYS)] = "cosine"
    """Shape of the decay after warmup."""
    lr_decay_steps: int | None = None
    """Step at which the decay ends. Default: train_steps."""
    wsd_decay_steps: int | None = None
    """wsd: steps of the final linear decay. Default: a tenth of the run."""
    weight_decay: float = 0.1
    """Decoupled weight decay; not applied to norms and biases."""
    start_weight_decay: float | None = None
    """Weight decay at step 0, from which it goes to weight_decay at the last step. Default: weight_decay."""
    weight_decay_ramp: Literal["constant", "linear", "cosine"] | None = None
    """Shape of the way from start_weight_decay to weight_decay. Default: linear where the start is given."""
    beta1: float = 0.9
    """Adam's first decay rate (lars, sgd: momentum)."""
    beta2: float = 0.95
    """Adam's second decay rate."""
    eps: float = 1e-8
    """Adam's epsilon."""
    clip_grad: float = 1.0
    """Maximum global gradient norm; 0 disables clipping."""
    loss_scale: float | None = None
    """fp16: constant loss scale. Default: dynamic."""
    initial_loss_scale: float | None = None
    """fp16: first dynamic loss scale. Default: 65,536 times global_batch_size, up to the next power of two."""
    loss_scale_window: int = 1000
    """fp16: steps without overflow before the scale doubles."""
    hysteresis: int = 2
    """fp16: overflows before the scale halves, counted since it last doubled."""
    consecutive_hysteresis: bool = False
    """fp16: count overflows only since the last step without one."""
    min_loss_scale: float = 1.0
    """fp16: smallest dynamic loss scale; three steps in a row that overflow under it end the run."""

    @property
    def num_moments(self) -> int:
        """Number of fp32 states per weight: a momentum, or Adam's two moments."""
        return 1 if self.optimizer in ("lars", "sgd") else 2

    def __post_init__(self) -> None:
        check_names(self)
        # A rate that makes weights overflow is found where it does: nothing of such state is saved.
        in_range(self, "lr decoupled_lr", 0, math.inf, above=True)
        in_range(self, "init_lr decoupled_min_lr", 0, math.inf)
        in_range(self, "eps", 0, 100, above=True)
        in_range(self, "weight_decay start_weight_decay", 0, 1000)
        # Beyond fp32.
        in_range(self, "clip_grad", 0, 1e38)
        # Times a loss, its gradients are still far from the end of fp32.
        in_range(self, "loss_scale initial_loss_scale min_loss_scale", 0, 2.0**65, above=True)
        in_range(self, "warmup_steps", 0, 10**10)
        in_range(self, "lr_decay_steps wsd_decay_steps loss_scale_window hysteresis", 1, 10**10)
        in_range(self, "beta1 beta2", 0, 1)
        in_range(self, "base_batch_size", 1, 10**7)
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
        """The options with the learning rates of the embedding and the output layer in place of the others'."""
        if self.decoupled_lr is None:
            return self
        low = self.min_lr if self.decoupled_min_lr is None else self.decoupled_min_lr
        return replace(self, lr=self.decoupled_lr, min_lr=low, decoupled_lr=None, decoupled_min_lr=None)
