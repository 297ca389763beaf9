"""The measuring parts of benchmarks/gpu.py, which starts them: `python benchmarks/gpu_parts.py PART [--device cpu]`.

A row is printed, and appended to the file that MEGALITE_ROWS names, as soon as it is known.
"""

from __future__ import annotations

import argparse
import gc
import importlib
import json
import os
import platform
import statistics
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from itertools import cycle, product
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel

from benchmarks.kernels import copy_rate, medians
from benchmarks.step import figures, timed_step
from megalite.core.build import build_engine
from megalite.core.engine import Engine
from megalite.core.mesh.context import ParallelContext
from megalite.core.mesh.device import pick_device
from megalite.core.mesh.grid import Grid
from megalite.extras.plan.memory.ranks import memory_per_rank
from megalite.runtime.options import cli
from megalite.runtime.options.run import Config

# Everything that a part imports outside torch: what lacks is named in the first seconds.
_MODULES = ("numpy", "yaml", "safetensors", "pytest", "hypothesis", "triton", "pynvml")
_OPTIONAL = ("pynvml",)
_TINY = "--num-layers 2 --hidden-size 64 --num-heads 4 --vocab-size 512 --seq-len 64"
# Llama-3.2-1B, and 4 layers of Llama-3-8B's width: (name, flags, micro-batch sizes).
_MODELS = {
    "cuda": (
        ("llama-1b", "--preset llama-3.2-1b --seq-len 4096", (4, 1, 2, 8)),
        ("8b width", "--preset llama-3-8b --num-layers 4 --seq-len 4096", (4,)),
    ),
    "cpu": (("tiny", _TINY, (1, 2)),),
}
_MICROBATCHES, _STEPS = 2, 5
_BACKENDS = {
    "cudnn": SDPBackend.CUDNN_ATTENTION,
    "flash": SDPBackend.FLASH_ATTENTION,
    "efficient": SDPBackend.EFFICIENT_ATTENTION,
    "math": SDPBackend.MATH,
}


def row(**values: Any) -> None:
    """Report one row."""
    line = json.dumps({k: round(v, 6) if isinstance(v, float) else v for k, v in values.items()})
    print(line, flush=True)
    if path := os.environ.get("MEGALITE_ROWS"):
        with open(path, "a") as out:
            out.write(line + "\n")


def seconds_of(run: Callable[[], Any], device: torch.device, samples: int = 10) -> float:
    """Return the median seconds of a call."""
    return medians({"": run}, device, samples)[""]


def smi(fields: str) -> list[str]:
    """Ask nvidia-smi for fields of the first GPU; empty without it."""
    command = ["nvidia-smi", "-i", "0", f"--query-gpu={fields}", "--format=csv,noheader,nounits"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=10, check=True)
    except (OSError, subprocess.SubprocessError):
        return []
    return [field.strip() for field in done.stdout.strip().split(",")]


@contextmanager
def sampled_clocks() -> Iterator[dict[str, Any]]:
    """Sample SM clock (MHz) and power (W) while the body runs; their medians are there at its end."""
    found: dict[str, Any] = {}
    seen: list[tuple[float, float]] = []
    done = threading.Event()

    def sample() -> None:
        while not done.wait(0.5):
            values = smi("clocks.sm,power.draw")
            if len(values) == 2:
                seen.append((float(values[0]), float(values[1])))

    thread = threading.Thread(target=sample, daemon=True)
    thread.start()
    try:
        yield found
    finally:
        done.set()
        thread.join()
        if seen:
            found["sm_mhz"], found["watts"] = (statistics.median(values) for values in zip(*seen))


def machine(device: torch.device) -> None:
    """Name the machine, and every module that lacks."""
    lacking = []
    for name in _MODULES:
        try:
            importlib.import_module(name)
        except ImportError:
            lacking.append(name)
    on_gpu = device.type == "cuda"
    row(
        device=torch.cuda.get_device_name() if on_gpu else "cpu",
        memory_gib=torch.cuda.get_device_properties(0).total_memory / 2**30 if on_gpu else 0.0,
        driver=", ".join(smi("driver_version,clocks.max.sm,power.limit,ecc.mode.current,mig.mode.current")),
        torch=torch.__version__,
        cuda=torch.version.cuda,
        cudnn=torch.backends.cudnn.version(),
        nccl=".".join(map(str, torch.cuda.nccl.version())) if on_gpu else "",
        python=platform.python_version(),
        lacking=" ".join(lacking),
        date=time.strftime("%Y-%m-%d"),
    )
    if needed := [name for name in lacking if name not in _OPTIONAL and (on_gpu or name != "triton")]:
        sys.exit(f"error: {' '.join(needed)}: not installed; install what a part needs")


