"""The commands of `megalite`: one per job, imported when it runs."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from importlib import import_module
from typing import NamedTuple

from megalite.core.base.errors import UserError
from megalite.core.options.names import suggest
from megalite.extras.tool import run_tool, show
from megalite.runtime.base.collector import importing

Main = Callable[[Sequence[str]], int | None]
"""A command: takes the words after its name, returns the exit code (None: 0)."""


class Command(NamedTuple):
    """A line of `megalite --help`.

    Attributes:
        about: what the command does.
        place: "package.module:function" under megalite.extras.
    """

    about: str
    place: str


COMMANDS = {
    "train": Command("start the ranks of this host and train", "launch.train:main"),
    "launch": Command("train on several hosts, over ssh, with Slurm or on Kubernetes", "launch.command:main"),
    "join": Command("join a run with --elastic from a host that was not in its launch", "launch.join:main"),
    "tokenizer": Command("train a tokenizer on text", "prepare.command:tokenizer"),
    "preprocess": Command("turn text or conversations into token files", "prepare.command:preprocess"),
    "convert": Command("convert checkpoints from and to Hugging Face, and from Megatron-LM", "convert.command:main"),
    "plan": Command("predict memory and time of every layout on a cluster, without a GPU", "plan.command:main"),
    "estimate": Command("run the real step of one rank of any world, without a GPU", "estimate.command:main"),
    "schedule": Command("time and draw pipeline schedules", "view.schedule:main"),
    "mup": Command("check that activations and learning rates carry over from width to width", "mup.command:main"),
    "check": Command("check that a cluster is ready for a run (under torchrun)", "diagnose.command:main"),
    "scaling": Command("measure a run on 1, 2, 4, ... ranks", "diagnose.scaling:main"),
    "plot": Command("draw the loss curves of runs", "view.command:plot"),
    "view": Command("show runs in a browser: one page, as a file or live", "view.page.command:main"),
    "inspect": Command("show what a checkpoint holds, and verify its checksums", "view.command:inspect"),
    "generate": Command("generate text with a trained model", "inference.command:generate"),
    "evaluate": Command("compute loss and perplexity of a model", "inference.command:evaluate"),
    "lm-eval": Command("run EleutherAI's tasks on a model, in any layout", "inference.command:lm_eval"),
}


def find_main(name: str) -> Main:
    """Import and return the function of a command."""
    module, function = COMMANDS[name].place.split(":")
    with importing():
        main: Main = getattr(import_module(f"megalite.extras.{module}"), function)
    return lambda words: _with_local_words(name, main, words)


def _with_local_words(name: str, main: Main, words: Sequence[str]) -> int | None:
    """Run a command with local copies of what URLs among its arguments name."""
    if not any("://" in word for word in words):
        return main(words)
    from megalite.extras.local_words import local_words

    with local_words(name, words) as local:
        return main(local)


def _usage() -> str:
    width = max(map(len, COMMANDS))
    lines = [f"  {name:<{width}}  {command.about}" for name, command in COMMANDS.items()]
    return "\n".join(["usage: megalite COMMAND [options]", "", *lines, "", "Each has --help."])


def _dispatch(words: Sequence[str]) -> int | None:
    if not words or words[0] in ("-h", "--help"):
        show(_usage())
        return 0
    name, *rest = words
    if name not in COMMANDS:
        raise UserError(f"megalite {name}", "unknown command", suggest(name, COMMANDS, "megalite "))
    return find_main(name)(rest)


def run(name: str) -> None:
    """Run one command with this process's arguments, and end the process."""
    run_tool(lambda: find_main(name)(sys.argv[1:]))


def main() -> None:
    """Run `megalite COMMAND ...` and end the process."""
    run_tool(lambda: _dispatch(sys.argv[1:]))
