"""Host memory that `--offload activations` takes: the inputs of the blocks that wait for their backward pass."""

from __future__ import annotations

from collections.abc import Sequence

from megalite.core.base.host_memory import pinned_bytes
from megalite.core.model.saved import residual_bytes
from megalite.core.options.step import StepConfig
from megalite.core.parts.schedules.steady import extend, most_waiting, sample_sizes


def offloaded_bytes(cfg: StepConfig, dp: int, schedule: str, layers: Sequence[range], pinned: bool) -> list[int]:
    """Compute the bytes of host memory that the activations of each pipeline rank take at most.

    Args:
        cfg: options of a run with `--offload activations`.
        dp: data-parallel size.
        schedule: name of the schedule.
        layers: layers of every stage.
        pinned: whether the buffers are in pinned memory, which comes in powers of two.
    """
    p = cfg.parallel
    m = cfg.num_microbatches(dp)
    size = residual_bytes(cfg)
    buffer, sizes = pinned_bytes(size) if pinned else size, sample_sizes(p.pp, m)
    sent = tuple(sent_blocks(*stage) for stage in enumerate(layers))
    most = [most_waiting(schedule, p.pp, p.vp, count, sent) for count in sizes]
    return [round(extend(m, sizes, [buffer * blocks for blocks in ranks])) for ranks in zip(*most)]


def sent_blocks(stage: int, blocks: range) -> int:
    """Count the blocks of a stage whose input goes to the host; what arrives from another stage stays on the device."""
    return len(blocks) - (stage > 0)
