"""Small Llamas of one shape and several widths, trained in this process."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch

from megalite.core.build import build_engine
from megalite.core.engine import Engine
from megalite.core.mesh.context import ParallelContext
from megalite.core.mesh.grid import Grid
from megalite.core.step import train_step
from megalite.runtime.options.cli import parse
from megalite.runtime.options.run import Config

HEAD = 16
LAYERS = 2
VOCAB = 256


def make(width: int, optimizer: str, base: int | None, lr: float, steps: int, *more: str) -> Engine[Config]:
    """Build a model with its initial weights: heads of one size, an MLP of three times the width.

    Args:
        width: hidden size, a multiple of 16.
        base: muP's base width; None: without muP.
        more: further flags of the command line.
    """
    mup = [] if base is None else ["--mup-base-width", str(base)]
    sizes = {
        "num-layers": LAYERS,
        "hidden-size": width,
        "num-heads": width // HEAD,
        "ffn-hidden-size": 3 * width,
        "vocab-size": VOCAB,
        "seq-len": 32,
        "global-batch-size": 8,
        "micro-batch-size": 8,
        "lr": lr,
        "train-steps": steps,
        "optimizer": optimizer,
    }
    flags = [word for name, value in sizes.items() for word in (f"--{name}", str(value))]
    cfg = parse([*flags, "--mock-data", "--device", "cpu", *mup, *more]).config
    engine = build_engine(cfg, ParallelContext.create(Grid.from_config(cfg.parallel, 1), torch.device("cpu")))
    engine.optimizer.init_parameters(cfg.train.seed)
    return engine


def train(engine: Engine[Config], batches: Sequence[np.ndarray]) -> list[float]:
    """Train on batches of token ids [samples, seq_len + 1]; return the loss of each step."""
    return [train_step(engine, batch, step).loss for step, batch in enumerate(batches, 1)]


def skewed(steps: int, samples: int = 8, length: int = 33, seed: int = 7) -> list[np.ndarray]:
    """Make batches of tokens, the low ones frequent, so that there is something to learn."""
    draws = np.random.default_rng(seed).random((steps, samples, length))
    return list((draws**3 * VOCAB).astype(np.int64))
