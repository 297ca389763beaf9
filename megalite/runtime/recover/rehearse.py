"""What a process that waits for its turn does beforehand, so that its first step is not a cold one."""

from __future__ import annotations

import gc
import logging
import sys

import torch

from megalite.core.base.log import env_int, logger
from megalite.core.build import build_engine
from megalite.core.mesh.context import ParallelContext
from megalite.core.mesh.device import only_deterministic_kernels, pick_device, spare_gpu_memory
from megalite.core.options.model import ModelConfig
from megalite.core.options.train import TrainConfig
from megalite.core.step import train_step
from megalite.runtime.options.run import Config

# Assumed: what CUDA, its libraries and the kernels take of a GPU.
_CONTEXT = 600 << 20


def rehearse(cfg: Config | None = None) -> None:
    """Train a tiny model for a step on one process, on the host: what a first step imports is then imported.

    Then the same on the GPU, if there is one with memory to spare: its context, libraries and kernels take seconds.

    Args:
        cfg: the run; None: on the host alone.
    """
    level = logger.level
    logger.setLevel(logging.WARNING)
    try:
        _train(ParallelContext.single(), TrainConfig(micro_batch_size=1, global_batch_size=1, train_steps=1))
        if cfg is not None and cfg.parallel.device != "cpu":
            _rehearse_on_gpu(cfg)
    finally:
        logger.setLevel(level)
    # Collections walk no more through what the imports have made: the first took half a second.
    gc.collect()
    gc.freeze()


def _rehearse_on_gpu(cfg: Config) -> None:
    spare, parallel = spare_gpu_memory(), cfg.parallel
    if spare is None:
        return
    if spare < _CONTEXT:
        if env_int("LOCAL_RANK", 0) == 0:
            text = f"a GPU has {spare >> 20} MiB to spare, and a process that waits needs {_CONTEXT >> 20}"
            print(f"{text}: recoveries take some seconds longer", file=sys.stderr, flush=True)
        return
    if cfg.train.deterministic:
        only_deterministic_kernels()
    # As the run does later: what CUDA reads at its start it reads here.
    device = pick_device(parallel.device, parallel.tp, parallel.zero, cfg.train.offload, True)
    train = TrainConfig(
        micro_batch_size=1, global_batch_size=1, train_steps=1, precision=cfg.train.precision, ops=cfg.train.ops
    )
    _train(ParallelContext.single(device), train)
    if device.type == "cuda":
        gc.collect()
        torch.cuda.empty_cache()  # for the process that trains


def _train(ctx: ParallelContext, train: TrainConfig) -> None:
    model = ModelConfig(num_layers=1, hidden_size=16, num_heads=1, vocab_size=16, seq_len=8)
    engine = build_engine(Config(model=model, train=train), ctx)
    engine.optimizer.init_parameters(seed=0)
    train_step(engine, torch.zeros(1, model.seq_len + 1, dtype=torch.int64), step=1)
    engine.optimizer.wait_weights()
