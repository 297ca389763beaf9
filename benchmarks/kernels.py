"""Speed of every op on every backend that runs here: `python benchmarks/kernels.py [--device cuda] [--json FILE]`.

First the rate of a plain copy; then, per op, median time, GB/s over the bytes the op cannot avoid, share of the copy
rate, and the ratio to the torch backend. Variants of an op are timed in turn, sample by sample, so that a machine that
slows down affects all of them. On a GPU buffers are larger than its L2 cache. torch.compile, Liger and apex are
included where they are installed; --check-goals makes a missed goal exit 1.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import platform
import re
import statistics
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from megalite.core.base.errors import UserError
from megalite.core.ops import Ops, resolve
from megalite.core.ops.choose import OPS
from megalite.core.ops.cpu_memory import keep_freed_memory
from megalite.extras.tool import run_tool

Run = Callable[[], Any]


@dataclass(frozen=True)
class Sizes:
    """tokens x hidden activations, ffn width, vocabulary, and elements of a flat optimizer buffer."""

    tokens: int
    hidden: int
    ffn: int
    vocab: int
    flat: int


SIZES = {"cuda": Sizes(16384, 4096, 14336, 128256, 1 << 28), "cpu": Sizes(1024, 1024, 2816, 8192, 1 << 24)}
_SLEEP_CYCLES = 1_000_000  # half a millisecond
COPY_ELEMENTS = {"cuda": 1 << 28, "cpu": 1 << 24}


@dataclass
class Bench:
    """One measurement: the bytes it cannot avoid, its goal as a share of the copy rate, and variants by backend."""

    name: str
    bytes: int
    goal: float | None
    variants: dict[str, Run]


@dataclass(frozen=True)
class Row:
    bench: str
    backend: str
    ms: float
    gb_per_s: float
    share_of_copy: float
    speedup: float
    goal: float | None


def timed(run: Run, device: torch.device) -> float:
    """Seconds of one call; on CPU, processor time per thread, which other processes on the machine do not lengthen."""
    if device.type == "cuda":
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        # Meanwhile the host gets ahead: the time of a small kernel would be that of its launch.
        torch.cuda._sleep(_SLEEP_CYCLES)
        start.record()
        run()
        end.record()
        end.synchronize()
        return start.elapsed_time(end) / 1e3
    before = time.process_time()
    run()
    return (time.process_time() - before) / torch.get_num_threads()


def medians(variants: dict[str, Run], device: torch.device, samples: int) -> dict[str, float]:
    """Median seconds of each variant; all are warmed up first, then timed in turn."""
    for run in variants.values():
        for _ in range(3):
            run()
    times: dict[str, list[float]] = {name: [] for name in variants}
    for _ in range(samples):
        for name, run in variants.items():
            times[name].append(timed(run, device))
    return {name: statistics.median(values) for name, values in times.items()}


def backends(device: torch.device, dtype: torch.dtype, op: str) -> dict[str, Ops]:
    """Every backend of an op that runs here, torch first."""
    found = {}
    for backend in sorted(OPS[op].backends, key=lambda b: b.name != "torch"):
        if backend.why_not(device, dtype) is None:
            found[backend.name] = resolve(f"torch,{op}={backend.name}", device, dtype)
    return found


def both_ways(
    functions: dict[str, Callable[..., Any]], inputs: list[Tensor], grads: list[Tensor]
) -> list[dict[str, Run]]:
    """[forward runs, backward runs] of differentiable functions of `inputs`; backward reuses one graph."""
    forward: dict[str, Run] = {}
    backward: dict[str, Run] = {}
    for name, function in functions.items():
        leaves = [t.detach().requires_grad_() for t in inputs]
        outputs = function(*leaves)
        outputs = outputs if isinstance(outputs, tuple) else (outputs,)
        forward[name] = partial(function, *leaves)
        backward[name] = partial(torch.autograd.grad, outputs, leaves, grads[: len(outputs)], retain_graph=True)
    return [forward, backward]


def liger(name: str) -> Any:
    """A class of liger_kernel.ops, or None where Liger is not installed."""
    if importlib.util.find_spec("liger_kernel") is None:
        return None
    import liger_kernel.ops as module

    return getattr(module, name, None)


def norms(device: torch.device, dtype: torch.dtype, size: Sizes, compiled: bool) -> Iterator[Bench]:
    shape, element = (size.tokens, size.hidden), dtype.itemsize
    x, residual, dy = (torch.randn(shape, device=device, dtype=dtype) for _ in range(3))
    w = torch.ones(size.hidden, device=device, dtype=dtype)

    def plain(x: Tensor, r: Tensor, w: Tensor) -> tuple[Tensor, Tensor]:
        total = x + r
        return F.rms_norm(total, (size.hidden,), w, 1e-5), total

    functions: dict[str, Callable[..., Any]] = {
        name: lambda x, r, w, ops=ops: ops.add_rmsnorm(x, r, w, 1e-5)
        for name, ops in backends(device, dtype, "rmsnorm").items()
    }
    if compiled:
        functions["compile"] = torch.compile(plain)
    if device.type == "cuda" and (fused := liger("LigerFusedAddRMSNormFunction")):
        functions["liger"] = lambda x, r, w: fused.apply(x, r, w, 1e-5)
    forward, backward = both_ways(functions, [x, residual, w], [dy, dy])
    moved = 4 * x.numel() * element
    yield Bench("add_rmsnorm", moved, 0.90, forward)
    yield Bench("add_rmsnorm backward", moved, 0.80, backward)

    def plain_layer(x: Tensor, r: Tensor, w: Tensor, b: Tensor) -> tuple[Tensor, Tensor]:
        total = x + r
        return F.layer_norm(total, (size.hidden,), w, b, 1e-5), total

    functions = {
        name: lambda x, r, w, b, ops=ops: ops.add_layernorm(x, r, w, b, 1e-5)
        for name, ops in backends(device, dtype, "layernorm").items()
    }
    if compiled:
        functions["compile"] = torch.compile(plain_layer)
    forward, backward = both_ways(functions, [x, residual, w, w.clone()], [dy, dy])
    yield Bench("add_layernorm", moved, 0.88, forward)
    yield Bench("add_layernorm backward", moved, 0.75, backward)


def rope(device: torch.device, dtype: torch.dtype, size: Sizes, compiled: bool) -> Iterator[Bench]:
    heads, width = size.hidden // 128, 128
    kv = max(1, heads // 4)
    seq = min(size.tokens, 4096)
    qkv = torch.randn(seq, size.tokens // seq, heads + 2 * kv, width, device=device, dtype=dtype)
    cos, sin = torch.randn(2, seq, width // 2, device=device)
    # In place and repeated: the numbers stay bounded since a rotation by a table of norm 1 is what is applied.
    norm = (cos.square() + sin.square()).sqrt()
    cos, sin = cos / norm, sin / norm
    found = backends(device, dtype, "rope")
    grads = [torch.randn(*qkv.shape[:2], n, width, device=device, dtype=dtype) for n in (heads, kv, kv)]
    in_place: dict[str, Run] = {n: partial(o.rope_qkv, qkv, cos, sin, heads, kv) for n, o in found.items()}
    # The graph of backward keeps views of its own copy, which no later forward may overwrite.
    functions: dict[str, Callable[..., Any]] = {
        name: lambda x, ops=ops: ops.rope_qkv(x.clone(), cos, sin, heads, kv) for name, ops in found.items()
    }
    _, backward = both_ways(functions, [qkv], grads)
    rotated = qkv.numel() * (heads + kv) // (heads + 2 * kv)
    yield Bench("rope_qkv", 2 * rotated * dtype.itemsize, 0.85, in_place)
    yield Bench("rope_qkv backward", 2 * qkv.numel() * dtype.itemsize, 0.85, backward)


def activations(device: torch.device, dtype: torch.dtype, size: Sizes, compiled: bool) -> Iterator[Bench]:
    gate_up = torch.randn(size.tokens, 2 * size.ffn, device=device, dtype=dtype)
    dy = torch.randn(size.tokens, size.ffn, device=device, dtype=dtype)
    out = dy.numel() * dtype.itemsize

    def plain(x: Tensor) -> Tensor:
        gate, up = x.chunk(2, dim=-1)
        return F.silu(gate) * up

    functions: dict[str, Callable[..., Any]] = {
        name: ops.swiglu for name, ops in backends(device, dtype, "glu").items()
    }
    if compiled:
        functions["compile"] = torch.compile(plain)
    if device.type == "cuda" and (fused := liger("LigerSiLUMulFunction")):
        functions["liger"] = lambda x: fused.apply(*x.chunk(2, dim=-1))
    forward, backward = both_ways(functions, [gate_up], [dy])
    yield Bench("swiglu", 3 * out, 0.90, forward)
    yield Bench("swiglu backward", 5 * out, 0.90, backward)
    functions = {name: partial(ops.gelu, approximate="tanh") for name, ops in backends(device, dtype, "gelu").items()}
    if compiled:
        functions["compile"] = torch.compile(partial(F.gelu, approximate="tanh"))
    forward, backward = both_ways(functions, [dy.clone()], [dy])
    yield Bench("gelu", 2 * out, 0.90, forward)
    yield Bench("gelu backward", 3 * out, 0.90, backward)


def cross_entropy(device: torch.device, dtype: torch.dtype, size: Sizes, compiled: bool) -> Iterator[Bench]:
    rows = size.tokens // 4
    logits = torch.randn(rows, size.vocab, device=device, dtype=dtype)
    target = torch.randint(size.vocab, (rows,), device=device)
    lse, scale = torch.full((rows,), 12.0, device=device), torch.ones(rows, device=device)
    found = backends(device, dtype, "cross_entropy")
    stats: dict[str, Run] = {n: partial(o.cross_entropy_stats, logits, target, 0) for n, o in found.items()}
    grads: dict[str, Run] = {n: partial(o.cross_entropy_grad_, logits, target, 0, lse, scale) for n, o in found.items()}
    moved = logits.numel() * dtype.itemsize
    yield Bench("cross_entropy stats", moved, 0.90, stats)
    yield Bench("cross_entropy gradient", 2 * moved, 0.90, grads)


def flat(device: torch.device, dtype: torch.dtype, size: Sizes, compiled: bool) -> Iterator[Bench]:
    param, m, v = (torch.zeros(size.flat, device=device) for _ in range(3))
    out = torch.empty(size.flat, device=device, dtype=torch.bfloat16)
    # 1, since the torch backend scales the gradient in place, call after call.
    multiplier = torch.tensor(1.0, device=device)
    hyper: dict[str, Any] = {"lr": 1e-3, "beta1": 0.9, "beta2": 0.95, "eps": 1e-8, "weight_decay": 0.1, "step": 10}
    for grad_dtype, label, moved in ((torch.float32, "fp32", 30), (torch.bfloat16, "bf16", 28)):
        grad = torch.randn(size.flat, device=device).to(grad_dtype)
        variants: dict[str, Run] = {
            name: partial(ops.adamw, param, grad, m, v, out, grad_multiplier=multiplier, **hyper)
            for name, ops in backends(device, torch.bfloat16, "adamw").items()
        }
        yield Bench(f"adamw {label} gradient", moved * size.flat, 0.92, variants)
        variants = {
            name: partial(ops.l2_norm, grad) for name, ops in backends(device, torch.bfloat16, "l2_norm").items()
        }
        yield Bench(f"l2_norm {label}", grad.itemsize * size.flat, 0.92, variants)


def wgrad(device: torch.device, dtype: torch.dtype, size: Sizes, compiled: bool) -> Iterator[Bench]:
    """Compute-bound: no goal as a share of the copy rate; the ratio is to a GEMM and a separate fp32 addition."""
    tokens = size.tokens // 4
    dy = torch.randn(tokens, size.ffn, device=device, dtype=dtype)
    x = torch.randn(tokens, size.hidden, device=device, dtype=dtype)
    main_grad = torch.zeros(size.ffn, size.hidden, device=device)
    variants: dict[str, Run] = {"torch (GEMM, then add)": lambda: main_grad.add_(dy.t() @ x)}
    for name, ops in backends(device, dtype, "matmul").items():
        label = "addmm" if name == "torch" else name
        variants[label] = partial(ops.linear_wgrad, main_grad, dy, x)
    variants["GEMM alone"] = lambda: dy.t() @ x
    yield Bench("wgrad", (dy.numel() + x.numel()) * dtype.itemsize + 8 * main_grad.numel(), None, variants)


def delta_nets(device: torch.device, dtype: torch.dtype, size: Sizes, compiled: bool) -> Iterator[Bench]:
    """Heads of 128, two of values for each of keys. The rule is compute-bound: no goal as a share of the copy rate."""
    values = max(2, size.hidden // 128)
    q, k = (torch.randn(size.tokens, 1, values // 2, 128, device=device, dtype=dtype) for _ in range(2))
    v, dout = (torch.randn(size.tokens, 1, values, 128, device=device, dtype=dtype) for _ in range(2))
    decay, beta = (torch.rand(size.tokens, 1, values, device=device) for _ in range(2))
    functions: dict[str, Callable[..., Any]] = {
        name: ops.gated_delta_rule for name, ops in backends(device, dtype, "delta_rule").items()
    }
    given = [q, k, v, -decay, beta.to(dtype)]
    moved = sum(x.nbytes for x in (*given, dout))
    forward, backward = both_ways(functions, given, [dout])
    yield Bench("gated_delta_rule", moved, None, forward)
    yield Bench("gated_delta_rule backward", 2 * moved - dout.nbytes, None, backward)
    x = torch.cat([part.flatten(-2) for part in (q, k, v)], dim=-1)
    weight = torch.randn(x.shape[-1], 4, device=device, dtype=dtype)
    functions = {name: ops.causal_conv for name, ops in backends(device, dtype, "causal_conv").items()}
    forward, backward = both_ways(functions, [x, weight], [torch.randn_like(x)])
    yield Bench("causal_conv", 2 * x.nbytes, None, forward)
    yield Bench("causal_conv backward", 3 * x.nbytes, None, backward)


GROUPS = {
    "norms": norms,
    "rope": rope,
    "activations": activations,
    "cross_entropy": cross_entropy,
    "flat": flat,
    "wgrad": wgrad,
    "delta_nets": delta_nets,
}


def device_name(device: torch.device) -> str:
    """The GPU's or the processor's name."""
    cpus = Path("/proc/cpuinfo")
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    models = re.findall(r"model name\s*: (.*)", cpus.read_text()) if cpus.exists() else []
    return models[0] if models else platform.machine()


def copy_rate(device: torch.device, samples: int) -> float:
    """Bytes per second of a plain copy, reads and writes counted."""
    source = torch.randn(COPY_ELEMENTS[device.type], device=device)
    target = torch.empty_like(source)
    return 2 * source.nbytes / medians({"copy": lambda: target.copy_(source)}, device, samples)["copy"]


def measure(bench: Bench, copy: float, device: torch.device, samples: int) -> list[Row]:
    times = medians(bench.variants, device, samples)
    reference = next(iter(times.values()))
    return [
        Row(
            bench.name,
            name,
            t * 1e3,
            bench.bytes / t / 1e9,
            bench.bytes / t / copy,
            reference / t,
            bench.goal if device.type == "cuda" else None,
        )
        for name, t in times.items()
    ]


def best(rows: list[Row]) -> dict[str, Row]:
    """The fastest of megalite's own backends for each measurement that has a goal."""
    own = [r for r in rows if r.goal is not None and r.backend in ("triton", "cuda", "torch")]
    return {r.bench: min((o for o in own if o.bench == r.bench), key=lambda o: o.ms) for r in own}


