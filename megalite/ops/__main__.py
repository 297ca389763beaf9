"""Every op, the backend chosen here, and why; with --check, each against float64 formulas."""

from __future__ import annotations

import argparse

import torch

from megalite.errors import run_tool
from megalite.ops import resolve
from megalite.ops.check import check
from megalite.ops.registry import pages

_DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m megalite.ops", description=__doc__)
    parser.add_argument("--ops", default="auto", help='what a run would be given, "rmsnorm=triton,adamw=cuda" say')
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu", help="cpu or cuda")
    parser.add_argument("--dtype", choices=_DTYPES, default="bf16", help="dtype of the activations")
    parser.add_argument("--check", action="store_true", help="also run the chosen backends against float64 formulas")
    args = parser.parse_args()
    device, dtype = torch.device(args.device), _DTYPES[args.dtype]
    ops = resolve(args.ops, device, dtype)
    choices = {choice.page: choice for choice in ops.choices}
    print(f"{'op':14} {'backend':8} why")
    for page in pages():
        choice = choices[page.name]
        print(f"{page.name:14} {choice.backend:8} {choice.reason}")
        for backend in page.backends:
            reason = backend.why_not(device, dtype)
            if backend.name != choice.backend:
                print(f"{'':14} {'':8} {backend.name}: {reason or 'can run here'}")
    if not args.check:
        return 0
    results = check(ops, device, dtype)
    print(f"\n{'case':52} {'error':>9} {'limit':>9}")
    for result in results:
        print(
            f"{result.case:52} {result.error:9.1e} {result.limit:9.0e} {'' if result.ok else 'FAILED ' + result.fault}"
        )
    failed = sum(not result.ok for result in results)
    print(f"{len(results)} cases, {failed} failed")
    return 1 if failed else 0


if __name__ == "__main__":
    run_tool(main)
