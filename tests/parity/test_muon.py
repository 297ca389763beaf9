"""Muon: plain torch with its own `torch.optim.Muon` in one process, and the same in every layout."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from megalite.core.mesh.grid import Grid
from megalite.core.model.flops import flops_per_token
from megalite.core.options.lr import learning_rate
from megalite.core.options.model import ModelConfig
from megalite.core.options.optim import OptimConfig
from megalite.core.options.update_rule import RULES, MatrixRule, Share
from megalite.extras.plan.memory.matrices import Placed, matrices_of, placed_matrices, transform_flops
from megalite.extras.plan.memory.ranks import memory_per_rank
from megalite.extras.plan.report import update_rows
from megalite.runtime.options.cli import parse
from megalite.runtime.options.run import Config
from tests.parity import jobs, models, runs
from tests.parity.harness import boxes_of, put_together
from tests.parity.matrices import CUT, MIXTRAL, SMALL, assert_same, products_in_fp32, trained
from tests.parity.oracle import hf_llama, initial_weights
from tests.unit.extras.estimate.fake_runs import Tool
from tests.unit.extras.estimate.tools import started
from tests.workers import WorkerPool

# (tp, pp) -> (layout, training options) that share the start of their ranks.
GRID: dict[tuple[int, int], list[tuple[dict[str, Any], dict[str, Any]]]] = {
    (1, 1): [
        ({"zero": 0}, {}),
        ({"zero": 3, **CUT, "zero_group": "2"}, {}),
        ({"zero": 3, **CUT}, {"offload": "optimizer+params", "recompute": "full"}),
        ({"zero": 1, **SMALL, "cp": 2}, {"offload": "optimizer"}),
    ],
    (2, 1): [
        ({"zero": 3, **CUT}, {}),
        ({"zero": 1, **SMALL}, {"offload": "optimizer"}),
        ({"zero": 0}, {}),
        ({"zero": 1, "overlap_grad_reduce": False, "sequence_parallel": False}, {}),
        ({"zero": 2, "zero_reduce": "step", **CUT}, {}),
    ],
    (1, 2): [
        ({"zero": 2, "schedule": "interleaved", "vp": 2, **SMALL}, {}),
        ({"zero": 3, **CUT, "schedule": "zb-h1"}, {}),
    ],
    (2, 2): [
        ({"zero": 2, "schedule": "zb-v", "vp": 2, **SMALL}, {}),
        ({"zero": 1}, {"offload": "optimizer"}),
    ],
}
SHORT = 2  # rows of (2, 1) that the short suite has; the full suite has all others


def config(model: Any, parallel: dict[str, Any] | None = None, **train: Any) -> Config:
    cfg = jobs.make_config(model, parallel, **train)
    return replace(cfg, optim=replace(cfg.optim, optimizer="muon", muon_ns="fp32", lr=1e-3))


FURTHER = {**GRID, (2, 1): GRID[2, 1][SHORT:]}


@pytest.mark.parametrize(
    ("tp", "pp", "rows"),
    [(2, 1, GRID[2, 1][:SHORT]), *(pytest.param(*grid, FURTHER[grid], marks=pytest.mark.full) for grid in GRID)],
    ids=["2-1", *(f"{tp}-{pp}-more" for tp, pp in GRID)],
)
def test_same_in_every_layout(pool: WorkerPool, tp: int, pp: int, rows: list[Any]) -> None:
    world = max(4, 2 * tp * pp)
    cases = [config(jobs.llama(), {"tp": tp, "pp": pp, **layout}, **train) for layout, train in rows]
    cases += [config(jobs.gpt2(), {"tp": tp, "pp": pp, **rows[0][0]})] if tp * pp == 4 else []
    for case, *ranks in zip(cases, *pool.run(world, trained, cases, world)):
        what = f"{case.parallel} {case.train.offload}"
        assert_same(ranks, config(case.model), what)
        if case.model == jobs.llama():
            for steps, *_ in ranks:
                np.testing.assert_allclose(steps, torch_steps(), rtol=1e-6, err_msg=what)


# Delta nets and gated attention, whose matrices take turns in the rows of a parameter; also with experts.
GATED, NEXT = (models.shallow(replace(model, init_std=0.1)) for model in (models.HYBRID, models.NEXT))
TURNS: dict[tuple[int, tuple[tuple[str, Any], ...]], list[tuple[Any, dict[str, Any], dict[str, Any]]]] = {
    (4, (("tp", 2),)): [
        (GATED, {"zero": 1, **SMALL}, {}),
        (GATED, {"zero": 3, **CUT}, {"recompute": "full"}),
        (GATED, {"zero": 0}, {}),
    ],
    (2, ()): [(GATED, {"zero": 2, **CUT}, {"offload": "optimizer"})],
    (8, (("tp", 4),)): [(GATED, {"zero": 3, **CUT}, {})],
    (4, (("pp", 2), ("tp", 2))): [(GATED, {"zero": 0, "schedule": "zb-h1"}, {})],
    (4, (("ep", 2), ("tp", 2))): [(NEXT, {"zero": 3, **CUT}, {})],
    (4, (("cp", 2),)): [(GATED, {"zero": 1, **SMALL}, {})],
}


@pytest.mark.full
@pytest.mark.parametrize("shape", TURNS)
def test_matrices_in_turns_are_the_same_in_every_layout(pool: WorkerPool, shape: Any) -> None:
    world, layout = shape
    cases = [config(model, {**dict(layout), **more}, **train) for model, more, train in TURNS[shape]]
    for case, *ranks in zip(cases, *pool.run(world, trained, cases, world)):
        assert_same(ranks, config(case.model), f"{case.parallel} {case.train.offload}")


def logical(leaf: str, model: ModelConfig, rows: np.ndarray) -> list[np.ndarray]:
    """The matrices in a packed weight [rows, in], as the layers read its outputs."""
    if leaf == "qkv_proj":
        width, d = model.num_heads * model.head_size, model.head_size
        heads = rows[: 2 * width].reshape(model.num_heads, 2 * d, -1)
        queries, gates = (x.reshape(width, -1) for x in (heads[:, :d], heads[:, d:]))
        return [queries, gates, *np.split(rows[2 * width :], 2)]
    key_heads, value_heads, key_size, value_size = model.delta_heads
    r = value_heads // key_heads
    mixed = rows[: key_heads * 2 * (key_size + r * value_size)].reshape(key_heads, -1, rows.shape[1])
    q, k, v, z = np.split(mixed, np.cumsum([key_size, key_size, r * value_size]), 1)
    b, a = np.split(rows[mixed.shape[0] * mixed.shape[1] :].reshape(key_heads, 2 * r, -1), 2, 1)
    return [x.reshape(-1, rows.shape[1]) for x in (q, k, v, z, b, a)]


def first_update(case: Config) -> tuple[dict[str, np.ndarray], ...]:
    """Masters before the first step, and momenta and masters after it."""
    engine = jobs.start(0, case, 1)
    initial = {name: array.copy() for name, array in put_together([boxes_of(engine, "master")]).items()}
    jobs.run_steps(engine, 1)
    return initial, *(put_together([boxes_of(engine, role)]) for role in ("exp_avg", "master"))


def torch_update(case: Config, weight: np.ndarray, momentum: np.ndarray) -> np.ndarray:
    """What torch.optim.Muon makes of a matrix in its first step, given the momentum that it left."""
    o, param = case.optim, torch.nn.Parameter(torch.from_numpy(weight.copy()))
    # The first momentum is a twentieth of the gradient.
    param.grad = torch.from_numpy(momentum.copy()) / (1 - o.muon_momentum)
    lr = learning_rate(1, o, jobs.STEPS)
    muon = torch.optim.Muon([param], lr=lr, weight_decay=o.weight_decay, adjust_lr_fn="match_rms_adamw")
    with products_in_fp32():
        muon.step()
    return param.detach().numpy()


@pytest.mark.parametrize(("layer", "leaf", "matrices"), [(0, "in_proj", 6), (1, "qkv_proj", 4)])
def test_matrices_in_turns_are_matrices_of_their_own(layer: int, leaf: str, matrices: int) -> None:
    """One step: torch.optim.Muon on q, gates, k and v of attention; on q, k, v, z, betas and decays of a delta net."""
    case, name = config(GATED), f"layers.{layer}.self_attn.{leaf}.weight"
    initial, momenta, masters = ([*logical(leaf, case.model, x[name])] for x in first_update(case))
    assert len(initial) == matrices
    for weight, momentum, after in zip(initial, momenta, masters):
        np.testing.assert_allclose(after, torch_update(case, weight, momentum), rtol=0, atol=1e-6)


def test_more_ranks_than_matrices(pool: WorkerPool) -> None:
    """Seven matrices: one of eight ranks owns none."""
    case = config(jobs.llama(1))
    assert_same([rank[0] for rank in pool.run(8, trained, [case], 8)], case, "8 ranks")


TWO_LAYERS = models.shallow(MIXTRAL)
# Ranks, layout -> rows that share the start of their ranks: (layout, training options).
EXPERTS: dict[tuple[int, tuple[tuple[str, Any], ...]], list[tuple[dict[str, Any], dict[str, Any]]]] = {
    (4, (("ep", 2), ("tp", 2))): [({"zero": 1, **SMALL}, {}), ({"zero": 3, **CUT}, {"recompute": "full"})],
    (4, (("ep", 2),)): [
        ({"zero": 1, **SMALL}, {"offload": "optimizer"}),
        ({"zero": 3, **CUT, "zero_group": "2"}, {}),
        ({"zero": 0}, {}),
    ],
    (4, (("ep", 2), ("tp", 2), ("etp", "1"))): [({"zero": 2, **CUT}, {}), ({"zero": 1}, {})],
    (4, (("ep", 2), ("pp", 2))): [({"zero": 2, "schedule": "zb-v", "vp": 2, **SMALL}, {})],
}


@pytest.mark.full
@pytest.mark.parametrize("shape", EXPERTS)
def test_same_wherever_experts_live(pool: WorkerPool, shape: Any) -> None:
    world, layout = shape
    model = MIXTRAL if ("pp", 2) in layout else TWO_LAYERS
    cases = [config(model, {**dict(layout), **more}, **train) for more, train in EXPERTS[shape]]
    for case, *ranks in zip(cases, *pool.run(world, trained, cases, world)):
        single = config(model, micro_batch_size=case.train.micro_batch_size)
        assert_same(ranks, single, f"{case.parallel} {case.train.offload}")


def test_each_expert_is_a_matrix_of_its_own() -> None:
    """One step, from the momentum that it left: torch.optim.Muon on every expert's gate, up and down."""
    case = config(TWO_LAYERS)
    first = first_update(case)
    for name, parts in (("gate_up_proj", 2), ("down_proj", 1)):
        leaf = f"layers.1.mlp.experts.{name}.weight"
        for expert in range(8):
            for part in range(parts):
                weight, momentum, after = (np.split(arrays[leaf][expert], parts)[part] for arrays in first)
                expected = torch_update(case, weight, momentum)
                np.testing.assert_allclose(after, expected, rtol=0, atol=1e-6, err_msg=f"{leaf} {expert}")