def parse_args() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--dtype", choices=("fp32", "bf16"), default="bf16", help="dtype of activations")
    parser.add_argument("--only", choices=GROUPS, nargs="*", default=list(GROUPS), help="groups of ops")
    parser.add_argument("--samples", type=int, default=30, help="timed calls of each variant")
    parser.add_argument("--threads", type=int, default=1, help="CPU threads")
    parser.add_argument(
        "--compile", action=argparse.BooleanOptionalAction, help="torch.compile too (default: on a GPU)"
    )
    parser.add_argument("--keep-memory", action="store_true", help="CPU: keep freed memory (core/ops/cpu_memory.py)")
    parser.add_argument("--json", type=Path, help="write the figures there")
    parser.add_argument("--check-goals", action="store_true", help="exit 1 if a goal is missed (GPU only)")
    args = parser.parse_args()
    if args.samples < 1:
        raise UserError(f"--samples {args.samples}", "must be at least 1", "use --samples 30")
    if args.device == "cuda" and not torch.cuda.is_available():
        raise UserError("--device cuda", "this torch sees no GPU", "use --device cpu")
    return args


def main() -> int:
    args = parse_args()
    device = torch.device(args.device)
    torch.set_num_threads(args.threads)
    if args.keep_memory:
        keep_freed_memory()
    compiled = device.type == "cuda" if args.compile is None else args.compile
    dtype = {"fp32": torch.float32, "bf16": torch.bfloat16}[args.dtype]
    name = device_name(device)
    copy = copy_rate(device, args.samples)
    print(f"{name}, torch {torch.__version__}, {args.dtype}, copy {copy / 1e9:.0f} GB/s, {args.samples} samples")
    print(f"{'op':24} {'backend':22} {'ms':>9} {'GB/s':>7} {'of copy':>7} {'speedup':>7} {'goal':>5}")
    rows: list[Row] = []
    for group in args.only:
        for bench in GROUPS[group](device, dtype, SIZES[device.type], compiled):
            for row in measure(bench, copy, device, args.samples):
                goal = f"{row.goal:.0%}" if row.goal else ""
                print(
                    f"{row.bench:24} {row.backend:22} {row.ms:9.3f} {row.gb_per_s:7.0f} {row.share_of_copy:7.0%} "
                    f"{row.speedup:7.2f} {goal:>5}",
                    flush=True,
                )
                rows.append(row)
            # The closures hold the buffers of the last measurement.
            bench.variants.clear()
    missed = [r for r in best(rows).values() if r.goal and r.share_of_copy < r.goal]
    for row in missed:
        print(f"missed: {row.bench} {row.share_of_copy:.0%} of the copy rate with {row.backend}, goal {row.goal:.0%}")
    if args.json:
        head = {"device": name, "torch": torch.__version__, "cuda": torch.version.cuda, "dtype": args.dtype}
        head |= {
            "threads": args.threads,
            "keep_memory": args.keep_memory,
            "samples": args.samples,
            "date": time.strftime("%Y-%m-%d"),
        }
        args.json.write_text(
            json.dumps(head | {"copy_gb_per_s": copy / 1e9, "rows": [asdict(r) for r in rows]}, indent=1)
        )
    return 1 if missed and args.check_goals else 0


if __name__ == "__main__":
    run_tool(main)
