"""Run tasks of EleutherAI's lm-eval on a run or an export, in the run's layout and without conversion.

    torchrun --nproc-per-node 4 tools/lm_harness.py runs/small --tasks arc_easy hellaswag
    python tools/lm_harness.py runs/small --tp 1 --pp 1 --tasks mine --include-path tasks

Requires pip install 'megalite[lm-eval]'. The tasks' data are downloaded unless they are local files.
"""

from __future__ import annotations

import argparse
import json
import os
from collections.abc import Sequence
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch

from megalite.data.tokenizer import Tokenizer, optional_import
from megalite.dist.agree import agree
from megalite.dist.context import ParallelContext, init_process_group, world_size
from megalite.dist.device import pick_device
from megalite.dist.grid import Grid
from megalite.errors import ToolParser, UserError, in_range, require
from megalite.log import logger
from megalite.train.exit import leaving_together
from megalite.train.inference import Weights, find_weights
from megalite.train.scoring import Scorer, scoring_config

# The other ranks wait in one operation while rank 0 downloads data or computes metrics.
_PATIENCE = timedelta(days=1)


def main(argv: Sequence[str] | None = None) -> None:
    """Print lm-eval's table of results on rank 0."""
    args = _parser().parse_args(argv)
    in_range(args, "tp pp batch_size limit", 1, 100_000)
    in_range(args, "max_length", 2, 2**30)
    in_range(args, "num_fewshot", 0, 100_000)
    in_range(args, "seed", 0, 2**63)
    world = world_size()
    weights = find_weights(args.path, args.tokenizer)
    layout = {"tp": args.tp, "pp": args.pp, "precision": args.precision}
    cfg = scoring_config(weights, world, **layout, rows=args.batch_size, max_length=args.max_length)
    device = pick_device(args.device, cfg.parallel.tp)
    ctx = join(device, world, cfg.parallel.tp, cfg.parallel.pp)
    # Mistakes are found before the weights are read.
    prepared = agree(ctx, lambda: _prepared(args, weights) if ctx.rank == 0 else None)
    scorer = Scorer(cfg, ctx, weights)
    if prepared is None:
        scorer.serve()
        return
    try:
        _evaluate(args, weights, scorer, *prepared)
    except UserError:
        # Between two requests; after any other failure the ranks end each other.
        scorer.close()
        raise
    scorer.close()


def join(device: torch.device, world: int, tp: int, pp: int) -> ParallelContext:
    """Join the process group and build the axes, with time limits that allow for what rank 0 does alone."""
    init_process_group(device, _PATIENCE)
    return ParallelContext.create(Grid.of(world, tp, pp), device, timeout=_PATIENCE)


def _parser() -> ToolParser:
    parser = ToolParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("path", type=Path, help="run directory, a checkpoint in it, or a Hugging Face folder")
    parser.add_argument("--tasks", nargs="+", required=True, metavar="TASK", help="names or patterns of tasks")
    parser.add_argument("--include-path", metavar="DIR", help="folder with task files (*.yaml) of your own")
    parser.add_argument("--num-fewshot", type=int, metavar="N", help="examples per question (default: the task's)")
    parser.add_argument("--limit", type=int, metavar="N", help="use the first N documents of each task only")
    parser.add_argument("--tp", type=int, help="tensor-parallel size (default: the run's)")
    parser.add_argument("--pp", type=int, help="pipeline-parallel size (default: the run's)")
    parser.add_argument("--precision", choices=["fp32", "bf16", "fp16"], help="default: the run's; fp32 for a folder")
    parser.add_argument("--batch-size", type=int, default=8, metavar="N", help="rows per pass and rank (default 8)")
    parser.add_argument("--max-length", type=int, metavar="N", help="most tokens of a row (default: the run's)")
    bos = "begin every context with the tokenizer's beginning of text, for models that were trained so (Llama)"
    parser.add_argument("--bos", action="store_true", help=bos)
    parser.add_argument("--seed", type=int, default=0, help="of sampled text (default 0)")
    parser.add_argument("--tokenizer", help="tokenizer folder or file (default: the run's, or the folder's)")
    parser.add_argument("--device", default="auto", choices=["auto", "cpu", "cuda"])
    parser.add_argument("--json", type=Path, metavar="FILE", help="also write the results here")
    return parser


def _prepared(args: argparse.Namespace, weights: Weights) -> tuple[Tokenizer, Any]:
    """Check what is read and written; return the tokenizer and the tasks."""
    if args.json is not None:
        _check_writable(args.json)
    tokenizer = weights.load_tokenizer()
    remedy = "use the tokenizer of the training"
    require(
        tokenizer.eos_id is not None,
        f"tokenizer {tokenizer.path}",
        "has no end of text, which separates documents",
        remedy,
    )
    require(
        not args.bos or tokenizer.bos_id is not None,
        "--bos",
        f"tokenizer {tokenizer.path} has no beginning of text",
        remedy,
    )
    return tokenizer, _tasks(args)


def _check_writable(path: Path) -> None:
    given, remedy = f"--json {path}", "choose another path"
    require(path.parent.is_dir(), given, "is in a folder that does not exist", "make it, or choose another path")
    require(not path.is_dir(), given, "is a folder", remedy)
    require(os.access(path if path.exists() else path.parent, os.W_OK), given, "cannot be written", remedy)


def _tasks(args: argparse.Namespace) -> Any:
    """Return lm-eval's registry of tasks, in which all those asked for are."""
    optional_import("lm_eval", "lm-eval", "lm-eval")
    from lm_eval.tasks import TaskManager

    manager = TaskManager(include_path=args.include_path)
    for name in args.tasks:
        if not manager.match_tasks([name]):
            raise UserError(f"--tasks {name}", "lm-eval has no such task", "correct it, or give --include-path")
    return manager


def _evaluate(args: argparse.Namespace, weights: Weights, scorer: Scorer, tokenizer: Tokenizer, manager: Any) -> None:
    import lm_eval
    from lm_eval.utils import make_table

    from lm_eval_model import HarnessLM

    cfg, ctx = scorer.cfg, scorer.ctx
    length = args.max_length or weights.cfg.seq_len
    lm = HarnessLM(scorer, tokenizer, length, args.bos, args.seed)
    layout = {"dp": ctx.dp.size, "pp": ctx.pp.size, "tp": ctx.tp.size, "precision": cfg.train.precision}
    start = "the tokenizer's beginning of text" if args.bos else "nothing (--bos for models trained with one)"
    logger.info(f"lm-eval {lm_eval.__version__}, {layout}, at most {length} tokens; contexts begin with {start}")
    tasks = manager.match_tasks(args.tasks)
    found = lm_eval.simple_evaluate(
        model=lm,
        tasks=tasks,
        num_fewshot=args.num_fewshot,
        limit=args.limit,
        task_manager=manager,
        log_samples=False,
    )
    print(make_table(found))
    if "groups" in found:
        print(make_table(found, "groups"))
    if args.json is not None:
        kept = {key: found.get(key) for key in ("results", "groups", "versions", "n-shot")}
        run = {"path": str(weights.path), "step": weights.step, **layout, "max_length": length, "bos": args.bos}
        text = json.dumps({"lm_eval": lm_eval.__version__, **run, **kept}, indent=2, default=str)
        args.json.write_text(text + "\n")


if __name__ == "__main__":
    with leaving_together():
        main()
