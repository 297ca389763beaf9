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
from megalite.core.step import eval_step
from megalite.extras.estimate.match import find_faults
from megalite.extras.estimate.rank import plausible_status, run_step
from megalite.extras.estimate.record import Communication, recorded_world
from megalite.extras.plan.memory.states import _largest_bucket
from megalite.runtime.options.run import Config
from tests.parity import jobs
from tests.parity.test_layouts import LAYOUTS, MODELS, VARIANTS

SP_OFF = {"sequence_parallel": False}
CUT = {"tp": 2, "pp": 2}
WHOLE_3 = {"zero": 3, "zero_whole_below": 0}

# As in the parity grid: (world, layers, layout, training options); for Llama and for GPT-2 with tied embeddings.
MORE: dict[str, tuple[int, int, dict[str, Any], dict[str, Any]]] = {
    "zero0": (8, 4, {**CUT, "zero": 0}, {}),
    "zero2": (8, 4, {**CUT, "zero": 2}, {}),
    "zero2-step": (8, 4, {**CUT, "zero": 2, "zero_reduce": "step"}, {}),
    "zero3": (8, 4, {**CUT, **WHOLE_3}, {}),
    "zero3-small-whole": (8, 4, {**CUT, "zero": 3, "zero_whole_below": 4000}, {}),
    "zero3-backward": (8, 4, {**CUT, **WHOLE_3, "zero_keep": "backward"}, {}),
    "zero3-keep-step": (8, 4, {**CUT, **WHOLE_3, "zero_keep": "step"}, {}),
    "zero3-zb-h1": (8, 4, {**CUT, **WHOLE_3, "schedule": "zb-h1"}, {}),
    "zero3-zb-v": (8, 4, {**CUT, **WHOLE_3, "vp": 2, "schedule": "zb-v"}, {}),
    "zero3-vp2": (8, 4, {**CUT, **WHOLE_3, "vp": 2}, {}),
    "zero3-groups": (16, 4, {**CUT, **WHOLE_3, "zero_group": "2"}, {"global_batch_size": 16}),
    "zero2-groups": (8, 4, {"tp": 2, "zero": 2, "zero_group": "2"}, {}),
    "one-bucket": (8, 4, {**CUT, "bucket_size": 2**39}, {}),
    "no-overlap": (
        8,
        4,
        {**CUT, "overlap_grad_reduce": False, "overlap_param_gather": False, "overlap_tp_reduce": False},
        {},
    ),
    "no-sp-zb-h1": (8, 4, {**CUT, **SP_OFF, "schedule": "zb-h1"}, {}),
    "tp4-no-sp": (8, 4, {"tp": 4, **SP_OFF}, {}),
    "recompute-full": (8, 4, CUT, {"recompute": "full"}),
    "recompute-selective": (8, 4, {**CUT, "schedule": "zb-h1"}, {"recompute": "selective"}),
    "loss-chunk": (8, 4, CUT, {"loss_chunk": 5}),
    "smoothing": (8, 4, CUT, {"label_smoothing": 0.1}),
    "bf16": (8, 4, CUT, {"precision": "bf16", "grad_reduce_dtype": "bf16"}),
    "int8": (8, 4, CUT, {"compress": "int8"}),
    "topk": (8, 4, CUT, {"compress": "topk:0.1"}),
    "powersgd": (8, 4, CUT, {"compress": "powersgd:2"}),
    "gpipe": (8, 4, {**CUT, "schedule": "gpipe"}, {}),
    "naive": (8, 4, {**CUT, "schedule": "naive"}, {}),
    "eager": (8, 4, {"tp": 2, "pp": 4, "schedule": "1f1b-eager"}, {}),
    "pp3": (6, 6, {"pp": 3, "schedule": "zb-h1"}, {}),
    "pp4-vp3": (4, 12, {"pp": 4, "vp": 3}, {}),
}
LARGE: dict[str, tuple[int, int, dict[str, Any], dict[str, Any]]] = {
    "64-interleaved": (64, 16, {"tp": 4, "pp": 4, "vp": 2}, {"global_batch_size": 16}),
    "64-zb-v-zero3": (64, 16, {"tp": 2, "pp": 8, "vp": 2, "schedule": "zb-v", **WHOLE_3}, {"global_batch_size": 32}),
}
# (world, layers, layout, training options, model): a rank of a group holds the head and the tail of every sample.
SHARED: dict[str, tuple[int, int, dict[str, Any], dict[str, Any], dict[str, Any]]] = {
    "cp2-gather-zb-v": (8, 4, {**CUT, "cp": 2, "cp_comm": "gather", "vp": 2, "schedule": "zb-v"}, {}, {}),
    "cp2-ring-zero3": (8, 4, {"tp": 2, "cp": 2, "cp_comm": "ring", **WHOLE_3}, {"recompute": "selective"}, {}),
    "cp4-a2a-zero2": (8, 4, {"cp": 4, "cp_comm": "a2a", "zero": 2, "zero_group": "2"}, {"recompute": "full"}, {}),
    "cp8-a2a+ring": (8, 4, {"cp": 8, "cp_comm": "a2a+ring"}, {}, {"num_heads": 4, "num_kv_heads": 4}),
    "cp8-a2a+gather": (16, 4, {"cp": 8, "tp": 2, "cp_comm": "a2a+gather"}, {}, {"seq_len": 32}),
}
SHARED_MORE: dict[str, tuple[int, int, dict[str, Any], dict[str, Any], dict[str, Any]]] = {
    "64-cp16": (64, 4, {**CUT, "cp": 16, "cp_comm": "ring", "schedule": "zb-h1"}, {}, {"seq_len": 64}),
    "64-cp64-gather": (64, 1, {"cp": 64, "cp_comm": "gather", **WHOLE_3}, {}, {"seq_len": 128}),
    "64-cp64-a2a+ring": (64, 1, {"cp": 64, "cp_comm": "a2a+ring"}, {"recompute": "selective"}, {"seq_len": 128}),
    "64-cp32-a2a+gather": (64, 2, {"pp": 2, "cp": 32, "cp_comm": "a2a+gather"}, {}, {"seq_len": 64}),
}
EXPERTS = {"num_experts": 8, "moe_topk": 2, "moe_ffn_size": 24, "moe_aux_loss_coeff": 0.01}
SPARSE: dict[str, tuple[int, int, dict[str, Any], dict[str, Any], dict[str, Any]]] = {
    "ep2-zb-v": (8, 4, {**CUT, "ep": 2, "vp": 2, "schedule": "zb-v"}, {}, EXPERTS),
    "mtp-zero3": (8, 4, {**CUT, **WHOLE_3}, {}, {"mtp_num_layers": 2}),
}
SPARSE_MORE: dict[str, tuple[int, int, dict[str, Any], dict[str, Any], dict[str, Any]]] = {
    "ep4-whole-zero3": (8, 4, {"tp": 2, "ep": 4, "etp": "1", **WHOLE_3}, {"recompute": "full"}, EXPERTS),
    "mtp-cp2-zb-v": (8, 4, {**CUT, "cp": 2, "vp": 2, "schedule": "zb-v"}, {}, {"mtp_num_layers": 1}),
    "ep2-cp2-zero2": (8, 4, {"tp": 2, "cp": 2, "ep": 2, "zero": 2}, {}, EXPERTS),
    "64-ep64": (64, 2, {"ep": 64}, {"global_batch_size": 64}, {**EXPERTS, "num_experts": 64, "seq_len": 32}),
    "64-ep16-whole": (
        64,
        4,
        {"tp": 4, "pp": 2, "ep": 16, "etp": "1", "schedule": "zb-h1"},
        {},
        {**EXPERTS, "num_experts": 16, "seq_len": 32},
    ),
}
ALL = {
    **{
        f"{name}-{model}": (MODELS[model], *layout, *([{}] if len(layout) == 3 else []))
        for name, layout in (LAYOUTS | MORE).items()
        for model in ("llama", "gpt2")
    },
    **{name: (MODELS["gpt2"], *layout) for name, layout in LARGE.items()},
    **{
        name: (lambda layers, options=options: jobs.llama(layers, **options), 8, 4, CUT, {})
        for name, options in VARIANTS.items()
    },
    **{
        name: (lambda layers, options=options: jobs.llama(layers, **options), *layout)
        for name, (*layout, options) in (SHARED | SHARED_MORE | SPARSE | SPARSE_MORE).items()
    },
}


