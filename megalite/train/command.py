"""`megalite train`: the command line, the checks before any rank starts, and restarts."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path

import torch

import megalite
from megalite.checkpoint.hf.start import hf_model_config
from megalite.dist.elastic import USER_ERROR_CODE, LocalRanks, Place
from megalite.errors import ToolParser, require
from megalite.log import logger, setup_logging
from megalite.plan.layout_check import check_layout

_PORT = 29500
# No host has so many GPUs, or cores for so many ranks.
_MOST_RANKS = 1024

_DESCRIPTION = """Start the ranks of this host: megalite train --nproc 8 --tp 2 --pp 2 --preset llama-3-8b ...

Without SCRIPT.py the ranks run pretrain_gpt.py. Ctrl-C or SIGTERM: they finish the step, save and exit 0; a second
Ctrl-C ends them at once. Exit code: 0, 2 for a mistake in what was asked, else 1. For several hosts use
tools/launch.py; a scheduler that starts one command per host gives --nnodes, --node-rank and --master-addr."""


def _parser() -> argparse.ArgumentParser:
    p = ToolParser(
        prog="megalite train",
        usage="megalite train [--nproc N] [options] [SCRIPT.py] FLAGS...",
        description=_DESCRIPTION,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        add_help=False,
        allow_abbrev=False,
    )
    p.add_argument(
        "--nproc", "--nproc-per-node", type=int, metavar="N", help="ranks on this host (one per GPU; 1 without)"
    )
    p.add_argument("--max-restarts", type=int, default=0, metavar="N", help="start the ranks again after a failure")
    p.add_argument("--nnodes", type=int, default=1, metavar="N", help="hosts of the run (1)")
    p.add_argument("--node-rank", type=int, default=0, metavar="K", help="number of this host, from 0")
    p.add_argument("--master-addr", metavar="NAME", help="host 0, as the others know it")
    p.add_argument("--master-port", type=int, default=_PORT, metavar="P", help=f"its port for the rendezvous ({_PORT})")
    p.add_argument(
        "--shutdown-timeout", type=int, metavar="S", help="seconds from SIGTERM until ranks are killed (no limit)"
    )
    return p


def main(argv: Sequence[str]) -> int:
    """Parse, check, and run attempts until one succeeds or must not be repeated. Returns the exit code."""
    parser = _parser()
    args, words = _split(parser, argv)
    if {"-h", "--help"} & set(words):
        print(parser.format_help() + "\nFLAGS of pretrain_gpt.py: python pretrain_gpt.py --help")
        return 0
    script = _script(words)
    nproc = args.nproc if args.nproc is not None else torch.cuda.device_count() or 1
    _check(args, nproc)
    check_layout(script, args.nnodes * nproc, read_model=hf_model_config)
    setup_logging(rank=0)
    if args.nproc is None:
        logger.info(f"starting {nproc} rank{'s' * (nproc > 1)} on this host (--nproc)")
    master = args.master_addr if args.nnodes > 1 else None
    place = Place(nproc, args.nnodes, args.node_rank, master, args.master_port)
    for attempt in range(args.max_restarts + 1):
        if attempt:
            logger.warning(f"restart {attempt} of {args.max_restarts}: all ranks again")
        ranks = LocalRanks(place, script, args.shutdown_timeout)
        code = ranks.run()
        if code in (0, USER_ERROR_CODE) or ranks.asked:
            break
    return code


def _split(parser: argparse.ArgumentParser, argv: Sequence[str]) -> tuple[argparse.Namespace, list[str]]:
    """Separate our options from the training command: those of a named script are its own, whatever their names."""
    at = next((i for i, word in enumerate(argv) if word.endswith(".py")), len(argv))
    args, rest = parser.parse_known_args(argv[:at])
    return parser.parse_known_args(argv) if rest else (args, list(argv[at:]))


def _script(words: Sequence[str]) -> list[str]:
    """Return the training script and its flags."""
    if words and words[0].endswith(".py"):
        return list(words)
    # Beside the package: in a checkout, and where pip installs both.
    script = Path(megalite.__file__).resolve().parents[1] / "pretrain_gpt.py"
    require(script.exists(), f"megalite train {' '.join(words[:1])}", f"no {script}", "name the training script")
    return [str(script), *words]


def _check(args: argparse.Namespace, nproc: int) -> None:
    for flag, value, low, high in (
        ("--nproc", nproc, 1, _MOST_RANKS),
        ("--max-restarts", args.max_restarts, 0, 10**6),
        ("--nnodes", args.nnodes, 1, 10**5),
        ("--shutdown-timeout", args.shutdown_timeout or 1, 1, 10**6),
    ):
        require(low <= value <= high, f"{flag} {value}", f"must be from {low} to {high}", "give a number in that range")
    require(0 < args.master_port < 65536, f"--master-port {args.master_port}", "is not a port", "use 1 to 65535")
    rank, nodes = args.node_rank, args.nnodes
    require(0 <= rank < nodes, f"--node-rank {rank}", f"must be below --nnodes {nodes}", "number the hosts from 0")
    if nodes > 1:
        remedy = "use tools/launch.py, or give --node-rank and --master-addr on every host"
        require(args.master_addr is not None, f"--nnodes {nodes}", "needs --master-addr", remedy)
        rule = "would restart the ranks of one host, and the others would wait for them forever"
        require(args.max_restarts == 0, f"--max-restarts with --nnodes {nodes}", rule, "let the scheduler restart all")
