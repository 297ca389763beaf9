"""Experts: loss, gradient norm and every gradient are those of one process, however they are distributed."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

from megalite.core.model.parameters import param_map
from megalite.core.ops import Ops
from megalite.core.options.rates import rates_at
from megalite.core.sharding import Shard
from megalite.runtime.options.run import Config
from tests.parity import jobs
from tests.parity.features import Feature
from tests.parity.harness import (
    Shape,
    assert_same,
    assert_same_bits,
    boxes_of,
    config,
    one_process,
    put_together,
    ranks_of,
    scaled,
    trained,
)
from tests.parity.models import EXPERTS, MIXTRAL, QWEN, dropped, shallow
from tests.parity.packed import weighted
from tests.rows import always_run
from tests.workers import WorkerPool

# One expert of each token, not gated; tied embeddings; no losses of the router.
SWITCH = jobs.llama(**EXPERTS | {"moe_topk": 1}, moe_renormalize=False, activation="gelu", tie_embeddings=True)

TWO_LAYERS = replace(MIXTRAL, num_layers=2)
PLACES: dict[str, Shape] = {
    "experts by stride": ranks_of(2, ep=2),
    "weights without the copy": ranks_of(2, tp=2, sequence_parallel=False),
    "router not summed over tp": ranks_of(2, tp=2),
    "balance divided by cp": ranks_of(2, cp=2),
    "counts of one rank": ranks_of(2, cp=2),
    "experts averaged by ep": ranks_of(2, ep=2),
    "experts summed over dp": ranks_of(4, ep=2),
}


class TestExperts(Feature):
    strong = {
        ranks_of(4, ep=2): [(MIXTRAL, 1, {}, {"data": weighted}), (QWEN, 3, {}, {"recompute": "full"})],
        ranks_of(4, ep=2, tp=2): [
            (MIXTRAL, 1, {"sequence_parallel": False}, {}),
            (QWEN, 2, {}, {}),
            (QWEN, 1, {"moe_dispatch": "auto"}, {"recompute": "full"}),  # allgather: ep is less than k
        ],
        ranks_of(4, ep=4, tp=2, etp="1"): [(MIXTRAL, 3, {}, {}), (SWITCH, 1, {}, {"recompute": "selective"})],
        ranks_of(8, ep=2, tp=2, pp=2): [(QWEN, 1, {"schedule": "zb-v", "vp": 2}, {})],
        ranks_of(4, ep=4, cp=2): [(MIXTRAL, 1, {}, {})],
    }
    grid = {
        ranks_of(2, ep=2): [
            (MIXTRAL, 0, {}, {}),
            (QWEN, 1, {}, {"offload": "optimizer"}),
            (MIXTRAL, 3, {"zero_keep": "backward"}, {}),
            (MIXTRAL, 1, {"overlap_grad_reduce": False, "overlap_param_gather": False}, {}),
        ],
        ranks_of(4, ep=2): [
            (SWITCH, 0, {}, {"data": weighted}),
            (QWEN, 3, {"zero_group": "2"}, {"recompute": "full"}),
            (MIXTRAL, 2, {"zero_reduce": "step"}, {"loss_chunk": 5}),
        ],
        ranks_of(8, ep=8): [(QWEN, 3, {}, {})],
        ranks_of(2, tp=2): [(SWITCH, 1, {"overlap_tp_reduce": False}, {"recompute": "full"})],
        ranks_of(2, tp=2, etp="1"): [(QWEN, 1, {}, {})],
        ranks_of(4, ep=2, tp=2): [(SWITCH, 3, {}, {}), (QWEN, 3, {"sequence_parallel": False}, {"recompute": "full"})],
        ranks_of(4, ep=2, tp=2, etp="1"): [(QWEN, 1, {}, {"recompute": "full"})],
        ranks_of(4, ep=2, pp=2): [
            (MIXTRAL, 3, {"schedule": "interleaved", "vp": 2}, {"recompute": "full"}),
            (SWITCH, 2, {"schedule": "zb-h1"}, {}),
        ],
        ranks_of(4, ep=4, cp=2): [(QWEN, 3, {"cp_comm": "ring"}, {})],
        ranks_of(8, ep=4, cp=2, tp=2, etp="1"): [(MIXTRAL, 1, {}, {})],
        ranks_of(8, ep=2, cp=2, tp=2): [(MIXTRAL, 3, {"sequence_parallel": False}, {})],
        ranks_of(8, ep=4, tp=2, pp=2, etp="1"): [
            (QWEN, 1, {"schedule": "zb-h1"}, {}),
            (MIXTRAL, 1, {"schedule": "zb-v", "vp": 2, "moe_dispatch": "allgather"}, {}),
        ],
        ranks_of(4, ep=4): [(SWITCH, 3, {"moe_dispatch": "allgather"}, {})],
        ranks_of(4, tp=2, ep=2, sequence_parallel=False, moe_dispatch="allgather"): [(MIXTRAL, 2, {}, {})],
    }
    recomputed = {ranks_of(4, ep=2, tp=2): [(dropped(QWEN), 1, {}, {})]}
    planted = {mistake: (shape, (MIXTRAL, 1, {}, {})) for mistake, shape in PLACES.items()}
    # Experts run outside of the compiled code, with the pass of their micro-batch.
    compiled = [
        (ranks_of(2, ep=2), (replace(MIXTRAL, num_layers=1), 1, {}, {"recompute": "full"})),
        (ranks_of(2, tp=2, etp="1", ep=2), (replace(MIXTRAL, num_layers=1), 1, {}, {})),
    ]

    @staticmethod
    def mistakes(rank: int, cfg: Config) -> dict[str, tuple[Any, str, Any]]:
        from types import SimpleNamespace

        from megalite.core.mesh.collectives import FinishedWork
        from megalite.core.ops.grouped import grouped_wgrad
        from megalite.core.parts.ffn import experts as kind
        from megalite.core.parts.ffn.experts import moe, routing
        from megalite.core.parts.ffn.experts.dispatch import AllToAll
        from megalite.core.parts.ffn.experts.grouped_linear import GroupedLinear

        reduce: Any = Shard.reduce
        balance, way, axes = routing.Router._balance, AllToAll.__init__, reduce.fget
        spread, declared, init = moe.copy_to, kind._router, GroupedLinear.__init__

        def divided(self: Any, *args: Any) -> Any:
            loss, counts = balance(self, *args)
            return loss / cfg.parallel.cp, counts

        def by_stride(self: AllToAll, ids: torch.Tensor, num: int, ep: Any, ops: Ops, known: Any = None) -> None:
            way(self, ids % ep.size * (num // ep.size) + ids // ep.size, num, ep, ops, known)

        def over_dp(self: Shard) -> tuple[str, ...]:
            return (*axes(self), *(("ep",) if "ep" in self.layout.grid.names else ()))

        def averaged(main_grad: torch.Tensor, dy: torch.Tensor, *rest: Any) -> None:
            grouped_wgrad(main_grad, dy / cfg.parallel.ep, *rest)

        def averaging(self: Any, *args: Any) -> None:
            init(self, *args)
            self.products = type(self.products)(replace(self.products.ops, grouped_wgrad=averaged))

        return {
            "weights without the copy": (moe, "copy_to", lambda x, tp: x if x.shape[-1] == 2 else spread(x, tp)),
            "router not summed over tp": (kind, "_router", lambda *args: replace(declared(*args), partial=())),
            "balance divided by cp": (routing.Router, "_balance", divided),
            "counts of one rank": (
                routing,
                "collectives",
                SimpleNamespace(all_reduce=lambda x, axis: FinishedWork()),
            ),
            "experts averaged by ep": (GroupedLinear, "__init__", averaging),
            "experts summed over dp": (Shard, "reduce", property(over_dp)),
            "experts by stride": (AllToAll, "__init__", by_stride),
        }


@pytest.mark.full
def test_schedules_are_bitwise_the_same(pool: WorkerPool) -> None:
    """Split backward passes too; the norm's order of sums is that of the ranks."""
    schedules: list[dict[str, Any]] = [{"schedule": "1f1b"}, {"schedule": "zb-h1"}]
    schedules += [{"schedule": name, "vp": 2} for name in ("interleaved", "zb-v")]
    cfgs = [config(MIXTRAL, 1, {"ep": 2, "pp": 2, **schedule}) for schedule in schedules]
    ranks = pool.run(4, trained, cfgs, 4)
    assert_same_bits([rank[:2] for rank in ranks])
    expected, *others = [put_together([rank[i].gradients for rank in ranks]) for i in range(len(cfgs))]
    for gradients, schedule in zip(others, schedules[1:]):
        for name, gradient in expected.items():
            assert np.array_equal(gradients[name], gradient), f"{schedule} {name}"


