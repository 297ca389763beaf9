"""Command lines of Megatron-LM train the model that megatron-core trains from them: its parameters, loss, gradients.

`tests/data/megatron_models.npz` holds what megatron-core computed; `record_megatron_models.py` wrote it.
"""

from __future__ import annotations

import re
from dataclasses import replace
from functools import cache
from typing import Any

import numpy as np
import pytest
import torch

from megalite.core.model.parameters import buffer_map, param_map
from megalite.core.options.model import ModelConfig
from megalite.core.sharding import ParamSpec
from megalite.core.step import forward_backward
from megalite.extras.compat.dialect import DIALECT
from megalite.extras.convert.megatron.names import place, unpack
from megalite.runtime.data import Rows
from megalite.runtime.options import cli
from megalite.runtime.options.run import Config
from tests.parity import jobs
from tests.unit.extras.compat import megatron_recording
from tests.unit.extras.compat.megatron_recording import Recording

TOLERANCE = 1e-5
NAMES = ("gpt", "llama", "llama_groups", "mixtral", "experts", "deepseek", "latents")
# What checkpoints are not imported of: megalite -> Megatron; {} numbers the experts, which are stacked here.
MORE_NAMES = {
    "mlp.router.weight": "mlp.router.weight",
    "mlp.router.bias": "mlp.router.expert_bias",
    "mlp.experts.gate_up_proj.weight": "mlp.experts.local_experts.{}.linear_fc1.weight",
    "mlp.experts.up_proj.weight": "mlp.experts.local_experts.{}.linear_fc1.weight",
    "mlp.experts.down_proj.weight": "mlp.experts.local_experts.{}.linear_fc2.weight",
    "mlp.shared_expert.gate_up_proj.weight": "mlp.shared_experts.linear_fc1.weight",
    "mlp.shared_expert.down_proj.weight": "mlp.shared_experts.linear_fc2.weight",
    "self_attn.q_a_proj.weight": "self_attention.linear_q_down_proj.weight",
    "self_attn.q_a_layernorm.weight": "self_attention.q_layernorm.weight",
    "self_attn.q_b_proj.weight": "self_attention.linear_q_up_proj.weight",
    "self_attn.kv_a_proj_with_mqa.weight": "self_attention.linear_kv_down_proj.weight",
    "self_attn.kv_a_layernorm.weight": "self_attention.kv_layernorm.weight",
    "self_attn.kv_b_proj.weight": "self_attention.linear_kv_up_proj.weight",
}


@cache
def recordings() -> dict[str, Recording]:
    return megatron_recording.read()


def parsed(name: str, *without: str) -> Config:
    """Read a command line, without some flags that have a value."""
    flags = re.findall(r"--\S+(?: (?!--)\S+)*", " ".join(recordings()[name].flags))
    argv = " ".join(flag for flag in flags if flag.split()[0] not in without).split()
    return cli.parse(["--mock-data", "--device", "cpu", *argv], dialect=DIALECT).config


def theirs(spec: ParamSpec, cfg: ModelConfig) -> list[str]:
    """Their tensors that make up one of ours: itself, or that of each expert."""
    layer, leaf = re.fullmatch(r"(layers\.\d+\.)?(.*)", spec.name).groups()  # type: ignore[union-attr]
    if leaf not in MORE_NAMES:
        return [place(spec)]
    name = f"decoder.{layer}{MORE_NAMES[leaf]}"
    return [name.format(i) for i in range(cfg.num_experts or 0)] if "{}" in name else [name]


def ours_of(tensors: dict[str, np.ndarray], spec: ParamSpec, cfg: ModelConfig) -> torch.Tensor:
    names = theirs(spec, cfg)
    if len(names) > 1:
        return torch.stack([torch.from_numpy(tensors[name]) for name in names])
    return unpack(names[0], torch.from_numpy(tensors[names[0]]), spec, cfg)


