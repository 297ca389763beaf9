"""Out of memory: one page that shows what uses it, and the cheapest flags with which the run fits."""

from __future__ import annotations

import contextlib
import dataclasses
import math
import os
import resource
import textwrap
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import product
from pathlib import Path
from typing import Literal

import torch

from megalite.config.run import Config
from megalite.dist.context import local_world_size
from megalite.dist.grid import Grid
from megalite.errors import UserError
from megalite.host import available_memory
from megalite.log import logger
from megalite.pipeline.choose import names_of
from megalite.plan.cluster import Cluster
from megalite.plan.device import device_in_use, machine
from megalite.plan.memory import RankMemory, least_memory, memory_per_rank
from megalite.plan.time import step_time

# Share of the available memory to plan for: the accounting is accurate to about 5 %, and allocators need slack.
_FILL = 0.9
# Other memory of a process, bytes: communication buffers and workspace; threads and libraries loaded late.
_BESIDES = {"cuda": 2**30, "cpu": 128 * 2**20}
_OFFERED = 3
_ZERO: tuple[Literal[0, 1, 2, 3], ...] = (0, 1, 2, 3)
_RECOMPUTE: tuple[Literal["none", "selective", "full"], ...] = ("none", "selective", "full")
_OFFLOAD: tuple[Literal["none", "activations", "optimizer", "optimizer+params"], ...] = (
    "none",
    "activations",
    "optimizer",
    "optimizer+params",
)


@dataclass(frozen=True)
class Remedy:
    """Flags to add, with the peak memory of the worst rank (bytes) and the factor of the predicted step time."""

    flags: tuple[str, ...]
    total: int
    slower: float

    def __str__(self) -> str:
        change = abs(self.slower - 1)
        pace = "as fast" if change < 0.005 else f"about {change:.0%} {'slower' if self.slower > 1 else 'faster'}"
        return f"{' '.join(self.flags):<58}{_gib(self.total):>12}   {pace}"


@dataclass
class MemoryContext:
    """What the diagnosis uses; `cfg` may be replaced once the run is open (then its vocabulary is known).

    Attributes:
        cfg, topology, device, rank: of the run.
        usable: bytes that a rank may use beyond what the process had at the start.
    """

    cfg: Config
    topology: Grid
    device: torch.device
    rank: int
    usable: int


def is_out_of_memory(e: BaseException) -> bool:
    """Whether an allocation failed, on the GPU or in the host's memory."""
    if isinstance(e, (torch.OutOfMemoryError, MemoryError)):
        return True
    # Where torch's allocator holds the rest of the memory, it ends in a library: NCCL's and cuBLAS's words.
    signs = ("allocate memory", "out of memory", "CUBLAS_STATUS_ALLOC_FAILED")
    return isinstance(e, RuntimeError) and any(sign in str(e) for sign in signs)


@contextlib.contextmanager
def diagnosing_memory(cfg: Config, topology: Grid, device: torch.device, rank: int) -> Iterator[MemoryContext]:
    """If the body runs out of memory, report why and what helps; the error propagates.

    The page is written to RUN_DIR/logs/out_of_memory_rank_N.txt and to the console.
    """
    context = MemoryContext(cfg, topology, device, rank, usable_bytes(device))
    try:
        yield context
    except Exception as e:
        if is_out_of_memory(e):
            text = page(context, str(e).splitlines()[0] if str(e) else type(e).__name__)
            path = Path(context.cfg.run.run_dir) / "logs" / f"out_of_memory_rank_{rank}.txt"
            try:
                path.parent.mkdir(parents=True, exist_ok=True)
                path.write_text(text + "\n")
                text += f"\nthis page: {path}"
            except OSError as why:
                logger.warning(f"{path} cannot be written ({why.strerror})")
            for line in text.splitlines():
                logger.error(line)
        raise


