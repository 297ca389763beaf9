"""The rates of one step, from the options, and what their schedules come to over a run."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

from megalite.core.options.lr import learning_rate, weight_decay

if TYPE_CHECKING:  # decays with options read this module before `OptimConfig` is whole
    from megalite.core.options.optim import OptimConfig
    from megalite.core.options.train import TrainConfig


class StepRates(NamedTuple):
    """The learning rate of a step, that of embedding and output layers, and weight decay."""

    lr: float
    decoupled_lr: float
    weight_decay: float


def full_batch(optim: OptimConfig, train: TrainConfig) -> int:
    """Return the samples that `--lr-by samples` counts as one step of the schedules."""
    return optim.lr_batch_size or train.global_batch_size


def rates_at(optim: OptimConfig, train: TrainConfig, step: int) -> StepRates:
    """Return the rates of a step (the first is 1)."""
    at, last = (counted(optim, train, n) for n in (step, train.train_steps))
    rates = optim.scaled(train.global_batch_size)
    lr, decoupled_lr = (learning_rate(at, options, last) for options in (rates, rates.decoupled))
    return StepRates(lr, decoupled_lr, weight_decay(at, rates, last))


def counted(optim: OptimConfig, train: TrainConfig, steps: int) -> float:
    """Return how far schedules are after some steps. By samples, a step counts as the full batches up to its end."""
    return train.batches.samples(steps) / full_batch(optim, train) if optim.lr_by == "samples" else steps


def describe_warmup(optim: OptimConfig, train: TrainConfig) -> str:
    """Say how many steps a warm-up takes that is counted in samples, or that it outlasts the run; else empty."""
    steps = count = optim.warmup_steps
    length = f"warm-up of {count} steps"
    if optim.lr_by == "samples":
        samples = count * full_batch(optim, train)
        steps, length = train.batches.steps_to(samples), f"warm-up of {samples} samples"
    if steps > train.train_steps:
        return f"{length}: the {train.train_steps} steps of the run end within it"
    return f"{length}: {steps} steps" if steps != count else ""
