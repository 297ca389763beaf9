"""Time of a training step in one process, precision against precision, interleaved in one run.

python benchmarks/step.py [--precisions fp32 bf16] [--compiled] [--json FILE] [-- any flags of pretrain_gpt.py]

Prints tokens/s, the ratio to the first precision, and model FLOP utilisation in both conventions where the device's
peak is known. Medians; the machine is named in the output. Without flags: 2 layers, hidden 1024, vocabulary 8192.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import statistics
import time
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch

from megalite import __version__
from megalite.core.build import build_engine
from megalite.core.engine import Engine
from megalite.core.mesh.context import ParallelContext
from megalite.core.mesh.device import pick_device
from megalite.core.model.flops import flops_per_token, peak_flops
from megalite.core.step import train_step
from megalite.extras.tool import run_tool
from megalite.runtime.options import cli
from megalite.runtime.options.run import Config

Precision = Literal["fp32", "bf16", "fp16"]
DEFAULTS = [
    *("--num-layers", "2", "--hidden-size", "1024", "--num-heads", "16", "--vocab-size", "8192"),
    *("--seq-len", "256", "--micro-batch-size", "2", "--global-batch-size", "4"),
]


def machine(device: torch.device) -> dict[str, Any]:
    """What the figures were measured on."""
    name = "CPU"
    cpus = Path("/proc/cpuinfo")
    if device.type == "cuda":
        name = torch.cuda.get_device_name(device)
    elif cpus.exists():
        name = next(line.split(":")[1].strip() for line in cpus.read_text().splitlines() if "model name" in line)
    return {
        "device": name,
        "threads": torch.get_num_threads(),
        "torch": torch.__version__,
        "cuda": torch.version.cuda,
        "megalite": __version__,
        "date": time.strftime("%Y-%m-%d"),
    }


def build(cfg: Config, precision: Precision, compiled: bool, device: torch.device) -> Engine:
    """One engine with initial weights."""
    compiled = compiled or cfg.train.compile
    cfg = dataclasses.replace(cfg, train=dataclasses.replace(cfg.train, precision=precision, compile=compiled))
    engine = build_engine(cfg, ParallelContext.single(device))
    engine.optimizer.init_parameters(cfg.train.seed)
    return engine


def timed_step(engine: Engine, batch: np.ndarray, step: int) -> float:
    """Seconds of one step, everything the device was given included."""
    cuda = engine.ctx.device.type == "cuda"
    if cuda:
        torch.cuda.synchronize()
    start = time.perf_counter()
    train_step(engine, batch, step)
    if cuda:
        torch.cuda.synchronize()
    return time.perf_counter() - start


def figures(cfg: Config, times: list[float], first: float, device: torch.device) -> dict[str, Any]:
    """One engine's row."""
    median = statistics.median(times)
    rate = cfg.train.global_batch_size * cfg.model.seq_len / median
    peak = peak_flops(device)
    row = {"step_s": median, "spread_s": [min(times), max(times)], "tokens_per_s": rate, "speedup": first / median}
    per_token = flops_per_token(cfg.model)
    for convention, flops in (("causal", per_token.causal * rate), ("full", per_token.full * rate)):
        row[f"tflops_{convention}"] = flops / 1e12
        row[f"mfu_{convention}"] = flops / peak if peak else None
    return row


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--precisions", nargs="+", default=["fp32", "bf16"], choices=["fp32", "bf16", "fp16"])
    parser.add_argument("--compiled", action="store_true", help="each precision with --compile too")
    parser.add_argument("--steps", type=int, default=7, help="measured steps of each precision, after two unmeasured")
    parser.add_argument("--json", help="also write the figures to this file")
    parser.add_argument("flags", nargs="*", help="after `--`: flags of pretrain_gpt.py")
    args = parser.parse_args()
    cfg = cli.parse([*([] if "--preset" in args.flags else DEFAULTS), *args.flags]).config
    device = pick_device(cfg.parallel.device)
    per_token, peak = flops_per_token(cfg.model), peak_flops(device)
    print(f"FLOPs a token: {per_token}")
    if peak:
        print(f"MFU = FLOPs a token x tokens/s / {peak:.3e} FLOP/s, the dense bf16 peak")
    engines = {}
    for precision in args.precisions:
        engines[precision] = build(cfg, precision, False, device)
        if args.compiled:
            engines[f"{precision} compiled"] = build(cfg, precision, True, device)
    draws = np.random.default_rng(0)
    seconds: dict[str, list[float]] = {name: [] for name in engines}
    for step in range(1, args.steps + 3):
        batch = draws.integers(0, cfg.model.vocab, (cfg.train.global_batch_size, cfg.model.seq_len + 1))
        for name, engine in engines.items():
            time_s = timed_step(engine, batch, step)
            if step > 2:
                seconds[name].append(time_s)
    first = statistics.median(seconds[args.precisions[0]])
    rows = {name: figures(cfg, times, first, device) for name, times in seconds.items()}
    for name, row in rows.items():
        low, high = row["spread_s"]
        mfu = f", MFU {row['mfu_causal']:.1%} causal, {row['mfu_full']:.1%} full" if row["mfu_full"] else ""
        print(
            f"{name}: {row['step_s'] * 1e3:.1f} ms per step ({low * 1e3:.1f} to {high * 1e3:.1f}), "
            f"{row['tokens_per_s']:,.0f} tokens/s, {row['speedup']:.2f}x {args.precisions[0]}, "
            f"{row['tflops_causal']:.3f} TFLOP/s{mfu}"
        )
    print(json.dumps(machine(device)))
    if args.json:
        result: dict[str, Any] = {"machine": machine(device), "model": dataclasses.asdict(cfg.model), "rows": rows}
        result["flops_per_token"] = {
            **dataclasses.asdict(per_token),
            "causal": per_token.causal,
            "full": per_token.full,
        }
        result["peak_flops"] = peak
        Path(args.json).write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    run_tool(main)
