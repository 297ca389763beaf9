"""Copies, matrix products and attention of one GPU, for benchmarks/gpu_rows.py."""

from __future__ import annotations

import mmap
import os
import statistics
import subprocess
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from itertools import cycle
from typing import Any

import torch
import torch.nn.functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel

from benchmarks.kernels import backends, copy_rate, medians
from megalite.core.ops import resolve
from megalite.core.ops.bands import Band
from megalite.core.options.recipe import RECIPES
from megalite.core.parts.quant import fp8

# Output and input features of a layer's products: Llama-3.2-1B and Llama-3-8B.
_LAYERS = {
    "1b": {"qkv": (3072, 2048), "o": (2048, 2048), "gate_up": (16384, 2048), "down": (2048, 8192)},
    "8b": {"qkv": (6144, 4096), "o": (4096, 4096), "gate_up": (28672, 4096), "down": (4096, 14336)},
}
_ATTENTION = {
    "cudnn": SDPBackend.CUDNN_ATTENTION,
    "flash": SDPBackend.FLASH_ATTENTION,
    "efficient": SDPBackend.EFFICIENT_ATTENTION,
}
_BF16 = torch.bfloat16


def seconds_of(run: Callable[[], Any], device: torch.device, samples: int = 5) -> float:
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


def _square(size: int, device: torch.device) -> Callable[[], torch.Tensor]:
    """Return a product of square matrices; three pairs in turns: one alone would partly stay in the L2 cache."""
    pairs = cycle([torch.randn(2, size, size, device=device, dtype=_BF16).unbind() for _ in range(3)])

    def multiply() -> torch.Tensor:
        a, b = next(pairs)
        return a @ b

    return multiply


def ceilings(device: torch.device) -> dict[str, Any]:
    """Measure a copy, and a large matrix product in a burst."""
    size = 8192 if device.type == "cuda" else 128
    burst = 2 * size**3 / seconds_of(_square(size, device), device) / 1e12
    return {"copy_gb_per_s": copy_rate(device, 10) / 1e9, "size": size, "tflops": burst}


def sustained(device: torch.device) -> dict[str, Any]:
    """Measure a large product for ten seconds, with clock and power: what "peak" is in a long run."""
    size, long_s = (8192, 10.0) if device.type == "cuda" else (128, 0.6)
    multiply, rates = _square(size, device), []
    began = time.monotonic()
    with sampled_clocks() as clocks:
        while time.monotonic() - began < long_s:
            rates.append(2 * size**3 / seconds_of(multiply, device, 20) / 1e12)
    return {"seconds_long": long_s, "first_tflops": rates[0], "tflops": rates[-1], **clocks}


