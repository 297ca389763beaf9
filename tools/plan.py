#!/usr/bin/env python3
"""Memory and step time of every layout on a described cluster, without a GPU: search, explain, sweep, check, fit.

`calibrate` measures the machine at hand instead.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

from megalite.config import cli
from megalite.config.run import Config
from megalite.dist.grid import Grid
from megalite.errors import ToolParser, UserError, run_tool
from megalite.plan.cluster import FITTED, Cluster, read_calibration
from megalite.plan.memory import memory_per_rank
from megalite.plan.report import as_json, best_layouts, explain_text, mfu, search_text
from megalite.plan.search import Found, pick, search
from megalite.plan.time import step_time
from picture import picture_errors
from plan_views import draw_search, draw_sweep


def _parser(name: str, about: str) -> argparse.ArgumentParser:
    parser = ToolParser(prog=f"plan.py {name}", description=about, allow_abbrev=False)
    parser.add_argument("--json", action="store_true", help="figures as JSON instead of text")
    return parser


def _planned(
    name: str, about: str, argv: Sequence[str], searches: bool = True, **extra: dict[str, object]
) -> tuple[argparse.Namespace, Config, frozenset[str], Cluster, list[str]]:
    """Read the options of the planner, and all others as those of pretrain_gpt.py.

    A search keeps the layout's options that are flags, and chooses those of files anew.
    """
    kept = "; those of the layout are kept" if searches else ""
    parser = _parser(name, f"{about} All other flags are those of pretrain_gpt.py{kept}.")
    parser.add_argument(
        "--cluster", required=True, help="NAME:GPUS[,domain=N][,network=GB/s]: h100:64, b200:288,domain=72"
    )
    parser.add_argument("--png", type=Path, metavar="F", help="draw to F (.png, .svg or .pdf)")
    for flag, options in extra.items():
        parser.add_argument(f"--{flag}", **options)  # type: ignore[arg-type]
    args, asked = parser.parse_known_args(argv)
    if not any(word.split("=")[0] in ("--precision", "--config", "--bf16", "--fp16") for word in asked):
        asked += ["--precision", "bf16"]
    parsed = cli.parse([*asked, *(("--layout", "auto") if searches else ())], prog="plan.py")
    cfg = parsed.config
    if cfg.model.vocab_size is None:
        raise UserError("no vocabulary size", "the plan requires it", "give --preset or --vocab-size")
    path = cfg.run.calibration
    device, constants = (None, FITTED) if path is None else read_calibration(Path(path))
    return args, cfg, parsed.layout or frozenset(), Cluster.parse(args.cluster, device, constants), asked


def search_command(argv: Sequence[str]) -> int:
    args, cfg, held, cluster, asked = _planned(
        "search",
        "Search every layout: what does not fit and why, the best ones, and the command line of the pick.",
        argv,
        top={"type": int, "default": 10, "help": "how many of the best to show (10)"},
    )
    if args.top < 1:
        raise UserError(f"--top {args.top}", "must be at least 1", "drop it for the ten best")
    found = search(cfg, cluster, held)
    print(json.dumps(as_json(found, cluster)) if args.json else search_text(found, cluster, asked, args.top))
    if args.png:
        with picture_errors(f"picture {args.png}"):
            draw_search(best_layouts(found, args.top), cluster).savefig(args.png, dpi=150)
    return 0


def explain_command(argv: Sequence[str]) -> int:
    about = "Show every term of one layout, given by its flags or a file."
    args, cfg, _, cluster, _ = _planned("explain", about, argv, searches=False)
    grid = Grid.of(cluster.gpus, cfg.parallel.tp, cfg.parallel.pp)
    time, ranks = step_time(cfg, grid, cluster), memory_per_rank(cfg, grid)
    if args.png:
        one = Found(cfg, grid, ranks, time, cluster.device.memory, cluster.device.host_memory)
        with picture_errors(f"picture {args.png}"):
            draw_search([one], cluster).savefig(args.png, dpi=150)
    if args.json:
        memory = [{**vars(rank), "total": rank.total} for rank in ranks]
        print(json.dumps({"step_time_s": time.total, "terms": time.terms, "memory": memory}))
    else:
        print(explain_text(cfg, grid, cluster, time))
    return 0


def sweep_command(argv: Sequence[str]) -> int:
    args, cfg, held, cluster, _ = _planned(
        "sweep",
        "Predict strong scaling (the same global batch) and weak scaling (it grows with the GPUs).",
        argv,
        gpus={"default": "64..4096", "help": "FROM..TO, doubling (64..4096); replaces the number of --cluster"},
    )
    points = []
    sizes = _sizes(args.gpus)
    for mode in ("strong", "weak"):
        for gpus in sizes:
            batch = cfg.train.global_batch_size * (gpus // sizes[0] if mode == "weak" else 1)
            where = cluster.with_gpus(gpus)
            try:
                best = pick(search(replace(cfg, train=replace(cfg.train, global_batch_size=batch)), where, held))
            except UserError:
                best = None  # fewer samples than ranks
            if best is not None:
                points.append({"mode": mode, "gpus": gpus, "global_batch_size": batch, **as_json([best], where)[0],
                               "tokens_per_s": batch * cfg.model.seq_len / best.time.total})  # fmt: skip
                if not args.json:
                    print(f"{mode:<7}{gpus:>7} GPUs{batch:>8} samples{best.time.total:>10.4g} s  "
                          f"MFU {mfu(best, where):6.1%}  dp {best.grid['dp']} tp {best.options['tp']} "
                          f"pp {best.options['pp']} vp {best.options['vp']} {best.options['schedule']}")  # fmt: skip
    if not points:
        raise UserError(f"--gpus {args.gpus}", "no layout fits on any of them", "use more GPUs, or other options")
    if args.png:
        with picture_errors(f"picture {args.png}"):
            draw_sweep(points).savefig(args.png, dpi=150)
    if args.json:
        print(json.dumps(points))
    return 0


def _sizes(text: str) -> list[int]:
    first, dots, last = text.partition("..")
    if not (dots and first.isdecimal() and last.isdecimal() and 0 < int(first) <= int(last)):
        raise UserError(f"--gpus {text}", "must be FROM..TO", "write 64..4096")
    sizes = [int(first)]
    while sizes[-1] * 2 <= int(last):
        sizes.append(sizes[-1] * 2)
    return sizes


def check_command(argv: Sequence[str]) -> int:
    parser = _parser("check", "Compare predictions with published runs; exit 1 if an error is above its goal.")
    parser.add_argument("--reference", type=Path, required=True, metavar="F", help="JSON of published runs")
    parser.add_argument("--markdown", action="store_true", help="the table of docs/plan.md instead")
    args = parser.parse_args(argv)
    from megalite.plan.check import check, markdown, summarize, table
    from megalite.plan.published import read_runs

    rows = check(read_runs(args.reference))
    summary = summarize(rows)
    if args.json:
        print(json.dumps({"rows": [row.as_json() for row in rows], "summary": vars(summary)}))
    else:
        print(markdown(rows, summary) if args.markdown else table(summary))
    return 1 if summary.failed else 0


def fit_command(argv: Sequence[str]) -> int:
    parser = _parser("fit", "Fit the constants to published runs, and to all but one source each (a minute).")
    parser.add_argument("--reference", type=Path, required=True, metavar="F", help="JSON of published runs")
    parser.add_argument("--markdown", action="store_true", help="the table of docs/plan.md instead")
    args = parser.parse_args(argv)
    from megalite.plan.fit import fit, left_out, timed
    from megalite.plan.published import read_runs

    runs = timed(read_runs(args.reference))
    values, errors = fit(runs), left_out(runs)
    if args.json:
        print(json.dumps({"constants": values, "left_out": errors}))
        return 0
    if args.markdown:
        print("| left out | step time |\n|---|---|")
        print("\n".join(f"| {source} | {value:.1%} |" for source, value in errors.items()))
        return 0
    print("\n".join(f"{name:<12}{value:.4g}" for name, value in values.items()))
    print("\nmean absolute error of a source, constants fitted to all others:")
    print("\n".join(f"  {source:<16}{value:6.1%}" for source, value in errors.items()))
    return 0


def calibrate_command(argv: Sequence[str]) -> int:
    from megalite.train.calibration.run import main as calibrate  # with torch, which a plan does without

    return calibrate(argv, [str(Path(__file__).resolve()), "calibrate"])


COMMANDS: dict[str, Callable[[Sequence[str]], int]] = {
    "search": search_command,
    "explain": explain_command,
    "sweep": sweep_command,
    "check": check_command,
    "fit": fit_command,
    "calibrate": calibrate_command,
}


def main(argv: Sequence[str] | None = None) -> int:
    words = list(sys.argv[1:] if argv is None else argv)
    name = words.pop(0) if words and not words[0].startswith("-") else "search"
    if name not in COMMANDS:
        raise UserError(f"plan.py {name}", f"must be one of {', '.join(COMMANDS)}", "see plan.py --help")
    if name == "search" and words in (["-h"], ["--help"]):
        print(f"{__doc__}\n\nplan.py [{'|'.join(COMMANDS)}] FLAGS (search is the default; each has --help)\n")
    return COMMANDS[name](words)


if __name__ == "__main__":
    run_tool(main)
