"""Run a function on several processes of this machine, from a notebook: `run_ranks`.

Functions and classes of a cell cannot be imported by other processes: cloudpickle sends their code together with what
they use. New processes are forked from a helper that has imported torch and done nothing else: they start in
milliseconds, and share neither threads nor locks with the notebook.
"""

from __future__ import annotations

import gc
import inspect
import multiprocessing as mp
import os
import pickle
import sys
import tempfile
import time
import traceback
from collections.abc import Callable
from contextlib import redirect_stderr, redirect_stdout
from multiprocessing.connection import Connection, wait
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
import torch.distributed as dist

from megalite.core.base.errors import UserError, require
from megalite.core.base.redact import mask
from megalite.core.mesh.rendezvous import run_until_waiting

# Imported once for all ranks.
_PRELOAD = ["cloudpickle", "megalite.api", "megalite.runtime.loop.loop", "numpy.random"]

# Seconds for a rank that has returned to exit.
_EXIT_S = 10.0


def run_ranks(world: int, function: Callable[..., Any], *args: Any, timeout: float = 600.0) -> list[Any]:
    """Run `function(rank, *args)` on `world` new processes, which share a gloo process group.

    The function may use modules, functions, classes and values that are defined in the notebook; each process works on
    its own copy. The output and logs of the ranks are printed at the end, even after a failure, in the order of ranks.

    Args:
        world: number of processes.
        function: any function, also a lambda or a closure.
        args: values that can be pickled, the same for every rank.
        timeout: seconds after which the ranks are killed.

    Returns:
        The return value of each rank, in the order of ranks.

    Raises:
        UserError: a rank raised one, the function or an argument cannot be sent, or cloudpickle is missing.
        RuntimeError: a rank failed, with its traceback, or the time is up. The other ranks are killed.
    """
    require(world >= 1, f"world {world}", "must be at least 1", "give the number of processes")
    work = _packed(function, args)
    context = mp.get_context("forkserver")
    context.set_forkserver_preload(_PRELOAD)
    with tempfile.TemporaryDirectory() as folder:
        ranks: dict[Connection, int] = {}
        processes = []
        try:
            for rank in range(world):
                ours, theirs = context.Pipe()
                job = (theirs, rank, world, folder, os.getcwd(), work)
                process = context.Process(target=_serve, args=job, daemon=True)
                process.start()
                processes.append(process)
                theirs.close()
                ranks[ours] = rank
            results = _receive(ranks, time.monotonic() + timeout)
            for connection, process in zip(ranks, processes):
                connection.close()
                process.join(_EXIT_S)
        finally:
            for process in processes:
                process.kill()
                process.join()
            for rank in range(len(processes)):
                _repeat(_files(folder, rank))
    return results


def _files(folder: str, rank: int) -> tuple[Path, Path]:
    """Return where a rank writes its standard output and its standard error."""
    return Path(folder, f"{rank}.out"), Path(folder, f"{rank}.err")


def _repeat(files: tuple[Path, Path]) -> None:
    """Print what a rank wrote; one that was killed early may have written nothing."""
    for file, stream in zip(files, (sys.stdout, sys.stderr)):
        if file.exists():
            # newline="" keeps the carriage returns of progress bars.
            with file.open(encoding="utf-8", newline="") as text:
                print(text.read(), end="", file=stream)


def _receive(ranks: dict[Connection, int], deadline: float) -> list[Any]:
    """Wait for every rank's result; of several failures the first is raised, as others follow from it."""
    done: dict[int, Any] = {}
    while len(done) < len(ranks):
        ready = wait([c for c, rank in ranks.items() if rank not in done], max(0.0, deadline - time.monotonic()))
        if not ready:
            raise RuntimeError(f"ranks {sorted(set(ranks.values()) - set(done))} returned nothing in time")
        failures: list[tuple[float, Exception]] = []
        for connection in ready:
            assert isinstance(connection, Connection)
            rank = ranks[connection]
            try:
                failure, result, at = pickle.loads(connection.recv_bytes())
            except EOFError:
                failure, result, at = "died", None, 0.0
            if failure == "UserError":
                failures.append((at, UserError.from_message(result)))
            elif failure:
                failures.append((at, RuntimeError(f"rank {rank} {failure}" + (f"\n{result}" if result else ""))))
            done[rank] = result
        if failures:
            raise min(failures, key=lambda failed: failed[0])[1] from None
    return [done[rank] for rank in range(len(done))]


