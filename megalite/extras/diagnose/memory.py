"""Out of memory: one page that shows what uses it, and the cheapest flags with which the run fits."""

from __future__ import annotations

import contextlib
import dataclasses
import math
import textwrap
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import product
from pathlib import Path
from typing import Literal

import torch

from megalite.base.errors import UserError
from megalite.base.hardware import available_memory, process_memory
from megalite.base.log import logger
from megalite.config.run import Config
from megalite.dist.grid import Grid
from megalite.dist.rendezvous import local_world_size
from megalite.extras.plan.cluster import Cluster
from megalite.extras.plan.device import device_in_use, machine
from megalite.extras.plan.memory.ranks import RankMemory, least_memory, memory_per_rank
from megalite.extras.plan.time.step import step_time
from megalite.pipeline.choose import names_of

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
    """A change of flags with which the run fits.

    Attributes:
        flags: flags to add.
        total: peak memory of the worst rank, in bytes.
        slower: ratio of predicted step times, with and without the change.
    """

    flags: tuple[str, ...]
    total: int
    slower: float

    def __str__(self) -> str:
        change = abs(self.slower - 1)
        pace = "as fast" if change < 0.005 else f"about {change:.0%} {'slower' if self.slower > 1 else 'faster'}"
        return f"{' '.join(self.flags):<58}{_gib(self.total):>12}   {pace}"


@dataclass
class MemoryContext:
    """Input of the diagnosis; `cfg` may be replaced once the run is open (then its vocabulary size is known).

    Attributes:
        cfg: options of the run.
        grid: all ranks.
        device: device of this rank.
        rank: global rank.
        usable: bytes that a rank may use beyond what the process had at the start.
    """

    cfg: Config
    grid: Grid
    device: torch.device
    rank: int
    usable: int


def is_out_of_memory(e: BaseException) -> bool:
    """Whether an allocation failed, on the GPU or in the host's memory."""
    if isinstance(e, (torch.OutOfMemoryError, MemoryError)):
        return True
    # If torch's allocator holds all other memory, allocations fail in libraries: messages of NCCL and cuBLAS.
    signs = ("allocate memory", "out of memory", "CUBLAS_STATUS_ALLOC_FAILED")
    return isinstance(e, RuntimeError) and any(sign in str(e) for sign in signs)


@contextlib.contextmanager
def diagnosing_memory(cfg: Config, grid: Grid, device: torch.device, rank: int) -> Iterator[MemoryContext]:
    """If the body runs out of memory, report why and what helps; the error propagates.

    The report is written to RUN_DIR/logs/out_of_memory_rank_N.txt and to the console.
    """
    context = MemoryContext(cfg, grid, device, rank, usable_bytes(device))
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
    return process_memory()


def page(context: MemoryContext, message: str) -> str:
    """Format the report.

    Args:
        message: first line of the allocator's error.
    """
    cfg, t, pp_rank = context.cfg, context.grid, context.grid.coords(context.rank)["pp"]
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
    offers = remedies(cfg, t, budget, cluster, host)
    lines = [*head, "", "what the run requires on this rank, by the planner's accounting:", *_account(ranks[pp_rank])]
    lines += ["not counted: the allocator's slack, communication buffers, workspace of single kernels", ""]
    if offers:
        lines += [f"cheapest changes that fit (peak memory on the worst rank; step time predicted with {rates}):"]
        lines += [f"  {remedy}" for remedy in offers]
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


def remedies(cfg: Config, grid: Grid, budget: int, cluster: Cluster, host: int = 0) -> list[Remedy]:
    """Find up to three changes with which every rank needs at most `budget` bytes, cheapest first.

    Global batch, model and number of ranks stay the same. A change is skipped if a cheaper one changes a subset of its
    flags.

    Args:
        cluster: devices of the ranks; the planner's step time on it orders the changes.
        host: bytes that each rank may offload; 0: offload is not offered.
    """
    now = predicted_seconds(cfg, grid.world, cluster)
    candidates = [(c[0], c[1], predicted_seconds(c[1], grid.world, cluster) / now)
                  for c in _candidates(cfg, grid, host > 0)]  # fmt: skip
    candidates.sort(key=lambda c: (c[2], len(c[0])))
    offers: list[Remedy] = []
    for flags, changed, slower in candidates:
        if any(_names(remedy.flags) <= _names(flags) for remedy in offers):
            continue
        try:
            changed_grid = Grid.from_config(changed.parallel, grid.world)
            if least_memory(changed, changed_grid) > budget:
                continue
            ranks = memory_per_rank(changed, changed_grid)
        except UserError:
            continue
        total, offloaded = max(m.total for m in ranks), max(m.host for m in ranks)
        if total <= budget and (offloaded <= host or changed.train.offload == cfg.train.offload):
            offers.append(Remedy(flags, total, slower))
        if len(offers) == _OFFERED:
            break
    return offers


def _names(flags: tuple[str, ...]) -> set[str]:
    return {flag.split()[0] for flag in flags}


def _candidates(cfg: Config, grid: Grid, offload: bool) -> Iterator[tuple[tuple[str, ...], Config]]:
    """Yield (flags, config) of every change."""
    p, t = cfg.parallel, cfg.train
    smaller = [t.micro_batch_size >> k for k in range(t.micro_batch_size.bit_length())]
    batches = [size for size in smaller if t.micro_batch_size % size == 0]
    modes = _RECOMPUTE[_RECOMPUTE.index(t.recompute) :]
    tps = [p.tp << k for k in range(grid.world.bit_length())]
    pps = [p.pp << k for k in range(grid.world.bit_length())]
    zeros = [zero for zero in _ZERO if zero >= p.zero]
    places = list(_OFFLOAD) if offload and t.offload == "none" else [t.offload]
    for tp, pp, batch, mode, zero, place in product(tps, pps, batches, modes, zeros, places):
        # A single data-parallel rank has nothing to shard over.
        alone = grid.world == tp * pp and place != "optimizer+params"
        if grid.world % (tp * pp) or (alone and zero != p.zero):
            continue
        # Offload is offered for the current layout only: changing tp or pp costs less.
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
    """Predict the seconds of a step; infinite if it cannot run.

    For `auto`, that is the time of the fastest schedule that it may choose: with so many changes, none is simulated.
    """
    try:
        grid = Grid.from_config(cfg.parallel, world)
        return min(step_time(cfg, grid, cluster, name).total for name in names_of(cfg, grid["dp"]))
    except UserError:
        return math.inf


def _gib(size: int) -> str:
    return f"{size / 2**30:.2f} GiB" if size >= 2**30 else f"{size / 2**20:.1f} MiB"
