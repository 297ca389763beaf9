"""Routers, grouped products and the way of tokens to experts, against plain torch."""

from __future__ import annotations

from dataclasses import replace
from itertools import accumulate
from typing import Any

import pytest
import torch
from torch.nn import functional as F

from megalite.core.batch import ForwardPass
from megalite.core.mesh.context import Axis, ParallelContext
from megalite.core.mesh.grid import Grid
from megalite.core.ops import grouped, resolve
from megalite.core.options.model import ModelConfig
from megalite.core.options.recipe import RECIPES
from megalite.core.parts.ffn.experts import dispatch
from megalite.core.parts.ffn.experts.dispatch import DISPATCHES
from megalite.core.parts.ffn.experts.grouped_linear import GroupedLinear
from megalite.core.parts.ffn.experts.moe import MoELayer
from megalite.core.parts.ffn.experts.routing import Router
from megalite.core.parts.quant.fp8_products import select
from megalite.core.sharding import Layout
from megalite.core.sharding.parameter import ShardedParameter
from megalite.extras.estimate.record import Communication, Wait, recorded_world
from tests.parity.jobs import init_parameters
from tests.unit.model.tiny_layers import layers_of
from tests.unit.ops.fp8_by_hand import by_hand

TRAINING = ForwardPass(1, 0, training=True, grad_scale=0.5)
CPU = torch.device("cpu")
SIZES = [3, 0, 5, 16, 0]


def model(**options: Any) -> ModelConfig:
    sizes = {"num_layers": 1, "hidden_size": 16, "num_heads": 2, "vocab_size": 32, "seq_len": 8, "init_std": 0.3}
    experts = {"num_experts": 6, "moe_topk": 2, "moe_ffn_size": 8}
    return ModelConfig.from_arch("llama", **{**sizes, **experts, **options})


def router_of(logits: torch.Tensor, **options: Any) -> Router:
    """A router whose logits are those."""
    router = Router(layers_of(model(num_experts=logits.shape[1], **options)), 0)
    router.forward = lambda x: logits  # type: ignore[method-assign]
    return router


def test_renormalized_softmax_is_the_softmax_over_the_chosen() -> None:
    logits = torch.randn(40, 6, generator=torch.Generator().manual_seed(1), requires_grad=True)
    x_SBH, upstream = torch.zeros(20, 2, 16), torch.linspace(-1, 2, 80).view(40, 2)
    routing = router_of(logits).route(x_SBH, TRAINING)
    best = logits.topk(2)
    assert torch.equal(routing.ids_TK, best.indices)
    expected = best.values.softmax(-1)
    torch.testing.assert_close(routing.weights_TK, expected, rtol=1e-6, atol=1e-7)
    grads = [torch.autograd.grad(w, logits, upstream, retain_graph=True)[0] for w in (routing.weights_TK, expected)]
    torch.testing.assert_close(*grads, rtol=1e-5, atol=1e-6)
    plain = router_of(logits, moe_renormalize=False).route(x_SBH, TRAINING)
    torch.testing.assert_close(plain.weights_TK, logits.softmax(-1).gather(1, best.indices))


def test_recomputation_keeps_the_choice_and_the_counts() -> None:
    """Rounding may turn near ties; here every token would choose other experts."""
    logits = torch.randn(40, 6, generator=torch.Generator().manual_seed(4))
    router, x_SBH = router_of(logits), torch.zeros(20, 2, 16)
    remembers, recomputing = router.log.passes()
    with remembers:
        ids_TK = router.route(x_SBH, TRAINING).ids_TK
    sums = router.log.by_layer()[0]
    router.forward = lambda x: -logits  # type: ignore[method-assign]
    with recomputing:
        again = router.route(x_SBH, TRAINING)
    assert torch.equal(again.ids_TK, ids_TK)
    torch.testing.assert_close(again.weights_TK, (-logits).gather(1, ids_TK).softmax(-1))
    assert torch.equal(router.log.by_layer()[0], sums)
    assert not router.log.choices


