"""List every op, the backend chosen here, and why."""

from __future__ import annotations

import argparse

import torch

from megalite.core.base.dtypes import DTYPES
from megalite.core.base.errors import UserError
from megalite.core.ops.choose import OPS, resolve


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m megalite.core.ops", description=__doc__)
    parser.add_argument("--ops", default="auto", help='the --ops of a run, such as "rmsnorm=triton,adamw=cuda"')
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu", help="cpu or cuda")
    parser.add_argument("--dtype", choices=DTYPES, default="bf16", help="dtype of the activations")
    args = parser.parse_args()
    device, dtype = torch.device(args.device), DTYPES[args.dtype]
    try:
        choices = resolve(args.ops, device, dtype).choices
    except UserError as e:
        parser.exit(2, f"error: {e}\n")
    print(f"{'op':14} {'backend':8} why")
    for choice in choices:
        print(f"{choice.op:14} {choice.backend:8} {choice.reason}")
        for backend in OPS[choice.op].backends:
            if backend.name != choice.backend:
                print(f"{'':23} {backend.name}: {backend.why_not(device, dtype) or 'can run here'}")


if __name__ == "__main__":
    main()