def check_parameters(one: Recording, cfg: ModelConfig) -> dict[str, ParamSpec]:
    """Check that names and shapes of parameters, and of routers' biases, are theirs; return ours."""
    specs = {spec.name: spec for spec in (*param_map(cfg).values(), *buffer_map(cfg).values()) if spec.tied_to is None}
    expected: dict[str, tuple[int, ...]] = {}
    for spec in specs.values():
        names = theirs(spec, cfg)
        expected |= dict.fromkeys(names, spec.shape if len(names) == 1 else spec.shape[1:])
    assert {name: tensor.shape for name, tensor in one.weights.items()} == expected
    return specs


def errors(one: Recording, cfg: Config) -> dict[str, float]:
    """Differences of the loss, and of each gradient, relative to the largest of its tensor."""
    specs = check_parameters(one, cfg.model)
    (engine,) = jobs.engines([cfg], 1)
    jobs.spoil_gradients(engine)
    params = {p.shard.spec.name: p for bucket in engine.optimizer.buckets for p in bucket.params}
    biases = {state.name: state.flat for state in engine.optimizer.beside}
    assert params.keys() | biases.keys() == specs.keys()
    with torch.no_grad():
        for name, spec in specs.items():
            value = ours_of(one.weights, spec, cfg.model)
            biases[name].copy_(value) if name in biases else params[name].copy_(value)
    rows = Rows.of(one.tokens)
    loss_sum = forward_backward(engine, rows, 1, 1 / one.tokens[:, 1:].size)
    engine.optimizer.finish_grads()
    found = {"loss": abs(float(loss_sum) / one.tokens[:, 1:].size - one.loss) / one.loss}
    for name, param in params.items():
        expected = ours_of(one.gradients, specs[name], cfg.model)
        found[name] = ((param.main_grad.view(expected.shape) - expected).abs().max() / expected.abs().max()).item()
    return found


def compare(one: Recording, cfg: Config) -> None:
    assert {name: error for name, error in errors(one, cfg).items() if not error <= TOLERANCE} == {}


@pytest.mark.parametrize("name", NAMES)
def test_a_command_line_trains_the_model_that_it_trains_there(name: str) -> None:
    compare(recordings()[name], parsed(name))


@pytest.mark.parametrize("name", NAMES)
def test_dropout_where_nothing_is_said_about_it(name: str) -> None:
    """The recordings have none, as their random numbers are others; there, 0.1 is what a script gets."""
    m = parsed(name, "--attention-dropout", "--hidden-dropout").model
    assert (m.attention_dropout, m.hidden_dropout) == (0.1, 0.1)


@pytest.mark.parametrize(
    ("name", "option", "wrong"),
    [
        ("gpt", "activation", "gelu"),
        ("gpt", "mlp_bias", False),
        ("gpt", "tie_embeddings", False),
        ("gpt", "norm_eps", 1e-6),
        ("llama", "ffn_hidden_size", 128),
        ("llama_groups", "qkv_bias", False),
        ("llama_groups", "rope_fraction", 1.0),
        ("llama_groups", "num_kv_heads", 4),
        ("mixtral", "moe_renormalize", False),
        ("mixtral", "moe_aux_loss_coeff", 0.0),
        ("experts", "activation", "gelu_tanh"),
        ("experts", "moe_z_loss_coeff", 0.0),
        ("deepseek", "moe_router_load_balancing_type", "aux_loss"),
        ("deepseek", "moe_router_topk_scaling_factor", 1.0),
        ("deepseek", "moe_dense_layers", ()),
        ("latents", "norm_eps", 1e-5),
    ],
)
def test_one_wrong_default_is_found(name: str, option: str, wrong: Any) -> None:
    cfg = parsed(name)
    assert getattr(cfg.model, option) != wrong
    with pytest.raises(AssertionError):
        compare(recordings()[name], replace(cfg, model=replace(cfg.model, **{option: wrong})))