def ceilings(device: torch.device) -> None:
    """Measure a copy, a large matrix product in a burst and for ten seconds, and every product of the models."""
    size, long_s = (8192, 10.0) if device.type == "cuda" else (256, 0.5)
    row(what="copy", gb_per_s=copy_rate(device, 10) / 1e9)
    # Three pairs in turns: one alone would partly stay in the L2 cache.
    pairs = cycle([torch.randn(2, size, size, device=device, dtype=torch.bfloat16).unbind() for _ in range(3)])
    flops = 2 * size**3

    def multiply() -> torch.Tensor:
        a, b = next(pairs)
        return a @ b

    row(what=f"product {size}^3, burst", tflops=flops / seconds_of(multiply, device, 5) / 1e12)
    began, rates = time.monotonic(), []
    with sampled_clocks() as clocks:
        while time.monotonic() - began < long_s:
            rates.append(flops / seconds_of(multiply, device, 10) / 1e12)
    row(what=f"product {size}^3, {long_s:.0f} s", tflops=rates[-1], **clocks)
    for name, m, n, k in products(device):
        row(what=name, m=m, n=n, k=k, **product_rates(m, n, k, device))


def product_rates(m: int, n: int, k: int, device: torch.device) -> dict[str, float]:
    """Return TFLOP/s of a linear layer's three products in bf16, the weight gradient's into fp32."""
    x, w = (torch.randn(*shape, device=device, dtype=torch.bfloat16) for shape in ((m, k), (n, k)))
    dy = torch.randn(m, n, device=device, dtype=torch.bfloat16)
    grad = torch.zeros(n, k, device=device)
    passes: dict[str, Callable[[], Any]] = {"forward": lambda: F.linear(x, w), "dgrad": lambda: dy @ w}
    if device.type == "cuda":
        passes["wgrad"] = lambda: torch.addmm(grad, dy.t(), x, out_dtype=torch.float32, out=grad)
    return {f"{name}_tflops": 2 * m * n * k / seconds_of(run, device, 5) / 1e12 for name, run in passes.items()}


def products(device: torch.device) -> Iterator[tuple[str, int, int, int]]:
    """Yield (name, tokens, output features, input features) of the models' products."""
    for name, flags, batches in _MODELS[device.type]:
        m = cli.parse(flags.split()).config.model
        h, tokens = m.hidden_size, batches[0] * m.seq_len
        qkv = (m.num_heads + 2 * m.kv_heads) * m.head_size
        up = 2 * m.ffn_size if m.gated else m.ffn_size
        yield f"{name} qkv", tokens, qkv, h
        yield f"{name} o", tokens, h, m.num_heads * m.head_size
        yield f"{name} gate_up", tokens, up, h
        yield f"{name} down", tokens, h, m.ffn_size
        yield f"{name} output layer", tokens, m.vocab, h


def attention(device: torch.device) -> None:
    """Measure every SDPA backend, with the strides of a run, heads of 64 and 128, also deterministic."""
    batch, seq, heads = (4, 4096, 32) if device.type == "cuda" else (1, 16, 4)
    for width in (64, 128):
        q, k, v = (
            torch.randn(seq, batch, n, width, device=device, dtype=torch.bfloat16).permute(1, 2, 0, 3).requires_grad_()
            for n in (heads, heads // 4, heads // 4)
        )
        flops = 2 * 2 * batch * heads * seq * seq * width / 2
        for (name, backend), deterministic in product(_BACKENDS.items(), (False, True)):
            torch.use_deterministic_algorithms(deterministic)
            try:
                there, back = attention_seconds(backend, q, k, v, device)
                rates = {"forward_tflops": flops / there / 1e12, "backward_tflops": 2.5 * flops / back / 1e12}
                row(backend=name, head=width, deterministic=deterministic, **rates)
            except RuntimeError as e:
                row(backend=name, head=width, deterministic=deterministic, refused=str(e).split("\n")[0][:120])
            finally:
                torch.use_deterministic_algorithms(False)


def attention_seconds(
    backend: SDPBackend, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, device: torch.device
) -> tuple[float, float]:
    """Return seconds of a forward and of a backward pass; RuntimeError where the backend cannot run."""

    def forward() -> torch.Tensor:
        return F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)

    with sdpa_kernel(backend):
        out = forward()
        grad = torch.randn_like(out)
        backward = partial(torch.autograd.grad, out, (q, k, v), grad, retain_graph=True)
        return seconds_of(forward, device, 5), seconds_of(backward, device, 5)


