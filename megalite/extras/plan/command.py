"""Predict memory and step time of every layout on a cluster, without a GPU: search, explain, sweep, check.

`calibrate` measures the machine at hand.
"""

from __future__ import annotations

import argparse
import json
import re
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

from megalite.core.base.errors import UserError, in_range, require
from megalite.core.base.hardware import DEVICES
from megalite.core.mesh.grid import Grid
from megalite.core.options.train import TrainConfig
from megalite.extras.compat.dialect import DIALECT
from megalite.extras.plan.cluster import FITTED, Cluster, read_calibration
from megalite.extras.plan.fewest import fewest
from megalite.extras.plan.memory.ranks import RankMemory, memory_per_rank
from megalite.extras.plan.outlook import batch_note, cores_of_text, outlook, read_tokens, reliability, rounder_batch
from megalite.extras.plan.pictures import draw_search, draw_sweep
from megalite.extras.plan.recovery import check_failures, effective_text, failure_figures, traffic
from megalite.extras.plan.report import as_json, best_layouts, explain_text, mfu, search_text
from megalite.extras.plan.saves import code_lines
from megalite.extras.plan.search import Candidate, pick, search
from megalite.extras.plan.time.step import StepTime, step_time
from megalite.extras.tool import ToolParser
from megalite.extras.view.picture import picture_errors
from megalite.runtime.options import cli
from megalite.runtime.options.run import Config

# Flags that set the batch size, and those of files that may.
_GIVES_BATCH = {"--global-batch-size", "--batch-size-schedule", "--config", "--deepspeed-config", "--accelerate-config"}

_MOST = 16_384
"""The largest number of GPUs that --fewest tries unless --cluster has another."""
_MTBF = {"type": float, "metavar": "HOURS", "help": "from one failure of the run to the next: what share is progress"}


def _parser(name: str, about: str) -> argparse.ArgumentParser:
    parser = ToolParser(prog=f"megalite plan {name}", description=about, allow_abbrev=False)
    parser.add_argument("--json", action="store_true", help="print JSON instead of text")
    return parser


def _planned(
    name: str, about: str, argv: Sequence[str], searches: bool = True, **extra: dict[str, object]
) -> tuple[argparse.Namespace, Config, frozenset[str], Cluster, list[str]]:
    """Read the planner's options, and all others as options of pretrain_gpt.py.

    A search keeps layout options that are flags; those in files are chosen anew.
    """
    kept = "; layout flags are kept" if searches else ""
    parser = _parser(name, f"{about} All other flags are those of pretrain_gpt.py{kept}.")
    parser.add_argument(
        "--cluster",
        required=True,
        help="NAME:GPUS[,nvlink=GB/s][,network=GB/s][,memory=GB][,domain=N]…: h100:64; or FILE.yaml of these",
    )
    parser.add_argument("--png", type=Path, metavar="F", help="draw to F (.png, .svg or .pdf)")
    for flag, options in extra.items():
        parser.add_argument(f"--{flag}", **options)  # type: ignore[arg-type]
    args, asked = parser.parse_known_args(argv)
    if not any(word.split("=")[0] in ("--precision", "--config", "--bf16", "--fp16") for word in asked):
        asked += ["--precision", "bf16"]
    gpus = re.search(r":(\d+)", args.cluster)
    auto = ("--layout", "auto") if searches else ()
    parsed = cli.parse([*asked, *auto], world=int(gpus[1]) if gpus else None, dialect=DIALECT)
    cfg = parsed.config
    if cfg.model.vocab_size is None:
        raise UserError("no vocabulary size", "the plan requires it", "give --preset or --vocab-size")
    path = cfg.run.calibration
    device, constants = (None, FITTED) if path is None else read_calibration(Path(path))
    return args, cfg, parsed.layout or frozenset(), Cluster.parse(args.cluster, device, constants), asked