def usable_bytes(device: torch.device) -> int:
    """Get the bytes that this process can still use: the GPU's free memory, or the tightest limit on the host."""
    if device.type == "cuda":
        return torch.cuda.mem_get_info(device)[0]
    used, installed = _sizes("/proc/self/status"), os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    resident = used.get("VmRSS", 0)
    limits = [_sizes("/proc/meminfo").get("MemTotal", installed) - resident]
    for kind, key in ((resource.RLIMIT_AS, "VmSize"), (resource.RLIMIT_DATA, "VmData")):
        soft, _ = resource.getrlimit(kind)
        if soft != resource.RLIM_INFINITY:
            limits.append(soft - used.get(key, 0))
    group = Path("/sys/fs/cgroup/memory.max")
    if group.exists() and group.read_text().strip() != "max":
        limits.append(int(group.read_text()) - resident)
    return max(0, min(limits))


def _sizes(path: str) -> dict[str, int]:
    """Read a table in /proc: sizes in bytes by name; empty where there is no /proc."""
    try:
        rows = [line.split() for line in Path(path).read_text().splitlines()]
    except OSError:
        return {}
    return {row[0].rstrip(":"): int(row[1]) * 1024 for row in rows if len(row) == 3 and row[2] == "kB"}


def page(context: MemoryContext, message: str) -> str:
    """Make the page.

    Args:
        message: first line of the allocator's error.
    """
    cfg, t, pp_rank = context.cfg, context.topology, context.topology.coords(context.rank)["pp"]
    head = [
        f"out of memory on rank {context.rank} (pp rank {pp_rank} of {t['pp']}, {context.device})",
        *textwrap.wrap(message, 110, initial_indent="  ", subsequent_indent="  "),
        f"available when the run began: {_gib(context.usable)}",
    ]
    if context.device.type == "cuda":
        peak, reserved = torch.cuda.max_memory_allocated(context.device), torch.cuda.memory_reserved(context.device)
        head.append(f"measured: peak of {_gib(peak)} in tensors, {_gib(reserved)} held by the allocator")
    if cfg.model.vocab_size is None:
        return "\n".join([*head, "the vocabulary size was not known yet: try --dry-run with --vocab-size"])
    ranks = memory_per_rank(cfg, t)
    needs = max(m.total for m in ranks)
    budget = int(_FILL * max(0, min(context.usable - _BESIDES[context.device.type], needs)))
    host = available_memory() // local_world_size() if context.device.type == "cuda" else 0
    cluster, rates = machine(device_in_use(context.device), t.world, cfg.run.calibration)
    found = remedies(cfg, t, budget, cluster, host)
    lines = [*head, "", "what the run requires on this rank, by the planner's accounting:", *_account(ranks[pp_rank])]
    lines += ["not counted: the allocator's slack, communication buffers, workspace of single kernels", ""]
    if found:
        lines += [f"cheapest changes that fit (peak memory on the worst rank; step time predicted with {rates}):"]
        lines += [f"  {remedy}" for remedy in found]
    else:
        lines += [
            f"no layout, micro-batch, recomputation or --zero on {t.world} rank{'s' * (t.world > 1)} fits into "
            f"{_gib(budget)}{', nor any --offload' * (host > 0)}: use more ranks, or a smaller model or --seq-len"
        ]
    return "\n".join(lines)


def _account(memory: RankMemory) -> list[str]:
    rows = [(f.name, getattr(memory, f.name)) for f in dataclasses.fields(memory) if f.name != "parameters"]
    rows = [*sorted(rows, key=lambda row: -row[1]), ("total", memory.total)]
    return [f"  {name:<14}{_gib(size):>12}{size / memory.total:>8.0%}" for name, size in rows]


