"""Out of memory: one page that shows what uses it, and the cheapest flags with which the run fits."""

from __future__ import annotations

import contextlib
import dataclasses
import math
import textwrap
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch

from megalite.core.base.errors import UserError
from megalite.core.base.host_memory import available_memory, process_memory
from megalite.core.base.log import logger
from megalite.core.mesh.grid import Grid
from megalite.core.mesh.rendezvous import local_world_size
from megalite.core.options.recompute import MODES
from megalite.core.parts.ffn.experts import imbalance
from megalite.core.parts.schedules.choose import names_of
from megalite.extras.plan.cluster import Cluster
from megalite.extras.plan.device import device_in_use, machine
from megalite.extras.plan.memory.ranks import RankMemory, memory_per_rank
from megalite.extras.plan.report import flags as flags_of
from megalite.extras.plan.search import layout_options, search
from megalite.extras.plan.time.step import step_time
from megalite.runtime.options.fields import with_options
from megalite.runtime.options.run import Config

# Share of the available memory to plan for: the accounting is accurate to about 5 %, and allocators need slack.
_FILL = 0.9
# Other memory of a process, bytes: communication buffers and workspace; threads and libraries loaded late.
_BESIDES = {"cuda": 2**30, "cpu": 128 * 2**20}
_OFFERED = 3


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
            path = context.cfg.run.folder / "logs" / f"out_of_memory_rank_{rank}.txt"
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
    cfg = context.cfg
    t = context.grid
    pp_rank = context.grid.coords(context.rank)["pp"]
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
    if cfg.model.num_experts and cfg.parallel.ep > 1:
        factor = f"{imbalance(cfg.parallel):g} times the mean of rows on the busiest rank of ep"
        lines[-1:] = [f"experts are planned with {factor}; expert_load in metrics.jsonl tells what came", ""]
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

    They are layouts of the planner's search, with none of the memory that the run already saves given back. Global
    batch, model and number of ranks stay the same. A change is skipped if a cheaper one changes a subset of its flags.

    Args:
        cluster: devices of the ranks; the planner's step time on it orders the changes.
        host: bytes that each rank may offload; 0: offload is not offered.
    """
    now, old = predicted_seconds(cfg, grid.world, cluster), layout_options(cfg)
    fixed = {"vp"} | ({"schedule"} if old["schedule"] != "auto" else set())
    fixed |= {"offload"} if host == 0 or old["offload"] != "none" else set()
    try:
        layouts = search(cfg, cluster, fixed, budget, math.inf if "offload" in fixed else host)
    except UserError:
        return []
    offers: list[Remedy] = []
    for layout in layouts:
        new = layout.options | ({} if "schedule" in fixed else {"schedule": "auto"})
        if layout.grid.batch_ranks == 1 and new["offload"] != "optimizer+params":
            new |= {"zero": old["zero"], "zero_group": old["zero_group"]}  # there is nothing to shard over
        flags = tuple(" ".join(flags_of({name: new[name]})) for name in new if new[name] != old[name])
        known = any(_names(remedy.flags) <= _names(flags) for remedy in offers)
        if known or not flags or not layout.fits or not _saves(old, new):
            continue
        # `auto` chooses among the schedules once more.
        total = max(rank.total for rank in memory_per_rank(with_options(cfg, new), layout.grid))
        if total <= budget:
            offers.append(Remedy(flags, total, layout.time.total / now))
        if len(offers) == _OFFERED:
            break
    return offers


def _saves(old: Mapping[str, Any], new: Mapping[str, Any]) -> bool:
    """Whether no option of a layout takes more memory than before."""
    grows = all(new[name] >= old[name] for name in ("tp", "pp", "zero"))
    before, after = old["recompute"], new["recompute"]
    again = after == before or MODES[after].most > MODES[before].most
    return grows and again and new["micro_batch_size"] <= old["micro_batch_size"]


def _names(flags: tuple[str, ...]) -> set[str]:
    return {flag.split()[0] for flag in flags}


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
