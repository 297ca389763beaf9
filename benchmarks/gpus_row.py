"""One rank of a row of benchmarks/gpus.py: trains some steps in one layout, and rank 0 reports what was measured.

With --start N it starts N ranks of the command that follows, as torchrun would, in its own process group.
"""

from __future__ import annotations

import argparse
import json
import os
import socket
import statistics
import subprocess
import sys
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from functools import wraps
from typing import Any
from unittest import mock

import numpy as np
import torch

from benchmarks.step import timed_step
from megalite.core.build import build_engine
from megalite.core.engine import Engine
from megalite.core.mesh import collectives
from megalite.core.mesh.context import ParallelContext
from megalite.core.mesh.device import pick_device
from megalite.core.mesh.grid import Grid
from megalite.core.mesh.rendezvous import init_process_group, shutdown, world_size
from megalite.core.model.flops import flops_per_token, peak_flops
from megalite.core.pipeline.p2p import Channel
from megalite.extras.plan.device import device_in_use, machine
from megalite.extras.plan.memory.ranks import memory_per_rank
from megalite.extras.plan.time.step import step_time
from megalite.runtime.options import cli

_UNMEASURED = 3


def row(**values: Any) -> None:
    """Report one row."""
    line = json.dumps({k: round(v, 6) if isinstance(v, float) else v for k, v in values.items()})
    print(line, flush=True)
    if path := os.environ.get("MEGALITE_ROWS"):
        with open(path, "a") as out:
            out.write(line + "\n")


def start(ranks: int, command: list[str]) -> int:
    """Start the ranks of one host; when one fails, end the others."""
    env = {**os.environ, "WORLD_SIZE": str(ranks), "LOCAL_WORLD_SIZE": str(ranks), "OMP_NUM_THREADS": "1"}
    with socket.socket() as reserved:
        # Rank 0 listens there seconds later: until then nobody else is given a port that is bound.
        reserved.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        reserved.bind(("", 0))
        env |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(reserved.getsockname()[1])}
        return _wait(
            [
                subprocess.Popen([sys.executable, *command], env={**env, "RANK": str(rank), "LOCAL_RANK": str(rank)})
                for rank in range(ranks)
            ]
        )


def _wait(waiting: list[subprocess.Popen[bytes]]) -> int:
    code = 0
    while waiting:
        for process in list(waiting):
            try:
                ended = process.wait(0.2)
            except subprocess.TimeoutExpired:
                continue
            waiting.remove(process)
            if ended and not code:
                code = ended
                for other in waiting:
                    other.kill()
    return code


class Exposed:
    """Adds up how long the compute stream (on a CPU: the process) waits, by "axis operation"."""

    def __init__(self, device: torch.device) -> None:
        self.seconds: defaultdict[str, float] = defaultdict(float)
        self._on_gpu = device.type == "cuda"
        self._gaps: list[tuple[str, Any, Any]] = []

    def read(self) -> dict[str, float]:
        """Return the seconds by operation, the longest first."""
        for label, begin, end in self._gaps:
            self.seconds[label] += begin.elapsed_time(end) / 1e3
        self._gaps.clear()
        return dict(sorted(self.seconds.items(), key=lambda item: item[1], reverse=True))

    @contextmanager
    def measured(self) -> Iterator[None]:
        """Measure all waits inside."""
        waits, wait = collectives.waits, collectives.PendingWork.wait

        def labelled_wait(work: Any) -> None:
            before, first = waits.seconds, len(waits.gaps or ())
            wait(work)
            label = getattr(work, "label", "other")
            if waits.gaps is None:
                self.seconds[label] += waits.seconds - before
            else:
                self._gaps += [(label, begin, end) for begin, end in waits.gaps[first:]]

        def labelled(start: Callable[..., Any], kind: str) -> Callable[..., Any]:
            @wraps(start)
            def run(*args: Any) -> Any:
                result = start(*args)
                work = result[1] if isinstance(result, tuple) else result
                axis = args[0].axis if isinstance(args[0], Channel) else args[2 if kind in _TWO_TENSORS else 1]
                work.label = f"{axis.name} {kind}"
                return result

            return run

        with ExitStack() as stack:
            for kind in ("all_reduce", "broadcast", *_TWO_TENSORS):
                change = labelled(getattr(collectives, kind), kind)
                stack.enter_context(mock.patch.object(collectives, kind, change))
            for kind in ("send", "receive"):
                stack.enter_context(mock.patch.object(Channel, kind, labelled(getattr(Channel, kind), kind)))
            stack.enter_context(mock.patch.object(collectives.PendingWork, "wait", labelled_wait))
            waits.gaps = [] if self._on_gpu else None
            try:
                yield
            finally:
                waits.gaps = None


