"""The collectives and messages of all ranks fit together, in every layout, if each operation blocks its rank.

No processes: each rank's real step runs here, one after the other, in a world that only records. gloo cannot show this,
as it lets two groups of a rank proceed at the same time.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Sequence
from typing import Any

import pytest
import torch

from megalite.core.build import build_engine
from megalite.core.mesh.context import ParallelContext
from megalite.core.mesh.grid import Grid
from megalite.core.optim.gather_chain import GatherChain
from megalite.core.options.parallel import ParallelConfig
from megalite.core.parts.ffn.experts.routing import Router
from megalite.core.rows import Rows
from megalite.core.step import eval_step
from megalite.extras.estimate.match import find_faults
from megalite.extras.estimate.rank import plausible_status, run_step, zeros
from megalite.extras.estimate.record import Communication, recorded_world
from megalite.extras.plan.memory.states import _largest_bucket
from megalite.runtime.options.run import Config
from tests.parity import jobs
from tests.rows import always_run
from tests.unit.extras.estimate.layouts import ALL, SHARED_MORE, SPARSE_MORE, in_turn


def run_rank(cfg: Config, grid: Grid, rank: int, evaluates: bool = True) -> list[Communication]:
    """What a rank posts in a step and, unless it is left out, an evaluation."""
    with recorded_world(rank, grid) as log, pytest.MonkeyPatch.context() as patch:
        if cfg.model.num_experts:
            patch.setattr(Router, "forward", in_turn)
        engine = build_engine(cfg, ParallelContext.create(grid, torch.device("cpu")))
        run_step(engine, log)
        if evaluates:
            with plausible_status(cfg):
                eval_step(engine, zeros(engine))
        return [event for event in log if isinstance(event, Communication)]


def run_all(name: str, evaluates: bool = True) -> list[list[Communication]]:
    """What all ranks of a layout post."""
    make, world, layers, parallel, train = ALL[name]
    cfg = jobs.make_config(make(layers), parallel, **{"micro_batch_size": 1, **train})
    grid = Grid.from_config(cfg.parallel, world)
    return [run_rank(cfg, grid, rank, evaluates) for rank in range(world)]


# GPT-2 posts what Llama does, and the sum of its tied embedding.
ROWS = [n for n in ALL if not n.endswith("-llama") or n in ("zero3-zb-v-llama", "pp4-vp3-llama")]
# Of each sort of messages one layout: pipelines, ZeRO stages, cp, experts, further tokens, codecs.
ALWAYS = [n for n in ROWS if n not in SHARED_MORE | SPARSE_MORE and not n.startswith("64-") and "-llama" not in n]


@pytest.mark.parametrize("name", always_run(ROWS, *ALWAYS[::4]))
def test_all_ranks_fit_together(name: str) -> None:
    logs = run_all(name)
    assert find_faults(logs) == []
    assert all(logs)


@pytest.mark.parametrize("name", ["uneven-zero3-llama", "uneven-ep3"])
def test_ranks_that_leave_passes_without_samples_out_hang(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    monkeypatch.setattr(Rows, "filled", lambda self, samples: self)
    assert find_faults(run_all(name, evaluates=False))


def test_buckets_grow_with_the_ranks_that_reduce_them(monkeypatch: pytest.MonkeyPatch) -> None:
    """dp x cp counts, as both reduce; the planner reckons with the same buckets."""
    monkeypatch.setattr(ParallelConfig, "bucket_elements", lambda parallel, ranks: 4_000 * ranks)
    sums, planned = [], []
    for world, cp, axis in ((2, 1, "dp"), (8, 1, "dp"), (8, 2, "dpxcp")):
        cfg = jobs.make_config(jobs.llama(4), {"cp": cp, "bucket_size": None})
        log = run_rank(cfg, Grid.from_config(cfg.parallel, world), 0)
        sums.append(sum((event.kind, event.axis) == ("reduce_scatter", axis) for event in log))
        planned.append(_largest_bucket(cfg, [[(9_000,)] * 4], world))
    assert sums[0] > sums[1] == sums[2]
    assert planned == [9_000, 27_000, 27_000]


@pytest.fixture(scope="module")
def logs() -> list[list[Communication]]:
    return run_all("tp2-pp2-vp2-dp2-zero1-gpt2")


def swapped(log: Sequence[Communication], i: int) -> list[Communication]:
    return [*log[:i], log[i + 1], log[i], *log[i + 2 :]]


def test_two_operations_in_another_order_get_stuck(logs: list[list[Communication]]) -> None:
    tried = 0
    for i, (one, other) in enumerate(itertools.pairwise(logs[3])):
        both = set(one.ranks) & set(other.ranks) - {3}
        # If another rank takes part in both, it waits in the one and this rank in the other. Equal ones may be swapped.
        whom = {posted.peer for posted in (one, other) if posted.peer is not None}
        if one == other or not both or len(whom) == 2:
            continue
        tried += 1
        assert find_faults([*logs[:3], swapped(logs[3], i), *logs[4:]]), (i, one, other)
    assert tried > 20


def test_what_one_rank_leaves_out_or_does_differently(logs: list[list[Communication]]) -> None:
    log = logs[5]
    assert find_faults([*logs[:5], log[:-1], *logs[6:]])
    for i in range(0, len(log), 7):
        missing = [*log[:i], *log[i + 1 :]]
        assert find_faults([*logs[:5], missing, *logs[6:]])
        larger = [*log[:i], dataclasses.replace(log[i], numel=log[i].numel + 1), *log[i + 1 :]]
        assert "rank 5" in find_faults([*logs[:5], larger, *logs[6:]])[0]


def test_one_rank_that_gathers_in_another_order(monkeypatch: pytest.MonkeyPatch) -> None:
    before = GatherChain.__init__

    def backwards(self: GatherChain, buckets: Any) -> None:
        buckets = list(buckets)
        odd = torch.distributed.get_rank() == 2
        before(self, buckets[::-1] if odd else buckets)

    monkeypatch.setattr(GatherChain, "__init__", backwards)
    assert find_faults(run_all("dp2-zero1-llama")) == []
    assert find_faults(run_all("tp2-pp2-dp2-zero1-llama"))


@pytest.mark.parametrize("name", ["zero3-groups-llama", "zero2-groups-llama"])
def test_sums_over_groups_overlap_with_the_backward_pass(name: str) -> None:
    make, world, layers, parallel, train = ALL[name]
    cfg = jobs.make_config(make(layers), parallel, **{"micro_batch_size": 1, **train})
    log = run_rank(cfg, Grid.from_config(cfg.parallel, world), 0)
    posts = [(event.axis, event.kind) for event in log]
    first_sum = posts.index(("replicas", "all_reduce"))
    assert ("shares", "reduce_scatter") in posts[first_sum:]