def linear_products(model: str, device: torch.device) -> dict[str, Any]:
    """Return TFLOP/s of the three products of every linear layer in bf16, the weight gradient's into fp32."""
    tokens, divisor = (16384 if model == "1b" else 8192, 1) if device.type == "cuda" else (64, 64)
    ops = resolve("auto", device, _BF16)
    found: dict[str, Any] = {"tokens": tokens, "ran": [ops.describe()]}
    for name, sizes in _LAYERS[model].items():
        n, k = (size // divisor for size in sizes)
        x, w, dy = (torch.randn(*s, device=device, dtype=_BF16) for s in ((tokens, k), (n, k), (tokens, n)))
        grad = torch.zeros(n, k, device=device)
        passes: dict[str, Callable[[], Any]] = {
            "forward": partial(ops.linear, x, w, None),
            "dgrad": partial(ops.linear_dgrad, dy, w),
            "wgrad": partial(ops.linear_wgrad, grad, dy, x, True),
        }
        flops = 2 * tokens * n * k / 1e12
        found |= {f"{name}_{way}_tflops": flops / seconds_of(run, device) for way, run in passes.items()}
    return found


def grouped_products(experts: int, device: torch.device) -> dict[str, Any]:
    """Return TFLOP/s of the products of Qwen3-30B-A3B's experts, by backend; 32,768 rows, groups of unequal sizes."""
    rows, out, width = (32768, 1536, 2048) if device.type == "cuda" else (64, 16, 8)
    shares = torch.rand(experts, generator=torch.Generator().manual_seed(0)) + 0.5
    sizes = (shares / shares.sum() * rows).long().tolist()
    sizes[0] += rows - sum(sizes)
    x, dy = (torch.randn(rows, n, device=device, dtype=_BF16) for n in (width, out))
    w = torch.randn(experts, out, width, device=device, dtype=_BF16)
    grad = torch.zeros(experts, out, width, device=device)
    flops, found = 2 * rows * out * width / 1e12, dict[str, Any]()
    for name, ops in backends(device, _BF16, "grouped").items():
        passes: dict[str, Callable[[], Any]] = {
            "forward": partial(ops.grouped_linear, x, w, sizes),
            "dgrad": partial(ops.grouped_dgrad, dy, w, sizes),
            "wgrad": partial(ops.grouped_wgrad, grad, dy, x, sizes, True),
        }
        found |= {f"{name}_{way}_tflops": flops / seconds_of(run, device) for way, run in passes.items()}
    if device.type == "cuda":
        ends = torch.tensor(sizes).cumsum(0).to(torch.int32).to(device)

        def one_launch() -> None:
            grad.add_(torch._grouped_mm(dy.t(), x, offs=ends))

        found["grouped_mm_then_add_wgrad_tflops"] = flops / seconds_of(one_launch, device)
    return found


def fp8_products(device: torch.device) -> dict[str, Any]:
    """Compare FP8 products on tensor cores with their emulation, any rows and a short contraction too; TFLOP/s of one.

    Values are relative errors (L2) against the products of the dequantized codes.
    """
    kernels = device.type == "cuda"
    large = (8192, 14336, 4096) if kernels else (32, 128, 128)
    found: dict[str, Any] = {}
    for name, recipe in RECIPES.items():
        if kernels and torch.cuda.get_device_capability(device) not in recipe.capabilities:
            continue
        quantize, product = (
            (fp8.fused_quantize, fp8.scaled_product) if kernels else (fp8.quantize, fp8.emulated_product)
        )
        for m, n, k in (large, (1037, 256, 2048), (1037, 256, 128), (1, 128, 128)):
            x, w = (torch.randn(rows, k, device=device, dtype=_BF16) for rows in (m, n))
            a = quantize(x, recipe.activation, torch.float8_e4m3fn, recipe.power_of_2)
            b = quantize(w, recipe.weight, torch.float8_e4m3fn, recipe.power_of_2)
            want = a.values() @ b.values().t()
            for dtype in (torch.float32, _BF16):
                label = f"{name}_{m}_{k}_{str(dtype)[6:]}"
                try:
                    got = product(a, b, dtype, fast=dtype == _BF16).float()
                    found[f"{label}_error"] = float((got - want).norm() / want.norm())
                except RuntimeError as e:
                    found[f"{label}_refused"] = str(e).split("\n")[0][:200]
            if m == large[0]:
                seconds = seconds_of(partial(product, a, b, _BF16, fast=True), device)
                found[f"{name}_tflops"] = 2 * m * n * k / seconds / 1e12
                moved = x.nbytes + x.numel()
                cast = seconds_of(
                    partial(quantize, x, recipe.activation, torch.float8_e4m3fn, recipe.power_of_2), device
                )
                found[f"{name}_quantize_gb_per_s"] = moved / cast / 1e9
    return found


def attention(heads: int, width: int, device: torch.device) -> dict[str, Any]:
    """Return TFLOP/s of every SDPA backend, causal, with the strides of a run; grouped keys, four queries to each."""
    batch, seq, heads = (4, 4096, heads) if device.type == "cuda" else (1, 16, 4)
    q, k, v = (
        torch.randn(seq, batch, n, width, device=device, dtype=_BF16).permute(1, 2, 0, 3).requires_grad_()
        for n in (heads, heads // 4, heads // 4)
    )
    flops, found = 2 * 2 * batch * heads * seq * seq * width / 2 / 1e12, dict[str, Any]()
    for name, backend in _ATTENTION.items() if device.type == "cuda" else {"math": SDPBackend.MATH}.items():
        try:
            there, back = attention_seconds(backend, q, k, v, device)
            found |= {f"{name}_forward_tflops": flops / there, f"{name}_backward_tflops": 2.5 * flops / back}
        except RuntimeError as e:
            found[f"{name}_refused"] = str(e).split("\n")[0][:120]
    return found


def attention_seconds(
    backend: SDPBackend, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, device: torch.device
) -> tuple[float, float]:
    """Return seconds of a forward and of a backward pass; RuntimeError where the backend cannot run."""

    def forward() -> torch.Tensor:
        return F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)

    with sdpa_kernel(backend):
        out = forward()
        backward = partial(torch.autograd.grad, out, (q, k, v), torch.randn_like(out), retain_graph=True)
        return seconds_of(forward, device), seconds_of(backward, device)


def attend(device: torch.device) -> dict[str, Any]:
    """Return milliseconds of `attend` whole, in a band for a window, and with a mask for it as dropout has one."""
    seq, heads, width = (4096, 32, 128) if device.type == "cuda" else (16, 4, 8)
    ops = resolve("auto", device, _BF16)
    q, dout = (torch.randn(1, heads, seq, width, device=device, dtype=_BF16) for _ in range(2))
    k, v = (torch.randn(1, heads // 4, seq, width, device=device, dtype=_BF16) for _ in range(2))
    place = torch.arange(seq, device=device)
    window = (place[:, None] >= place) & (place[:, None] - place < seq // 4)
    found: dict[str, Any] = {"ran": [ops.describe()]}
    ways: dict[str, dict[str, Any]] = {
        "causal": {"causal": True},
        "band": {"band": Band(0, seq // 4)},
        "window": {"visible": window[None, None]},
    }
    for name, options in ways.items():
        out, lse = ops.attend(q, k, v, **options)
        found[f"{name}_forward_ms"] = seconds_of(partial(ops.attend, q, k, v, **options), device) * 1e3
        backward = partial(ops.attend_backward, dout, q, k, v, out, lse, **options)
        found[f"{name}_backward_ms"] = seconds_of(backward, device) * 1e3
    return found


def host_copies(device: torch.device) -> dict[str, Any]:
    """Return GB/s from the device to pageable memory, to a page-locked buffer, and to a registered file in memory."""
    size = 2**30 if device.type == "cuda" else 2**20
    source = torch.ones(size, dtype=torch.uint8, device=device)
    with open(os.memfd_create("copies"), "r+b") as file:
        os.truncate(file.fileno(), size)
        shared = torch.frombuffer(mmap.mmap(file.fileno(), size), dtype=torch.uint8)
    targets = {"pageable": torch.empty(size, dtype=torch.uint8), "memfd": shared}

    def rate(target: torch.Tensor) -> float:
        return size / seconds_of(lambda: target.copy_(source, non_blocking=True), device, 3) / 1e9

    found = {f"{name}_gb_per_s": rate(target) for name, target in targets.items()}
    if device.type == "cuda":
        found["pinned_gb_per_s"] = rate(torch.empty(size, dtype=torch.uint8, pin_memory=True))
        runtime = torch.cuda.cudart()
        if code := int(runtime.cudaHostRegister(shared.data_ptr(), size, 0)):
            found["registering_failed_with"] = code
        else:
            found["registered_memfd_gb_per_s"] = rate(shared)
            runtime.cudaHostUnregister(shared.data_ptr())
    return found
