"""List every op, the backend chosen here, and why."""

from __future__ import annotations

import torch

from megalite.base.errors import ToolParser, run_tool
from megalite.dist.dtypes import DTYPES
from megalite.ops.choose import OPS, resolve


def main() -> int:
    parser = ToolParser(prog="python -m megalite.ops", description=__doc__)
    parser.add_argument("--ops", default="auto", help='the --ops of a run, such as "rmsnorm=triton,adamw=cuda"')
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu", help="cpu or cuda")
    parser.add_argument("--dtype", choices=DTYPES, default="bf16", help="dtype of the activations")
    args = parser.parse_args()
    device, dtype = torch.device(args.device), DTYPES[args.dtype]
    print(f"{'op':14} {'backend':8} why")
    for choice in resolve(args.ops, device, dtype).choices:
        print(f"{choice.op:14} {choice.backend:8} {choice.reason}")
        for backend in OPS[choice.op].backends:
            if backend.name != choice.backend:
                print(f"{'':23} {backend.name}: {backend.why_not(device, dtype) or 'can run here'}")
    return 0


if __name__ == "__main__":
    run_tool(main)
