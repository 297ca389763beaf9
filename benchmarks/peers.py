#!/usr/bin/env python3
"""One tiny Llama in plain torch, transformers, DDP, FSDP2, DeepSpeed, DTensor, torch's pipelining, Megatron-Core and
megalite.

Every peer of a layout has its own processes, started as its users would, and they take turns, one step each, in an
order that rotates: whatever else the machine does falls on all of them alike. Every step is timed from a barrier to the
slowest rank's end, with what megalite would overlap with its next step included. Ratios are of each round's two
neighbors, then their median.

    python benchmarks/peers.py --rounds 15 --json peers.json --markdown peers.md

One thread and one core per process when there are several (ranks share cores in turn where there are fewer), all cores
when there is one. Peers of a layout do the same work: the run fails at the first step whose losses differ by more than
1e-5 of their size. DeepSpeed and Megatron-Core are skipped, with the reason printed, where they cannot be imported.
"""

from __future__ import annotations

import argparse
import json
import math
import multiprocessing as mp
import os
import statistics
import sys
import tempfile
import time
from importlib import metadata
from importlib.util import find_spec
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from megalite.core.base.errors import UserError
from megalite.extras.tool import run_tool

WORLDS = {
    "single": 1,
    "experts": 1,
    "expert layer": 1,
    "expert layer, 16 samples": 1,
    "dp2": 2,
    "tp2": 2,
    "pp2": 2,
    "pp2 vp2": 2,
    "tp2 pp2": 4,
}
WORLDS |= {"dp2 zero2": 2, "dp2 zero3": 2, "dp4 zero2": 4, "dp4 zero3": 4}


def _worker(rank: int, rank_core: int | None, store: str, layout: str, peer: str, talk: Connection) -> None:
    """One rank of one peer: a step for every batch that comes."""
    if rank_core is not None:
        # Before any thread starts: left alone, the kernel may put two ranks on one core and leave the other idle.
        os.sched_setaffinity(0, {rank_core})
    sys.path.insert(0, str(Path(__file__).parent))
    import numpy as np
    import peer_layouts
    import torch
    import torch.distributed as dist

    (world, tp, pp, vp), peers = peer_layouts.LAYOUTS[layout]
    torch.set_num_threads(1 if world > 1 else len(os.sched_getaffinity(0)))
    if world > 1:
        dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=world)
    step = peers[peer](tp, pp, vp)
    dp = world // (tp * pp)
    talk.send("ready")
    while (batch := talk.recv()) is not None:
        share = np.split(batch, dp)[rank if dp > 1 else 0]
        if world > 1:
            dist.barrier()
        wall, cpu = time.perf_counter(), time.process_time()
        loss = step(share)
        spent = torch.tensor([time.perf_counter() - wall, time.process_time() - cpu], dtype=torch.float64)
        if world > 1:
            dist.all_reduce(spent[:1], dist.ReduceOp.MAX)
            dist.all_reduce(spent[1:], dist.ReduceOp.SUM)
        talk.send((spent[0].item(), spent[1].item(), loss))
    if world > 1:
        dist.destroy_process_group()


class Peer:
    """The processes of one peer."""

    def __init__(self, layout: str, name: str, world: int, folder: str) -> None:
        self.layout, self.name = layout, name
        spawn = mp.get_context("spawn")
        cores = sorted(os.sched_getaffinity(0))
        store = os.path.join(folder, name.replace(" ", "_"))
        self.talks, self.workers = [], []
        for rank in range(world):
            core = cores[rank % len(cores)] if world > 1 else None
            ours, theirs = spawn.Pipe()
            worker = spawn.Process(target=_worker, args=(rank, core, store, layout, name, theirs))
            worker.start()
            theirs.close()
            self.talks.append(ours)
            self.workers.append(worker)
        self.hear()

    def hear(self) -> Any:
        """What every rank answers; rank 0's answer."""
        try:
            return [talk.recv() for talk in self.talks][0]
        except EOFError:
            raise RuntimeError(f"{self.layout}, {self.name}: a worker failed; its traceback is above") from None

    def say(self, message: Any) -> None:
        for talk in self.talks:
            talk.send(message)

    def end(self, at_once: bool) -> None:
        for worker in self.workers:
            if at_once:
                worker.kill()
            worker.join()


def run_layout(layout: str, world: int, rounds: int, warmup: int) -> dict[str, list[tuple[float, float, float]]]:
    """(wall seconds, CPU seconds of all ranks, loss) of every step of every peer, warm-up included."""
    sys.path.insert(0, str(Path(__file__).parent))
    import numpy as np
    import peer_layouts
    import peer_models

    reasons = {name: peer_layouts.missing(name) for name in peer_layouts.LAYOUTS[layout][1]}
    for name, reason in reasons.items():
        if reason is not None:
            print(f"{layout}, {name}: skipped: {reason}")
    names = [name for name, reason in reasons.items() if reason is None]
    rows: dict[str, list[tuple[float, float, float]]] = {name: [] for name in names}
    draws = np.random.default_rng(0)
    shape = (peer_models.GLOBAL_BATCH, peer_models.SEQ + 1)
    peers: dict[str, Peer] = {}
    done = False
    with tempfile.TemporaryDirectory() as folder:
        try:
            for name in names:
                peers[name] = Peer(layout, name, world, folder)
            for turn in range(warmup + rounds):
                # Skewed, so that there is something to learn.
                batch = (draws.random(shape) ** 3 * peer_models.VOCAB).astype(np.int64)
                first = turn % len(names)
                for name in names[first:] + names[:first]:
                    peers[name].say(batch)
                    rows[name].append(peers[name].hear())
                check_losses(layout, turn + 1, {name: rows[name][-1][2] for name in names})
            for peer in peers.values():
                peer.say(None)
            done = True
        finally:
            for peer in peers.values():
                peer.end(at_once=not done)
    return rows


