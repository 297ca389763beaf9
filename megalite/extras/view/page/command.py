"""`megalite view`: one page of a run, as a file or, while it trains, from a server on this host."""

from __future__ import annotations

import argparse
import contextlib
import time
from collections.abc import Sequence
from pathlib import Path

from megalite.core.base.errors import UserError, require
from megalite.extras.plan.cluster import Cluster
from megalite.extras.tool import ToolParser
from megalite.extras.view.page.collect import collect
from megalite.extras.view.page.curves import MOST_POINTS
from megalite.extras.view.page.embed import page
from megalite.extras.view.page.serve import serve
from megalite.extras.view.runs import names_of_runs
from megalite.runtime.record.metrics import METRICS_FILE


def _parse(argv: Sequence[str]) -> argparse.Namespace:
    parser = ToolParser(
        prog="megalite view",
        description="Show runs in a browser: curves, ranks and shards, schedule, messages, memory, experts, "
        "checkpoints and the plan. The page is one file that needs no network.",
    )
    parser.add_argument("runs", nargs="+", type=Path, metavar="RUN_DIR", help="run directories (--run-dir of a run)")
    parser.add_argument("--html", type=Path, metavar="F", help="page to write")
    parser.add_argument(
        "--serve",
        type=int,
        nargs="?",
        const=0,
        metavar="PORT",
        help="show it on this host (127.0.0.1) instead, with new steps as they come; PORT 0: any (0)",
    )
    parser.add_argument("--cluster", help="of the plan, as for megalite plan (as many H100s as the run has ranks)")
    parser.add_argument(
        "--max-points", type=int, help=f"points of a curve ({MOST_POINTS}, fewer if the page would be larger than 3 MB)"
    )
    parser.add_argument("--no-estimate", action="store_true", help="leave out messages and shares of buckets (faster)")
    parser.add_argument("--hide-paths", action="store_true", help="leave out the folders of this machine")
    return parser.parse_args(argv)


def main(argv: Sequence[str]) -> None:
    """Run `megalite view`."""
    args = _parse(argv)
    require((args.html is None) != (args.serve is None), "megalite view", "needs --html F or --serve", "give one")
    named = args.html is None or args.html.name
    require(bool(named), f"--html {args.html}", "names no file", "add a name, such as run.html")
    folder = args.html.parent if args.html is not None else Path()
    require(folder.is_dir(), f"--html {args.html}", f"there is no folder {folder}", "make it first")
    enough = args.max_points is None or args.max_points >= 100
    require(enough, f"--max-points {args.max_points}", "must be at least 100", "drop it")
    for run in args.runs:
        if not (run / METRICS_FILE).exists() and not (run / "config.yaml").exists():
            rule = f"has neither {METRICS_FILE} nor config.yaml"
            raise UserError(f"run directory {run}", rule, "use the --run-dir of a run that has started")
    if args.cluster is not None:
        Cluster.parse(args.cluster)
    runs = list(zip(names_of_runs(args.runs), args.runs))
    hide = "…/" if args.hide_paths else None

    def make(live: bool) -> str:
        made = time.strftime("%Y-%m-%d %H:%M:%S UTC", time.gmtime())
        data = collect(runs, made, args.max_points, args.cluster, not args.no_estimate)
        return page(data, ", ".join(name for name, _ in runs), hide, live)

    if args.serve is not None:
        serve(args.runs, lambda: make(True), args.serve, hide)
        return
    text = make(False)
    unfinished = args.html.with_name(args.html.name + ".tmp")
    try:
        unfinished.write_bytes(text.encode())
        unfinished.replace(args.html)
    except OSError as e:
        raise UserError(f"--html {args.html}", f"cannot be written ({e.strerror})", "choose another file") from None
    finally:
        with contextlib.suppress(OSError):
            unfinished.unlink(missing_ok=True)
    print(f"wrote {args.html.resolve()} ({len(text.encode()):,} bytes): open it in a browser")
