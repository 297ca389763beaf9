#!/usr/bin/env python3
"""Compare measured and simulated step time of every schedule: real processes, real messages, stages that sleep.

The executor runs each schedule's programs over gloo, with stages that sleep for the cost of each op instead of
computing. Sleeping needs no core, so pp = 4 can be measured on 2 cores. The ratio measured / simulated shows how much
the executor and the messages add; taking the best of several steps excludes interference by other programs.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing as mp
import os
import queue
import tempfile
import time
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext

import torch
import torch.distributed as dist

from megalite.core.base.errors import UserError
from megalite.core.batch import ForwardPass, Message, MicroBatch
from megalite.core.mesh.context import ParallelContext
from megalite.core.mesh.grid import Grid
from megalite.core.options.parallel import SCHEDULES
from megalite.core.parts.schedules.simulate import simulate
from megalite.core.pipeline.executor import Executor, Stage, WeightGradQueue
from megalite.core.pipeline.p2p import Channel
from megalite.core.pipeline.schedule import Costs, Schedule, build_schedule
from megalite.extras.tool import run_tool

SHAPE = (4, 1, 8)


class _Sleep(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, anchor, stage):
        ctx.stage = stage
        time.sleep(stage.costs.forward)
        return torch.zeros(SHAPE)

    @staticmethod
    def backward(ctx, grad):
        stage = ctx.stage
        time.sleep(stage.costs.input_grad + (0.0 if stage.deferring else stage.costs.weight_grad))
        return (grad if ctx.needs_input_grad[0] else None), None, None


class SleepingStage(torch.nn.Module):
    """A stage, and its own queue of weight gradients, that only lets time pass. Costs are in seconds."""

    def __init__(self, first: bool, last: bool, costs: Costs) -> None:
        super().__init__()
        self.first, self.last, self.costs = first, last, costs
        self.deferring = False
        self.anchor = torch.zeros((), requires_grad=True)  # makes the first stage's output part of a graph

    @property
    def queue(self) -> WeightGradQueue:
        return self

    def forward(self, x: torch.Tensor, batch: MicroBatch, fwd: ForwardPass) -> torch.Tensor:
        return _Sleep.apply(x, self.anchor, self)

    @contextmanager
    def defer(self, microbatch: int) -> Iterator[None]:
        self.deferring = True
        yield
        self.deferring = False

    def run(self, microbatch: int) -> None:
        time.sleep(self.costs.weight_grad)

    def backward(self) -> AbstractContextManager[None]:
        return nullcontext()


def _worker(rank: int, store: str, pp: int, jobs: list[tuple[Schedule, Costs]], steps: int, results: mp.Queue) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=pp)
    context = ParallelContext.create(Grid.of(pp, pp=pp), torch.device("cpu"))
    activations, gradients = (
        Channel(axis, Message(SHAPE, torch.float32), context.device) for axis in (context.pp, context.pp_grad)
    )
    tokens = torch.zeros(SHAPE[:2], dtype=torch.int64)
    for schedule, costs in jobs:
        last = schedule.placement.num_stages - 1
        stages: dict[int, Stage] = {
            s: SleepingStage(s == 0, s == last, costs) for s in schedule.placement.stages_of(rank)
        }
        executor = Executor(stages, activations, gradients)
        batch = [MicroBatch.of_samples(tokens, tokens)] * schedule.num_microbatches
        times = []
        for _ in range(steps):
            dist.barrier()
            start = time.perf_counter()
            executor.run(schedule.programs[rank], batch, step=0, first=0)
            elapsed = torch.tensor(time.perf_counter() - start, dtype=torch.float64)
            dist.all_reduce(elapsed, op=dist.ReduceOp.MAX)
            times.append(elapsed.item())
        if rank == 0:
            results.put(times)
    dist.destroy_process_group()


def measure(pp: int, jobs: list[tuple[Schedule, Costs]], steps: int) -> list[list[float]]:
    """Return the seconds of every step of every job, on the slowest rank."""
    spawn = mp.get_context("spawn")
    results = spawn.Queue()
    with tempfile.TemporaryDirectory() as folder:
        store = os.path.join(folder, "store")
        workers = [spawn.Process(target=_worker, args=(r, store, pp, jobs, steps, results)) for r in range(pp)]
        for worker in workers:
            worker.start()
        times: list[list[float]] = []
        try:
            while len(times) < len(jobs):
                try:
                    times.append(results.get(timeout=1.0))
                except queue.Empty:
                    if any(worker.exitcode for worker in workers):
                        raise RuntimeError("a worker failed; its traceback is above") from None
            for worker in workers:
                worker.join()
        finally:
            for worker in workers:
                worker.terminate()
    return times


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--pp", type=int, default=4)
    parser.add_argument("--num-microbatches", "-m", type=int, default=8)
    parser.add_argument("--op-ms", type=float, default=40.0, help="F, I and W of a rank's whole share, milliseconds")
    parser.add_argument("--steps", type=int, default=5, help="steps per schedule; the best one counts")
    parser.add_argument("--json", action="store_true")
    args = parser.parse_args()
    if args.pp < 2:
        raise UserError(f"--pp {args.pp}", "needs at least 2 ranks to pass messages between", "use --pp 2")
    if args.steps < 1 or args.op_ms <= 0:
        raise UserError(f"--steps {args.steps} --op-ms {args.op_ms}", "both must be above 0", "use the defaults")
    jobs = []
    for name in SCHEDULES:
        vp = 2 if name in ("interleaved", "zb-v") else 1
        seconds = args.op_ms / 1000
        costs = Costs(seconds, seconds, seconds).per_chunk(vp)
        jobs.append((build_schedule(name, args.pp, vp, args.num_microbatches), costs))
    rows = []
    for (schedule, costs), times in zip(jobs, measure(args.pp, jobs, args.steps)):
        planned = simulate(schedule, costs).makespan
        rows.append(
            {
                "ratio": min(times) / planned,
                "schedule": schedule.name,
                "vp": schedule.vp,
                "simulated_s": planned,
                "best_s": min(times),
                "worst_s": max(times),
            }
        )
    if args.json:
        print(json.dumps({"pp": args.pp, "num_microbatches": args.num_microbatches, "rows": rows}))
        return
    print("measured/simulated  schedule      vp  simulated s   best s  worst s")
    for row in rows:
        print(
            f"{row['ratio']:18.3f}  {row['schedule']:12s} {row['vp']:3d} {row['simulated_s']:12.3f} "
            f"{row['best_s']:8.3f} {row['worst_s']:8.3f}"
        )


if __name__ == "__main__":
    run_tool(main)
