"""What a reward model takes over from a language model: all but its head, and what predicts further tokens."""

from __future__ import annotations

from dataclasses import replace

from megalite.core.model.parameters import buffer_map, param_map
from megalite.core.options.model import ModelConfig

NEW_HEAD = "the output layer of the language model is left out; that of rewards starts with random weights of --seed"


def gets_new_head(theirs: ModelConfig, ours: ModelConfig) -> bool:
    """Whether a reward model starts from a language model."""
    return (theirs.head, ours.head) == ("lm", "score")


def taken_over(theirs: ModelConfig, ours: ModelConfig) -> ModelConfig:
    """Return what a run of the model `ours` makes of the model that it starts from."""
    return replace(theirs, head="score", mtp_num_layers=0) if gets_new_head(theirs, ours) else theirs


def tensors_only_in(one: ModelConfig, other: ModelConfig) -> set[str]:
    """Name the tensors that one model has and another does not."""
    first, second = ({*param_map(cfg), *buffer_map(cfg)} for cfg in (one, other))
    return first - second