def in_turn(self: Router, x: torch.Tensor, logits_of: Any = Router.forward) -> torch.Tensor:
    """Logits by which tokens choose all experts in turn: each gets as many rows from every rank."""
    first = torch.arange(len(x))[:, None] * self.k
    places = (torch.arange(self.num_experts) - first) % self.num_experts
    # Weights that nobody has initialized may be NaN.
    return 0 * logits_of(self, x).nan_to_num(0, 0, 0) - places.float()


def run_rank(cfg: Config, grid: Grid, rank: int) -> list[Communication]:
    """What a rank posts in a step and an evaluation."""
    with recorded_world(rank, grid) as log, pytest.MonkeyPatch.context() as patch:
        if cfg.model.num_experts:
            patch.setattr(Router, "forward", in_turn)
        engine = build_engine(cfg, ParallelContext.create(grid, torch.device("cpu")))
        run_step(engine, log)
        with plausible_status(cfg):
            batch = torch.zeros(cfg.train.global_batch_size // engine.ctx.dp.size, cfg.model.seq_len + 1)
            eval_step(engine, batch.long())
        return [event for event in log if isinstance(event, Communication)]


def run_all(name: str) -> list[list[Communication]]:
    """What all ranks of a layout post."""
    make, world, layers, parallel, train = ALL[name]
    cfg = jobs.make_config(make(layers), parallel, **{"micro_batch_size": 1, **train})
    grid = Grid.from_config(cfg.parallel, world)
    return [run_rank(cfg, grid, rank) for rank in range(world)]


@pytest.mark.parametrize(
    "name", [pytest.param(n, marks=[pytest.mark.full] * (n in SHARED_MORE | SPARSE_MORE)) for n in ALL]
)
def test_all_ranks_fit_together(name: str) -> None:
    logs = run_all(name)
    assert find_faults(logs) == []
    assert all(logs)


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
