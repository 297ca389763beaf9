"""Run tasks of EleutherAI's lm-eval on a run or an export: all ranks take part, led by rank 0."""

from __future__ import annotations

import argparse
import json
import os
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch

from megalite.core.base.errors import UserError, in_range, require
from megalite.core.base.log import logger
from megalite.core.mesh.agree import agree
from megalite.core.mesh.context import ParallelContext
from megalite.core.mesh.device import pick_device
from megalite.core.mesh.grid import Grid
from megalite.core.mesh.rendezvous import init_process_group, world_size
from megalite.extras.inference.load import Weights, find_weights
from megalite.extras.inference.score import Scorer, scoring_config
from megalite.runtime.data.tokenizer import Tokenizer, optional_import

# The other ranks wait in one operation while rank 0 downloads data or computes metrics.
_PATIENCE = timedelta(days=1)


def run_tasks(args: argparse.Namespace) -> None:
    """Print lm-eval's table of results on rank 0. `args`: options of `megalite lm-eval`."""
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
    # Mistakes are reported before the weights are read.
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
    return ParallelContext.create(Grid.of(world, tp=tp, pp=pp), device, timeout=_PATIENCE)


def _prepared(args: argparse.Namespace, weights: Weights) -> tuple[Tokenizer, Any]:
    """Check inputs and outputs; return the tokenizer and the tasks."""
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
    """Return lm-eval's registry of tasks, which contains all those requested."""
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

    from megalite.extras.inference.lm_eval_model import HarnessLM

    cfg, ctx = scorer.cfg, scorer.ctx
    length = args.max_length or weights.cfg.seq_len
    lm = HarnessLM(scorer, tokenizer, length, args.bos, args.seed)
    layout = {"dp": ctx.dp.size, "pp": ctx.pp.size, "tp": ctx.tp.size, "precision": cfg.train.precision}
    start = "the tokenizer's beginning of text" if args.bos else "nothing (--bos for models trained with one)"
    logger.info(f"lm-eval {lm_eval.__version__}, {layout}, at most {length} tokens; contexts begin with {start}")
    tasks = manager.match_tasks(args.tasks)
    results = lm_eval.simple_evaluate(
        model=lm,
        tasks=tasks,
        num_fewshot=args.num_fewshot,
        limit=args.limit,
        task_manager=manager,
        log_samples=False,
    )
    print(make_table(results))
    if "groups" in results:
        print(make_table(results, "groups"))
    if args.json is not None:
        parts = {key: results.get(key) for key in ("results", "groups", "versions", "n-shot")}
        run = {"path": str(weights.path), "step": weights.step, **layout, "max_length": length, "bos": args.bos}
        text = json.dumps({"lm_eval": lm_eval.__version__, **run, **parts}, indent=2, default=str)
        args.json.write_text(text + "\n")
