"""The console script `megalite`, also `python -m megalite`."""

from __future__ import annotations

import sys

from megalite.errors import UserError, run_tool

_USAGE = """usage: megalite train [--nproc N] [options] [SCRIPT.py] FLAGS...

Starts the ranks of this host, as torchrun does: `megalite train --help`. The other tools are scripts in tools/."""


def _command() -> int:
    words = sys.argv[1:]
    if words[:1] == ["train"]:
        from megalite.train import command  # takes seconds to import

        return command.main(words[1:])
    if not words or words[0] in ("-h", "--help"):
        print(_USAGE)
        return 0
    raise UserError(f"megalite {words[0]}", "is not a command", "write megalite train FLAGS, or see megalite --help")


def main() -> None:
    """Run `megalite COMMAND ...` and end the process."""
    run_tool(_command)


if __name__ == "__main__":
    main()