@pytest.mark.parametrize("weight", [None, 0.75], ids=["all tokens", "some are padding"])
@pytest.mark.parametrize("by_sequence", [False, True])
def test_losses_of_a_router(by_sequence: bool, weight: float | None) -> None:
    """Written out: E / (k T^2) sum over experts of tokens x probabilities, for each unit, times T and the weight."""
    logits = torch.randn(40, 6, generator=torch.Generator().manual_seed(2), requires_grad=True)
    kind = "seq_aux_loss" if by_sequence else "aux_loss"
    coeffs = {"moe_aux_loss_coeff": 0.3, "moe_z_loss_coeff": 0.07, "moe_router_load_balancing_type": kind}
    lengths = (20, 20) if weight is None else (20, 13)
    there_SB = torch.arange(20)[:, None] < torch.tensor(lengths)
    fwd = TRAINING if weight is None else replace(TRAINING, router_weights_SB=weight * there_SB)
    routing = router_of(logits, **coeffs).route(torch.zeros(20, 2, 16), fwd)
    p_SBE, chosen_SBE = logits.softmax(-1).view(20, 2, 6), torch.zeros(40, 6)
    chosen_SBE = chosen_SBE.scatter(1, logits.topk(2).indices, 1.0).view(20, 2, 6)
    units = [(p_SBE[:n, b], chosen_SBE[:n, b]) for b, n in enumerate(lengths)]
    if not by_sequence:
        units = [(torch.cat([p for p, _ in units]), torch.cat([c for _, c in units]))]
    balance = sum((len(p) * 6 / (2 * len(p) ** 2) * (c.sum(0) * p.sum(0)).sum() for p, c in units), torch.zeros(()))
    z = logits.exp().sum(-1).log().square()[there_SB.flatten()].sum()
    expected = (1.0 if weight is None else weight) * (0.3 * balance + 0.07 * z)
    assert routing.loss is not None
    torch.testing.assert_close(routing.loss, expected)
    y = torch.ones(3, requires_grad=True)
    (got,) = torch.autograd.grad(routing.add_loss(2 * y, TRAINING).sum(), logits, retain_graph=True)
    (want,) = torch.autograd.grad(0.5 * expected, logits)
    torch.testing.assert_close(got, want)


def test_a_router_works_in_fp32() -> None:
    router = Router(layers_of(model()), 0)
    init_parameters(router, 1)
    router.bfloat16()
    router.weight.main_grad = torch.zeros(6, 16)
    x = torch.randn(8, 16).bfloat16().requires_grad_()
    logits = router(x)
    assert logits.dtype == torch.float32
    assert torch.equal(logits, x.float() @ router.weight.float().t())
    logits.backward(dy := torch.randn(8, 6))
    assert x.grad is not None
    assert x.grad.dtype == torch.bfloat16
    torch.testing.assert_close(router.weight.main_grad, dy.t() @ x.detach().float())


BACKENDS = {backend.name: backend for backend in grouped.OP.backends}


@pytest.mark.parametrize("sizes", [SIZES, [3, 0, 150, 40, 0], [0, 133]], ids=str)
@pytest.mark.parametrize("backend", [name for name in BACKENDS if name != "triton"])  # in tests/unit/ops
def test_grouped_products(backend: str, sizes: list[int]) -> None:
    """Each group's rows with its own matrix; torch's grouped GEMM, the backend on CUDA, runs here too."""
    functions = BACKENDS[backend].load(grouped.OP)
    num, groups = sum(sizes), len(sizes)
    x, w, dy = torch.randn(num, 16), torch.randn(groups, 8, 16), torch.randn(num, 8)
    ends = list(accumulate(sizes))
    rows = [slice(end - size, end) for size, end in zip(sizes, ends)]
    y = functions["grouped_linear"](x, w, sizes)
    torch.testing.assert_close(y, torch.cat([x[r] @ m.t() for r, m in zip(rows, w)]))
    dx = functions["grouped_dgrad"](dy, w, sizes)
    torch.testing.assert_close(dx, torch.cat([dy[r] @ m for r, m in zip(rows, w)]))
    grad = torch.full((groups, 8, 16), torch.nan)
    functions["grouped_wgrad"](grad, dy, x, sizes, False)
    expected = torch.stack([dy[r].t() @ x[r] for r in rows])
    close: dict[str, Any] = {"rtol": 1e-5, "atol": 1e-4}
    torch.testing.assert_close(grad, expected, **close)
    functions["grouped_wgrad"](grad, dy, x, sizes, True)
    torch.testing.assert_close(grad, 2 * expected, **close)


