"""Command lines of a checkout, each in a process forked from one that has imported it: 20 ms instead of seconds."""

from __future__ import annotations

import gc
import importlib
import os
import runpy
import signal
import sys
import tempfile
import time
import traceback
from pathlib import Path
from typing import NamedTuple, NoReturn

from tests.ranks import reserve_port

ROOT = Path(__file__).resolve().parents[2]
_LIMIT_S = 300.0
# What a launcher or a scheduler may have set.
_FOREIGN = ("RANK", "LOCAL_", "WORLD_", "GROUP_", "MASTER_", "TORCH", "SLURM_", "MEGALITE_", "NCCL_", "GLOO_", "WANDB_")


class Output(NamedTuple):
    """What a command line has printed (of several ranks: the first), and its exit codes, one per rank."""

    out: str
    err: str
    codes: list[int]


def enter(checkout: Path, work: Path) -> None:
    """Import a checkout's package, and make its environment independent of this host; once per process.

    Args:
        checkout: folder with pretrain_gpt.py and megalite/.
        work: empty folder in which the command lines run.
    """
    for name in [name for name in os.environ if name.startswith(_FOREIGN)]:
        del os.environ[name]
    os.environ.update(
        COLUMNS="80",
        CUDA_VISIBLE_DEVICES="",
        HOME=str(work),
        LC_ALL="C.UTF-8",
        NO_COLOR="1",
        OMP_NUM_THREADS="1",
        PYTHONPATH=str(checkout),
        TERM="dumb",
    )
    os.chdir(work)
    sys.path[:] = [str(checkout), *(path for path in sys.path if path not in ("", str(ROOT), str(checkout)))]
    import megalite
    import pretrain_gpt  # noqa: F401

    assert Path(megalite.__file__).parents[1] == checkout.resolve(), megalite.__file__
    for name in megalite.__all__:
        getattr(megalite, name)
    importlib.import_module("numpy.random")
    # What a collection in a child touches, it would copy.
    gc.collect()
    gc.freeze()


def call(program: str, *words: str, ranks: int = 1) -> Output:
    """Run a program with these words.

    Args:
        program: "pretrain_gpt.py" or "megalite".
        words: its arguments.
        ranks: number of processes, as torchrun would start them.
    """
    with tempfile.TemporaryDirectory() as folder:
        place = Path(folder)
        port = reserve_port() if ranks > 1 else 0
        for rank in range(ranks):
            for name in ("out", "err"):
                (place / f"{name}_{rank}").touch()
        children = [_start(program, words, rank, ranks, port, place) for rank in range(ranks)]
        codes = _wait(children)
        out, err = ((place / f"{name}_0").read_text(errors="backslashreplace") for name in ("out", "err"))
        return Output(out, err, codes)


def _start(program: str, words: tuple[str, ...], rank: int, ranks: int, port: int, place: Path) -> int:
    """Fork a process that runs the program as this rank; return its id."""
    if pid := os.fork():
        return pid
    os.setpgid(0, 0)
    for name, descriptor in (("out", 1), ("err", 2)):
        os.dup2(os.open(place / f"{name}_{rank}", os.O_WRONLY | os.O_APPEND), descriptor)
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    if ranks > 1:
        os.environ.update(RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=str(ranks), LOCAL_WORLD_SIZE=str(ranks))
        os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
    return _run(program, words)


def _run(program: str, words: tuple[str, ...]) -> NoReturn:
    """Run a program as Python would, and end this process."""
    code: object = 1
    command = ["-m", program] if program == "megalite" else [str(Path(os.environ["PYTHONPATH"], program))]
    sys.argv = [program, *words]
    # A guard runs the same command again.
    sys.orig_argv = [sys.executable, *command, *words]
    try:
        if program == "megalite":
            runpy.run_module("megalite", run_name="__main__", alter_sys=True)
        else:
            runpy.run_path(command[0], run_name="__main__")
        code = 0
    except SystemExit as e:
        code = e.code or 0
    except BaseException:
        traceback.print_exc()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code if isinstance(code, int) else 1)


def _wait(children: list[int]) -> list[int]:
    codes: dict[int, int] = {}
    end = time.monotonic() + _LIMIT_S
    while len(codes) < len(children) and time.monotonic() < end:
        for pid in children:
            if pid not in codes and (done := os.waitpid(pid, os.WNOHANG))[0]:
                codes[pid] = os.waitstatus_to_exitcode(done[1])
                if pid == children[0] and codes[pid]:  # what a launcher does
                    for other in children[1:]:
                        if other not in codes:
                            os.kill(other, signal.SIGTERM)
        time.sleep(0.002)
    for pid in children:
        # With what it has started: a group of its own.
        if pid not in codes:
            os.killpg(pid, signal.SIGKILL)
            codes[pid] = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
    return [codes[pid] for pid in children]