def plain_steps(hf: Any, cfg: Config) -> list[tuple[float, float]]:
    """torch.optim.Muon on the matrices of Hugging Face's blocks, AdamW on everything else, in one process."""
    named = dict(hf.named_parameters())
    blocks = [p for name, p in named.items() if (".layers." in name or ".h." in name) and p.dim() == 2]
    others = [p for p in named.values() if all(p is not m for m in blocks)]
    groups: list[dict[str, Any]] = [
        {"params": [p for p in others if (p.dim() == 2) is decays]} for decays in (True, False)
    ]
    groups[1]["weight_decay"] = 0.0
    o = cfg.optim
    optimizers = (
        torch.optim.AdamW(groups, betas=(o.beta1, o.beta2), eps=o.eps, weight_decay=o.weight_decay),
        torch.optim.Muon(blocks, momentum=0.95, weight_decay=o.weight_decay, adjust_lr_fn="match_rms_adamw"),
    )
    out = []
    for step, figures in jobs.plain_gradients(hf, o.clip_grad):
        out.append(figures)
        for optimizer in optimizers:
            for group in optimizer.param_groups:
                group["lr"] = learning_rate(step, o, jobs.STEPS)
            optimizer.step()
    return out


@cache
def torch_steps() -> list[tuple[float, float]]:
    """`plain_steps` of `jobs.llama()`, with the products of torch.optim.Muon in fp32 too."""
    cfg = config(jobs.llama())
    with products_in_fp32():
        return plain_steps(hf_llama(cfg.model, initial_weights(cfg.model, cfg.train.seed)), cfg)


