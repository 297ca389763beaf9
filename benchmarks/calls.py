#!/usr/bin/env python3
"""What a call of a C++ kernel costs: `python benchmarks/calls.py [--json FILE]`.

Operands have one row of 64 elements, so that checking them, allocating the result and starting the kernel take nearly
all of the time. Ops take turns, round by round; a figure is the median over the rounds of the processor time of a call
on one thread. To compare two builds, run each in its own checkout, in turns.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch

from megalite.core.base.errors import UserError
from megalite.core.parts.kernels import cpp
from megalite.core.parts.kernels.native import why_no_cpp
from megalite.extras.tool import run_tool
from megalite.runtime.data.blend import compiled

_CALLS = 2000


def calls(dtype: torch.dtype) -> dict[str, Callable[[], Any]]:
    """A call of every kernel, by its name."""

    def draw(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=generator).to(dtype)

    generator = torch.Generator().manual_seed(0)
    x, weight, heads = draw(1, 64), draw(64), draw(1, 1, 3, 16)
    rstd, one, cos = torch.ones(1), torch.ones(1), torch.ones(1, 8)
    target = torch.zeros(1, dtype=torch.int64)
    flat = [torch.ones(64) for _ in range(4)]
    operands: dict[str, tuple[Any, ...]] = {
        "norm": (x, x.clone(), weight, None, 1e-5),
        "norm_backward": (x, x.clone(), x.clone(), weight, None, rstd, draw(64), None, False, False),
        "glu": (x, 0),
        "glu_backward": (draw(1, 32), x, 0),
        "rope_": (heads, cos, cos.clone(), 2),
        "rope": (heads, cos, cos.clone(), False),
        "rope_pack": (draw(1, 1, 1, 16), draw(1, 1, 1, 16), draw(1, 1, 1, 16), cos, cos.clone()),
        "cross_entropy_stats": (x, target, 0, 64),
        "cross_entropy_grad_": (x.clone(), target, 0, one, one.clone(), 64),
        "adamw_": (*flat, weight.bfloat16(), torch.tensor(0.5), 1e-3, 0.9, 0.95, 1e-8, 0.1, 1),
        "l2_norm": (weight,),
    }
    found: dict[str, Callable[[], Any]] = {name: partial(cpp.KERNELS[name], *operands[name]) for name in cpp.KERNELS}
    if (blend := compiled()) is not None:
        weights, taken, choices = np.ones(2), np.zeros(2, np.int64), np.empty((1, 2), np.int64)
        found["blend rule"] = partial(blend, weights, taken, choices, 0, 1)
    return found


def measure(rounds: int, dtype: torch.dtype) -> dict[str, float]:
    """Microseconds of a call, by kernel."""
    times: dict[str, list[float]] = {}
    runs = calls(dtype)
    for _ in range(rounds):
        for name, run in runs.items():
            before = time.process_time()
            for _ in range(_CALLS):
                run()
            times.setdefault(name, []).append((time.process_time() - before) / _CALLS * 1e6)
    return {name: statistics.median(values) for name, values in times.items()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=25, help=f"rounds of {_CALLS} calls of every kernel (25)")
    parser.add_argument("--json", type=Path, metavar="F", help="also write the figures to F")
    args = parser.parse_args()
    if args.rounds < 1:
        raise UserError(f"--rounds {args.rounds}", "must be at least 1", "use --rounds 25")
    torch.set_num_threads(1)
    if (why_not := why_no_cpp(torch.device("cpu"), torch.float32)) is not None:
        raise UserError("the C++ kernels", why_not, "install megalite with a C++ compiler")
    figures = {kind: measure(args.rounds, dtype) for kind, dtype in (("fp32", torch.float32), ("bf16", torch.bfloat16))}
    for name in figures["fp32"]:
        print(f"{name:24}" + "  ".join(f"{kind} {figures[kind][name]:6.2f} us" for kind in figures))
    if args.json:
        args.json.write_text(json.dumps(figures, indent=1) + "\n")


if __name__ == "__main__":
    run_tool(main)