def check_losses(layout: str, step: int, losses: dict[str, float]) -> None:
    """Require that all peers did the same work.

    Raises:
        RuntimeError: a loss differs from megalite's by more than 1e-5 of it.
    """
    ours = losses["megalite"]
    for name, loss in losses.items():
        # A NaN is not close to anything.
        if not math.isclose(loss, ours, rel_tol=1e-5):
            raise RuntimeError(f"{layout}, step {step}: the loss of {name} is {loss}, megalite's {ours}")


def summarise(rows: dict[str, list[tuple[float, float, float]]], warmup: int, tokens: int) -> list[dict[str, Any]]:
    """Medians, spread and ratios to megalite of every peer. A ratio above 1: megalite is ahead."""
    ours = rows["megalite"][warmup:]
    out = []
    for name, steps in rows.items():
        measured = steps[warmup:]
        wall, cpu = [s[0] for s in measured], [s[1] for s in measured]
        quarters = statistics.quantiles(wall, n=4)
        out.append(
            {
                "peer": name,
                "wall_s": statistics.median(wall),
                "wall_quartiles_s": [quarters[0], quarters[2]],
                "cpu_s": statistics.median(cpu),
                "tokens_per_s": tokens / statistics.median(wall),
                "wall_ratio": statistics.median(a[0] / b[0] for a, b in zip(measured, ours)),
                "cpu_ratio": statistics.median(a[1] / b[1] for a, b in zip(measured, ours)),
                "first_losses": [s[2] for s in steps[:3]],
                "last_loss": steps[-1][2],
            }
        )
    return out


def machine() -> dict[str, Any]:
    import torch
    import transformers

    import megalite

    cpus = Path("/proc/cpuinfo").read_text() if Path("/proc/cpuinfo").exists() else ""
    names = [line.split(":")[1].strip() for line in cpus.splitlines() if "model name" in line]
    return {
        "cpu": names[0] if names else "unknown",
        "cores": len(os.sched_getaffinity(0)),
        "load_average": os.getloadavg()[0],
        "torch": torch.__version__,
        "transformers": transformers.__version__,
        "deepspeed": metadata.version("deepspeed") if find_spec("deepspeed") else None,
        "megatron_core": metadata.version("megatron-core") if find_spec("megatron") else None,
        "megalite": megalite.__version__,
        "date": time.strftime("%Y-%m-%d"),
    }


def markdown(report: dict[str, Any]) -> str:
    lines = [
        "| layout | peer | step, ms (quartiles) | CPU, ms | tokens/s | time / megalite's | CPU / megalite's "
        "| loss of step 1, 3, last |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for layout, rows in report["layouts"].items():
        for row in rows:
            low, high = row["wall_quartiles_s"]
            losses = ", ".join(f"{x:.6f}" for x in (row["first_losses"][0], row["first_losses"][-1], row["last_loss"]))
            lines.append(
                f"| {layout} | {row['peer']} | {row['wall_s'] * 1e3:.0f} ({low * 1e3:.0f} to {high * 1e3:.0f}) "
                f"| {row['cpu_s'] * 1e3:.0f} | {row['tokens_per_s']:,.0f} | {row['wall_ratio']:.2f} "
                f"| {row['cpu_ratio']:.2f} | {losses} |"
            )
    m = report["machine"]
    lines += [
        "",
        f"{m['date']}, {m['cores']} cores of {m['cpu']}, load average {m['load_average']:.1f} at the start, torch "
        f"{m['torch']}, transformers {m['transformers']}, DeepSpeed {m['deepspeed'] or 'not installed'}, Megatron-Core "
        f"{m['megatron_core'] or 'not installed'}, megalite {m['megalite']}; medians of {report['rounds']} rounds.",
    ]
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--layouts", nargs="+", default=list(WORLDS), choices=WORLDS, metavar="NAME", help=", ".join(WORLDS)
    )
    parser.add_argument("--rounds", type=int, default=15, help="measured steps of every peer (15)")
    parser.add_argument("--warmup", type=int, default=3, help="steps of every peer before that (3)")
    parser.add_argument("--json", type=Path, metavar="F", help="also write all figures to F")
    parser.add_argument("--markdown", type=Path, metavar="F", help="also write the table to F")
    args = parser.parse_args()
    if args.rounds < 2 or args.warmup < 0:
        raise UserError(f"--rounds {args.rounds} --warmup {args.warmup}", "needs 2 rounds or more", "leave them out")
    report: dict[str, Any] = {"machine": machine(), "rounds": args.rounds, "layouts": {}}
    tokens = 16 * 128
    for layout in args.layouts:
        rows = run_layout(layout, WORLDS[layout], args.rounds, args.warmup)
        report["layouts"][layout] = summarise(rows, args.warmup, tokens)
        # Told as it comes: a run takes minutes.
        print("\n".join(markdown({**report, "layouts": {layout: report["layouts"][layout]}}).splitlines()[2:-2]))
    if args.json:
        args.json.write_text(json.dumps(report, indent=1) + "\n")
    if args.markdown:
        args.markdown.write_text(markdown(report) + "\n")


if __name__ == "__main__":
    run_tool(main)
