"""A small data-parallel training run for the launcher's tests: gloo, the same losses on any number of hosts.

Saves on SIGTERM and leaves with 0, dumps stacks on SIGUSR1, and fails where `--fail-rank` says.
"""

from __future__ import annotations

import argparse
import faulthandler
import os
import signal
import socket
import sys
import time
from pathlib import Path

import torch
import torch.distributed as dist


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, required=True)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--fail-rank", type=int, default=-1, help="raises at step 2, on its first attempt only")
    args = parser.parse_args()
    stop = []
    signal.signal(signal.SIGTERM, lambda *_: stop.append(True))
    faulthandler.register(signal.SIGUSR1)
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    (args.out / f"pid_{rank}").write_text(f"{os.getpid()} {socket.gethostname()}")
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.Tanh(), torch.nn.Linear(16, 1)).double()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    inputs = torch.randn(args.steps % 1000 + 1, 8, 8, dtype=torch.double)
    for step in range(args.steps):
        if args.steps > 1000:
            time.sleep(0.01)  # until the test ends the run, which leaves the processors to others
        if step == 2 and rank == args.fail_rank and not (args.out / "failed").exists():
            (args.out / "failed").touch()
            raise ValueError(f"rank {rank} was told to fail")
        x = inputs[step % len(inputs)].chunk(world)[rank]
        loss = ((model(x) - x.sum(1, keepdim=True)) ** 2).sum() / 8
        optimizer.zero_grad()
        loss.backward()
        flags = torch.tensor([loss.item(), float(bool(stop))], dtype=torch.double)
        for tensor in [flags, *(p.grad for p in model.parameters())]:
            dist.all_reduce(tensor)
        optimizer.step()
        if rank == 0:
            print(f"step {step} loss {flags[0].item():.12f}", flush=True)
        if flags[1]:
            (args.out / f"saved_{rank}").write_text(str(step))
            break
    dist.barrier()
    dist.destroy_process_group()
    # Not through the interpreter's end, where a gloo thread still freeing a gradient aborts the process now and then.
    sys.stdout.flush()
    os._exit(0)


if __name__ == "__main__":
    main()
