"""Who runs which layout in benchmarks/peers.py, and megalite's own entry."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import torch
import torch.distributed as dist
from peer_experts import megalite_layer, transformers_layer
from peer_megatron import megatron_core, megatron_missing
from peer_models import (
    EXPERT_FLAGS,
    MODEL_FLAGS,
    SEED,
    Step,
    dtensor,
    hf_mixtral,
    hf_transformers,
    plain_torch,
    shard_plainly,
    shard_sequence,
    torch_pipeline,
)
from peer_sharded import deepspeed_missing, deepspeed_zero, fsdp2

from megalite.core.build import build_engine
from megalite.core.mesh.context import ParallelContext
from megalite.core.mesh.grid import Grid
from megalite.core.step import train_step
from megalite.runtime.options import cli

# (tp, pp, vp) -> a peer's step.
Maker = Callable[[int, int, int], Step]


def megalite(*flags: str) -> Maker:
    def make(tp: int, pp: int, vp: int) -> Step:
        cfg = cli.parse([*MODEL_FLAGS, "--tp", str(tp), "--pp", str(pp), "--vp", str(vp), *flags]).config
        world = dist.get_world_size() if dist.is_initialized() else 1
        engine = build_engine(cfg, ParallelContext.create(Grid.of(world, tp=tp, pp=pp), torch.device("cpu")))
        engine.optimizer.init_parameters(SEED)
        count = 0

        def step(batch: np.ndarray) -> float:
            nonlocal count
            count += 1
            result = train_step(engine, batch, count)
            # What overlaps with the next step would run beside the next peer's.
            engine.optimizer.wait_weights()
            return result.loss

        return step

    return make


# torch's SHARD_GRAD_OP gathers per micro-batch, which is `--zero 3 --zero-keep backward`; ZeRO-2 gathers once per step.
ZERO2: dict[str, Maker] = {
    "FSDP2, SHARD_GRAD_OP": fsdp2(reshard_after_forward=False),
    "FSDP2, SHARD_GRAD_OP, one gather per step": fsdp2(reshard_after_forward=False, gather_once=True),
    "DeepSpeed ZeRO-2": deepspeed_zero(2),
    "megalite --zero 3 --zero-keep backward": megalite("--zero", "3", "--zero-keep", "backward"),
    "megalite": megalite("--zero", "2"),
}
ZERO3: dict[str, Maker] = {
    "FSDP2": fsdp2(reshard_after_forward=True),
    "DeepSpeed ZeRO-3": deepspeed_zero(3),
    "megalite": megalite("--zero", "3"),
}


def expert_layer(samples: int) -> tuple[tuple[int, int, int, int], dict[str, Maker]]:
    """Peers of a layer of experts, on micro-batches of so many samples."""
    return (1, 1, 1, 1), {
        "transformers, loop": transformers_layer("eager", samples),
        "transformers, grouped_mm": transformers_layer("grouped_mm", samples),
        "megalite": megalite_layer(samples),
    }


# Layout -> ((world, tp, pp, vp), {peer: its maker}); megalite comes last and all others are compared with it.
LAYOUTS: dict[str, tuple[tuple[int, int, int, int], dict[str, Maker]]] = {
    "single": (
        (1, 1, 1, 1),
        {
            "torch": plain_torch,
            "transformers": hf_transformers,
            "Megatron-Core": megatron_core,
            "megalite": megalite(),
        },
    ),
    "experts": ((1, 1, 1, 1), {"transformers": hf_mixtral, "megalite": megalite(*EXPERT_FLAGS)}),
    "expert layer": expert_layer(2),
    "expert layer, 16 samples": expert_layer(16),
    "dp2": ((2, 1, 1, 1), {"DDP": plain_torch, "transformers + DDP": hf_transformers, "megalite": megalite()}),
    "tp2": (
        (2, 2, 1, 1),
        {
            "DTensor": dtensor(shard_plainly),
            "DTensor, sequence": dtensor(shard_sequence),
            "Megatron-Core, no sequence": megatron_core,
            "megalite, no sequence": megalite("--no-sequence-parallel"),
            "megalite": megalite(),
        },
    ),
    "pp2": (
        (2, 1, 2, 1),
        {
            "pipelining 1F1B": torch_pipeline("Schedule1F1B"),
            "pipelining zero bubble": torch_pipeline("ScheduleInterleavedZeroBubble"),
            "Megatron-Core 1F1B": megatron_core,
            "megalite": megalite(),
        },
    ),
    "pp2 vp2": (
        (2, 1, 2, 2),
        {
            "pipelining interleaved": torch_pipeline("ScheduleInterleaved1F1B"),
            "pipelining ZBV": torch_pipeline("ScheduleZBVZeroBubble"),
            "megalite": megalite(),
        },
    ),
    "tp2 pp2": (
        (4, 2, 2, 1),
        {
            "DTensor + 1F1B": torch_pipeline("Schedule1F1B", shard_plainly),
            "DTensor, sequence + 1F1B": torch_pipeline("Schedule1F1B", shard_sequence),
            "megalite, no sequence": megalite("--no-sequence-parallel"),
            "megalite": megalite(),
        },
    ),
    "dp2 zero2": ((2, 1, 1, 1), ZERO2),
    "dp2 zero3": ((2, 1, 1, 1), ZERO3),
    "dp4 zero2": ((4, 1, 1, 1), ZERO2),
    "dp4 zero3": ((4, 1, 1, 1), ZERO3),
}


def missing(peer: str) -> str | None:
    """Return why a peer cannot run here, None if it can."""
    if peer.startswith("Megatron-Core"):
        return megatron_missing()
    return deepspeed_missing() if peer.startswith("DeepSpeed") else None