@pytest.mark.parametrize("recipe", RECIPES)
def test_fp8_products_of_each_expert(recipe: str) -> None:
    """Codes and scales are those of each expert's own rows and matrix."""
    quant = select(recipe, range(1), CPU, emulate=True)
    layers = replace(layers_of(model(num_experts=5, moe_ffn_size=24)), quant=quant)
    linear = GroupedLinear(layers, "layers.0.mlp.experts.down_proj")
    init_parameters(linear, 1)
    linear.weight.main_grad = torch.full((5, 16, 24), torch.nan)
    x, dy = torch.randn(24, 24), torch.randn(24, 16) * torch.logspace(-3, 0, 24)[:, None]
    rule, expected = (
        RECIPES[recipe],
        {"y": torch.zeros(24, 16), "dx": torch.zeros(24, 24), "dw": torch.zeros(5, 16, 24)},
    )

    def coded(operand: torch.Tensor, dims: str) -> torch.Tensor:
        block = rule.activation if "N" in dims else rule.weight
        name = rule.grad_format if {"N", "O"} <= set(dims) else "e4m3"
        return torch.from_numpy(by_hand(operand.detach().double().numpy(), block, name, rule.power_of_2)).float()

    for e, end in enumerate(accumulate(SIZES)):
        if SIZES[e]:
            rows, w = slice(end - SIZES[e], end), linear.weight[e]
            expected["y"][rows] = coded(x[rows], "NI") @ coded(w, "OI").t()
            expected["dx"][rows] = coded(dy[rows], "NO") @ coded(w.t(), "IO").t()
            expected["dw"][e] = coded(dy[rows].t(), "ON") @ coded(x[rows].t(), "IN").t()
    for times in (1, 2):
        linear.weight.has_grad = times == 2
        y = linear(x.requires_grad_(), SIZES)
        (dx,) = torch.autograd.grad(y, x, dy)
        for got, want in ((y, expected["y"]), (dx, expected["dx"]), (linear.weight.main_grad, times * expected["dw"])):
            torch.testing.assert_close(got, want, rtol=0, atol=1e-5 * want.abs().max().item())


def test_a_width_that_the_grouped_gemm_rejects_is_looped_over(monkeypatch: pytest.MonkeyPatch) -> None:
    functions = BACKENDS["cuda"].load(grouped.OP)
    monkeypatch.delattr(torch, "_grouped_mm")
    for out, width in ((8, 12), (12, 8)):
        x, w, dy = torch.randn(24, width), torch.randn(5, out, width), torch.randn(24, out)
        assert torch.equal(functions["grouped_linear"](x, w, SIZES), grouped.grouped_linear(x, w, SIZES))
        assert torch.equal(functions["grouped_dgrad"](dy, w, SIZES), grouped.grouped_dgrad(dy, w, SIZES))


def test_a_router_adds_to_bf16_gradients() -> None:
    """Without a product that reads fp32 and writes bf16, which CUDA lacks."""
    router = Router(layers_of(model()), 0)
    init_parameters(router, 1)

    def refuse(*args: Any) -> None:
        raise AssertionError("fp32 factors, bf16 sum")

    router.ops = replace(router.ops, linear_wgrad=refuse)
    router.weight.main_grad = torch.full((6, 16), torch.nan, dtype=torch.bfloat16)
    x, dy = torch.randn(8, 16), torch.randn(8, 6)
    for times in (1, 2):
        router(x.clone().requires_grad_()).backward(dy)
        torch.testing.assert_close(router.weight.main_grad, (times * dy.t() @ x).bfloat16(), rtol=0.02, atol=0.02)


