"""Run a function on several processes of this machine, from a notebook: `run_ranks`.

Functions of a cell cannot be imported by other processes, so their code travels together with the names they use. New
processes are forked from a helper that has imported torch and done nothing else: they start in milliseconds, and share
neither threads nor locks with the notebook.
"""

from __future__ import annotations

import dis
import gc
import marshal
import multiprocessing as mp
import os
import pickle
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Iterator
from contextlib import redirect_stderr, redirect_stdout
from importlib import import_module
from multiprocessing.connection import Connection, wait
from pathlib import Path
from types import CodeType, FunctionType, ModuleType
from typing import Any

import torch
import torch.distributed as dist

from megalite.errors import UserError, require

# What a function uses, by name; "" is the function itself: ("module", its name), ("function", code, defaults, keyword
# defaults) or ("value", the value).
Names = dict[str, tuple[Any, ...]]

# Imported once for all ranks; torch imports the last, and sympy with it, in the first backward pass.
_PRELOAD = ["megalite.api", "megalite.train.loop", "numpy.random", "torch.fx.experimental.symbolic_shapes"]

# For a rank that has returned to exit.
_EXIT_S = 10.0


def run_ranks(world: int, function: Callable[..., Any], *args: Any, timeout: float = 600.0) -> list[Any]:
    """Run `function(rank, *args)` on `world` new processes, which share a gloo process group.

    The function may use modules, functions and values that are defined in the notebook; each process works on its own
    copy. What the ranks print and log is printed here at the end, however they end, in the order of ranks.

    Args:
        world: number of processes.
        function: defined by `def` at the top of a cell, or importable.
        args: any values that can be pickled, the same for every rank.
        timeout: seconds until the ranks are ended.

    Returns:
        What each rank returned, in the order of ranks.

    Raises:
        UserError: a rank raised one, or the function or an argument cannot travel.
        RuntimeError: a rank failed, with its traceback, or the time is up. The other ranks are ended.
    """
    require(world >= 1, f"world {world}", "must be at least 1", "give the number of processes")
    names: Names = {}
    _collect("", function, names)
    work = _packed(names, args)
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
    """Print what a rank wrote; one that was ended early may not have begun."""
    for file, stream in zip(files, (sys.stdout, sys.stderr)):
        if file.exists():
            # Progress bars return the carriage.
            with file.open(encoding="utf-8", newline="") as written:
                print(written.read(), end="", file=stream)


def _receive(ranks: dict[Connection, int], deadline: float) -> list[Any]:
    """Wait for every rank's result."""
    done: dict[int, Any] = {}
    while len(done) < len(ranks):
        ready = wait([c for c, rank in ranks.items() if rank not in done], max(0.0, deadline - time.monotonic()))
        if not ready:
            raise RuntimeError(f"ranks {sorted(set(ranks.values()) - set(done))} returned nothing in time")
        for connection in ready:
            assert isinstance(connection, Connection)
            rank = ranks[connection]
            try:
                failure, result = connection.recv()
            except EOFError:
                raise RuntimeError(f"rank {rank} died") from None
            if failure == "UserError":
                raise UserError.from_message(result)
            if failure:
                raise RuntimeError(f"rank {rank} failed\n{result}")
            done[rank] = result
    return [done[rank] for rank in range(len(done))]


def _serve(connection: Connection, rank: int, world: int, store: str, folder: str, work: bytes) -> None:
    """Run the function on this rank, and stay until the other side has read the result.

    Args:
        store: folder of the ranks' files.
        folder: where the notebook works.
        work: from `_packed`.
    """
    # What the imports left behind is not searched again in every process.
    gc.freeze()
    torch.set_num_threads(max(1, (os.cpu_count() or 1) // world))
    # Line by line, so that the lines of a rank that dies are there.
    out, err = (path.open("w", 1, "utf-8", "backslashreplace") for path in _files(store, rank))
    with out, err:
        try:
            os.chdir(folder)
            with redirect_stdout(out), redirect_stderr(err):
                function, args = _unpacked(work)
                rendezvous = f"file://{os.path.join(store, 'store')}"
                dist.init_process_group("gloo", init_method=rendezvous, rank=rank, world_size=world)
                message = ("", function(rank, *args))
                dist.destroy_process_group()
        except UserError as e:
            message = ("UserError", str(e))
        except BaseException:
            message = ("failed", traceback.format_exc())
    try:
        connection.send(message)
    except Exception:
        connection.send(("failed", traceback.format_exc()))
    # Tensors travel as shared memory that this process must hold until it is mapped.
    connection.poll(None)


def _collect(name: str, value: Any, into: Names) -> None:
    """Describe a value that a function uses under `name`, and all that it uses itself."""
    if isinstance(value, ModuleType):
        into[name] = ("module", value.__name__)
    elif isinstance(value, FunctionType) and value.__module__ == "__main__":
        given = f"{value.__name__} on other processes"
        require(
            not value.__closure__, given, "uses variables of an enclosing function", "define it at the top of a cell"
        )
        into[name] = ("function", marshal.dumps(value.__code__), value.__defaults__, value.__kwdefaults__)
        for used in _globals_of(value.__code__):
            if used in value.__globals__ and used not in into:
                _collect(used, value.__globals__[used], into)
    else:
        kind = value if isinstance(value, type) else type(value)
        given = f"{name} on other processes"
        rule = f"is of class {kind.__name__}, which only the notebook knows"
        require(kind.__module__ != "__main__", given, rule, "define the class in a module, or inside the function")
        into[name] = ("value", value)


def _globals_of(code: CodeType) -> Iterator[str]:
    """Yield the global names that a function's code reads, that of inner functions included."""
    for instruction in dis.get_instructions(code):
        if instruction.opname in ("LOAD_GLOBAL", "LOAD_NAME"):
            yield str(instruction.argval)
    for inner in code.co_consts:
        if isinstance(inner, CodeType):
            yield from _globals_of(inner)


def _packed(names: Names, args: tuple[Any, ...]) -> bytes:
    """Pickle the described names and the arguments; `UserError` names what cannot be."""
    try:
        return pickle.dumps((names, args))
    except Exception as e:
        parts = {name: described for name, described in names.items() if name}
        parts |= {f"argument {number}": arg for number, arg in enumerate(args, start=1)}
        culprit = next((name for name, part in parts.items() if not _can_be_pickled(part)), "a default of the function")
        rule = f"cannot be pickled ({type(e).__name__}: {e})"
        raise UserError(f"{culprit} on other processes", rule, "make it inside the function") from None


def _can_be_pickled(value: Any) -> bool:
    try:
        pickle.dumps(value)
    except Exception:
        return False
    return True


def _unpacked(work: bytes) -> tuple[Callable[..., Any], tuple[Any, ...]]:
    """Make the function and its arguments anew."""
    try:
        names, args = pickle.loads(work)
    except Exception as e:
        # A class is pickled as its name, and the names of a notebook's `__main__` are not there.
        given, rule = "a value or an argument", f"cannot be read on other processes ({type(e).__name__}: {e})"
        raise UserError(given, rule, "define classes in a module, or inside the function") from None
    return _restored(names)[""], args


def _restored(names: Names) -> dict[str, Any]:
    """Make the described names anew."""
    space: dict[str, Any] = {"__name__": "__main__", "__builtins__": __builtins__}
    for name, (kind, what, *defaults) in names.items():
        if kind == "module":
            space[name] = import_module(what)
        elif kind == "function":
            code = marshal.loads(what)
            space[name] = FunctionType(code, space, code.co_name, defaults[0])
            space[name].__kwdefaults__ = defaults[1]
        else:
            space[name] = what
    return space