def test_balance_by_sequence_does_not_know_micro_batches() -> None:
    for model, same in ((MIXTRAL, True), (QWEN, False)):
        by_size = [one_process(scaled(jobs.make_config(model, micro_batch_size=size))) for size in (1, 2, 4)]
        router = "layers.0.mlp.router.weight"
        gradients, *others = (put_together([result.gradients])[router] for result in by_size)
        for result, more in zip(by_size[1:], others):
            np.testing.assert_allclose(result.steps[0], by_size[0].steps[0], rtol=1e-5 if same else 1e-2)
            assert np.allclose(more, gradients, rtol=1e-4, atol=1e-5 * np.abs(gradients).max()) == same


def unused(rank: int, cfgs: Any, world: int, run: Any = trained) -> Any:
    """`run`, with routers that never choose the second half of the experts."""
    from megalite.core.parts.ffn.experts.routing import Router

    logits_of = Router.forward

    def forward(self: Router, x: torch.Tensor) -> torch.Tensor:
        logits = logits_of(self, x)
        return logits - 100 * (torch.arange(logits.shape[1]) >= 4)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Router, "forward", forward)
        return run(rank, cfgs, world)


def test_experts_and_ranks_without_a_token(pool: WorkerPool) -> None:
    (alone,) = unused(0, [scaled(jobs.make_config(MIXTRAL))], 1)
    for zero, dispatch in ((1, "alltoall"), (3, "allgather")):
        ranks = pool.run(4, unused, [config(MIXTRAL, zero, {"ep": 4, "moe_dispatch": dispatch})], 4)
        assert_same([rank[0] for rank in ranks], alone, f"zero {zero}, {dispatch}")
    gradients = put_together([alone.gradients])
    for name in ("gate_up_proj", "down_proj"):
        held = gradients[f"layers.2.mlp.experts.{name}.weight"]
        assert np.abs(held[:4]).min((1, 2)).shape == (4,)
        assert (np.abs(held[:4]).max((1, 2)) > 0).all()
        assert (held[4:] == 0).all()


