"""All rows of benchmarks/gpu.py, in the order of what would be missed most, with their limits in seconds."""

from __future__ import annotations

import os
import platform
import subprocess
import sys
import time
from dataclasses import asdict
from functools import partial
from importlib import metadata
from importlib.util import find_spec
from typing import Any

import torch

from benchmarks import gpu_baselines, gpu_checks, gpu_products, gpu_steps, kernels
from benchmarks.rows import ROOT, Row
from megalite.core.ops.choose import OPS
from megalite.core.parts.kernels import native

# name -> flags and micro-batch: published models, or a few layers at the width of one.
STEPS: dict[str, tuple[str, int]] = {
    "Llama-3.2-1B": ("--preset llama-3.2-1b --seq-len 4096", 4),
    "Llama-3-8B, 4 layers": ("--preset llama-3-8b --num-layers 4 --seq-len 8192", 1),
    "Qwen3-30B-A3B, 4 layers, 16 experts": ("--preset qwen3-30b-a3b --num-layers 4 --num-experts 16 --seq-len 4096", 1),
    "Qwen3-30B-A3B, 4 layers": ("--preset qwen3-30b-a3b --num-layers 4 --seq-len 4096", 1),
    "Llama-3.2-1B, FP8 blockwise": ("--preset llama-3.2-1b --seq-len 4096 --fp8 blockwise", 4),
    "Llama-3-8B, 4 layers, FP8 blockwise": ("--preset llama-3-8b --num-layers 4 --seq-len 8192 --fp8 blockwise", 1),
    "Llama-3-8B, 4 layers, FP8 tensorwise": ("--preset llama-3-8b --num-layers 4 --seq-len 8192 --fp8 tensorwise", 1),
    "Llama-3-8B, 16 layers": ("--preset llama-3-8b --num-layers 16 --seq-len 8192", 1),
    "Llama-3-8B, 16 layers, FP8 blockwise": ("--preset llama-3-8b --num-layers 16 --seq-len 8192 --fp8 blockwise", 1),
    "gpt-oss-20b, 4 layers": ("--preset gpt-oss-20b --num-layers 4 --seq-len 4096", 1),
    "DeepSeek-V2-Lite, 4 layers": ("--preset deepseek-v2-lite --num-layers 4 --seq-len 4096", 1),
    "Qwen3-Next-80B-A3B, 4 layers, 64 experts": (
        "--preset qwen3-next-80b-a3b --num-layers 4 --num-experts 64 --seq-len 4096",
        1,
    ),
    "Gemma-3-4B, 6 layers": ("--preset gemma-3-4b --num-layers 6 --seq-len 8192", 1),
    "Llama-3.2-1B, compiled": ("--preset llama-3.2-1b --seq-len 4096 --compile", 4),
}
# Models whose steps the host may limit.
HOSTS = ("Qwen3-30B-A3B, 4 layers, 16 experts", "Qwen3-30B-A3B, 4 layers", "Qwen3-Next-80B-A3B, 4 layers, 64 experts")
# Limits of rows that take longer than their kind.
_SECONDS = {"Qwen3-Next-80B-A3B, 4 layers, 64 experts": 60.0, "Llama-3.2-1B, compiled": 90.0, "delta_nets": 60.0}
_DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
_SLICES = 4


def machine(device: torch.device) -> dict[str, Any]:
    """Name the machine and the versions of everything that counts."""
    cuda = device.type == "cuda"
    git = subprocess.run(["git", "-C", str(ROOT), "describe", "--always"], capture_output=True, text=True)
    versions = {name: _version(name) for name in ("triton", "numpy", "transformers")}
    return {
        "device": torch.cuda.get_device_name() if cuda else "cpu",
        "memory_gib": torch.cuda.get_device_properties(0).total_memory / 2**30 if cuda else 0.0,
        "driver": ", ".join(gpu_products.smi("driver_version,clocks.max.sm,power.limit,ecc.mode.current")),
        "torch": torch.__version__,
        "cuda": torch.version.cuda,
        "cudnn": torch.backends.cudnn.version(),
        "python": platform.python_version(),
        **versions,
        "commit": git.stdout.strip(),
        "date": time.strftime("%Y-%m-%d"),
    }


def _version(name: str) -> str:
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return ""


def backends(device: torch.device) -> dict[str, Any]:
    """Name the backend of every op in bf16, and why the CUDA library is not used if it is not."""
    chosen = {
        op: next((b.name for b in found.backends if b.why_not_auto(device, torch.bfloat16) is None), "none")
        for op, found in OPS.items()
    }
    return {"cuda_library": native.why_no_cuda(device, torch.float32) or "loaded", **chosen}


