"""Run the real training step of one rank, without a GPU or peers, and show what it holds, computes and sends."""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from megalite.core.base.errors import UserError
from megalite.extras.estimate.guard import install_guard
from megalite.extras.tool import ToolParser
from megalite.extras.view.picture import picture_errors


def _parse(argv: Sequence[str]) -> tuple[argparse.Namespace, list[str]]:
    parser = ToolParser(
        prog="megalite estimate",
        description=f"{__doc__} All other flags are those of pretrain_gpt.py.",
        allow_abbrev=False,
    )
    parser.add_argument("--rank", type=int, default=0, help="which rank (0)")
    parser.add_argument("--world", type=int, required=True, help="number of ranks")
    parser.add_argument(
        "--budget", action="store_true", help="print instead how long its kernels would take on an H200 and an H100"
    )
    parser.add_argument(
        "--streams",
        action="store_true",
        help="check instead whether two steps and an evaluation use memory in order on all streams; 1: they do not",
    )
    parser.add_argument("--json", action="store_true", help="print JSON instead of text")
    parser.add_argument("--png", type=Path, metavar="F", help="draw memory over the step to F (.png, .svg or .pdf)")
    return parser.parse_known_args(argv)


def main(argv: Sequence[str]) -> None:
    """Run `megalite estimate`.

    Raises:
        SystemExit: with 1, `--streams` found a fault.
    """
    args, flags = _parse(argv)
    install_guard()
    # What follows imports torch.
    from megalite.core.mesh.grid import Grid
    from megalite.extras.compat.dialect import DIALECT
    from megalite.extras.estimate.budget import budget_json, budget_table
    from megalite.extras.estimate.races import check_rank
    from megalite.extras.estimate.rank import check_request, estimate
    from megalite.extras.estimate.report import order_text, to_json, to_text
    from megalite.extras.plan.memory.ranks import memory_per_rank
    from megalite.runtime.checkpoint.hf.start import hf_model_config
    from megalite.runtime.options import cli
    from megalite.runtime.options.fields import with_options
    from megalite.runtime.start.inputs import with_vocab_size

    parsed = cli.parse(flags, read_model=hf_model_config, world=args.world, dialect=DIALECT)
    if parsed.layout is not None:
        rule = "an estimate is for one layout"
        raise UserError("--layout auto", rule, "choose one with `megalite plan`, and give its flags")
    # A step with the largest batch.
    cfg = with_options(with_vocab_size(parsed.config), {"batch_size_schedule": None})
    if cfg.model.vocab_size is None:
        raise UserError("no vocabulary size", "the estimate requires it", "give --vocab-size, --tokenizer or --data")
    grid = Grid.from_config(cfg.parallel, args.world)
    if args.streams:
        check_request(cfg, grid, args.rank, streams=True)
        order = check_rank(cfg, grid, args.rank)
        print(json.dumps({"operations": order.operations, "faults": order.faults}) if args.json else order_text(order))
        raise SystemExit(1 if order.faults else 0)
    result = estimate(cfg, grid, args.rank)
    if args.budget:
        print(json.dumps(budget_json(result, cfg)) if args.json else budget_table(result, cfg))
    else:
        predicted = memory_per_rank(cfg, grid)[grid.coords(args.rank)["pp"]]
        print(json.dumps(to_json(result, predicted)) if args.json else to_text(result, predicted))
    if args.png:
        with picture_errors(f"picture {args.png}"):
            draw(result).savefig(args.png, dpi=150)


def draw(result: Any) -> Any:
    """Draw memory over the pipeline operations of the step."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(12, 4), layout="constrained")
    axes = figure.add_subplot()
    timeline = [entry for entry in result.timeline if "@" not in entry[0]]  # no messages
    before, most = ([entry[i] / 2**30 for entry in timeline] for i in (1, 2))
    at = range(len(before))
    axes.fill_between(at, most, step="post", color="#d5e3f0", label="peak during the operation")
    axes.fill_between(at, before, step="post", color="#4c78a8", label="kept from earlier operations")
    axes.axhline(result.states / 2**30, color="black", linewidth=0.8, linestyle="--", label="between steps")
    ticks = at[:: max(1, len(at) // 24)]
    axes.set_xticks(ticks, [timeline[i][0] for i in ticks], rotation=90, fontsize=7)
    axes.set_ylabel("GiB")
    axes.set_title(
        f"rank {result.rank} of {result.grid.world}: {result.peak.nbytes / 2**30:.2f} GiB at {result.peak.during}"
    )
    axes.set_xlim(0, max(1, len(at) - 1))
    axes.legend(loc="lower right", fontsize=8)
    return figure