@pytest.mark.full
def test_experts_without_a_token_decay(pool: WorkerPool) -> None:
    """Their gradients are 0, not missing: two steps of AdamW take a part of their weights, and nothing else."""
    cfg = jobs.make_config(MIXTRAL, {"ep": 4})
    held = put_together([boxes for _, boxes in pool.run(4, unused, cfg, 4, masters)])
    left = np.prod([1 - cfg.optim.weight_decay * rates_at(cfg.optim, cfg.train, step).lr for step in (1, 2)])
    for name in ("gate_up_proj", "down_proj"):
        spec = param_map(MIXTRAL)[f"layers.2.mlp.experts.{name}.weight"]
        start = Shard(spec).initial(cfg.train.seed).numpy()
        np.testing.assert_allclose(held[spec.name][4:], left * start[4:], rtol=1e-6)
        assert not np.allclose(held[spec.name][:4], left * start[:4], rtol=1e-3)


def crowded(rank: int, cfgs: Sequence[Config], world: int) -> Any:
    """`trained`, with routers that prefer the first half of the experts; bytes kept for backward by experts' layers."""
    from megalite.core.parts.ffn.experts.moe import Experts
    from megalite.core.parts.ffn.experts.routing import Router

    logits_of, apply, kept = Router.forward, Experts.forward, list[int]()

    def forward(self: Router, x: torch.Tensor) -> torch.Tensor:
        return logits_of(self, x) - 3.0 * (torch.arange(8) >= 4)

    def measured(self: Experts, *args: Any) -> torch.Tensor:
        def pack(x: torch.Tensor) -> torch.Tensor:
            kept[-1] += x.nbytes
            return x

        kept.append(0)
        with torch.autograd.graph.saved_tensors_hooks(pack, lambda x: x):
            return apply(self, *args)

    out: list[Any] = []
    for cfg in cfgs:
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(Router, "forward", forward)
            patch.setattr(Experts, "forward", measured)
            out += trained(rank, [cfg], world)
        out.append(max(kept))
        kept.clear()
    return out


