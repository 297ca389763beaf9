"""How a command-line tool parses, prints and ends: a mistake of the user is one line."""

from __future__ import annotations

import argparse
import errno
import faulthandler
import os
import re
import sys
from collections.abc import Callable
from typing import NoReturn

from megalite.core.base.errors import UserError, printable
from megalite.core.base.redact import mask, mask_tracebacks
from megalite.core.options.names import suggest
from megalite.runtime.base.child import allow_many_files
from megalite.runtime.base.permitted import permitted

# Disk errors that the user of a tool can fix.
_DISK_ERRORS = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EROFS, errno.EIO)


class ToolError(RuntimeError):
    """A failure of a tool that is no mistake of the user (exit code 1); the message is complete, in one line."""


class ToolParser(argparse.ArgumentParser):
    """A parser of flags whose mistakes are `UserError`s: one line, without the usage."""

    def error(self, message: str) -> NoReturn:
        remedy = f"see {self.prog} --help"
        if unknown := re.match(r"unrecognized arguments: (--[^\s=]+)", message):
            remedy = suggest(unknown[1], self._option_string_actions, otherwise=remedy)
        raise UserError(self.prog, message, remedy)


def run_tool(main: Callable[[], int | None]) -> None:
    """Run a command-line tool's `main` and end the process.

    A `UserError`, or a path without permission, prints one `error:` line and exits with 2, a `ToolError` or a full or
    failing disk likewise with 1, Ctrl-C with 130. A crash (SIGBUS, SIGSEGV) prints the stack. A closed pipe (`| head`)
    ends the process quietly.
    """
    code: int | str | None
    if not faulthandler.is_enabled():
        faulthandler.enable(file=2)
    allow_many_files()
    mask_tracebacks()
    try:
        try:
            with permitted():
                code = main() or 0
        except SystemExit as e:  # --help
            code = e.code
        sys.stdout.flush()
        if {"torch", "megalite.extras.estimate.guard"} <= sys.modules.keys() and isinstance(code, int):
            # Threads of the autograd engine for the device that it imitates may outlive what they wait for: once, with
            # all printed, the process was aborted at its end.
            os._exit(code)
        sys.exit(code)
    except UserError as e:
        print(f"error: {e}", file=sys.stderr)
        sys.exit(2)
    except ToolError as e:
        print(f"error: {printable(mask(str(e)))}", file=sys.stderr)
        sys.exit(1)
    except BrokenPipeError:
        _exit_without_reader()
    except OSError as e:
        if e.errno not in _DISK_ERRORS:
            raise
        where = f"{e.filename}: " if e.filename else ""
        print(
            f"error: {printable(where)}{e.strerror}: nothing was finished; free some space or choose another disk",
            file=sys.stderr,
        )
        sys.exit(1)
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        sys.exit(130)


def show(text: str) -> None:
    """Print text; a reader that closes the pipe (`| head`) ends the process quietly with 1."""
    try:
        print(text, flush=True)
    except BrokenPipeError:
        _exit_without_reader()


def _exit_without_reader() -> NoReturn:
    # Otherwise Python complains again when it flushes standard output at exit.
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    sys.exit(1)
