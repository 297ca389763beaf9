"""`megalite plot` and `megalite inspect`."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from megalite.core.base.errors import printable
from megalite.extras.tool import ToolParser
from megalite.extras.view.runs import X_LABELS, load_runs, save


def plot(argv: Sequence[str]) -> None:
    """Draw runs."""
    about = "Draw loss (with evaluations), learning rate and gradient norm of runs."
    parser = ToolParser(prog="megalite plot", description=about)
    parser.add_argument("runs", nargs="+", type=Path, metavar="RUN_DIR", help="run directories (--run-dir of a run)")
    parser.add_argument("--out", type=Path, required=True, metavar="F", help="picture to write (.png, .svg or .pdf)")
    parser.add_argument("--x", choices=tuple(X_LABELS), default="step", help="horizontal axis (step)")
    args = parser.parse_args(argv)
    save(load_runs(args.runs, args.x), args.out, args.x)
    print(f"wrote {args.out}")


def inspect(argv: Sequence[str]) -> None:
    """Describe a checkpoint."""
    parser = ToolParser(prog="megalite inspect", description="Show what a checkpoint holds, and verify its checksums.")
    parser.add_argument("checkpoint", metavar="CKPT", help="checkpoint folder, or a run directory (its newest)")
    parser.add_argument("--verify", action="store_true", help="read everything and verify all checksums")
    parser.add_argument("--tensors", action="store_true", help="list all tensors and where their parts are")
    about = "write it to a new folder as plain safetensors shards, which need no base and no package zstandard"
    parser.add_argument("--flatten", type=Path, metavar="OUT", help=about)
    args = parser.parse_args(argv)
    from megalite.extras.saved_model import resolve_checkpoint
    from megalite.extras.view.checkpoint import describe  # with torch
    from megalite.extras.view.flatten import flatten

    # Once: a run that goes on may save another one meanwhile.
    checkpoint = resolve_checkpoint(args.checkpoint)
    for line in describe(checkpoint, args.tensors, args.verify):
        print(printable(line))
    if args.flatten is not None:
        print(printable(f"wrote {args.flatten}: {flatten(checkpoint, args.flatten):,} bytes in shards"))