def _serve(connection: Connection, rank: int, world: int, store: str, folder: str, work: bytes) -> None:
    """Run the function on this rank.

    Args:
        store: folder of the ranks' files.
        folder: working directory of the notebook.
        work: function and arguments from `_packed`.
    """
    # Objects of the imports need not be searched again in every process.
    gc.freeze()
    # No more than OMP_NUM_THREADS, by which torch has set its own.
    torch.set_num_threads(max(1, min(torch.get_num_threads(), (os.cpu_count() or 1) // world)))
    run_until_waiting()
    # Line by line, so that the output of a rank that dies is complete.
    out, err = (path.open("w", 1, "utf-8", "backslashreplace") for path in _files(store, rank))
    with out, err:
        try:
            os.chdir(folder)
            with redirect_stdout(out), redirect_stderr(err):
                function, args = _unpacked(work)
                rendezvous = f"file://{os.path.join(store, 'store')}"
                dist.init_process_group("gloo", init_method=rendezvous, rank=rank, world_size=world)
                # A rank whose function returns at once must not leave while others still connect to it.
                dist.barrier()
                failure, result = "", function(rank, *args)
                dist.destroy_process_group()
        except UserError as e:
            failure, result = "UserError", str(e)
        except BaseException:
            failure, result = "failed", mask(traceback.format_exc())
    # Since the host began: the same clock on all ranks.
    now = time.monotonic()
    try:
        packed = _cloudpickle().dumps((failure, result, now))
    except Exception:
        packed = pickle.dumps(("failed", mask(traceback.format_exc()), now))
    connection.send_bytes(packed)


def _cloudpickle() -> ModuleType:
    try:
        import cloudpickle
    except ImportError:
        raise UserError("run_ranks", "requires cloudpickle", "pip install 'megalite[notebooks]'") from None
    return cloudpickle


def _packed(function: Callable[..., Any], args: tuple[Any, ...]) -> bytes:
    """Pickle the function and its arguments; a `UserError` names what cannot be pickled."""
    dumps = _cloudpickle().dumps
    try:
        return dumps((function, args))
    except Exception as e:
        culprit = next((name for name, part in _parts(function, args).items() if not _works(dumps, part)), "a value")
        rule = f"cannot be pickled ({type(e).__name__}: {e})"
        raise UserError(f"{culprit} on other processes", rule, "make it inside the function") from None


def _parts(function: Callable[..., Any], args: tuple[Any, ...]) -> dict[str, Any]:
    """Return by name what is pickled: the arguments, and the values that the function uses."""
    parts = {f"argument {number}": arg for number, arg in enumerate(args, start=1)}
    if inspect.isfunction(function):
        used = inspect.getclosurevars(function)
        parts |= {**used.globals, **used.nonlocals}
    return parts


def _works(dumps: Callable[[Any], bytes], part: Any) -> bool:
    try:
        dumps(part)
    except Exception:
        return False
    return True


def _unpacked(work: bytes) -> tuple[Callable[..., Any], tuple[Any, ...]]:
    """Unpickle the function and its arguments."""
    try:
        function, args = pickle.loads(work)
    except Exception as e:
        # Of a module's content, only the names are sent.
        given, rule = "the function or an argument", f"cannot be read on other processes ({type(e).__name__}: {e})"
        raise UserError(given, rule, "define it in the notebook, or in a module that can be imported") from None
    return function, args
