"""`megalite mup check` and `megalite mup sweep`: small models of several widths, with muP and without."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from megalite.core.base.errors import in_range, require
from megalite.extras.tool import ToolParser
from megalite.extras.view.picture import picture_errors

CASES = ("with muP", "without")


def main(argv: Sequence[str]) -> None:
    """Print, and draw, what changes with the width."""
    parser = ToolParser(prog="megalite mup", description="Check that settings carry over from width to width.")
    parser.add_argument(
        "what",
        choices=("check", "sweep"),
        metavar="{check,sweep}",
        help="activations after four steps, or losses by learning rate",
    )
    parser.add_argument("--optimizer", default="adamw", help="one that muP supports (adamw)")
    parser.add_argument(
        "--widths",
        type=int,
        nargs="+",
        default=[64, 128, 256, 512],
        help="hidden sizes, base width first (64 128 256 512)",
    )
    parser.add_argument("--steps", type=int, default=200, help="sweep: steps of each run (200)")
    parser.add_argument(
        "--rates", type=int, nargs=2, default=(-13, -5), metavar="K", help="sweep: from 2^K to 2^K (-13 -5)"
    )
    parser.add_argument("--png", type=Path, help="picture to write (.png, .svg or .pdf)")
    parser.add_argument("--json", action="store_true", help="print the figures as JSON")
    args = parser.parse_args(argv)
    in_range(args, "steps", 1, 10**6)
    first, last = args.rates
    require(first <= last, f"--rates {first} {last}", "must be exponents, the lower one first", "write --rates -13 -5")
    several, given = len(set(args.widths)) > 1, " ".join(map(str, args.widths))
    require(several or args.what == "sweep", f"--widths {given}", "one width has no slope", "give --widths 64 128 256")
    bases = dict(zip(CASES, (args.widths[0], None)))
    if args.what == "check":
        from megalite.extras.mup.coordinates import measure, slopes  # with torch

        curves: dict[str, dict[str, dict[Any, float]]] = {
            case: by_layer({w: measure(w, args.optimizer, base) for w in args.widths}) for case, base in bases.items()
        }
        axes, text = ("width", "mean |activation| after 4 steps"), ""
        for case, layers in curves.items():
            text += f"{case}: slopes of log size over log width\n"
            text += "".join(f"  {name:24}{slope:6.2f}\n" for name, slope in slopes(layers).items())
    else:
        from megalite.extras.mup.sweep import sweep, table

        rates = [2.0**k for k in range(args.rates[0], args.rates[1] + 1)]
        losses = {case: sweep(args.widths, rates, args.optimizer, base, args.steps) for case, base in bases.items()}
        text = "\n\n".join(f"{case}\n{table(rows)}" for case, rows in losses.items())
        curves = {case: {f"width {width}": dict(row) for width, row in rows.items()} for case, rows in losses.items()}
        axes = ("learning rate", "loss")
    print(json.dumps(curves) if args.json else text)
    if args.png is not None:
        with picture_errors(f"--png {args.png}"):
            draw(curves, args.png, axes)


def by_layer(by_width: Mapping[int, Mapping[str, float]]) -> dict[str, dict[Any, float]]:
    """Turn {width: {layer: size}} into {layer: {width: size}}."""
    return {name: {w: sizes[name] for w, sizes in by_width.items()} for name in next(iter(by_width.values()))}


def draw(curves: Mapping[str, Mapping[str, Mapping[Any, float]]], path: Path, axes: tuple[str, str]) -> None:
    """Draw a panel per case, and a line per name in it."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot as plt

    figure, panels = plt.subplots(1, len(curves), figsize=(10, 4), sharey=True)
    for panel, (case, lines) in zip(panels, curves.items()):
        for name, line in lines.items():
            panel.plot(list(line), list(line.values()), marker="o", markersize=3, label=name)
        panel.set_xscale("log", base=2)
        if axes[0] == "width":
            panel.set_yscale("log")
        panel.set_title(case)
        panel.set_xlabel(axes[0])
    panels[0].set_ylabel(axes[1])
    panels[-1].legend(fontsize=7)
    figure.tight_layout()
    figure.savefig(path, dpi=120)
    plt.close(figure)
