"""The rates of one step, from the options."""

from __future__ import annotations

from typing import NamedTuple

from megalite.config.optim import OptimConfig
from megalite.config.train import TrainConfig
from megalite.schedules.lr import learning_rate, weight_decay


class StepRates(NamedTuple):
    """The learning rate of a step, that of embedding and output layers, and weight decay."""

    lr: float
    decoupled_lr: float
    weight_decay: float


def rates_at(optim: OptimConfig, train: TrainConfig, step: int) -> StepRates:
    """Return the rates of a step (the first is 1)."""
    # By samples, a step counts as the number of full batches up to its end.
    by_samples, batch = optim.lr_by == "samples", train.global_batch_size
    at, last = (train.batches.samples(n) / batch if by_samples else n for n in (step, train.train_steps))
    rates = optim.scaled(batch)
    lr, decoupled_lr = (learning_rate(at, options, last) for options in (rates, rates.decoupled))
    return StepRates(lr, decoupled_lr, weight_decay(at, rates, last))
