"""`--schedule auto`: the schedule with the least simulated time within the memory bound."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from functools import lru_cache

from megalite.config.run import Config
from megalite.errors import UserError
from megalite.pipeline.schedule import Costs, Schedule, build_schedule, check_schedule, compute_orders
from megalite.pipeline.simulate import Simulation, simulate
from megalite.schedules.pipeline import SCHEDULES, PipelineSchedule

# Two simulated times within this factor count as equal; the one that holds fewer activations is taken.
_SAME_TIME = 1.002

# A transformer's chunk: the input gradient takes a little longer than forward (attention has no weights), the weight
# gradient less; a message is small beside them, but not free.
USUAL_COSTS = Costs(1.0, 1.05, 0.85, transfer=0.05)
# FLOPs that a GPU computes while one byte travels to a neighbor on tp: 500 TFLOP/s of matrix products, 350 GB/s (H100).
_FLOPS_PER_BYTE = 1400.0


def simulate_all(
    pp: int, vp: int, num_microbatches: int, costs: Costs | None = None, mode: str = "dir"
) -> list[Simulation]:
    """Simulate every schedule that can run these numbers, in the order of `SCHEDULES`."""
    check_schedule("naive", pp, vp, num_microbatches)  # what even naive refuses, all refuse
    return [
        simulate(build_schedule(name, pp, vp, num_microbatches), costs, mode)
        for name in _runnable(SCHEDULES, pp, vp, num_microbatches)
    ]


def costs_of(cfg: Config) -> Costs:
    """Return `USUAL_COSTS` with the communication over tp that each operation waits for.

    A layer's forward pass has four collectives (two all-reduces, or as many pairs of gathers and reduce-scatters), and
    so has its input gradient. A fused backward pass hides all-reduces and reduce-scatters of the input gradient behind
    the weight gradients; where these are computed apart, only their own gathers can be hidden.
    """
    tp, m, usual = cfg.parallel.tp, cfg.model, USUAL_COSTS
    if tp == 1:
        return usual
    # The bytes of one of them, 2 h (t - 1) / t per token, against the layer's 2 W / t FLOPs per token (W / h here).
    weights = 2 * (m.num_heads + m.kv_heads) * m.head_size + (3 if m.gated else 2) * m.ffn_size
    collective = (tp - 1) / weights * _FLOPS_PER_BYTE
    hidden = (2 if cfg.sequence_parallel else 4) * collective if cfg.parallel.overlap_tp_reduce else 0.0
    waited = 4 * collective
    return replace(usual, forward=usual.forward + waited, input_grad=usual.input_grad + waited, overlapped=hidden)


def resolve_schedule(
    name: str,
    pp: int,
    vp: int,
    num_microbatches: int,
    split_backward: bool = True,
    costs: Costs = USUAL_COSTS,
    fewer: Sequence[int] = (),
) -> str:
    """Resolve `auto` to the schedule of a run; any other name is returned unchanged.

    The answer is a function of the arguments alone, so every rank gets the same one.

    Args:
        split_backward: see `choose_schedule`.
        costs: of a rank's whole share of the layers.
        fewer: numbers of micro-batches of other steps, which the schedule must be able to run too.

    Raises:
        UserError: nothing that holds no more than the classic schedule can run these numbers.
    """
    if name != "auto":
        return name
    counts = (num_microbatches, *fewer)
    return _choose(_candidates(), pp, vp, counts, costs.per_chunk(vp), None, "dir", split_backward)


def schedule_of(cfg: Config, dp: int) -> Schedule:
    """Build the schedule of a step with the largest batch of a run: the one given, or what `auto` stands for.

    Raises:
        UserError: a batch does not divide over dp, or the schedule cannot run its micro-batches.
    """
    return build_schedule(name_of(cfg, dp), cfg.parallel.pp, cfg.parallel.vp, cfg.num_microbatches(dp))


def name_of(cfg: Config, dp: int) -> str:
    """Name the schedule of a run.

    Raises:
        UserError: as `schedule_of`.
    """
    p, (*fewer, m) = cfg.parallel, cfg.microbatch_counts(dp)
    name = resolve_schedule(p.schedule, p.pp, p.vp, m, _may_split(cfg), costs_of(cfg), fewer)
    for count in (*fewer, m):
        check_schedule(name, p.pp, p.vp, count)
    return name


def names_of(cfg: Config, dp: int) -> list[str]:
    """List what `schedule_of` may turn out to be, without simulating anything: for `auto`, all that hold few enough.

    Raises:
        UserError: as `schedule_of`.
    """
    p, (*fewer, m) = cfg.parallel, cfg.microbatch_counts(dp)
    if p.schedule != "auto":
        for count in (*fewer, m):
            check_schedule(p.schedule, p.pp, p.vp, count)
        return [p.schedule]
    return list(_within(_candidates(), p.pp, p.vp, (m, *fewer), sample_sizes(p.pp, m), None, _may_split(cfg)))


def _may_split(cfg: Config) -> bool:
    return cfg.train.recompute != "full"


def choose_schedule(
    pp: int,
    vp: int,
    num_microbatches: int,
    costs: Costs | None = None,
    max_activations: int | None = None,
    mode: str = "dir",
    split_backward: bool = True,
) -> Schedule:
    """Choose the schedule with the least simulated time; among equals, the one that holds fewest activations.

    Args:
        pp: pipeline ranks.
        vp: chunks per rank.
        num_microbatches: micro-batches per step and pipeline.
        costs: of one op on one chunk (default: all equal, transfers free).
        max_activations: the most chunk activations that any rank may hold at once; None: as many as the classic
            schedule holds (`classic_activations`).
        mode: how transfers wait for each other, see `simulate`.
        split_backward: whether schedules may defer weight gradients. With full recomputation they should not: from I
            to W a chunk holds all that recomputing it brought back.

    Raises:
        UserError: no schedule keeps within max_activations.
    """
    counts, costs = (num_microbatches,), costs or Costs()
    name = _choose(_candidates(), pp, vp, counts, costs, max_activations, mode, split_backward)
    return build_schedule(name, pp, vp, num_microbatches)


def classic_activations(pp: int, vp: int, num_microbatches: int) -> int:
    """Count the chunk activations that the busiest rank of 1F1B (vp = 1) or of the interleaved schedule holds."""
    most = pp if vp == 1 else 2 * (pp - 1) + (vp - 1) * pp + 1
    return min(most, num_microbatches * vp)


Candidates = tuple[tuple[str, PipelineSchedule], ...]


def _candidates() -> Candidates:
    """List the schedules that `auto` may choose, as a key of the caches below."""
    return tuple((name, schedule) for name, schedule in SCHEDULES.items() if schedule.auto)


@lru_cache(maxsize=64)
def _choose(
    candidates: Candidates,
    pp: int,
    vp: int,
    counts: tuple[int, ...],
    costs: Costs,
    max_activations: int | None,
    mode: str,
    split_backward: bool,
) -> str:
    m = counts[0]
    check_schedule("naive", pp, vp, m)  # what even naive refuses, all refuse
    sizes = (m,) if costs.jitter else sample_sizes(pp, m)
    held = _within(candidates, pp, vp, counts, sizes, max_activations, split_backward)
    if len(held) == 1:
        return next(iter(held))
    times = {
        n: extend(m, sizes, [simulate(build_schedule(n, pp, vp, size), costs, mode).makespan for size in sizes])
        for n in held
    }
    fast = [n for n in held if times[n] <= min(times.values()) * _SAME_TIME]
    return min(fast, key=lambda n: (held[n], n != _usual(vp)))


@lru_cache(maxsize=64)
def _within(
    candidates: Candidates,
    pp: int,
    vp: int,
    counts: tuple[int, ...],
    sizes: tuple[int, ...],
    max_activations: int | None,
    split_backward: bool,
) -> Mapping[str, int]:
    """Return the chunk activations that each schedule holds, for those within the bound.

    Args:
        counts: micro-batches of a step, the most first; all must be possible.
    """
    m, names = counts[0], [name for name, _ in candidates]
    for count in counts:
        names = _runnable(names, pp, vp, count)
    if not split_backward:
        names = [n for n in names if not _splits_backward(n, pp, vp, sizes[0])]
    held = {n: round(extend(m, sizes, [_peak(n, pp, vp, size) for size in sizes])) for n in names}
    bound = classic_activations(pp, vp, m) if max_activations is None else max_activations
    allowed = {n: held[n] for n in names if held[n] <= bound}
    if not allowed:
        for count in counts if max_activations is None else ():
            check_schedule(_usual(vp), pp, vp, count)  # reports what is wrong with the numbers
        least = min(held, key=lambda n: held[n])
        raise UserError(
            f"room for {bound} chunk activations on a rank",
            f"the least that any schedule holds at pp {pp}, vp {vp} is {held[least]} ({least})",
            "use a smaller micro-batch, --recompute, or more pipeline or tensor ranks",
        )
    return allowed


def _usual(vp: int) -> str:
    return "interleaved" if vp > 1 else "1f1b"


def _runnable(among: Iterable[str], pp: int, vp: int, num_microbatches: int) -> list[str]:
    """List the schedules that can run these numbers."""
    names = []
    for name in among:
        try:
            check_schedule(name, pp, vp, num_microbatches)
        except UserError:
            continue  # not a candidate
        names.append(name)
    return names


def _splits_backward(name: str, pp: int, vp: int, num_microbatches: int) -> bool:
    """Whether the schedule runs weight gradients apart from input gradients."""
    return any(op.kind == "W" for order in compute_orders(name, pp, vp, num_microbatches) for op in order)


def _peak(name: str, pp: int, vp: int, num_microbatches: int) -> int:
    """Return the most chunk activations that a rank holds."""
    peak = 0
    for order in compute_orders(name, pp, vp, num_microbatches):
        alive = 0
        for op in order:
            alive += (op.kind == "F") - (op.kind in "BW")
            peak = max(peak, alive)
    return peak


def sample_sizes(pp: int, m: int) -> tuple[int, ...]:
    """Return numbers of micro-batches that stand for a large `m`.

    After 2 pp micro-batches every pipeline is in its steady state, where each further round of pp adds the same time
    and the same bytes: two sizes determine all others. They leave the same remainder over pp as `m`, because
    interleaved depends on it.
    """
    few = 2 * pp + m % pp
    return (m,) if m <= few + pp else (few, few + pp)


def extend(m: int, sizes: Sequence[int], figures: Sequence[float]) -> float:
    """Extend figures at `sample_sizes` to `m` on a straight line; exact for what a rank holds at most."""
    if len(sizes) == 1:
        return figures[0]
    return figures[0] + (figures[1] - figures[0]) / (sizes[1] - sizes[0]) * (m - sizes[0])