def engine_of(flags: str, micro_batch: int, device: torch.device, compiled: bool = False) -> tuple[Config, Engine]:
    """Build an engine in bf16 whose weights are drawn on the device: the real ones would take minutes on the host."""
    words = f"{flags} --precision bf16 --mock-data --micro-batch-size {micro_batch}"
    words += f" --global-batch-size {micro_batch * _MICROBATCHES}" + " --compile" * compiled
    cfg = cli.parse(words.split()).config
    engine = build_engine(cfg, ParallelContext.single(device))
    for state in engine.optimizer.states():
        if state.role == "master":
            state.flat.normal_(0.0, 0.02)
    engine.optimizer.finish_load()
    return cfg, engine


def step_seconds(engine: Engine, step: int) -> float:
    """Return the seconds of one step on random tokens."""
    cfg = engine.cfg
    shape = cfg.train.global_batch_size, cfg.model.seq_len + 1
    return timed_step(engine, np.random.default_rng(step).integers(0, cfg.model.vocab, shape), step)


def step(device: torch.device, compiled: bool = False) -> None:
    """Measure training steps: tokens/s, MFU in both conventions, peak memory beside the planned one."""
    # The first size of each model is the one to publish.
    firsts = [(name, flags, batches[0]) for name, flags, batches in _MODELS[device.type]]
    others = [(name, flags, size) for name, flags, batches in _MODELS[device.type] for size in batches[1:]]
    for name, flags, size in firsts if compiled else [*firsts, *others]:
        case = {"model": name, "micro_batch": size, "compiled": compiled}
        try:
            row(**case, **step_figures(flags, size, device, compiled))
        except torch.OutOfMemoryError as e:
            row(**case, refused=str(e).split("\n")[0][:120])


def step_figures(flags: str, size: int, device: torch.device, compiled: bool) -> dict[str, float | None]:
    """Return the figures of steps with micro-batches of `size`."""
    # An engine has cycles, through its hooks: the last row's would still hold its memory.
    gc.collect()
    if device.type == "cuda":
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
    cfg, engine = engine_of(flags, size, device, compiled)
    times = [step_seconds(engine, i + 1) for i in range(_STEPS + 2)][2:]
    measured = figures(cfg, times, times[0], device)
    planned = memory_per_rank(cfg, Grid.of(1))[0].total
    return {
        "ms": measured["step_s"] * 1e3,
        **{key: measured[key] for key in ("tokens_per_s", "mfu_causal", "mfu_full")},
        "peak_gib": torch.cuda.max_memory_allocated() / 2**30 if device.type == "cuda" else None,
        "planned_gib": planned / 2**30,
    }


def profile(device: torch.device) -> None:
    """Profile one step of the first model: the GPU's time by kernel, and its idle share."""
    from torch.autograd import DeviceType

    name, flags, batches = _MODELS[device.type][0]
    _, engine = engine_of(flags, batches[0], device)
    for i in range(3):
        step_seconds(engine, i + 1)
    with torch.profiler.profile() as prof:
        wall = step_seconds(engine, 4)
    kind = DeviceType.CUDA if device.type == "cuda" else DeviceType.CPU
    attribute = "self_device_time_total" if device.type == "cuda" else "self_cpu_time_total"
    events = [e for e in prof.key_averages() if e.device_type == kind and getattr(e, attribute) > 0]
    events.sort(key=lambda e: -getattr(e, attribute))
    busy = sum(getattr(e, attribute) for e in events) / 1e6
    row(
        model=name,
        wall_ms=wall * 1e3,
        busy_ms=busy * 1e3,
        idle=1 - busy / wall,
        launches=sum(e.count for e in events),
        top=[[e.key[:90], round(getattr(e, attribute) / 1e3, 3), e.count] for e in events[:25]],
    )


PARTS: dict[str, Callable[[torch.device], None]] = {
    "machine": machine,
    "ceilings": ceilings,
    "attention": attention,
    "step": step,
    "profile": profile,
    "compiled": lambda device: step(device, compiled=True),
}


def main() -> None:
    """Run one part."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("part", choices=PARTS)
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cuda")
    args = parser.parse_args()
    if args.device == "cpu":
        torch.set_num_threads(1)
    # As a run does: it also sets what the allocator reads at its start.
    PARTS[args.part](pick_device(args.device))


if __name__ == "__main__":
    main()