@pytest.mark.full
def test_a_crowded_rank_keeps_the_inputs_of_its_experts(pool: WorkerPool) -> None:
    """The same bits, whatever memory is planned for; with less, less is kept."""
    layouts = [{"ep": 4, "moe_memory_factor": factor, **more} for more in ({}, {"zero": 3}) for factor in (1.0, 8.0)]
    shares = []
    for rank in pool.run(4, crowded, [config(shallow(QWEN), 1, layout) for layout in layouts], 4):
        for narrow, kept, wide, all_kept in (rank[:4], rank[4:]):
            assert_same_bits([[narrow, wide]])
            shares.append(kept / all_kept)
    # On the ranks with fewer rows than they send, nothing changes.
    assert max(shares) == 1.0
    assert min(shares) < 0.6


def routed(rank: int, cfgs: Sequence[Config], world: int, skewed: bool) -> list[dict[str, float]]:
    """Figures of the routers of one step, also by layer."""
    from megalite.core.parts.ffn.experts.routing import Router
    from megalite.core.step import train_step

    logits_of = Router.forward
    out = []
    with pytest.MonkeyPatch.context() as patch:
        if skewed:
            patch.setattr(Router, "forward", lambda self, x: logits_of(self, x) + 50.0 * (torch.arange(8) < 2))
        for cfg in cfgs:
            engine = jobs.start(rank, cfg, world)
            share = np.split(jobs.batches(1)[0], engine.ctx.dp.size)[engine.ctx.dp.rank]
            figures = train_step(engine, share, 1).figures["routing"]
            assert figures is not None
            out.append(figures.record(by_layer=True))
    return out


@pytest.mark.parametrize("skewed", always_run([False, True], True))
def test_figures_of_the_routers(pool: WorkerPool, skewed: bool) -> None:
    """The same in any layout, once under recomputation; two experts that take every token have E / k times the mean."""
    (expected,) = routed(0, [jobs.make_config(MIXTRAL)], 1, skewed)
    loads = [expected[f"expert_load_layer_{layer}"] for layer in range(4)]
    assert expected["expert_load"] == max(loads)
    assert (loads == [4.0] * 4) if skewed else (1.0 < min(loads) < max(loads) < 4.0)
    # A balanced layer has 1, one with all tokens at two of eight experts nearly 4.
    for layer in range(4):
        assert (
            3.95 < expected[f"aux_loss_layer_{layer}"] <= 4.0
            if skewed
            else 1.0 < expected[f"aux_loss_layer_{layer}"] < 2
        )
    cfgs = [
        jobs.make_config(MIXTRAL, {"ep": 2, "tp": 2}, recompute="full"),
        jobs.make_config(MIXTRAL, {"ep": 2, "tp": 2, "sequence_parallel": False}),
        jobs.make_config(MIXTRAL, {"ep": 2, "pp": 2, "schedule": "zb-v", "vp": 2}, recompute="full"),
        jobs.make_config(MIXTRAL, {"ep": 4, "cp": 2}, micro_batch_size=2),
    ]
    for rank in pool.run(4, routed, cfgs, 4, skewed):
        for figures in rank:
            assert figures == pytest.approx(expected, rel=1e-5)


