"""The exception for user mistakes, the parser that raises it, and the main function that prints it as one line."""

from __future__ import annotations

import argparse
import errno
import faulthandler
import math
import os
import re
import sys
from collections.abc import Callable
from typing import Any, NoReturn

from megalite.base.child import allow_many_files

# Control characters (C0 without tab, DEL, C1), line separators, text direction marks, and halves of surrogate pairs.
_UNPRINTABLE = re.compile("[\x00-\x08\x0a-\x1f\x7f-\x9f\u2028-\u202e\u2066-\u2069\ud800-\udfff]")

# Disk errors that the user of a tool can fix.
_DISK_ERRORS = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EROFS, errno.EIO)

# An error quotes values and names, and a file may hold one of any length.
_MAX_FIELD = 1000


def _shorten(field: str) -> str:
    half = _MAX_FIELD // 2
    return field if len(field) <= _MAX_FIELD else f"{field[:half]} ... {field[-half:]}"


def printable(text: str, keep: str = "") -> str:
    r"""Return text of any origin (names, file contents, library errors) as one harmless line.

    Characters that a terminal or a log would act on are escaped as in Python, an ESC as \x1b. Those in `keep` stay.
    """
    return _UNPRINTABLE.sub(lambda m: m[0] if m[0] in keep else m[0].encode("unicode_escape").decode(), text)


class UserError(Exception):
    """A user mistake in configuration, data, checkpoint or layout (exit code 2).

    Args:
        given: the option or file, with its value ("--tp 3").
        rule: the rule it breaks ("num_heads 8 must be divisible by tp").
        remedy: what to change ("use --tp 2 or --tp 4").
    """

    def __init__(self, given: str, rule: str, remedy: str) -> None:
        # Always one line: messages quote file contents and library errors, which may contain newlines.
        given, rule, remedy = (_shorten(field) for field in (given, rule, remedy))
        super().__init__(printable(" ".join(f"{given}: {rule}; {remedy}".split())))

    @classmethod
    def from_message(cls, message: str) -> UserError:
        """Make the error from a complete message: another rank's, or several mistakes, one per line."""
        error = cls.__new__(cls)
        Exception.__init__(error, printable(message, keep="\n"))
        return error


class LocalUserError(UserError):
    """A user mistake that other ranks may not see: this rank has to report it itself."""


class ToolError(RuntimeError):
    """A failure of a tool that is no mistake of the user (exit code 1); the message is complete, in one line."""


class ToolParser(argparse.ArgumentParser):
    """A parser of flags whose mistakes are `UserError`s: one line, without the usage."""

    def error(self, message: str) -> NoReturn:
        raise UserError(self.prog, message, f"see {self.prog} --help")


def run_tool(main: Callable[[], int | None]) -> None:
    """Run a command-line tool's `main` and end the process.

    A `UserError` prints one `error:` line and exits with 2, a `ToolError` or a full or failing disk likewise with 1,
    Ctrl-C with 130. A crash (SIGBUS, SIGSEGV) prints the stack. A closed pipe (`| head`) ends the process quietly.
    """
    code: int | str | None
    if not faulthandler.is_enabled():
        faulthandler.enable(file=2)
    allow_many_files()
    try:
        try:
            code = main() or 0
        except SystemExit as e:  # --help
            code = e.code
        sys.stdout.flush()
        sys.exit(code)
    except UserError as e:
        print(f"error: {e}", file=sys.stderr)
        sys.exit(2)
    except ToolError as e:
        print(f"error: {printable(str(e))}", file=sys.stderr)
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


def require(ok: bool, given: str, rule: str, remedy: str) -> None:
    """Raise `UserError(given, rule, remedy)` unless `ok`."""
    if not ok:
        raise UserError(given, rule, remedy)


def in_range(options: Any, names: str, low: float, high: float, *, above: bool = False) -> None:
    """Check low <= value < high (`above`: low < value) for the options in `names`; None is skipped.

    Where there is no natural limit, `high` is far beyond any use: a typo must not take all memory.
    """
    for name in names.split():
        value, flag = getattr(options, name), "--" + name.replace("_", "-")
        top = "finite" if high == math.inf else f"below {high}"
        rule = f"must be {'more than' if above else 'at least'} {low} and {top}"
        ok = value is None or (low < value if above else low <= value) and value < high
        require(ok, f"{flag} {value}", rule, "use a value in that range")


def step_range(flag: str, given: str | None) -> range:
    """Parse the half-open step range of an A:B option (B excluded); empty for None."""
    if given is None:
        return range(0)
    first, colon, end = given.partition(":")
    ok = bool(colon) and first.isdecimal() and end.isdecimal() and 1 <= int(first) < int(end)
    require(ok, f"{flag} {given}", "must be A:B with 1 <= A < B, for steps A to B - 1", f"write {flag} 10:13")
    return range(int(first), int(end))
