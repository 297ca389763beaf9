"""The figures of a step: one line of metrics.jsonl."""

from __future__ import annotations

import resource
import sys
from pathlib import Path
from typing import Any

import torch

from megalite.core.base.log import logger
from megalite.core.model.flops import flops_per_token, peak_flops
from megalite.core.step import StepResult
from megalite.runtime.loop.run import Run


def step_record(run: Run, result: StepResult, seconds: float, waited: float) -> dict[str, Any]:
    """Make one line of metrics.jsonl."""
    cfg, ctx = run.engine.cfg, run.engine.ctx
    size = cfg.train.batches.size(run.step)
    tokens = size * cfg.model.seq_len
    per_second = tokens / seconds
    flops = flops_per_token(cfg.model).causal * per_second / ctx.world.size
    peak = peak_flops(ctx.device)
    counters, figures, by_layer = run.engine.counters, result.figures, cfg.run.moe_per_layer_logging
    return {
        "step": run.step,
        "loss": result.loss,
        **{key: x for counter in counters for key, x in counter.losses(figures[counter.name]).items()},
        "grad_norm": result.grad_norm,
        "lr": result.rates.lr,
        **({} if cfg.optim.decoupled_lr is None else {"decoupled_lr": result.rates.decoupled_lr}),
        **({} if cfg.optim.start_weight_decay is None else {"weight_decay": result.rates.weight_decay}),
        **({} if cfg.train.batch_size_schedule is None else {"global_batch_size": size}),
        "loss_scale": result.loss_scale,
        "skipped_steps": run.skipped_steps,
        "consumed_samples": run.consumed_samples,
        "consumed_tokens": run.consumed_samples * cfg.model.seq_len,
        **({"ranks": ctx.world.size} if cfg.run.elastic else {}),
        "step_time_s": seconds,
        "tokens_per_s": per_second,
        "tflops_per_gpu": flops / 1e12,
        "mfu": flops / peak if peak else None,
        "data_wait_s": waited,
        "grad_bytes_sent": run.engine.optimizer.grad_bytes_sent,
        "memory_gib": peak_memory(ctx.device) / 2**30,
        **{key: x for counter in counters for key, x in counter.record(figures[counter.name], by_layer).items()},
        **run.gpu.latest,
    }


def log_batch_size(run: Run) -> None:
    """Log a change of the batch size at the next step."""
    sizes = run.engine.cfg.train.batches
    before, after = (sizes.size(max(1, step)) for step in (run.step, run.step + 1))
    if before != after:
        logger.info(f"global batch size {before} -> {after} from step {run.step + 1} on (--batch-size-schedule)")


def peak_memory(device: torch.device) -> int:
    """Return the peak memory so far in bytes: allocated on the GPU, or resident in this process."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    try:
        # Not ru_maxrss: Linux lets a new process inherit that of the one that started it, a notebook's gigabytes.
        status = Path("/proc/self/status").read_text()
    except OSError:
        unit = 1 if sys.platform == "darwin" else 1024
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit
    return int(status.partition("VmHWM:")[2].split()[0]) * 1024
