"""Measure the cost of checkpoints on this machine: a save against a plain write of the same bytes, the effect of a save
in the background on the following steps, and a verified load. Ratios first; JSON with --json.

python benchmarks/checkpoint.py --mb 512
torchrun --nproc-per-node 4 benchmarks/checkpoint.py --mb 128
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import statistics
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import torch

from megalite.core.mesh import collectives
from megalite.core.mesh.context import ParallelContext
from megalite.core.mesh.device import pick_device
from megalite.core.mesh.grid import Grid
from megalite.core.mesh.rendezvous import init_process_group, shutdown, world_size
from megalite.core.sharding import Layout, ParamSpec, Shard, StateTensor
from megalite.runtime.checkpoint.load import load_checkpoint
from megalite.runtime.checkpoint.save import Checkpointer
from megalite.runtime.checkpoint.snapshot import copy_and_sum
from megalite.runtime.places.lock import RunLock


def states_of(ctx: ParallelContext, mb: float) -> list[StateTensor]:
    """Make about `mb` MB per rank of masters and moments, in matrices of 4 MiB per rank cut by rows."""
    count = max(1, round(mb * 1e6 / (3 * 4 * (1 << 20))))
    out = []
    for i in range(count):
        spec = ParamSpec(f"layers.{i}.weight", (1024 * ctx.world.size, 1024), (("tp", 0),))
        shard = Shard(spec, Layout(ctx.grid, ctx.rank))
        for kind in ("master", "exp_avg", "exp_avg_sq"):
            flat = torch.randn(1 << 20, device=ctx.device)
            out.append(StateTensor(shard.spec.name, kind, shard.spec.shape, flat, shard.flat_slices(0, 1 << 20), True))
    return out


def timed(ctx: ParallelContext, action: Callable[..., object]) -> float:
    """Measure the seconds from the time all ranks have arrived to the time all are done."""

    def together() -> None:
        collectives.all_reduce(torch.zeros(1, device=ctx.device), ctx.world).wait()
        if ctx.device.type == "cuda":
            torch.cuda.synchronize()

    together()
    started = time.perf_counter()
    action()
    together()
    return time.perf_counter() - started


def processor_time(action: Callable[[], object]) -> float:
    """Measure the processor time of this process: what other processes take does not count."""
    started = time.process_time()
    action()
    return time.process_time() - started


def finite_check(states: Sequence[StateTensor], copies: Sequence[torch.Tensor]) -> float:
    """Measure what the sums of a snapshot, by which it finds what is not finite, add to the copying."""
    plain, summed = [], []
    for _ in range(5):
        plain.append(processor_time(lambda: [c.copy_(s.flat) for c, s in zip(copies, states)]))
        summed.append(processor_time(lambda: [copy_and_sum(c, s.flat) for c, s in zip(copies, states)]))
    return statistics.median(summed) - statistics.median(plain)


def plain_write(folder: Path, ctx: ParallelContext, data: bytes) -> None:
    """Write one file per rank and flush it: the speed of the disk."""
    with (folder / f"plain_{ctx.rank}").open("wb") as f:
        f.write(data)
        f.flush()
        os.fsync(f.fileno())


def make_step(ctx: ParallelContext, seconds: float) -> Callable[[], None]:
    """Make a step of matrix products that takes about `seconds`."""
    size = 512 if ctx.device.type == "cpu" else 4096
    x = torch.randn(size, size, device=ctx.device)

    def once(count: int) -> None:
        for _ in range(count):
            torch.mm(x, x)

    once(3)
    count = max(1, round(seconds / (timed(ctx, lambda: once(10)) / 10)))
    counts = torch.tensor([float(count)], device=ctx.device)
    collectives.all_reduce(counts, ctx.world).wait()
    return lambda: once(int(counts.item() / ctx.world.size))


def measure(ctx: ParallelContext, mb: float, step_s: float, root: Path, repeats: int) -> dict[str, float]:
    states = states_of(ctx, mb)
    size = sum(s.flat.numel() * 4 for s in states)
    whole = size * ctx.world.size / 1e6
    data = b"".join(s.flat.cpu().numpy().tobytes() for s in states)
    copies = [torch.empty(s.flat.shape) for s in states]
    step = make_step(ctx, step_s)
    checkpointer = Checkpointer(root / "checkpoints", ctx)
    saves, plains, snapshots, alone, after, loads, finite, locks = [], [], [], [], [], [], [], []
    owned = root / "owned"
    owned.mkdir(exist_ok=True)
    lock = RunLock(owned, f"rank {ctx.rank}")
    if ctx.rank == 0:
        lock.acquire()
    path = root / "checkpoints"
    for i in range(repeats + 1):
        plains.append(timed(ctx, lambda: plain_write(root, ctx, data)))
        saves.append(timed(ctx, lambda i=i: checkpointer.save(3 * i + 1, states, {})))
        finite.append(finite_check(states, copies))
        locks.append(processor_time(lock.confirm) if ctx.rank == 0 else 0.0)
        alone += [timed(ctx, step) for _ in range(5)]
        snapshots.append(timed(ctx, lambda i=i: checkpointer.save(3 * i + 2, states, {}, background=True)))
        after.append(timed(ctx, step))
        checkpointer.finish()
        path = root / "checkpoints" / f"step_{3 * i + 2:08d}"
        loads.append(timed(ctx, lambda path=path: load_checkpoint(path, states, ctx)))
    checkpointer.close()
    lock.release()
    # The first of each allocates memory that later ones reuse.
    first, middle = snapshots[0], statistics.median
    save, plain, load = middle(saves[1:]), middle(plains[1:]), middle(loads[1:])
    return {
        "save_over_plain_write": save / plain,
        "step_after_save_over_step": middle(after[1:]) / middle(alone),
        "snapshot_share_of_save": middle(snapshots[1:]) / save,
        "finite_check_share_of_save": middle(finite[1:]) / save,
        "lock_check_share_of_save": middle(locks[1:]) / save,
        "mb": whole,
        "save_mb_per_s": whole / save,
        "plain_write_mb_per_s": whole / plain,
        "load_verified_mb_per_s": whole / load,
        "snapshot_mb_per_s": whole / middle(snapshots[1:]),
        "first_snapshot_s": first,
        "step_s": middle(alone),
        "step_after_save_s": middle(after[1:]),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--mb", type=float, default=256.0, help="MB of state per rank")
    parser.add_argument("--step", type=float, default=1.0, help="seconds per synthetic training step")
    parser.add_argument("--repeats", type=int, default=3, help="measurements; the median is reported")
    parser.add_argument("--device", default="auto", help="auto, cpu or cuda: where the state is")
    parser.add_argument("--folder", help="where to write (default: a temporary folder, which may be in memory)")
    parser.add_argument("--json", action="store_true", help="one JSON object instead of lines")
    args = parser.parse_args()
    device = pick_device(args.device)
    init_process_group(device)
    world = world_size()
    ctx = ParallelContext.create(Grid.of(world, tp=world), device)
    name = tempfile.mkdtemp(dir=args.folder) if ctx.rank == 0 else ""
    root = Path(collectives.gather_texts(name, ctx.world, device)[0])
    try:
        result = measure(ctx, args.mb, args.step, root, args.repeats)
    finally:
        if ctx.rank == 0:
            shutil.rmtree(root, ignore_errors=True)
    if ctx.rank == 0 and args.json:
        print(json.dumps(result))
    elif ctx.rank == 0:
        for key, value in result.items():
            print(f"{key:28} {value:10.3f}")
    shutdown()


if __name__ == "__main__":
    main()