def masters(rank: int, cfg: Config, world: int) -> Any:
    """What this rank owns of the weights after two steps."""
    engine = jobs.start(rank, cfg, world)
    return jobs.run_steps(engine, 2), boxes_of(engine, "master")


def test_clipping_knows_the_norm_of_all_experts(pool: WorkerPool) -> None:
    single = jobs.make_config(TWO_LAYERS)
    (norm, *_) = [norm for _, norm in masters(0, single, 1)[0]]
    clipped = replace(single.optim, clip_grad=norm / 2)
    steps, boxes = masters(0, replace(single, optim=clipped), 1)
    expected = put_together([boxes])
    cfg = replace(jobs.make_config(TWO_LAYERS, {"ep": 4}), optim=clipped)
    ranks = pool.run(4, masters, cfg, 4)
    held = put_together([boxes for _, boxes in ranks])
    for name, weights in expected.items():
        # Adam's first steps have the sign of a gradient, and rounding may turn that of a tiny one.
        far = np.abs(held[name] - weights) > 1e-6
        assert far.mean() < 1e-3, name
    np.testing.assert_allclose(ranks[0][0], steps, rtol=1e-5)


@pytest.mark.parametrize("rule", ["lamb", pytest.param("lars", marks=pytest.mark.full)])
def test_each_expert_has_a_trust_ratio(pool: WorkerPool, rule: str) -> None:
    """Weights after two steps, by rules that take norms of whole parameters: a stack of experts is none."""
    single = jobs.make_config(TWO_LAYERS)
    optim = replace(single.optim, optimizer=rule)
    steps, boxes = masters(0, replace(single, optim=optim), 1)
    expected = put_together([boxes])
    for parallel in ({"ep": 2, "tp": 2}, {"ep": 4, "tp": 2, "etp": "1"}, {"ep": 2, "zero": 0}):
        ranks = pool.run(4, masters, replace(jobs.make_config(TWO_LAYERS, parallel), optim=optim), 4)
        np.testing.assert_allclose(ranks[0][0], steps, rtol=1e-5)
        held = put_together([boxes for _, boxes in ranks])
        for name, weights in expected.items():
            assert (np.abs(held[name] - weights) > 1e-6).mean() < 1e-3, (parallel, name)


# Types and options that round: (further layout, optimizer, training options), and how far losses may be.
ROUNDING: list[tuple[dict[str, Any], dict[str, Any], dict[str, Any], float]] = [
    ({}, {}, {"precision": "bf16"}, 1e-2),
    ({}, {}, {"precision": "bf16", "grad_dtype": "bf16"}, 1e-2),
    ({}, {"initial_loss_scale": 512.0}, {"precision": "fp16"}, 1e-2),
    ({}, {}, {"compress": "int8"}, 1e-3),
    ({"zero": 3}, {}, {"offload": "optimizer+params"}, 1e-5),
]


def losses(rank: int, cfgs: Sequence[Config], world: int) -> list[list[float]]:
    return [[loss for loss, _ in jobs.train(rank, cfg, world, 2)] for cfg in cfgs]


@pytest.mark.full
def test_types_and_options_that_round(pool: WorkerPool) -> None:
    def rows(layout: dict[str, Any]) -> list[Config]:
        out = []
        for parallel, optim, train, _ in ROUNDING:
            given, more = ({**layout, **parallel}, train) if layout else ({}, {})
            cfg = jobs.make_config(replace(QWEN, num_layers=2), given, **{"micro_batch_size": 2, **more})
            out.append(replace(cfg, optim=replace(cfg.optim, **optim)))
        return out

    expected = losses(0, rows({}), 1)
    for rank in pool.run(4, losses, rows({"ep": 2, "tp": 2}), 4):
        for got, want, (*_, far) in zip(rank, expected, ROUNDING, strict=True):
            np.testing.assert_allclose(got, want, rtol=far)