def remedies(cfg: Config, topology: Grid, budget: int, cluster: Cluster, host: int = 0) -> list[Remedy]:
    """Find the cheapest changes with which every rank needs at most `budget` bytes, cheapest first; at most three.

    The global batch, the model and the number of ranks stay the same. A remedy is skipped if a cheaper one changes a
    subset of its flags.

    Args:
        cluster: the ranks' devices; the planner's step time on it orders the changes.
        host: bytes that each rank may offload; 0: offload is no remedy.
    """
    now = predicted_seconds(cfg, topology.world, cluster)
    candidates = [(c[0], c[1], predicted_seconds(c[1], topology.world, cluster) / now)
                  for c in _candidates(cfg, topology, host > 0)]  # fmt: skip
    candidates.sort(key=lambda c: (c[2], len(c[0])))
    found: list[Remedy] = []
    for flags, changed, slower in candidates:
        if any(_names(r.flags) <= _names(flags) for r in found):
            continue
        try:
            there = Grid.of(topology.world, changed.parallel.tp, changed.parallel.pp)
            if least_memory(changed, there) > budget:
                continue
            ranks = memory_per_rank(changed, there)
        except UserError:
            continue
        total, away = max(m.total for m in ranks), max(m.host for m in ranks)
        if total <= budget and (away <= host or changed.train.offload == cfg.train.offload):
            found.append(Remedy(flags, total, slower))
        if len(found) == _OFFERED:
            break
    return found


def _names(flags: tuple[str, ...]) -> set[str]:
    return {flag.split()[0] for flag in flags}


def _candidates(cfg: Config, topology: Grid, offload: bool) -> Iterator[tuple[tuple[str, ...], Config]]:
    """Yield (flags, config) of every change."""
    p, t = cfg.parallel, cfg.train
    smaller = [t.micro_batch_size >> k for k in range(t.micro_batch_size.bit_length())]
    batches = [size for size in smaller if t.micro_batch_size % size == 0]
    modes = _RECOMPUTE[_RECOMPUTE.index(t.recompute) :]
    tps = [p.tp << k for k in range(topology.world.bit_length())]
    pps = [p.pp << k for k in range(topology.world.bit_length())]
    zeros = [zero for zero in _ZERO if zero >= p.zero]
    places = list(_OFFLOAD) if offload and t.offload == "none" else [t.offload]
    for tp, pp, batch, mode, zero, place in product(tps, pps, batches, modes, zeros, places):
        # One rank has nobody to share with but its host.
        alone = topology.world == tp * pp and place != "optimizer+params"
        if topology.world % (tp * pp) or (alone and zero != p.zero):
            continue
        # Offload is for the layout at hand: another one costs less.
        if place != t.offload and (tp, pp) != (p.tp, p.pp):
            continue
        sequence = p.sequence_parallel or tp > 1
        changes: dict[str, tuple[object, object]] = {
            "--tp": (p.tp, tp),
            "--pp": (p.pp, pp),
            "--micro-batch-size": (t.micro_batch_size, batch),
        }
        changes |= {"--recompute": (t.recompute, mode), "--zero": (p.zero, zero), "--offload": (t.offload, place)}
        flags = tuple(f"{flag} {new}" for flag, (old, new) in changes.items() if old != new)
        if sequence and not p.sequence_parallel:
            flags += ("--sequence-parallel",)
        if not flags:
            continue
        try:
            changed = dataclasses.replace(
                cfg,
                parallel=dataclasses.replace(p, tp=tp, pp=pp, zero=zero, sequence_parallel=sequence),
                train=dataclasses.replace(t, micro_batch_size=batch, recompute=mode, offload=place),
            )
        except UserError:
            continue
        yield flags, changed


def predicted_seconds(cfg: Config, world: int, cluster: Cluster) -> float:
    """Predict the seconds of a step; those of the fastest schedule that `auto` may choose; infinite if none can run.

    None is simulated, since there are many changes to compare.
    """
    try:
        grid = Grid.of(world, cfg.parallel.tp, cfg.parallel.pp)
        return min(step_time(cfg, grid, cluster, name).total for name in names_of(cfg, grid["dp"]))
    except UserError:
        return math.inf


def _gib(size: int) -> str:
    return f"{size / 2**30:.2f} GiB" if size >= 2**30 else f"{size / 2**20:.1f} MiB"
