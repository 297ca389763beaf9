"""One gated delta net beside transformers', with the heads and the epsilon of the published model."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from megalite.core.batch import ForwardPass
from megalite.core.mesh.grid import Grid
from megalite.core.model.parameters import param_map
from megalite.core.pipeline.schedule import Placement
from megalite.core.sharding import Shard
from tests.parity import jobs
from tests.unit.extras.plan.counted import stages_of

HEADS = {"linear_num_key_heads": 2, "linear_num_value_heads": 4}


def test_a_layer_is_that_of_transformers(monkeypatch: pytest.MonkeyPatch) -> None:
    """Heads of 128, 200 tokens (three chunks and a part of one), fp32: values and every gradient."""
    theirs = pytest.importorskip("transformers.models.qwen3_next.modeling_qwen3_next")
    # Their chunks take differences of sums of decays, which costs their gradients 8e-5.
    monkeypatch.setattr(theirs, "torch_chunk_gated_delta_rule", theirs.torch_recurrent_gated_delta_rule)
    model = jobs.llama(2, **HEADS, hidden_size=64, linear_attention_freq=2, norm_eps=1e-6, init_std=0.1)
    layer: Any = stages_of(jobs.make_config(model), Grid.of(1), 0, Placement(1, 1))[0].layers["0"].self_attn
    jobs.init_parameters(layer, 1)
    other = theirs.Qwen3NextGatedDeltaNet(theirs.Qwen3NextConfig(**HEADS, hidden_size=64, rms_norm_eps=1e-6), 0)
    weights = {name: p.detach() for name, p in layer.named_parameters()}
    qkvz, ba = weights.pop("in_proj.weight").split((1536, 8))
    weights |= {"in_proj_qkvz.weight": qkvz, "in_proj_ba.weight": ba, "conv1d.weight": weights.pop("conv1d")}
    other.load_state_dict(weights)
    for p in layer.parameters():
        p.main_grad = torch.zeros_like(p)
    ours = torch.randn(200, 2, 64, generator=torch.Generator().manual_seed(1)).requires_grad_()
    hidden = ours.detach().clone().requires_grad_()
    out = layer(ours, None, None, ForwardPass(0, 0, training=True))
    expected = other(hidden_states=hidden.transpose(0, 1)).transpose(0, 1)
    for x in (out, expected):
        x.backward(torch.arange(x.numel()).view(x.shape).cos())
    got = {name: p.main_grad if p.has_grad else p.grad for name, p in layer.named_parameters()}
    got["in_proj_qkvz.weight"], got["in_proj_ba.weight"] = got.pop("in_proj.weight").split((1536, 8))
    got["conv1d.weight"] = got.pop("conv1d")
    grads = {name: p.grad for name, p in other.named_parameters()}
    assert got.keys() == grads.keys()
    for name, b in {**grads, "out": expected, "x": hidden.grad}.items():
        a = {**got, "out": out, "x": ours.grad}[name]
        assert (a - b).norm() <= 2e-6 * b.norm(), name


def test_the_convolution_starts_as_that_of_torch() -> None:
    """Whatever --init-std is: four weights of 0.02 would leave the norm behind the rule little but its epsilon."""
    model = jobs.llama(2, **HEADS, linear_attention_freq=2, init_std=0.02)
    start = Shard(param_map(model)["layers.0.self_attn.conv1d"]).initial(1)
    assert start.std().item() == pytest.approx(
        torch.nn.Conv1d(1024, 1024, 4, groups=1024).weight.std().item(), rel=0.05
    )
