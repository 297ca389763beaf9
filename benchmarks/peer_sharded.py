"""The peers of benchmarks/peers.py that shard weights, gradients and optimizer states over dp: FSDP2 and DeepSpeed."""

from __future__ import annotations

import logging
import os
import warnings
from collections.abc import Callable

import numpy as np
import torch
import torch.distributed as dist
from peer_models import (
    CLIP,
    GLOBAL_BATCH,
    MICRO_BATCH,
    PlainLlama,
    Step,
    accumulating,
    cross_entropy,
    initial_weights,
    make_optimizer,
    mean_over_ranks,
    model_config,
)
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard


def fsdp2(reshard_after_forward: bool, gather_once: bool = False) -> Callable[[int, int, int], Step]:
    """torchtitan's units: the embedding, each block, norm and head together (which backward needs first, so it stays).

    Args:
        reshard_after_forward: True is FULL_SHARD (ZeRO-3), False is SHARD_GRAD_OP.
        gather_once: keep the weights whole from the first micro-batch to the last.
    """

    def make(tp: int, pp: int, vp: int) -> Step:
        cfg = model_config()
        model = PlainLlama(cfg, initial_weights(cfg))
        mesh = init_device_mesh("cpu", (dist.get_world_size(),))
        for unit in (model.embed_tokens, *model.layers.values()):
            fully_shard(unit, mesh=mesh, reshard_after_forward=reshard_after_forward)
        fully_shard([model.norm, model.lm_head], mesh=mesh, reshard_after_forward=False)
        fully_shard(model, mesh=mesh, reshard_after_forward=reshard_after_forward)
        return accumulating(model, model, gather_once=gather_once)

    return make


def deepspeed_missing() -> str | None:
    """Return why DeepSpeed cannot be imported, None if it can."""
    # Without it DeepSpeed looks for CUDA.
    os.environ.setdefault("DS_ACCELERATOR", "cpu")
    logging.disable(logging.WARNING)
    try:
        import deepspeed  # noqa: F401
    except ImportError as error:
        return f"{error} (to include it: DS_BUILD_OPS=0 DS_ACCELERATOR=cpu pip install --no-build-isolation deepspeed)"
    finally:
        logging.disable(logging.NOTSET)
    return None


def deepspeed_zero(stage: int) -> Callable[[int, int, int], Step]:
    """DeepSpeed's engine around the same model and torch's AdamW, every other option at its default."""

    def make(tp: int, pp: int, vp: int) -> Step:
        # DeepSpeed requires its launcher's variable, logs every setting, and calls what torch has renamed.
        os.environ.update(DS_ACCELERATOR="cpu", LOCAL_RANK=str(dist.get_rank()))
        logging.disable(logging.WARNING)
        warnings.filterwarnings("ignore", category=FutureWarning)
        import deepspeed

        cfg = model_config()
        model = PlainLlama(cfg, initial_weights(cfg))
        config = {
            "train_micro_batch_size_per_gpu": MICRO_BATCH,
            "gradient_accumulation_steps": GLOBAL_BATCH // (MICRO_BATCH * dist.get_world_size()),
            "gradient_clipping": CLIP,
            "zero_optimization": {"stage": stage},
        }
        engine = deepspeed.initialize(model=model, optimizer=make_optimizer([model]), config=config)[0]

        def step(batch: np.ndarray) -> float:
            parts = torch.from_numpy(batch).split(MICRO_BATCH)
            total = torch.zeros(())
            for part in parts:
                loss = cross_entropy(engine(part[:, :-1]), part[:, 1:])
                engine.backward(loss)
                engine.step()
                total += loss.detach() / len(parts)
            return mean_over_ranks(total).item()

        return step

    return make
