"""FP8 products of each layer of a block against torchao's, which shares no code with ours (.ci/peers.sh runs this).

The same where a recipe says the same (rowwise). Where they differ on purpose, ours runs with torchao's choice, and
without it must be found to differ:

    scales      torchao's tensorwise has fp32 scales, as ours, and may round them to powers of 2: compared both ways.
    operands    `rowwise_with_gw_hp` multiplies wgrad in the run's type. It scales W of dgrad by one amax, which in
                powers of 2 is the same unless a row of W is hundreds of times smaller than another.
    eps         torchao takes no amax for less than 1e-12; ours follow smaller numbers.
    output      torchao's products of rows come out in bf16 where it does not emulate them; ours in the type asked for.
    blocks      torchao's prototype has fp32 scales for blocks of 128; ours are powers of 2.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from megalite.core.options.recipe import RECIPES
from megalite.core.parts.quant import fp8
from megalite.core.sharding import ParamSpec, Shard
from tests.unit.tensor_parallel.fp8_layers import LAYERS, config, operands, run_layers, shapes, spec_of

float8 = pytest.importorskip("torchao.float8", reason="torchao is not installed (.ci/peers.sh tests with it)")
EPS = 1e-12
TOKENS = config("rowwise").model.seq_len


def torchao_layer(spec: ParamSpec, recipe: str, seed: int, size: float, **options: Any) -> dict[str, Tensor]:
    """y, dx and dW of `nn.Linear` as torchao converts it."""
    out, into = spec.shape
    module = nn.Sequential(nn.Linear(into, out, bias=False))
    module[0].weight = nn.Parameter(Shard(spec).initial(seed))
    settings = replace(float8.Float8LinearConfig.from_recipe_name(recipe), **{"emulate": True, **options})
    float8.convert_to_float8_training(module, config=settings)
    x, dy = operands(spec, TOKENS)
    x = (x * size).requires_grad_()
    y = module(x)
    y.backward(dy * size)
    dx, dw = x.grad, module[0].weight.grad
    assert dx is not None
    assert dw is not None
    return {"y": y.detach()[:, 0], "dx": dx[:, 0], "dW": dw}


def largest_difference(
    monkeypatch: pytest.MonkeyPatch, recipe: str, theirs: str, size: float = 1.0, **options: Any
) -> dict[str, float]:
    """By product: the largest difference in any layer of a block, relative to the product's largest element."""
    cfg = config(recipe)
    monkeypatch.setattr("tests.unit.tensor_parallel.fp8_layers.operands", lambda *args: scaled(operands(*args), size))
    ours = run_layers(0, cfg, 1)
    found: dict[str, float] = {}
    for name in LAYERS:
        expected = torchao_layer(spec_of(cfg, name), theirs, cfg.train.seed, size, **options)
        for what, value in expected.items():
            got = ours[name][what][0].reshape(shapes(cfg, name)[what])
            assert got.isfinite().all()
            found[what] = max(found.get(what, 0.0), float((got - value).abs().max() / value.abs().max()))
    return found


def scaled(pair: tuple[Tensor, Tensor], size: float) -> tuple[Tensor, Tensor]:
    return pair[0] * size, pair[1] * size


def change(monkeypatch: pytest.MonkeyPatch, recipe: str, **fields: Any) -> None:
    """Give one of our recipes other settings."""
    monkeypatch.setitem(RECIPES, recipe, replace(RECIPES[recipe], **fields))


@pytest.mark.parametrize(
    ("recipe", "emulate", "bound"),
    [("tensorwise", True, 1e-5), ("rowwise", True, 1e-5), ("tensorwise", False, 1e-5), ("rowwise", False, 2.0**-8)],
)
def test_the_same_recipe(monkeypatch: pytest.MonkeyPatch, recipe: str, emulate: bool, bound: float) -> None:
    assert max(largest_difference(monkeypatch, recipe, recipe, emulate=emulate).values()) < bound


