"""`megalite train`: the command line, the checks before any rank starts, and restarts."""

from __future__ import annotations

import argparse
import logging
from collections.abc import Sequence
from pathlib import Path

import megalite
from megalite.core.base.errors import require
from megalite.core.base.log import logger, setup_logging
from megalite.extras.compat.dialect import DIALECT
from megalite.extras.compat.help import asks_for_help, show_help_if_asked
from megalite.extras.launch.layout_check import check_layout
from megalite.extras.tool import ToolParser

_PORT = 29500
# More than any host has GPUs, or cores for ranks.
_MOST_RANKS = 1024

_DESCRIPTION = """Start the ranks of this host: megalite train --nproc 8 --tp 2 --pp 2 --preset llama-3-8b ...

Without SCRIPT.py or -m MODULE the ranks run pretrain_gpt.py. On Ctrl-C or SIGTERM they finish the step, save and exit
with 0; a second Ctrl-C ends them at once. Exit code: 0, 2 for a user error, else 1. For several hosts use megalite
launch; a scheduler that starts one command per host gives --nnodes, --node-rank and --master-addr."""


def _parser() -> argparse.ArgumentParser:
    p = ToolParser(
        prog="megalite train",
        usage="megalite train [--nproc N] [options] [SCRIPT.py | -m MODULE] FLAGS...",
        description=_DESCRIPTION,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        add_help=False,
        allow_abbrev=False,
    )
    p.add_argument(
        "--nproc", "--nproc-per-node", type=int, metavar="N", help="ranks on this host (one per GPU, else 1)"
    )
    p.add_argument(
        "--max-restarts", type=int, default=0, metavar="N", help="restart the ranks after a failure, up to N times (0)"
    )
    p.add_argument("--nnodes", type=int, default=1, metavar="N", help="number of hosts (1)")
    p.add_argument("--node-rank", type=int, default=0, metavar="K", help="index of this host, from 0")
    p.add_argument("--master-addr", metavar="NAME", help="name or address of host 0 for the others")
    p.add_argument("--master-port", type=int, default=_PORT, metavar="P", help=f"its port for the rendezvous ({_PORT})")
    p.add_argument(
        "--shutdown-timeout", type=int, metavar="S", help="seconds from SIGTERM until the ranks are killed (no limit)"
    )
    return p


def main(argv: Sequence[str]) -> int:
    """Parse, check, and run attempts until one succeeds or must not be repeated; returns the exit code."""
    parser = _parser()
    args, words = _split(parser, argv)
    if asks_for_help(words):
        print(parser.format_help() + "\nFLAGS of pretrain_gpt.py:\n")
        show_help_if_asked(words, dialect=DIALECT)
    script = _script(words)
    # What follows imports torch.
    import torch

    from megalite.extras.launch.local import USER_ERROR_CODE, LocalRanks, Place
    from megalite.runtime.checkpoint.hf.start import hf_model_config

    nproc = args.nproc if args.nproc is not None else torch.cuda.device_count() or 1
    _check(args, nproc)
    logger.setLevel(logging.ERROR)  # rank 0 says the rest, once
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


def trainer_script() -> str:
    """Find pretrain_gpt.py, which is beside the package both in a checkout and where pip installs them."""
    script = Path(megalite.__file__).resolve().parents[1] / "pretrain_gpt.py"
    require(script.exists(), "megalite train", f"there is no {script}", "name the training script")
    return str(script)


def _split(parser: argparse.ArgumentParser, argv: Sequence[str]) -> tuple[argparse.Namespace, list[str]]:
    """Separate our options from the training command: all flags after a script belong to the script."""
    at = next((i for i, word in enumerate(argv) if _names_script(word)), len(argv))
    args, unknown = parser.parse_known_args(argv[:at])
    return parser.parse_known_args(argv) if unknown else (args, list(argv[at:]))


def _names_script(word: str) -> bool:
    return word.endswith(".py") or word == "-m"


def _script(words: Sequence[str]) -> list[str]:
    """Return the training script (or -m and its module) and its flags."""
    if words and _names_script(words[0]):
        found = words[0] == "-m" or Path(words[0]).is_file()
        require(found, words[0], "no such file", "name the training script, or omit it for pretrain_gpt.py")
        return list(words)
    return [trainer_script(), *words]


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
        remedy = "use megalite launch, or give --node-rank and --master-addr on every host"
        require(args.master_addr is not None, f"--nnodes {nodes}", "needs --master-addr", remedy)
        rule = "would restart the ranks of one host only, and the others would wait for them forever"
        require(args.max_restarts == 0, f"--max-restarts with --nnodes {nodes}", rule, "let the scheduler restart all")
