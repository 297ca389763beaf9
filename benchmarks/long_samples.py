#!/usr/bin/env python3
"""Long samples on this machine's CPU: one sample end to end with --cp, memory per rank beside one process's.

    python benchmarks/long_samples.py train --tokens 1048576 --window 1024 --layers 1 --hidden 32  # cp 4, one process
    python benchmarks/long_samples.py time --tokens 4096                        # a step with cp 2 against one process
    python benchmarks/long_samples.py torch                                     # torch's own context parallelism here

Memory is the peak of resident memory (VmHWM) less what was resident before the step. Times are processor time of all
ranks: on a shared machine, wall time says little. JSON goes to standard output.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import socket
import statistics
import time
from typing import Any

import numpy as np
import torch
import torch.multiprocessing as mp

from megalite.core.build import build_engine
from megalite.core.mesh.context import ParallelContext
from megalite.core.mesh.grid import Grid
from megalite.core.options.model import ModelConfig
from megalite.core.options.parallel import ParallelConfig
from megalite.core.options.train import TrainConfig
from megalite.core.step import train_step
from megalite.runtime.data import Rows
from megalite.runtime.options.run import Config

MIB = 2**20


def resident() -> tuple[int, int]:
    """Bytes of resident memory now, and at its peak."""
    with open("/proc/self/status") as file:
        sizes = dict(line.split(":", 1) for line in file)
    now, peak = (1024 * int(sizes[key].split()[0]) for key in ("VmRSS", "VmHWM"))
    return now, peak


def config(args: argparse.Namespace, cp: int, comm: str) -> Config:
    model = ModelConfig.from_arch(
        "llama",
        num_layers=args.layers,
        hidden_size=args.hidden,
        num_heads=args.heads,
        num_kv_heads=args.heads // 2,
        vocab_size=256,
        seq_len=args.tokens,
        window=args.window or None,
    )
    train = TrainConfig(
        micro_batch_size=1,
        global_batch_size=1,
        train_steps=args.steps,
        recompute=args.recompute,
        precision="fp32",
        loss_chunk=min(4096, args.tokens // cp),
    )
    return Config(model=model, parallel=ParallelConfig(cp=cp, cp_comm=comm, device="cpu"), train=train)  # type: ignore[arg-type]


def rank_main(rank: int, port: int, cfg: Config, results: Any) -> None:
    """Train on one sample, and report memory, processor time, loss and gradient norm."""
    torch.set_num_threads(1)
    world = cfg.parallel.cp
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port), RANK=str(rank), WORLD_SIZE=str(world))
    torch.distributed.init_process_group("gloo", rank=rank, world_size=world)
    engine = build_engine(cfg, ParallelContext.create(Grid.from_config(cfg.parallel, world), torch.device("cpu")))
    engine.optimizer.init_parameters(1234)
    tokens = np.random.default_rng(1).integers(0, 256, (1, cfg.model.seq_len + 1))
    rows = Rows(tokens[:, :-1], tokens[:, 1:])
    before, _ = resident()
    seconds, figures = [], []
    for step in range(1, cfg.train.train_steps + 1):
        start = time.process_time()
        result = train_step(engine, rows, step)
        engine.optimizer.wait_weights()
        seconds.append(time.process_time() - start)
        figures.append((result.loss, result.grad_norm))
    results.put((rank, resident()[1] - before, seconds, figures))
    torch.distributed.barrier()
    torch.distributed.destroy_process_group()


def run(cfg: Config) -> dict[str, Any]:
    """Train with as many processes as cp; memory by rank, processor seconds of all of them by step."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    results = mp.get_context("spawn").SimpleQueue()
    mp.spawn(rank_main, (port, cfg, results), nprocs=cfg.parallel.cp)
    found = sorted(results.get() for _ in range(cfg.parallel.cp))
    return {
        "cp": cfg.parallel.cp,
        "cp_comm": cfg.parallel.cp_comm if cfg.parallel.cp > 1 else None,
        "peak_mib_by_rank": [round(memory / MIB, 1) for _, memory, *_ in found],
        "processor_s": [round(sum(s), 3) for s in zip(*(seconds for _, _, seconds, _ in found))],
        "loss_and_norm": found[0][3],
    }


def check_same(runs: list[dict[str, Any]]) -> None:
    """Fail unless all runs have the losses and norms of the first."""
    for other in runs[1:]:
        np.testing.assert_allclose(other["loss_and_norm"], runs[0]["loss_and_norm"], rtol=1e-5)


def train(args: argparse.Namespace) -> dict[str, Any]:
    runs = [run(config(args, cp, comm)) for cp, comm in [(1, "auto"), *((4, comm) for comm in args.comm)]]
    check_same(runs)
    return {"runs": runs}


def measure(args: argparse.Namespace) -> dict[str, Any]:
    """Take turns, so that what else the machine does falls on all alike; the first step of a process does not count."""
    layouts = [(1, "auto"), *((2, comm) for comm in args.comm)]
    found: dict[str, list[float]] = {}
    runs = []
    for _ in range(args.rounds):
        for cp, comm in layouts:
            runs.append(run(config(args, cp, comm)))
            name, seconds = comm if cp > 1 else "one process", runs[-1]["processor_s"][1:]
            found.setdefault(name, []).append(statistics.median(seconds))
    check_same(runs)
    medians = {name: statistics.median(values) for name, values in found.items()}
    ratios = {name: round(value / medians["one process"], 3) for name, value in medians.items()}
    return {"processor_s": medians, "ratio_to_one_process": ratios}


def torch_rank(rank: int, port: int, results: Any) -> None:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor.experimental import context_parallel

    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port), RANK=str(rank), WORLD_SIZE="2")
    torch.distributed.init_process_group("gloo", rank=rank, world_size=2)
    mesh = init_device_mesh("cpu", (2,))
    q, k, v = (torch.randn(1, 8, 4096, 64) for _ in range(3))
    try:
        with context_parallel(mesh, buffers=[q, k, v], buffer_seq_dims=[2, 2, 2]):
            torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        results.put("ran")
    except Exception as e:  # whatever torch says is the result
        results.put(f"{type(e).__name__}: {str(e).splitlines()[0]}")
    torch.distributed.destroy_process_group()


def torch_own(args: argparse.Namespace) -> dict[str, Any]:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    results = mp.get_context("spawn").SimpleQueue()
    mp.spawn(torch_rank, (port, results), nprocs=2)
    return {"torch_context_parallel_on_cpu": [results.get() for _ in range(2)]}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=("train", "time", "torch"))
    parser.add_argument("--tokens", type=int, default=4096)
    parser.add_argument("--window", type=int, default=0, help="0: full attention in every layer")
    parser.add_argument("--layers", type=int, default=2)
    parser.add_argument("--hidden", type=int, default=64)
    parser.add_argument("--heads", type=int, default=4)
    parser.add_argument("--recompute", default="full")
    parser.add_argument("--steps", type=int, help="default 1, for `time` 4: the first does not count")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--comm", nargs="+", default=["gather"])
    args = parser.parse_args()
    args.steps = args.steps or (4 if args.what == "time" else 1)
    if args.what == "time" and args.steps < 2:
        parser.error("--steps 1: the first step does not count; give 2 or more")
    found = {"train": train, "time": measure, "torch": torch_own}[args.what](args)
    options = {name: value for name, value in vars(args).items() if name != "what"}
    machine = f"{platform.machine()}, {os.cpu_count()} cores, load {os.getloadavg()[0]:.1f}, torch {torch.__version__}"
    print(json.dumps({"machine": machine, "options": options, **found}, indent=1))


if __name__ == "__main__":
    main()