def test_scales_of_tensors_that_are_powers_of_2(monkeypatch: pytest.MonkeyPatch) -> None:
    rounded = {"round_scales_to_power_of_2": True}
    assert min(largest_difference(monkeypatch, "tensorwise", "tensorwise", **rounded).values()) > 1e-3
    change(monkeypatch, "tensorwise", power_of_2=True)
    assert max(largest_difference(monkeypatch, "tensorwise", "tensorwise", **rounded).values()) < 1e-5


def test_weight_gradients_in_the_runs_type(monkeypatch: pytest.MonkeyPatch) -> None:
    found = largest_difference(monkeypatch, "rowwise", "rowwise_with_gw_hp")
    assert max(found["y"], found["dx"]) < 1e-5 < 1e-3 < found["dW"]
    spec = spec_of(config("rowwise"), "mlp.down_proj")
    x, dy = (each[:, 0] for each in operands(spec, TOKENS))
    theirs = torchao_layer(spec, "rowwise_with_gw_hp", config("rowwise").train.seed, 1.0)["dW"]
    torch.testing.assert_close(theirs, dy.t() @ x, rtol=0, atol=1e-5 * float(theirs.abs().max()))


def test_numbers_below_torchaos_eps(monkeypatch: pytest.MonkeyPatch) -> None:
    """Inputs near 1e-17: torchao's codes run out of bits, ours do not, and with its smallest amax they do, too."""
    assert largest_difference(monkeypatch, "rowwise", "rowwise", size=1e-17)["y"] > 1e-3
    amaxes = fp8.amaxes
    monkeypatch.setattr(fp8, "amaxes", lambda *args: amaxes(*args).clamp_min(EPS))
    assert max(largest_difference(monkeypatch, "rowwise", "rowwise", size=1e-17).values()) < 1e-5


def matrix() -> Tensor:
    generator = torch.Generator().manual_seed(5)
    sizes = torch.exp(3 * torch.randn(256, 1, generator=generator))
    return torch.randn(256, 384, generator=generator) * sizes


def test_codes_of_mxfp8() -> None:
    """Scales rounded up, which torchao calls RCEIL."""
    mx = pytest.importorskip("torchao.prototype.mx_formats.mx_tensor")
    x = matrix()
    recipe = RECIPES["mxfp8"]
    ours = fp8.quantize(x, recipe.activation, torch.float8_e4m3fn, recipe.power_of_2)
    scale, codes = mx.to_mx(x, torch.float8_e4m3fn, 32, mx.ScaleCalculationMode.RCEIL)
    torch.testing.assert_close(scale.float(), ours.scale, rtol=0, atol=0)
    torch.testing.assert_close(codes.float(), ours.codes.float(), rtol=0, atol=0)


@pytest.mark.parametrize("weight", [False, True], ids=["activations", "weights"])
def test_codes_of_blocks(weight: bool) -> None:
    """Blocks of 128 with fp32 scales, torchao's choice; ours are the next power of 2."""
    kernels = pytest.importorskip("torchao.prototype.blockwise_fp8_training.kernels")
    x, recipe = matrix(), RECIPES["blockwise"]
    block = recipe.weight if weight else recipe.activation
    theirs, scale = (
        kernels.torch_blockwise_scale_weight_quant if weight else kernels.torch_blockwise_scale_act_quant_lhs
    )(x)
    ours = fp8.quantize(x, block, torch.float8_e4m3fn, power_of_2=False)
    torch.testing.assert_close(scale, ours.scale, rtol=1e-6, atol=0)
    np.testing.assert_array_equal(theirs.float().numpy(), ours.codes.float().numpy())
    rounded = fp8.quantize(x, block, torch.float8_e4m3fn, recipe.power_of_2).scale
    assert ((rounded >= scale) & (rounded < 2 * scale)).all()
    assert rounded.log2().frac().abs().max() == 0