def test_same_as_torch() -> None:
    """Loss and norm of every step to 1e-6, as in every layout above."""
    np.testing.assert_allclose(jobs.train(0, config(jobs.llama()), 1), torch_steps(), rtol=1e-6)


@pytest.mark.parametrize("shape", [(24, 64), (64, 24), (32, 32)])
def test_one_update_is_that_of_torch(shape: tuple[int, int]) -> None:
    """In bf16, which a last bit of the gradient moves: the same gradients, three steps."""
    generator = torch.Generator().manual_seed(1)
    theirs = torch.nn.Parameter(torch.randn(shape, generator=generator))
    ours, state = theirs.detach().flatten().clone(), torch.zeros(theirs.numel())
    rule, cfg = RULES["muon"], OptimConfig()
    assert isinstance(rule, MatrixRule)
    optimizer = torch.optim.Muon([theirs], lr=0.01, weight_decay=0.1, adjust_lr_fn="match_rms_adamw")
    for step in range(1, 4):
        theirs.grad = torch.randn(shape, generator=generator)
        grad = theirs.grad.clone().flatten()
        share = Share(ours, (state,), grad, None, torch.ones(()), 0.01, 0.1, step, None, None)  # type: ignore[arg-type]
        rule.direction(share, cfg)
        grad.copy_(rule.transform(grad.view(shape), cfg).flatten())
        rule.update(share, cfg)
        optimizer.step()
    np.testing.assert_allclose(ours.view(shape).numpy(), theirs.detach().numpy(), rtol=0, atol=5e-7)