@pytest.mark.parametrize("kind", DISPATCHES)
@pytest.mark.parametrize("num", [255, 256, 257])
def test_as_many_experts_as_a_byte_can_number(kind: str, num: int) -> None:
    ids = torch.randperm(num, generator=torch.Generator().manual_seed(1)).repeat(2).view(-1, 1)
    way = DISPATCHES[kind](ids, num, Axis("ep"), resolve("torch", "cpu", torch.float32))
    way.send(torch.randn(len(ids), 1), torch.ones(len(ids), 1), False)
    way.arrive()
    assert (way.order == ids.flatten().argsort(stable=True)).all()
    assert [*way.sizes] == [2] * num


@pytest.mark.parametrize("kind", DISPATCHES)
def test_rows_lie_expert_after_expert_in_the_order_of_tokens(kind: str) -> None:
    ids = torch.tensor([[2, 0], [0, 5], [2, 1], [5, 2]])
    way = DISPATCHES[kind](ids, 6, Axis("ep"), resolve("torch", "cpu", torch.float32))
    x = torch.arange(4.0)[:, None].requires_grad_()
    weights = torch.tensor([[1.0, 10.0]] * 4, requires_grad=True)
    way.send(x, weights, False)
    rows, of_rows = way.arrive()
    assert list(way.sizes) == [2, 1, 3, 0, 0, 2]
    assert rows.flatten().tolist() == [0, 1, 2, 0, 2, 3, 1, 3]
    assert of_rows is not None
    weighed = of_rows * torch.tensor([1, 1, 2, 3, 3, 3, 4, 4.0])
    back = way.bring_back(rows * weighed[:, None])
    assert back.flatten().tolist() == [0 * 13, 1 * (1 + 40), 2 * (3 + 20), 3 * (4 + 30)]
    back.sum().backward()
    assert x.grad is not None
    assert x.grad.flatten().tolist() == [3 + 10, 41, 23, 34]
    assert weights.grad is not None
    assert weights.grad.tolist() == [[0, 0], [1, 4], [6, 4], [12, 9]]


