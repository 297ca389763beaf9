"""A pool of gloo worker processes that lives on over tests: importing torch costs seconds, sending a function does not.
They are forked from one process that has imported it.

`pool.run(world, fn, *args)` calls `fn(rank, *args)` on `world` workers inside a fresh process group of that size and
returns the list of results. `fn` must be a top-level function of a module under tests/.
"""

from __future__ import annotations

import gc
import importlib
import json
import multiprocessing as mp
import os
import sys
import tempfile
import traceback
from collections.abc import Callable, Mapping, Sequence
from itertools import pairwise
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any

_ROOT = str(Path(__file__).resolve().parent.parent)


class WorkerError(Exception):
    """A worker raised or died; the message is the first failing rank's traceback."""


class _Forked:
    """A process that serves a run, forked: to start an interpreter takes longer than to save."""

    def __init__(self, module: str, settings: Mapping[str, Any], descriptors: Sequence[int]) -> None:
        from megalite.runtime.base import child

        self._code: int | None = None
        self.pid = os.fork()
        if self.pid == 0:
            try:
                # Nothing else stays open in it that would tell others that the worker is still there.
                ends = [2, *sorted(descriptors), os.sysconf("SC_OPEN_MAX")]
                for kept, end in pairwise(ends):
                    os.closerange(kept + 1, end)
                child._serve(module, json.dumps(settings))
                os._exit(0)
            except BaseException:
                traceback.print_exc()
                os._exit(1)

    def wait(self) -> int:
        if self._code is None:
            self._code = os.waitstatus_to_exitcode(os.waitpid(self.pid, 0)[1])
        return self._code


def _serve(connection: Connection, rank: int) -> None:
    sys.path.insert(0, _ROOT)
    # Workers get a terminal's Ctrl-C too; the parent ends them.
    import signal

    signal.signal(signal.SIGINT, signal.SIG_IGN)
    import torch
    import torch.distributed as dist

    from megalite.core.mesh.rendezvous import run_until_waiting
    from megalite.runtime.base.child import start_child
    from megalite.runtime.checkpoint import snapshot

    torch.set_num_threads(1)
    run_until_waiting()
    # All that the forked process has imported: a full collection would look at each object of it.
    gc.freeze()
    while True:
        try:
            job = connection.recv()
        except EOFError:
            return
        module, name, args, world, store = job
        # Where layouts are compared, how a writer has started does not matter; elsewhere it is put to the test.
        snapshot.start_child = _Forked if module.startswith("tests.parity.") else start_child  # type: ignore[assignment]
        try:
            if world > 1:
                dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=world)
                # A rank whose function returns at once must not leave while others still connect to it.
                dist.barrier()
            result = getattr(importlib.import_module(module), name)(rank, *args)
            if dist.is_initialized():
                # Nor while others still receive what it sent last, such as the weights after the last step.
                if dist.get_backend() == "gloo":
                    dist.barrier()
                dist.destroy_process_group()
            connection.send((True, result))
        except BaseException:
            connection.send((False, traceback.format_exc()))
        # Cycles of objects keep the groups of a job, whose threads wake up a hundred times a second.
        result = None
        gc.collect()


class WorkerPool:
    """Workers are started when first needed, and all of them anew after a failure."""

    def __init__(self) -> None:
        self._workers: list[tuple[Any, Connection]] = []

    def _grow(self, world: int) -> None:
        os.environ.setdefault("OMP_NUM_THREADS", "1")
        context = mp.get_context("forkserver")
        # torch imports the others, and sympy with them, in `Tensor.backward` with a gradient and under recomputation.
        compilers = ["torch.fx.experimental.symbolic_shapes", "torch._dynamo"]
        context.set_forkserver_preload(["megalite.runtime.start.start", *compilers])
        while len(self._workers) < world:
            ours, theirs = context.Pipe()
            process = context.Process(target=_serve, args=(theirs, len(self._workers)), daemon=True)
            process.start()
            theirs.close()
            self._workers.append((process, ours))

    def run(self, world: int, fn: Callable[..., Any], *args: Any, timeout: float = 400.0) -> list[Any]:
        """Run `fn(rank, *args)` on `world` ranks; results in rank order."""
        # Whoever still holds a store of the group may write its file while the folder is being removed.
        with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as folder:
            try:
                self._grow(world)
                return self._run((fn.__module__, fn.__name__, args, world, os.path.join(folder, "store")), timeout)
            except BaseException:
                # Also where the test is ended from outside: the next one would get the results of this one.
                self.close()
                raise

    def _run(self, job: tuple[str, str, tuple[Any, ...], int, str], timeout: float) -> list[Any]:
        world = job[3]
        connections = [c for _, c in self._workers[:world]]
        for connection in connections:
            connection.send(job)
        results: dict[int, Any] = {}
        while len(results) < world:
            ready = wait([c for i, c in enumerate(connections) if i not in results], timeout)
            if not ready:
                missing = [i for i in range(world) if i not in results]
                raise WorkerError(f"ranks {missing} gave no result in {timeout} s")
            for answered in ready:
                assert isinstance(answered, Connection)
                rank = connections.index(answered)
                try:
                    ok, value = answered.recv()
                except (EOFError, ConnectionResetError):
                    ok, value = False, f"rank {rank} died"
                if not ok:
                    raise WorkerError(f"rank {rank}:\n{value}")
                results[rank] = value
        return [results[i] for i in range(world)]

    def close(self) -> None:
        """End all workers."""
        for process, connection in self._workers:
            connection.close()
            process.kill()
            process.join()
        self._workers = []