def search_command(argv: Sequence[str]) -> int:
    args, cfg, held, cluster, asked = _planned(
        "search",
        "Search all layouts: show what does not fit and why, the best ones, and the command line of the pick.",
        argv,
        top={"type": int, "default": 10, "help": "number of layouts to show (10)"},
        tokens={"type": read_tokens, "metavar": "N", "help": "length of the training, for days and GPU hours: 300B"},
        price={"type": float, "metavar": "P", "help": "price of a GPU hour, for the cost of --tokens"},
        mtbf=_MTBF,
    )
    if args.top < 1:
        raise UserError(f"--top {args.top}", "must be at least 1", "drop it for the ten best")
    check_failures(cfg, cluster, args.mtbf)
    layouts = search(cfg, cluster, held)
    best = pick(layouts)
    lines = [] if best is None else outlook(best, cluster, args.tokens, args.price)
    if best is not None:
        lines += _failures(best.cfg, best.grid, best.ranks, cluster, best.time, args.mtbf)
        lines += cores_of_text(best, cluster, cfg.local_data.data)
    if best is not None and not args.json:
        lines += rounder_batch(best, cfg, cluster, held)
    if args.json:
        rows = as_json(layouts, cluster)
        if cfg.run.recover != "none" or args.mtbf is not None:
            for row, f in zip(rows, layouts):
                row["recovery"] = failure_figures(f.cfg, f.grid, f.ranks, cluster, f.time.total, args.mtbf)
        print(json.dumps(rows))
    else:
        words = {word.partition("=")[0] for word in asked}
        if cfg.train.global_batch_size == TrainConfig().global_batch_size and not words & _GIVES_BATCH:
            print(batch_note(cfg.train.global_batch_size))
        print(search_text(layouts, cluster, asked, args.top))
        # A comment: what stands above it is YAML.
        print("\n".join(f"# {line}" for line in [*lines, reliability(cfg)]))
    if args.png:
        with picture_errors(f"picture {args.png}"):
            draw_search(best_layouts(layouts, args.top), cluster).savefig(args.png, dpi=150)
    return 0


def explain_command(argv: Sequence[str]) -> int:
    about = "Show every term of one layout, given by its flags or a file."
    args, cfg, _, cluster, _ = _planned("explain", about, argv, searches=False, mtbf=_MTBF)
    check_failures(cfg, cluster, args.mtbf)
    grid = Grid.from_config(cfg.parallel, cluster.gpus)
    time, ranks = step_time(cfg, grid, cluster), memory_per_rank(cfg, grid)
    if args.png:
        one = Candidate(cfg, grid, ranks, time, cluster.device.memory, cluster.device.host_memory)
        with picture_errors(f"picture {args.png}"):
            draw_search([one], cluster).savefig(args.png, dpi=150)
    if args.json:
        memory = [{**vars(rank), "total": rank.total} for rank in ranks]
        told: dict[str, object] = {"step_time_s": time.total, "terms": time.terms, "memory": memory}
        if cfg.run.recover != "none" or args.mtbf is not None:
            told["recovery"] = failure_figures(cfg, grid, ranks, cluster, time.total, args.mtbf)
        print(json.dumps(told))
    else:
        lines = [*_failures(cfg, grid, ranks, cluster, time, args.mtbf), *code_lines(cfg, cluster)]
        print("\n".join([explain_text(cfg, grid, cluster, time), *lines]))
    return 0