_TWO_TENSORS = ("all_gather", "reduce_scatter", "all_to_all")


def engine_of(cfg: Any, ctx: ParallelContext) -> Engine:
    """Build an engine whose weights are drawn on the device: the real ones would take minutes on the host."""
    engine = build_engine(cfg, ctx)
    torch.manual_seed(1)
    for state in engine.optimizer.states():
        if state.role == "master":
            state.flat.normal_(0.0, 0.02)
    engine.optimizer.finish_load()
    return engine


def measure(name: str, flags: list[str], steps: int, device_name: str) -> None:
    """Train, and report on rank 0."""
    cfg = cli.parse([*flags, "--mock-data"]).config
    device = pick_device(device_name, cfg.parallel.tp, cfg.parallel.zero)
    init_process_group(device)
    grid = Grid.from_config(cfg.parallel, world_size())
    ctx = ParallelContext.create(grid, device)
    engine = engine_of(cfg, ctx)
    shape = cfg.train.global_batch_size // ctx.dp.size, cfg.model.seq_len + 1
    draws = np.random.default_rng(ctx.dp.rank)
    times = []
    exposed = Exposed(device)
    with ExitStack() as stack:
        for step in range(steps):
            if step == _UNMEASURED:
                stack.enter_context(exposed.measured())
            times.append(timed_step(engine, draws.integers(0, cfg.model.vocab, shape), step + 1))
    seconds = statistics.median(times[_UNMEASURED:])
    peak = torch.cuda.max_memory_allocated() if device.type == "cuda" else 0
    worst = torch.tensor([seconds, peak], dtype=torch.float64, device=device)
    collectives.all_reduce(worst, ctx.world, torch.distributed.ReduceOp.MAX).wait()
    seconds, peak = worst.tolist()
    waited = {label: s / (steps - _UNMEASURED) for label, s in exposed.read().items()}
    if ctx.rank == 0:
        report(name, cfg, grid, device, seconds, peak, waited)
    del engine
    shutdown()


def report(
    name: str, cfg: Any, grid: Grid, device: torch.device, seconds: float, peak: float, waited: dict[str, float]
) -> None:
    """Write the row."""
    rate = cfg.train.global_batch_size * cfg.model.seq_len / seconds / grid.world
    per_token, most = flops_per_token(cfg.model), peak_flops(device)
    cluster, _ = machine(device_in_use(device), grid.world)
    forecast = step_time(cfg, grid, cluster).total
    planned = max(stage.total for stage in memory_per_rank(cfg, grid))
    row(
        layout=name,
        tokens_per_s_per_gpu=rate,
        mfu_causal=per_token.causal * rate / most if most else None,
        mfu_full=per_token.full * rate / most if most else None,
        step_ms=seconds * 1e3,
        forecast_ms=forecast * 1e3,
        peak_gib=peak / 2**30,
        planned_gib=planned / 2**30,
        exposed_ms=sum(waited.values()) * 1e3,
        exposed_most=", ".join(f"{label} {s * 1e3:.1f}" for label, s in list(waited.items())[:3]),
        exposed={label: round(s * 1e3, 3) for label, s in waited.items()},
    )


def main() -> int:
    """Run one rank, or start all of them."""
    if sys.argv[1] == "--start":
        return start(int(sys.argv[2]), sys.argv[3:])
    parser = argparse.ArgumentParser(description=__doc__, allow_abbrev=False)
    parser.add_argument("--row", required=True, help="name of the row")
    parser.add_argument("--steps", type=int, required=True, help="number of steps, the first three not measured")
    parser.add_argument("--on", choices=("cpu", "cuda"), default="cuda")
    args, flags = parser.parse_known_args()
    measure(args.row, flags, args.steps, args.on)
    return 0


if __name__ == "__main__":
    sys.exit(main())
