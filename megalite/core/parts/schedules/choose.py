"""`--schedule auto`: the schedule with the least simulated time within the memory bound."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from functools import lru_cache

from megalite.core.base.errors import UserError
from megalite.core.options.parallel import SCHEDULES
from megalite.core.options.recompute import MODES, Extent
from megalite.core.options.step import StepConfig
from megalite.core.parts.schedules.simulate import Simulation, simulate
from megalite.core.parts.schedules.steady import extend, sample_sizes
from megalite.core.pipeline.order import PipelineSchedule
from megalite.core.pipeline.schedule import Costs, Schedule, build_schedule, check_schedule, compute_orders

# Simulated times within this factor count as equal; the schedule that holds fewer activations is chosen.
_SAME_TIME = 1.002

# Chunks of a transformer: the input gradient takes a little longer than the forward pass (attention has no weights),
# the weight gradient less; messages are cheap, but not free.
USUAL_COSTS = Costs(1.0, 1.05, 0.85, transfer=0.05)
# FLOPs that a GPU computes while it sends one byte over tp: 500 TFLOP/s of matrix products, 350 GB/s (H100).
_FLOPS_PER_BYTE = 1400.0


@dataclass(frozen=True)
class Request:
    """What a schedule has to run, within which memory.

    Attributes:
        pp: number of pipeline ranks.
        vp: number of chunks per rank.
        counts: numbers of micro-batches per step and pipeline, largest first; the schedule must be able to run all.
        max_activations: largest number of chunk activations that a rank may hold at once; None: as many as the classic
            schedule, 1F1B (vp = 1) or interleaved.
        split_backward: whether schedules may defer weight gradients. Where blocks are recomputed they should not: from
            I to W a chunk would hold all of their activations.
    """

    pp: int
    vp: int
    counts: tuple[int, ...]
    max_activations: int | None = None
    split_backward: bool = True

    @classmethod
    def of(cls, cfg: StepConfig, dp: int) -> Request:
        """Return the request of a run.

        Raises:
            UserError: a batch size cannot be shared out.
        """
        *fewer, m = cfg.microbatch_counts(dp)
        recomputes, p = MODES[cfg.train.recompute].most is Extent.BLOCK, cfg.parallel
        most = m * p.vp if p.moe_overlap else None  # pairs need more than a bound for others
        return cls(p.pp, p.vp, (m, *fewer), most, split_backward=not recomputes)

    @property
    def bound(self) -> int:
        """Largest number of chunk activations that a rank may hold at once."""
        if self.max_activations is not None:
            return self.max_activations
        pp, vp = self.pp, self.vp
        return min(pp if vp == 1 else 2 * (pp - 1) + (vp - 1) * pp + 1, self.counts[0] * vp)


def schedule_of(cfg: StepConfig, dp: int) -> Schedule:
    """Build the schedule for the largest batch of a run: the named one, or the choice of `auto`.

    Raises:
        UserError: a batch size is not divisible, or the schedule cannot run its micro-batches.
    """
    return build_schedule(name_of(cfg, dp), cfg.parallel.pp, cfg.parallel.vp, cfg.num_microbatches(dp))


def name_of(cfg: StepConfig, dp: int) -> str:
    """Return the name of a run's schedule, a function of the arguments alone and so the same on every rank.

    Raises:
        UserError: as `schedule_of`.
    """
    p = cfg.parallel
    if p.schedule == "auto":
        return _choose(_candidates(p.moe_overlap), Request.of(cfg, dp), _costs_of(cfg).per_chunk(p.vp), "dir")
    for count in cfg.microbatch_counts(dp):
        check_schedule(p.schedule, p.pp, p.vp, count)
    return p.schedule


def names_of(cfg: StepConfig, dp: int) -> list[str]:
    """List the schedules that `name_of` may choose, without simulation: for `auto`, all within the memory bound.

    Raises:
        UserError: as `schedule_of`.
    """
    if cfg.parallel.schedule != "auto":
        return [name_of(cfg, dp)]
    return list(_within(_candidates(cfg.parallel.moe_overlap), Request.of(cfg, dp)))


def choose_schedule(request: Request, costs: Costs | None = None, mode: str = "dir") -> Schedule:
    """Choose the schedule with the least simulated time; among equals, the one that holds the fewest activations.

    Args:
        request: what to run.
        costs: durations of the ops of one chunk (default: all equal, transfers free).
        mode: how transfers wait for each other, see `simulate`.

    Raises:
        UserError: no schedule stays within the bound.
    """
    name = _choose(_candidates(), request, costs or Costs(), mode)
    return build_schedule(name, request.pp, request.vp, request.counts[0])


def simulate_all(
    pp: int, vp: int, num_microbatches: int, costs: Costs | None = None, mode: str = "dir"
) -> list[Simulation]:
    """Simulate every schedule that can run these numbers, in the order of `SCHEDULES`."""
    check_schedule("naive", pp, vp, num_microbatches)  # runs whatever any schedule can run
    return [
        simulate(build_schedule(name, pp, vp, num_microbatches), costs, mode)
        for name in _runnable(SCHEDULES, pp, vp, num_microbatches)
    ]


def _costs_of(cfg: StepConfig) -> Costs:
    """Return `USUAL_COSTS` plus the communication over tp that each operation waits for.

    The forward pass of a layer has four collectives (two all-reduces, each a reduce-scatter and an all-gather), and so
    has its input gradient. A fused backward pass overlaps all of the latter with weight gradients; where these are
    computed separately, only their own gathers overlap.
    """
    tp = cfg.parallel.tp
    m = cfg.model
    usual = USUAL_COSTS
    if tp == 1:
        return usual
    # Bytes of one collective, 2 h (t - 1) / t per token, relative to the layer's 2 W / t FLOPs per token (W / h here).
    weights = 2 * (m.num_heads + m.kv_heads) * m.head_size + (3 if m.gated else 2) * m.ffn_size
    collective = (tp - 1) / weights * _FLOPS_PER_BYTE
    waited = 4 * collective
    hidden = waited if cfg.parallel.overlap_tp_reduce else 0.0
    forward = usual.forward + waited / cfg.parallel.tp_chunks
    return replace(usual, forward=forward, input_grad=usual.input_grad + waited, overlapped=hidden)


Candidates = tuple[tuple[str, PipelineSchedule], ...]


def _candidates(pairs: bool = False) -> Candidates:
    """List the schedules that `auto` may choose (hashable, a key of the caches below); `pairs`: among those with."""
    return tuple((name, s) for name, s in SCHEDULES.items() if (s.pairs if pairs else s.auto))


@lru_cache(maxsize=64)
def _choose(candidates: Candidates, request: Request, costs: Costs, mode: str) -> str:
    pp = request.pp
    vp = request.vp
    m = request.counts[0]
    check_schedule("naive", pp, vp, m)  # runs whatever any schedule can run
    held = _within(candidates, request)
    if len(held) == 1:
        return next(iter(held))
    sizes = (m,) if costs.jitter else sample_sizes(pp, m)
    times = {
        n: extend(m, sizes, [simulate(build_schedule(n, pp, vp, size), costs, mode).makespan for size in sizes])
        for n in held
    }
    fast = [n for n in held if times[n] <= min(times.values()) * _SAME_TIME]
    return min(fast, key=lambda n: (held[n], n != _usual(vp)))


@lru_cache(maxsize=64)
def _within(candidates: Candidates, request: Request) -> Mapping[str, int]:
    """Return the chunk activations that each schedule holds, for those within the bound."""
    pp = request.pp
    vp = request.vp
    m = request.counts[0]
    names, sizes = [name for name, _ in candidates], sample_sizes(pp, m)
    for count in request.counts:
        names = _runnable(names, pp, vp, count)
    if not request.split_backward:
        names = [n for n in names if not _splits_backward(n, pp, vp, sizes[0])]
    held = {n: round(extend(m, sizes, [_peak(n, pp, vp, size) for size in sizes])) for n in names}
    allowed = {n: held[n] for n in names if held[n] <= request.bound}
    if not allowed:
        for count in request.counts if request.max_activations is None or not held else ():
            check_schedule(_usual(vp), pp, vp, count)  # explains what is wrong with the numbers
        least = min(held, key=lambda n: held[n])
        raise UserError(
            f"memory for {request.bound} chunk activations per rank",
            f"every schedule holds at least {held[least]} at pp {pp}, vp {vp} ({least})",
            "use a smaller micro-batch, --recompute, or more pipeline or tensor ranks",
        )
    return allowed


def _usual(vp: int) -> str:
    return "interleaved" if vp > 1 else "1f1b"


def _runnable(names: Iterable[str], pp: int, vp: int, num_microbatches: int) -> list[str]:
    """List the schedules that can run these numbers."""
    runnable = []
    for name in names:
        try:
            check_schedule(name, pp, vp, num_microbatches)
        except UserError:
            continue
        runnable.append(name)
    return runnable


def _splits_backward(name: str, pp: int, vp: int, num_microbatches: int) -> bool:
    """Whether the schedule separates weight gradients from input gradients."""
    return any(op.kind == "W" for order in compute_orders(name, pp, vp, num_microbatches) for op in order)


def _peak(name: str, pp: int, vp: int, num_microbatches: int) -> int:
    """Return the largest number of chunk activations that a rank holds."""
    peak = 0
    for order in compute_orders(name, pp, vp, num_microbatches):
        alive = 0
        for op in order:
            alive += (op.kind == "F") - (op.kind in "BW")
            peak = max(peak, alive)
    return peak
