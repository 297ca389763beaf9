"""The FP8 products of a block's layers on a rank, their operands, and faults of quantization."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from megalite.core.mesh import collectives
from megalite.core.parts.quant import fp8, fp8_products
from megalite.core.parts.quant.fp8_products import Fp8Products
from megalite.core.sharding import ParamSpec, Shard
from megalite.runtime.options.run import Config
from tests.parity import jobs

SMALL = {"hidden_size": 64, "num_heads": 8, "num_kv_heads": 8, "head_dim": 16, "ffn_hidden_size": 128, "seq_len": 32}
BLOCKS = {"hidden_size": 128, "num_heads": 4, "num_kv_heads": 4, "head_dim": 64, "ffn_hidden_size": 256, "seq_len": 128}
LAYERS = ("self_attn.qkv_proj", "self_attn.o_proj", "mlp.gate_up_proj", "mlp.down_proj")
Results = dict[str, dict[str, tuple[torch.Tensor, tuple[Any, ...]]]]


def config(recipe: str, tp: int = 1, sequence_parallel: bool = False) -> Config:
    model = jobs.llama(1, **(BLOCKS if recipe == "blockwise" else SMALL))
    return jobs.make_config(model, {"tp": tp, "sequence_parallel": sequence_parallel}, fp8=recipe, fp8_emulate=True)


def operands(spec: ParamSpec, tokens: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Input and output gradient of a layer, with outliers and rows of different size."""
    generator = torch.Generator().manual_seed(len(spec.name))
    x, dy = (torch.randn(tokens, 1, n, generator=generator) for n in reversed(spec.shape))
    sizes = torch.exp(torch.randn(tokens, 1, 1, generator=generator))
    x[3, 0, 5] = 300.0
    return x * sizes, dy * sizes * 1e-4


def run_layers(rank: int, cfg: Config, world: int, fault: str = "") -> Results:
    """By layer: (values, where they are in the whole tensor) of y, dx, dW and of the codes of every operand."""
    with pytest.MonkeyPatch.context() as patch:
        plant(patch, fault)
        engine = jobs.start(rank, cfg, world)
        engine.optimizer.start_step(1)
        (stage,) = engine.stages.values()
        return {name: run_layer(stage.layers["0"].get_submodule(name), rank, cfg, patch) for name in LAYERS}


def run_layer(layer: Any, rank: int, cfg: Config, patch: pytest.MonkeyPatch) -> dict[str, Any]:
    spec, tp = layer.weight.shard.spec, cfg.parallel.tp
    out_features, in_features = spec.shape
    column = dict(spec.sharded_dims)["tp"] == 0
    features = ParamSpec("features", (spec.shape[0 if column else 1],), (("tp", 0),), parts=spec.parts)
    at = Shard(features, layer.weight.shard.layout).take(torch.arange(float(features.shape[0]))).long()
    x, dy = operands(spec, cfg.model.seq_len)
    shard = slice(None)
    if cfg.sequence_parallel:
        shard = slice(rank * len(x) // tp, (rank + 1) * len(x) // tp)
    whole = {"O": slice(None), "I": slice(None), "N": slice(None), ("O" if column else "I"): at}
    x, dy = (x[shard], dy[..., at]) if column else (x[..., at], dy[shard])
    held: dict[str, Any] = {}
    original = Fp8Products._codes

    def record(self: Fp8Products, x: torch.Tensor, dims: str) -> fp8.Codes:
        codes = original(self, x, dims)
        held[f"codes {dims}"] = codes.values(), tuple(whole[d] for d in dims)
        return codes

    patch.setattr(Fp8Products, "_codes", record)
    x = x.clone().requires_grad_()
    y = layer(x)
    y.backward(dy.clone())
    patch.setattr(Fp8Products, "_codes", original)
    held["y"] = y.detach(), (slice(None), 0, at) if column else (shard, 0, slice(None))
    held["dx"] = x.grad, (shard, 0, slice(None)) if column else (slice(None), 0, at)
    held["dW"] = layer.weight.main_grad.clone(), (at, slice(None)) if column else (slice(None), at)
    return held


def spec_of(cfg: Config, name: str) -> ParamSpec:
    from megalite.core.model.parameters import param_map

    return param_map(cfg.model)[f"layers.0.{name}.weight"]


def shapes(cfg: Config, name: str) -> dict[str, tuple[int, ...]]:
    out_features, in_features = spec_of(cfg, name).shape
    sizes = {"N": cfg.model.seq_len, "O": out_features, "I": in_features}
    codes = {f"codes {d}": tuple(sizes[i] for i in d) for d in ("NI", "OI", "NO", "IO", "ON", "IN")}
    tokens = cfg.model.seq_len
    return {**codes, "y": (tokens, out_features), "dx": (tokens, in_features), "dW": (out_features, in_features)}


def plant(patch: pytest.MonkeyPatch, fault: str) -> None:
    """Break the quantization."""
    if fault == "scale halved":
        scales = fp8.scales
        patch.setattr(fp8, "scales", lambda *args: scales(*args) / 2)
    elif fault == "no clamp":
        scales = fp8.scales
        # As where the amax of a part is taken for that of the whole; casts overflow as in torch 2.11.
        patch.setattr(fp8, "scales", lambda *args: scales(*args) / 1.5)
        patch.setattr(torch.Tensor, "clamp_", lambda self, low, high: self.masked_fill_(self.abs() > high, torch.nan))
    elif fault == "E5M2 weights":
        codes = fp8_products.Fp8.codes

        def wrong(self: Any, x: torch.Tensor, dims: str, amax: torch.Tensor | None = None) -> fp8.Codes:
            return quantize_e5m2(x, self) if "N" not in dims else codes(self, x, dims, amax)

        patch.setattr(fp8_products.Fp8, "codes", wrong)
    elif fault == "floor":
        patch.setattr(torch.Tensor, "to", floor_to(torch.Tensor.to))
    elif fault == "amax of this rank":
        local = SimpleNamespace(all_reduce=lambda *args: collectives.FinishedWork(), MAX=None)
        patch.setattr(fp8_products, "collectives", local)


def quantize_e5m2(x: torch.Tensor, settings: fp8_products.Fp8) -> fp8.Codes:
    return fp8.quantize(x, settings.recipe.weight, torch.float8_e5m2, settings.recipe.power_of_2)


def floor_to(to: Any) -> Any:
    """Round towards zero in casts to FP8."""

    def floored(self: torch.Tensor, *args: Any, **options: Any) -> torch.Tensor:
        if args[:1] == (torch.float8_e4m3fn,):
            mantissa, exponent = torch.frexp(self)
            self = torch.ldexp((mantissa * 16).trunc() / 16, exponent)
        return to(self, *args, **options)

    return floored