@pytest.mark.parametrize("activation", ["swiglu", "gelu"])
def test_a_layer_is_the_sum_of_its_experts(activation: str) -> None:
    """Every expert over every token, weighed by 0 where it is not chosen; the shared expert through its gate."""
    cfg = model(activation=activation, moe_shared_ffn_size=4, moe_shared_gate=True, moe_renormalize=False)
    layer = MoELayer(layers_of(cfg), 0)
    init_parameters(layer, 3)
    p = {name: parameter.detach() for name, parameter in layer.named_parameters()}
    x = torch.randn(8, 2, 16, generator=torch.Generator().manual_seed(4))

    def mlp(x: torch.Tensor, up: torch.Tensor, down: torch.Tensor) -> torch.Tensor:
        inner = x @ up.t()
        if activation == "gelu":
            return F.gelu(inner) @ down.t()
        gate, up = inner.chunk(2, -1)
        return (F.silu(gate) * up) @ down.t()

    first = "gate_up_proj" if activation == "swiglu" else "up_proj"
    probabilities = (x @ p["router.weight"].t()).softmax(-1)
    weights = probabilities * (probabilities >= probabilities.topk(2).values[..., -1:])
    experts = zip(p[f"experts.{first}.weight"], p["experts.down_proj.weight"])
    expected = sum(weights[..., e, None] * mlp(x, up, down) for e, (up, down) in enumerate(experts))
    shared = mlp(x, p[f"shared_expert.{first}.weight"], p["shared_expert.down_proj.weight"])
    expected = expected + (x @ p["shared_expert_gate.weight"].t()).sigmoid() * shared
    with torch.no_grad():
        torch.testing.assert_close(layer(x, ForwardPass(1, 0, training=False)), expected, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("bias", [False, True])
def test_outputs_of_experts_are_not_kept(bias: bool) -> None:
    """For backward, a row keeps its input, its activation and what that is made of."""
    cfg = model(hidden_size=256, moe_ffn_size=64, mlp_bias=bias)
    layer = MoELayer(layers_of(cfg), 0)
    init_parameters(layer, 3)
    x = torch.randn(64, 2, 256, requires_grad=True)
    routing = layer.router.route(x, TRAINING)
    kept: dict[int, int] = {}

    def pack(saved: torch.Tensor) -> torch.Tensor:
        kept[saved.untyped_storage().data_ptr()] = saved.untyped_storage().nbytes()
        return saved

    tokens = (x * 1.0).flatten(0, 1)
    with torch.autograd.graph.saved_tensors_hooks(pack, lambda saved: saved):
        way = layer.experts.start(routing)
        layer.experts.send(tokens, routing, way)
        layer.experts(routing, way)
    kept.pop(tokens.untyped_storage().data_ptr(), None)
    values = 4 * 2 * 128 * (256 + 3 * 64)
    assert values <= sum(kept.values()) < 1.05 * values


@pytest.mark.parametrize("kind", DISPATCHES)
def test_tokens_and_gradients_travel_while_the_shared_expert_runs(kind: str) -> None:
    """Forward and backward: started before it, and waited for after it."""
    grid = Grid.of(2, ep=2)
    with recorded_world(0, grid) as log:
        ctx = ParallelContext.create(grid, CPU)
        layers = layers_of(model(moe_shared_ffn_size=4, moe_shared_gate=True))
        layer = MoELayer(replace(layers, ep=ctx.ep, dispatch=kind, layout=Layout(grid, 0, batch=grid.batch)), 0)
        init_parameters(layer, 3)
        for parameter in layer.parameters():
            assert isinstance(parameter, ShardedParameter)
            parameter.main_grad = torch.zeros_like(parameter)
        assert layer.shared_expert is not None
        ran = list[int]()
        layer.shared_expert.register_forward_hook(lambda *args: ran.append(len(log)))
        layer.shared_expert.register_full_backward_hook(lambda *args: ran.append(len(log)))
        log.clear()
        y = layer(torch.randn(8, 2, 16, requires_grad=True), TRAINING)
        ahead, back = len(log), 0
        y.sum().backward()
    calls: list[str] = []
    for at, event in enumerate(log):
        calls += ["shared expert"] * ran.count(at)
        if isinstance(event, Wait):
            event, word = log[event.index], "arrived"
        else:
            word = "sent"
        # Counts and weights are fewer than 16 numbers a token.
        assert isinstance(event, Communication)
        calls += [word] * (event.dtype == torch.float32 and event.numel >= 16 * 16)
        back = len(calls) if at < ahead else back
    there_and_back = ["sent", "shared expert", "arrived", "sent", "arrived"]
    assert calls[:back] == there_and_back
    assert calls[back:] == ["sent", "arrived", "sent", "shared expert", "arrived"]


@pytest.mark.parametrize("kind", DISPATCHES)
def test_the_shared_expert_runs_before_the_host_waits(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Numbers of rows are on their way to the host meanwhile, and each layer waits for them once. A rank that holds all
    experts sends none: they start when a product of the host's asks for them.
    """
    calls = []
    start = dispatch.start_host_counts

    def started(*counts: torch.Tensor) -> Any:
        calls.append("start")
        wait = start(*counts)

        def waited() -> Any:
            calls.append("wait")
            return wait()

        return waited

    monkeypatch.setattr(dispatch, "start_host_counts", started)
    layer = MoELayer(replace(layers_of(model(moe_shared_ffn_size=4)), dispatch=kind), 0)
    init_parameters(layer, 3)
    assert layer.shared_expert is not None
    layer.shared_expert.register_forward_hook(lambda *args: calls.append("shared expert"))
    remembers, recomputing = layer.experts.log.passes()
    with remembers:
        layer(torch.randn(8, 2, 16), TRAINING)
    assert calls == (["shared expert", "start", "wait"] if kind == "alltoall" else ["start", "shared expert", "wait"])
    calls.clear()
    with recomputing:  # whose numbers are those of before
        layer(torch.randn(8, 2, 16), TRAINING)
    assert calls == (["shared expert", "start", "wait"] if kind == "alltoall" else ["shared expert"])
    assert layer.experts.log.counts == {}
