"""Memory of weights, gradients and optimizer states under each ZeRO stage: between steps, and what a step adds."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from operator import add

from megalite.core.base.host_memory import pinned_bytes
from megalite.core.optim.shares import group_among, plan_buckets, staging_bytes
from megalite.core.options.compression import Gradients
from megalite.extras.plan.memory.units import Shapes, UnitSizes
from megalite.runtime.options.run import Config
from megalite.runtime.recover.offsite import NUM_SLOTS

_WIDTH = {"fp32": 4, "bf16": 2}


@dataclass(frozen=True)
class States:
    """Bytes on a rank.

    Attributes:
        weights, main_grad, optimizer: bytes held between steps.
        host: bytes offloaded to the host or to disk, staging buffers included.
        temporary: peak bytes within a step of gathered weights, and of gradients not reduced yet or being compressed.
        copies: bytes of the copies that the rank's guard keeps on its host.
    """

    weights: int
    main_grad: int
    optimizer: int
    host: int
    temporary: int
    copies: int

    def __add__(self, other: States) -> States:
        return States(*map(add, vars(self).values(), vars(other).values()))


def states_of(
    cfg: Config,
    stages: Sequence[Sequence[UnitSizes]],
    coded: Sequence[Sequence[int]],
    dp: int,
    element: int,
    split: bool,
    shapes: Shapes = (),
    matrices: int = 0,
    of: int | None = None,
) -> States:
    """Compute what a rank holds: 18, 6 + 12 / dp, 2 + 16 / dp and 18 / dp bytes per parameter for bf16 and AdamW.

    Args:
        stages: units of each stage of the rank.
        coded: elements of each that are gathered as FP8 codes, from `coded_units`.
        element: bytes of a weight.
        split: whether the schedule splits the backward pass.
        shapes: matrices whose gradients are compressed, from `shapes_of`.
        matrices: elements of the blocks' matrices, from `matrices_of`.
        of: number of batch ranks, where only `dp` of them hold the same parameters (experts).
    """
    p, t = cfg.parallel, cfg.train
    params_away, group = t.offload == "optimizer+params", group_of(cfg, dp, of or dp)
    zero, cut = cfg.zero_stage(group), _cut(cfg, stages, group)
    total, gathered = sum(sum(unit) for units in stages for unit in units), sum(map(sum, cut))
    grad, sent, arriving = _gradient_bytes(cfg, dp)
    left, compressing = _compression(cfg, stages, shapes, dp) if dp > 1 else (0, 0)
    shared = total if zero == 2 else gathered
    weights = element * (total - gathered) + (0 if params_away else element * -(-gathered // group))
    ranks = group if zero else 1
    # Shares are fp32, and separate where the gradients are sharded or bf16.
    apart = -(-total // ranks) if grad == 2 else -(-shared // group)
    main_grad = (grad + sent) * (total - shared) + left + 4 * apart
    optimizer, host = -(-_state_bytes(cfg, total, matrices) // ranks), 0
    if t.offload.startswith("optimizer"):
        optimizer, host = 0, optimizer
        if params_away:
            shares = (element * -(-unit // group) for units in cut for unit in units)
            host += sum(shares if p.device == "cpu" else map(pinned_bytes, shares))
        if p.device != "cpu":
            host += staging_bytes(-(-_largest_update(cfg, stages, dp, group) // ranks), element)
    # Full gradients all arrive before the step reads any of them.
    temporary = compressing + (arriving * (total - shared) if p.overlap_grad_reduce else 0)
    if zero == 2:
        temporary += _gradient(cfg, _largest_bucket(cfg, stages, dp), total, sent + arriving)
    if zero == 3:
        temporary += -(-sum(map(sum, coded)) // group) + _at_stage_3(cfg, cut, coded, element, sent + arriving, split)
    kept = copies_of(cfg) * (-(-_state_bytes(cfg, total, matrices, copied=True) // ranks) + left)
    return States(weights, main_grad, optimizer, host, temporary, kept)


def copies_of(cfg: Config) -> int:
    """Return how many copies of a rank's masters, moments and residuals its guard keeps, another rank's included."""
    return {"none": 0, "process": NUM_SLOTS, "host": 2 * NUM_SLOTS}[cfg.run.recover]


def group_of(cfg: Config, dp: int, of: int) -> int:
    """Return how many of the `dp` ranks that hold the same parameters share a state; `of`: number of batch ranks."""
    if of == 1:
        return dp
    asked = cfg.parallel.zero_group_size(of, _ranks_of_host() if cfg.parallel.zero_group == "node" else of)
    return group_among(asked, dp, of) if asked else dp


def _cut(cfg: Config, stages: Sequence[Sequence[UnitSizes]], group: int) -> list[list[int]]:
    """List the elements of each unit whose weights are sharded."""
    least = cfg.parallel.zero_whole_below if cfg.zero_stage(group) == 3 else math.inf
    return [[sum(n for n in unit if n >= least) for unit in units] for units in stages]


def _largest_update(cfg: Config, stages: Sequence[Sequence[UnitSizes]], dp: int, group: int) -> int:
    """Return the elements of the largest bucket, on all ranks that share it."""
    sharded = cfg.zero_stage(group) == 3
    return max(map(max, _cut(cfg, stages, group))) if sharded else _largest_bucket(cfg, stages, dp)


def _gradient_bytes(cfg: Config, dp: int) -> tuple[int, int, int]:
    """Return the bytes per element of gradients, of a bf16 copy that is sent, and of what CPUs receive in a sum."""
    t = cfg.train
    grad = 2 if t.grad_dtype == "bf16" else 4
    sent = 2 if t.grad_reduce_dtype == "bf16" and grad > 2 else 0
    receives = cfg.parallel.device == "cpu" and cfg.zero_stage(dp) and dp > 1 and t.compress == "none"
    return grad, sent, (sent or grad) if receives else 0


def _state_bytes(cfg: Config, total: int, matrices: int, copied: bool = False) -> int:
    """Compute the bytes of masters and moments of `total` elements, `matrices` of them in the blocks' matrices.

    Args:
        copied: count masters also where they are the weights themselves.
    """
    # On the host, master weights are always separate from the weights.
    separate = copied or cfg.train.precision != cfg.optim.master_dtype or cfg.train.offload.startswith("optimizer")
    master, moment = (_WIDTH[dtype] for dtype in (cfg.optim.master_dtype, cfg.optim.moments_dtype))
    matrix_moments, moments = (len(cfg.optim.states_of(is_matrix)) for is_matrix in (True, False))
    return master * separate * total + moment * (matrix_moments * matrices + moments * (total - matrices))


def widened_bytes(cfg: Config, stages: Sequence[Sequence[UnitSizes]], dp: int, of: int) -> int:
    """Compute the bytes that an update takes on the device for masters and moments in fp32 instead of bf16.

    Arguments as for `states_of`.
    """
    o = cfg.optim
    if cfg.train.offload.startswith("optimizer"):
        return 0
    moments = max(len(o.states_of(is_matrix)) for is_matrix in (True, False)) * (o.moments_dtype == "bf16")
    group = group_of(cfg, dp, of)
    ranks = group if cfg.zero_stage(group) else 1
    return 4 * (moments + (o.master_dtype == "bf16")) * -(-_largest_update(cfg, stages, dp, group) // ranks)


def _ranks_of_host() -> int:
    from megalite.core.mesh.rendezvous import local_world_size  # with torch, which a search does without

    return local_world_size()


def _compression(cfg: Config, stages: Sequence[Sequence[UnitSizes]], shapes: Shapes, dp: int) -> tuple[int, int]:
    """Compute the bytes that `--compress` keeps between steps, and those that it uses within a step."""
    compression = cfg.train.compression
    if compression is None:
        return 0, 0
    total, largest = sum(sum(unit) for units in stages for unit in units), _largest_bucket(cfg, stages, dp)
    # Messages of other buckets, sent and received, wait until all gradients are complete.
    waiting = total - largest if cfg.parallel.overlap_grad_reduce else 0
    return compression.memory(Gradients(total, largest, waiting, shapes))


def _gradient(cfg: Config, largest: int, total: int, copies: int) -> int:
    """Compute the bytes of gradients that are not reduced yet, `largest` elements at a time."""
    each = 2 if cfg.train.grad_dtype == "bf16" else 4
    if cfg.parallel.zero_reduce == "step":
        return each * total + copies * largest
    # On a GPU one is reduced while the next one fills.
    return (each + copies + (each if cfg.parallel.device != "cpu" else 0)) * largest


def _at_stage_3(
    cfg: Config, cut: Sequence[Sequence[int]], coded: Sequence[Sequence[int]], element: int, copies: int, split: bool
) -> int:
    """Compute the peak bytes of gathered weights and of the gradients beside them; codes take one byte per element."""
    sizes = [[element * n - (element - 1) * c for n, c in zip(*unit)] for unit in zip(cut, coded)]
    total, whole = (sum(map(sum, stages)) for stages in (cut, sizes))
    return max(_of_units(cfg, units, total, taken, whole, copies, split) for units, taken in zip(cut, sizes))


def _of_units(
    cfg: Config, units: Sequence[int], total: int, taken: Sequence[int], whole: int, copies: int, split: bool
) -> int:
    """Compute `_at_stage_3` for one stage; units and all stages take `taken` and `whole` bytes once gathered."""
    ahead = [0, *taken[:-1]] if cfg.parallel.overlap_param_gather else [0] * len(units)
    # The next unit's weights are being gathered while one runs.
    weights = [n + more for n, more in zip(taken, ahead)]
    if cfg.parallel.zero_keep != "none":
        weights = [whole] * len(units)
    grads = [_gradient(cfg, n, total, copies) for n in units]
    # Deferred weight gradients need no weights.
    both = [max(w, g) if split and cfg.parallel.zero_keep != "step" else w + g for w, g in zip(weights, grads)]
    return max(both, default=0)


def _largest_bucket(cfg: Config, stages: Sequence[Sequence[UnitSizes]], dp: int) -> int:
    limit = cfg.parallel.bucket_elements(dp)
    units = [[max(unit, default=0)] for stage in stages for unit in stage]
    alone_from = cfg.parallel.zero_whole_below if cfg.parallel.zero == 2 else math.inf
    plans = plan_buckets(units, limit, alone_from)
    largest = max(sum(units[unit][i] for unit, i in bucket) for bucket in plans)
    return largest if len(plans) == 1 else min(largest, max(limit, *(unit[0] for unit in units)))