@pytest.mark.full
def test_checkpoints_of_muon_and_adamw(pool: WorkerPool, tmp_path: Path) -> None:
    """AdamW's average of gradients becomes the momentum; its second moments are missing on the way back, and named."""
    flags = [*runs.MODEL, "--num-layers", "2", "--hidden-dropout", "0", "--muon-ns", "fp32", "--lr", "1e-3"]

    def run(name: str, steps: int, *more: str, world: int = 1) -> str:
        arguments = [*flags, *more, "--train-steps", str(steps), "--run-dir", str(tmp_path / name)]
        if world == 1:
            runs.train(0, arguments, 1)
        else:
            pool.run(world, runs.train, arguments, world)
        return (tmp_path / name / "logs" / "rank_0.log").read_text()

    run("whole", 4, "--optimizer", "muon")
    run("moved", 2, "--optimizer", "muon", "--tp", "2", "--zero", "3", "--zero-whole-below", "500", world=4)
    assert "resumed from" in run("moved", 4, "--optimizer", "muon", "--pp", "2", world=2)
    np.testing.assert_allclose(runs.losses(tmp_path / "moved"), runs.losses(tmp_path / "whole"), rtol=1e-5)
    run("adamw", 2)
    log = run("mixed", 4, "--optimizer", "muon", "--resume", str(tmp_path / "adamw"))
    assert "resumed from" in log
    assert "--optimizer adamw -> muon" in log
    log = run("back", 6, "--resume", str(tmp_path / "mixed"))
    assert "the optimizer starts at zero (no exp_avg_sq of layers.0.self_attn.qkv_proj.weight and 7 more)" in log


