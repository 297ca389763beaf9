"""Rotary tables against transformers, attention against sums written out."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch

from megalite.core import ops as kernels
from megalite.core.batch import Documents, ForwardPass, Positions
from megalite.core.model.parameters import param_map
from megalite.core.options.choices import ACTIVATIONS, NORMS, POSITIONS
from megalite.core.options.model import ModelConfig
from megalite.core.options.rope import SCALING_FIELDS, RopeScaling
from megalite.core.parts.mixers.gqa.attention import Attention
from tests.unit.model.tiny_layers import CPU, layers_of, tiny

TRAINING = ForwardPass(1, 0, training=True)


@pytest.mark.parametrize("name", ACTIVATIONS)
def test_an_activation_treats_each_feature_alone(name: str) -> None:
    """Tensor parallelism cuts them: another order of features is that of the output. Its gradient is its slope."""
    kind, generator = ACTIVATIONS[name], torch.Generator().manual_seed(6)
    activation = kind.make(kernels.resolve(None, CPU, torch.float32))
    x, to, dy = (torch.randn(5, n, 24, generator=generator) for n in (1 + kind.gated, 1 + kind.gated, 1))
    x += 0.1 * x.sign()  # ReLU has no slope at 0
    y, order = activation(x.flatten(1)), torch.randperm(24, generator=generator)
    assert y.shape == (5, 24)
    torch.testing.assert_close(activation(x[..., order].flatten(1)), y[:, order], rtol=1e-6, atol=1e-7)
    below, above = ((activation((x + by * to).flatten(1)) * dy[:, 0]).sum() for by in (-1e-2, 1e-2))
    (activation(x.requires_grad_().flatten(1)) * dy[:, 0]).sum().backward()
    assert x.grad is not None
    torch.testing.assert_close((x.grad * to).sum(), (above - below) / 2e-2, rtol=1e-3, atol=1e-3)


@pytest.mark.parametrize("name", NORMS)
def test_a_norm_has_one_size_and_is_that_of_the_sum(name: str) -> None:
    kind, generator = NORMS[name], torch.Generator().manual_seed(7)
    norm, add_norm = kind.make(kernels.resolve(None, CPU, torch.float32))
    x, residual, *parameters = (torch.randn(n, 24, generator=generator) for n in (5, 5, *[1] * (1 + kind.bias)))
    rest = (*(p[0] for p in parameters), 1e-9)
    torch.testing.assert_close(norm(8 * x, *rest), norm(x, *rest))
    y, total = add_norm(x, residual, *rest)
    assert torch.equal(total, x + residual)
    torch.testing.assert_close(y, norm(total, *rest))


@pytest.mark.parametrize(
    ("theta", "fraction", "scaling"),
    [
        (10000.0, 1.0, None),
        (500000.0, 1.0, RopeScaling(original_max_position_embeddings=64)),
        (10000.0, 0.25, None),
        (10000.0, 1.0, RopeScaling("yarn", 8.0, 64)),
        (500000.0, 0.5, RopeScaling("yarn", 8.0, 4096, truncate=False)),
        (10000.0, 1.0, RopeScaling("yarn", 8.0, 64, beta_slow=0.25, beta_fast=4.0, attention_factor=0.9)),
        (300.0, 1.0, RopeScaling("yarn", 8.0, 64)),
    ],
)
def test_rotary_tables_are_those_of_transformers(theta: float, fraction: float, scaling: RopeScaling | None) -> None:
    from transformers import LlamaConfig
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

    cfg = tiny(hidden_size=512, rope_theta=theta, rope_fraction=fraction, rope_scaling=scaling, seq_len=256)
    rope: dict[str, Any] = {"rope_type": "default", "rope_theta": theta}
    amplitude = 1.0
    if scaling is not None:
        fields = ("factor", "original_max_position_embeddings", *SCALING_FIELDS[scaling.rope_type])
        rope |= {name: getattr(scaling, name) for name in fields}
        rope["attention_factor"] = scaling.attention_factor or None
        rope |= {"rope_type": scaling.rope_type, "partial_rotary_factor": fraction}
    hf = LlamaConfig(hidden_size=512, num_attention_heads=4, rope_parameters=rope, max_position_embeddings=256)
    if scaling is not None:
        frequencies, amplitude = ROPE_INIT_FUNCTIONS[scaling.rope_type](hf, CPU)
        # Frequencies are kept or divided by 8, or in between.
        dim = int(128 * fraction)
        plain = 1 / theta ** (torch.arange(0, dim, 2) / dim)
        ratio = plain / frequencies
        assert ratio.min() == pytest.approx(1)
        assert ratio.max() == pytest.approx(8)
        assert ((ratio > 1.01) & (ratio < 7.9)).any()
    else:
        dim = int(128 * fraction)
        frequencies = 1 / theta ** (torch.arange(0, dim, 2) / dim)
    rotary = layers_of(cfg).positions(0)
    assert rotary is not None
    tables = rotary(Positions.of_samples(256), CPU)
    assert tables is not None
    cos, sin = tables
    angles = torch.outer(torch.arange(256.0), frequencies)
    assert cos.dtype == sin.dtype == torch.float32
    # At 256 places a frequency that is rounded once more turns by 1.5e-5.
    torch.testing.assert_close(cos, angles.cos() * amplitude, rtol=0, atol=6e-5)
    torch.testing.assert_close(sin, angles.sin() * amplitude, rtol=0, atol=6e-5)


@pytest.mark.parametrize("name", POSITIONS)
def test_attention_knows_the_order_and_not_what_comes_before_a_document(name: str) -> None:
    """Without what it knows, a query sees a set of keys: the same in another order."""
    cfg = tiny(position=name)
    layers, order = layers_of(cfg), torch.tensor([1, 0, 2, 4, 3, 5])
    attention, make = Attention(layers, 0, recompute_core=False), layers.positions(0)
    assert layers.positions(1) is make
    qkv = torch.randn(6, 2, 3 * 32, generator=torch.Generator().manual_seed(4))

    def attend(qkv: torch.Tensor, documents: Documents | None = None) -> torch.Tensor:
        known = make and make(Positions.of_samples(len(qkv), documents), CPU)
        return attention._core(qkv.clone(), known, documents, TRAINING)

    alone, moved = attend(qkv), attend(qkv[order])
    assert torch.allclose(moved[-1], alone[-1], rtol=1e-5, atol=1e-6) == (make is None)
    starts = torch.tensor([0] * 4 + [4] * 6)[:, None].expand(-1, 2)
    packed = attend(torch.cat((qkv[:4] + 1, qkv)), Documents(starts))
    torch.testing.assert_close(packed[4:], alone, rtol=1e-5, atol=1e-6)
    assert (cfg.position_kind.columns > 0) == (cfg.key_size > cfg.head_size)


@pytest.mark.parametrize("kv_heads", [4, 2, 1])
def test_grouped_causal_attention_written_out(kv_heads: int) -> None:
    cfg = tiny(num_kv_heads=kv_heads)
    attention = Attention(layers_of(cfg), 0, recompute_core=False)
    qkv = torch.randn(6, 2, (4 + 2 * kv_heads) * 8, generator=torch.Generator().manual_seed(3))
    got = attention._core(qkv.clone(), None, None, TRAINING).view(6, 2, 4, 8)
    q, k, v = qkv.view(6, 2, -1, 8).split((4, kv_heads, kv_heads), 2)
    for head in range(4):
        group = head // (4 // kv_heads)
        for t in range(6):
            scores = torch.einsum("bd,sbd->bs", q[t, :, head], k[: t + 1, :, group]) / math.sqrt(8)
            expected = torch.einsum("bs,sbd->bd", scores.softmax(-1), v[: t + 1, :, group])
            torch.testing.assert_close(got[t, :, head], expected, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("arch", ["llama", "gpt2", "gpt_neox", "qwen3", "olmo2", "gemma2"])
def test_weight_decay_and_partial_gradients_are_declared(arch: str) -> None:
    for name, spec in param_map(ModelConfig.from_arch(arch, vocab_size=90)).items():
        # No decay on norms and biases, decay on every matrix.
        assert spec.weight_decay == (len(spec.shape) == 2), name
        head_norm = arch == "qwen3" and name.endswith(("q_norm.weight", "k_norm.weight"))
        if head_norm:
            assert spec.partial == ("tp",)
        elif not spec.sharded_dims:
            # Whatever lies on the residual stream sees one part of the sequence a rank.
            assert spec.partial == ("sequence",), name
        else:
            assert spec.partial == (), name