def step(name: str, device: torch.device) -> dict[str, Any]:
    """Measure a model; on a CPU a tiny one in its place."""
    flags, micro_batch = STEPS[name]
    if device.type == "cpu":
        return gpu_steps.step_row(gpu_steps.TINY, 1, device, steps=1)
    return gpu_steps.step_row(flags, micro_batch, device)


def host(name: str, device: torch.device) -> dict[str, Any]:
    """Profile the host's part of a step; on a CPU a tiny model's."""
    flags, micro_batch = STEPS[name]
    return gpu_steps.host_row(*((gpu_steps.TINY, 1) if device.type == "cpu" else (flags, micro_batch)), device)


def kernel_group(name: str, device: torch.device) -> dict[str, Any]:
    """Time one group of ops on every backend: GB/s over the bytes that an op cannot avoid."""
    sizes = kernels.SIZES["cuda"] if device.type == "cuda" else kernels.Sizes(64, 64, 128, 512, 1 << 12)
    copy, found = kernels.copy_rate(device, 5), []
    for bench in kernels.GROUPS[name](device, torch.bfloat16, sizes, False):
        found += [asdict(row) for row in kernels.measure(bench, copy, device, 10)]
        bench.variants.clear()  # the closures hold the buffers of the last measurement
    return {"copy_gb_per_s": copy / 1e9, "ops": found}


def pytest(files: tuple[str, ...], device: torch.device) -> dict[str, Any]:
    """Run files of tests/gpu.

    Raises:
        AssertionError: they failed; the last lines are named.
    """
    env = {**os.environ, "MEGALITE_TEST_DEVICE": device.type}
    command = [sys.executable, "-m", "pytest", "-q", "--durations=8", "-p", "no:cacheprovider", *files]
    if find_spec("xdist") is not None and device.type == "cuda":
        command += ["-n", "8"]
    if device.type == "cpu":
        command.append("--collect-only")  # they have a rehearsal of their own
    done = subprocess.run(command, cwd=ROOT, env=env, capture_output=True, text=True)
    print(done.stdout, done.stderr)
    lines = done.stdout.strip().split("\n")
    failed = [line for line in lines if line.startswith(("FAILED", "ERROR"))]
    assert done.returncode == 0, "; ".join([*failed, lines[-1]])[:380]
    return {"summary": lines[-1]}


def _rows() -> list[Row]:
    rows = [Row("machine", 20, machine, together=True), Row("backends", 20, backends, together=True)]
    rows += [
        Row(f"model: {name}", 45, partial(gpu_checks.check_model, name), together=True) for name in gpu_checks.MODELS
    ]
    for spec, dtypes in {"auto": ("bf16", "fp32", "fp16"), "triton": ("bf16", "fp32")}.items():
        for dtype in dtypes:
            for i in range(_SLICES):
                check = partial(gpu_checks.check_kernels, spec, _DTYPES[dtype], i, _SLICES)
                rows.append(Row(f"kernels: {spec} {dtype} {i + 1}/{_SLICES}", 60, check, together=True))
    rows += [Row(f"step: {name}", _SECONDS.get(name, 30.0), partial(step, name)) for name in STEPS]
    rows += [Row(f"host: {name}", 30.0, partial(host, name)) for name in HOSTS]
    rows += [
        Row("ceilings", 15, gpu_products.ceilings),
        *(Row(f"products: {name}", 15, partial(gpu_products.linear_products, name)) for name in ("1b", "8b")),
        *(Row(f"experts: {n}", 15, partial(gpu_products.grouped_products, n)) for n in (16, 128)),
        Row("fp8 products", 15, gpu_products.fp8_products),
        *(
            Row(f"attention: {n} heads of {width}", 15, partial(gpu_products.attention, n, width))
            for n, width in ((32, 64), (32, 128), (16, 256))
        ),
        Row("attend", 15, gpu_products.attend),
        Row("plain torch: Llama-3.2-1B", 60, gpu_baselines.llama),
        Row("plain torch: Qwen3-30B-A3B, 4 layers, 16 experts", 60, gpu_baselines.experts),
        *(Row(f"ops: {name}", _SECONDS.get(name, 20.0), partial(kernel_group, name)) for name in kernels.GROUPS),
        Row("host copies", 20, gpu_products.host_copies),
        Row("sustained", 20, gpu_products.sustained),
        Row("tests: training", 90, partial(pytest, ("tests/gpu/test_training.py", "tests/gpu/test_offload.py"))),
        Row("tests: ranks", 180, partial(pytest, ("tests/gpu/test_ranks.py",))),
        Row("tests: large", 60, partial(pytest, ("tests/gpu/test_kernels.py", "-k", "beyond or wgrad or adamw_reads"))),
    ]
    return rows


ROWS = _rows()
