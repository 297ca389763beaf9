"""Faults in the interpreter that finds this on its path, so that the program itself needs no test hooks.

HIDE_LINUX: there is no /proc, nor what else Python has on Linux only.
KILL_AT="WHEN:CALL:TEXT": WHEN is pre, post or half (of a write), CALL a function of `os`, TEXT a part of the path (of
"source>target" for a rename): the process is killed there.
"""

import os
import signal
import sys


def _install(when: str, call: str, text: str) -> None:
    real = getattr(os, call)

    def where(args: tuple) -> str:
        if call in ("rename", "replace"):
            return f"{args[0]}>{args[1]}"
        return os.readlink(f"/proc/self/fd/{args[0]}") if isinstance(args[0], int) else str(args[0])

    def wrapped(*args, **kwargs):
        here = text in where(args)
        if here and when == "half":
            real(args[0], args[1][: len(args[1]) // 2])
        result = real(*args, **kwargs) if not here or when == "post" else None
        if here:
            os.kill(os.getpid(), signal.SIGKILL)
        return result

    setattr(os, call, wrapped)


def _hide_linux() -> None:
    def look(event: str, args: tuple) -> None:
        if event in ("open", "os.listdir", "os.scandir"):
            path = os.fsdecode(args[0]) if isinstance(args[0], (str, bytes, os.PathLike)) else ""
            if path == "/proc" or path.startswith("/proc/"):
                raise FileNotFoundError(2, "No such file or directory", path)

    sys.addaudithook(look)
    for name in ("memfd_create", "sched_getaffinity"):
        delattr(os, name)


if "HIDE_LINUX" in os.environ:
    _hide_linux()
if "KILL_AT" in os.environ:
    _install(*os.environ["KILL_AT"].split(":", 2))
