"""What a process that waits for its turn does beforehand, so that its first step is not a cold one."""

from __future__ import annotations

import gc
import logging

import torch

from megalite.core.base.log import logger
from megalite.core.build import build_engine
from megalite.core.mesh.context import ParallelContext
from megalite.core.options.model import ModelConfig
from megalite.core.options.train import TrainConfig
from megalite.core.step import train_step
from megalite.runtime.options.run import Config


def rehearse() -> None:
    """Train a tiny model for a step on one process, on the host: what a first step imports is then imported.

    torch imports some 500 modules at the first backward pass, which takes longer than all else in a recovery.
    """
    level = logger.level
    logger.setLevel(logging.WARNING)
    model = ModelConfig(num_layers=1, hidden_size=8, num_heads=1, vocab_size=8, seq_len=4)
    train = TrainConfig(micro_batch_size=1, global_batch_size=1, train_steps=1)
    engine = build_engine(Config(model=model, train=train), ParallelContext.single())
    engine.optimizer.init_parameters(seed=0)
    train_step(engine, torch.zeros(1, model.seq_len + 1, dtype=torch.int64), step=1)
    engine.optimizer.wait_weights()
    logger.setLevel(level)
    # Collections walk no more through what the imports have made: the first took half a second.
    gc.collect()
    gc.freeze()