def _failures(
    cfg: Config, grid: Grid, ranks: Sequence[RankMemory], cluster: Cluster, time: StepTime, mtbf: float | None
) -> list[str]:
    """Describe what a layout does about failures; `mtbf`: hours from one to the next, if they are asked about."""
    lines = traffic(cfg, ranks, cluster, time.total)
    if mtbf is not None:
        figures = failure_figures(cfg, grid, ranks, cluster, time.total, mtbf)
        lines.append(effective_text(cfg, time.total, figures))
    return lines


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
                points.append(
                    {
                        "mode": mode,
                        "gpus": gpus,
                        "global_batch_size": batch,
                        **as_json([best], where)[0],
                        "tokens_per_s": batch * cfg.model.seq_len / best.time.total,
                    }
                )
                if not args.json:
                    o = best.options
                    print(
                        f"{mode:<7}{gpus:>7} GPUs{batch:>8} samples{best.time.total:>10.4g} s  "
                        f"MFU {mfu(best, where):6.1%}  dp {best.grid['dp']} cp {o['cp']} tp {o['tp']} pp {o['pp']} "
                        f"vp {o['vp']} {o['schedule']}"
                    )
    if not points:
        raise UserError(f"--gpus {args.gpus}", "no layout fits any of these sizes", "use more GPUs, or other options")
    if args.png:
        with picture_errors(f"picture {args.png}"):
            draw_sweep(points).savefig(args.png, dpi=150)
    if args.json:
        print(json.dumps(points))
    return 0


def fewest_command(argv: Sequence[str]) -> int:
    about = "Find the fewest GPUs of each type that hold the model and end within --days."
    chosen = any(word.partition("=")[0] == "--cluster" for word in argv)
    args, cfg, held, cluster, _ = _planned(
        "--fewest",
        f"{about} --cluster names one type and the most of it (default: every type, up to {_MOST:,}).",
        [*argv] if chosen else [*argv, "--cluster", f"h100:{_MOST}"],
        tokens={"type": read_tokens, "required": True, "metavar": "N", "help": "length of the training: 300B"},
        days={"type": float, "required": True, "metavar": "D", "help": "time for it"},
    )
    in_range(args, "days", 0, 1e5, above=True)
    require(args.png is None, f"--png {args.png} with --fewest", "pictures are of a search or a sweep", "drop it")
    given, rule = f"--calibration {cfg.run.calibration} without --cluster", "measures one machine, not every type"
    require(chosen or cfg.run.calibration is None, given, rule, "give --cluster machine:GPUS")
    clusters = (
        [cluster]
        if chosen
        else [replace(cluster, device=d, domain=d.domain, network=d.network) for d in DEVICES.values()]
    )
    rows = []
    for one in clusters:
        found = fewest(cfg, one, held, args.tokens, args.days)
        rows.append(found.as_json(args.tokens))
        if not args.json:
            print(found.text(args.tokens, args.days), flush=True)
    if args.json:
        print(json.dumps(rows))
    else:
        print(reliability(cfg))
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
    from megalite.extras.plan.check import check, markdown, summarize, table
    from megalite.extras.plan.published import read_runs

    rows = check(read_runs(args.reference))
    summary = summarize(rows)
    if args.json:
        print(json.dumps({"rows": [row.as_json() for row in rows], "summary": vars(summary)}))
    else:
        print(markdown(rows, summary) if args.markdown else table(summary))
    return 1 if summary.failed else 0


def calibrate_command(argv: Sequence[str]) -> int:
    from megalite.extras.plan.calibration.run import main as calibrate  # with torch, which a plan does without

    return calibrate(argv)


COMMANDS: dict[str, Callable[[Sequence[str]], int]] = {
    "search": search_command,
    "explain": explain_command,
    "sweep": sweep_command,
    "fewest": fewest_command,
    "check": check_command,
    "calibrate": calibrate_command,
}


def main(argv: Sequence[str]) -> int:
    """Run `megalite plan`."""
    words = list(argv)
    if "--fewest" in words:
        words.remove("--fewest")
        words.insert(0, "fewest")
    name = words.pop(0) if words and not words[0].startswith("-") else "search"
    if name not in COMMANDS:
        raise UserError(f"megalite plan {name}", f"must be one of {', '.join(COMMANDS)}", "see megalite plan --help")
    if name == "search" and words in (["-h"], ["--help"]):
        print(f"{__doc__}\n\nmegalite plan [{'|'.join(COMMANDS)}] FLAGS (search is the default; each has --help)\n")
    return COMMANDS[name](words)
