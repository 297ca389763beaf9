"""Measure what --save-code costs and saves for the state of a checkpoint: bytes by kind, and processor time of the
writer and of a verified load, coded beside plain; with --beside, of steps while a writer works. JSON.

python -m benchmarks.save_code runs/my-run/checkpoints/step_00000100 --rounds 5 --copies 8
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import os
import resource
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any, Literal

import torch

from benchmarks.checkpoint import make_step
from benchmarks.store import keep_apart
from megalite.core.base.dtypes import STORED
from megalite.core.base.slices import Slice
from megalite.core.mesh.context import ParallelContext
from megalite.core.sharding import StateTensor
from megalite.runtime.checkpoint.coded import encode
from megalite.runtime.checkpoint.load import load_checkpoint
from megalite.runtime.checkpoint.manifest import read_manifest
from megalite.runtime.checkpoint.save import Checkpointer

Code = Literal["none", "planes-zstd"]


def states_of(path: Path) -> list[StateTensor]:
    """Read all states of a checkpoint with masters and moments."""
    states = []
    for kind, tensors in read_manifest(path).tensors.items():
        for name, tensor in tensors.items():
            flat = torch.empty(Slice((), tensor.shape).numel, dtype=STORED[tensor.dtype])
            box = Slice((0,) * len(tensor.shape), tensor.shape)
            states.append(StateTensor(name, kind, tensor.shape, flat, [box], True))
    load_checkpoint(path, states, ParallelContext.single())
    return states


def measure(states: list[StateTensor], code: Code, root: Path) -> dict[str, float]:
    """Save once with a new writer, in the foreground, and load; seconds, and bytes of the shard."""
    ctx = ParallelContext.single()
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    checkpointer = Checkpointer(root, ctx, code=code)
    started = time.perf_counter()
    path = checkpointer.save(1, states, {})
    save_s = time.perf_counter() - started
    checkpointer.close()
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    assert path is not None
    started_cpu, started = time.process_time(), time.perf_counter()
    load_checkpoint(path, states, ctx)
    return {
        "bytes": read_manifest(path).files[0].size,
        "save_s": save_s,
        # Its start, about a tenth of a second, is among it.
        "writer_processor_s": after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime,
        "load_s": time.perf_counter() - started,
        "load_processor_s": time.process_time() - started_cpu,
    }


def medians(states: list[StateTensor], rounds: int) -> dict[str, Any]:
    """Measure both ways in turn; medians, and the quotients."""
    found: dict[Code, list[dict[str, float]]] = {"none": [], "planes-zstd": []}
    for _ in range(rounds):
        for code, rows in found.items():
            with tempfile.TemporaryDirectory() as root:
                rows.append(measure(states, code, Path(root)))
    middle: dict[str, Any] = {
        code: {k: statistics.median(row[k] for row in rows) for k in rows[0]} for code, rows in found.items()
    }
    share = middle["planes-zstd"]["bytes"] / middle["none"]["bytes"]
    return {"share": round(share, 4), **{str(code): row for code, row in middle.items()}}


def beside(states: list[StateTensor], rounds: int, root: Path) -> dict[str, dict[str, float]]:
    """Run steps of one thread, which has a core of its own, while a writer saves on another one, at the same priority.

    Returns:
        For each code, in times of the steps before and after: clock and processor time of a step; number of steps.
    """
    ctx = ParallelContext.single()
    step = make_step(ctx, 0.02)
    codes: tuple[Code, ...] = ("none", "planes-zstd")
    checkpointers = {code: Checkpointer(root / code, ctx, code=code) for code in codes}
    writers = [checkpointer._writer.process.pid for checkpointer in checkpointers.values()]
    keep_apart(writers)
    for pid in writers:
        os.setpriority(os.PRIO_PROCESS, pid, -20)

    def timed() -> tuple[float, float]:
        begun = time.perf_counter(), time.process_time()
        step()
        return time.perf_counter() - begun[0], time.process_time() - begun[1]

    found: dict[Code, list[list[float]]] = {code: [] for code in codes}
    for i in range(rounds):
        for code, checkpointer in checkpointers.items():
            alone = [timed() for _ in range(20)]
            checkpointer.save(i + 1, states, {}, background=True)
            during = []
            while checkpointer.pending:
                during.append(timed())
                checkpointer.poll()
            checkpointer.finish()
            alone += [timed() for _ in range(20)]
            middles = [[statistics.median(times) for times in zip(*rows)] for rows in (alone, during)]
            found[code].append([*(b / a for a, b in zip(*middles)), len(during)])
    for checkpointer in checkpointers.values():
        checkpointer.close()
    names = ("clock", "processor", "steps")
    return {code: dict(zip(names, map(statistics.median, zip(*rows)))) for code, rows in found.items()}


def share_of(flats: list[torch.Tensor]) -> float:
    """Return coded bytes by plain ones."""
    body = b"".join(flat.view(torch.uint8).numpy().tobytes() for flat in flats)
    return round(sum(map(len, encode(memoryview(body), [(0, flats[0].itemsize)]))) / len(body), 4)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("checkpoint", type=Path)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--copies", type=int, default=1, help="how often the state is saved, one after the other")
    parser.add_argument(
        "--beside", action="store_true", help="also time steps beside a writer; needs root and two cores"
    )
    args = parser.parse_args()
    torch.set_num_threads(1)
    states = states_of(args.checkpoint)
    # Speed of a larger state, in which starting the writer counts for little.
    many = [dataclasses.replace(state, name=f"{i}.{state.name}") for i in range(args.copies) for state in states]
    result: dict[str, Any] = {"all": medians(many, args.rounds)}
    for kind in dict.fromkeys(state.role for state in states):
        flats = [state.flat for state in states if state.role == kind]
        result[kind] = share_of(flats)
        if kind == "master":
            result["weights in bf16"] = share_of([flat.bfloat16() for flat in flats])
    if args.beside:
        with tempfile.TemporaryDirectory() as root:
            result["step beside a writer"] = beside(many, args.rounds, Path(root))
        result |= {"cores": os.cpu_count(), "load": os.getloadavg()[0]}
    print(json.dumps(result, indent=1))


if __name__ == "__main__":
    main()