def test_dry_run_lists_what_is_updated_how() -> None:
    rows = dict(update_rows(config(jobs.llama())))
    assert rows["muon"] == (
        "30,720 parameters: layers.*.self_attn.qkv_proj.weight (3 matrices), layers.*.self_attn.o_proj.weight, "
        "layers.*.mlp.gate_up_proj.weight (2 matrices), layers.*.mlp.down_proj.weight"
    )
    assert rows["adamw"].startswith("6,048 parameters: embed_tokens.weight, layers.*.input_layernorm.weight")


def test_newton_schulz_in_plan() -> None:
    """Of Llama 3 8B: 666 TFLOP in all, counted by hand; in steps of a million tokens it is 1 % of the work."""
    sizes = {"num_layers": 32, "hidden_size": 4096, "num_heads": 32, "num_kv_heads": 8, "ffn_hidden_size": 14336}
    cfg = config(ModelConfig.from_arch("llama", **sizes, vocab_size=128_256, seq_len=8192))
    blocks = matrices_of(cfg, [range(32)], [0])
    assert len(blocks) == 32 * 7
    whole = transform_flops(cfg, Placed(blocks, 1, 1, 1))
    assert whole == pytest.approx(666e12, rel=1e-3)
    assert whole < 0.02 * flops_per_token(cfg.model).causal * 2**20
    # The busiest of 8, 64 and 256 owners has this multiple of its fair part.
    shares = [transform_flops(cfg, Placed(blocks, 2, dp // 2, dp // 2)) / (whole / dp) for dp in (8, 64, 256)]
    assert shares == pytest.approx([1.0, 1.06, 2.11], abs=0.01)


IN_TURNS = (
    "--linear-attention-freq 2 --linear-num-key-heads 4 --linear-num-value-heads 8 --linear-key-head-dim 32 "
    "--linear-value-head-dim 32 --attention-output-gate"
)


@pytest.fixture(scope="module")
def tool() -> Iterator[Tool]:
    with started() as made:
        yield made


@pytest.mark.full
@pytest.mark.parametrize("layers", ["", IN_TURNS], ids=["attention", "delta nets"])
def test_memory_and_work_are_those_of_the_real_step(tool: Tool, layers: str) -> None:
    """The step of one rank on fake CUDA tensors, bf16, tp 2 x dp 2."""
    sizes = "--num-layers 2 --hidden-size 256 --num-heads 4 --vocab-size 512 --seq-len 32 --global-batch-size 4"
    flags = [*sizes.split(), *layers.split(), "--mock-data", "--tp", "2", "--precision", "bf16", "--device", "cuda"]
    cfgs = [parse([*flags, "--optimizer", name]).config for name in ("adamw", "muon")]
    grid = Grid.from_config(cfgs[0].parallel, 4)
    real = [tool.figures(" ".join([*flags, "--optimizer", name, "--world", "4"])) for name in ("adamw", "muon")]
    work = sum(transform_flops(cfgs[1], placed) for placed in placed_matrices(cfgs[1], grid, [range(2)], [0]))
    assert real[1]["flops"] - real[0]["flops"] == pytest.approx(work, rel=0.05)
    (plan,) = memory_per_rank(cfgs[1], grid)
    assert plan.weights + plan.main_grad + plan.optimizer == pytest.approx(real[1]["states_bytes"], rel=0.01)
    assert plan.total == pytest.approx(real[1]["peak_bytes"], rel=0.1)
