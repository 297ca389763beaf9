"""Model FLOPs per token against published conventions, and an independent count by PyTorch."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from megalite.core.model.flops import flops_per_token, peak_flops
from megalite.core.options.model import ModelConfig
from megalite.core.parts.families import PRESETS
from megalite.runtime.options.cli import parse

GPT3 = ModelConfig.from_arch(
    "gpt2", hidden_size=12288, num_layers=96, num_heads=96, ffn_hidden_size=49152, vocab_size=51200, seq_len=2048
)
GPT_7B = ModelConfig.from_arch(
    "gpt2", hidden_size=4096, num_layers=30, num_heads=32, ffn_hidden_size=16384, vocab_size=131072, seq_len=4096
)
LLAMA_8B = ModelConfig(
    hidden_size=4096,
    num_layers=32,
    num_heads=32,
    num_kv_heads=8,
    ffn_hidden_size=14336,
    vocab_size=128256,
    seq_len=8192,
)


@pytest.mark.parametrize(
    ("cfg", "causal"), [(GPT3, 1.06195e12), (GPT_7B, 4.24799e10), (LLAMA_8B, 5.14704e10)], ids=["175b", "7.1b", "8b"]
)
def test_causal_figures(cfg: ModelConfig, causal: float) -> None:
    assert flops_per_token(cfg).causal == pytest.approx(causal, rel=5e-6)


def test_every_preset_counts_as_its_dimensions_say() -> None:
    """Matrices 6 L W with W = h (2 q + 2 kv) + g h f, causal attention 6 L q s, head 6 V h.

    f: the width of the MLP; of experts those that a token goes to, and the shared one. Their routers are h E, h.
    """
    for name in PRESETS:
        m = parse(["--preset", name]).config.model
        q, kv, matrices = m.num_heads * m.head_size, m.kv_heads * m.head_size, 3 if m.gated else 2
        flops, keys_and_values = flops_per_token(m), float(q)
        deltas = sum(map(m.is_delta_net, range(m.num_layers)))
        width, routers, dense = m.ffn_size, 0, len(m.moe_dense_layers)
        attention = m.hidden_size * ((2 + m.attention_output_gate) * q + 2 * kv)
        if m.kv_lora_rank is not None:
            of_values = m.num_heads * m.value_size
            nope, keys_and_values = q - m.num_heads * m.rotary_dim, (q + of_values) / 2
            down = m.kv_lora_rank + m.rotary_dim + (m.q_lora_rank or 0)
            up = m.kv_lora_rank * (nope + of_values) + (m.q_lora_rank or m.hidden_size) * q
            attention = m.hidden_size * (down + of_values) + up
        if m.num_experts is not None:
            width = m.moe_topk * m.expert_ffn_size + m.moe_shared_ffn_size
            routers = m.num_experts + m.moe_shared_gate
        delta = states = 0
        if deltas:
            keys, values = (n * d for n, d in ((16, 128), (32, 128)))
            delta = m.hidden_size * (2 * keys + 3 * values + 2 * 32) + 4 * (2 * keys + values)
            states = 3 * 128 * values
        weights = attention * (m.num_layers - deltas) + delta * deltas
        weights += m.hidden_size * (
            (matrices * width + routers) * (m.num_layers - dense) + matrices * m.ffn_size * dense
        )
        assert flops.matrices == 6 * weights, name
        # OPT-350M has embeddings of 512 in a model of 1,024.
        projected = name == "opt-350m"
        assert flops.head == 6 * (m.vocab * 512 + 2 * 512 * 1024 if projected else m.vocab * m.hidden_size), name
        if m.window is None or m.window >= m.seq_len:
            pairs = (m.num_layers - deltas) * keys_and_values * m.seq_len
            assert flops.causal_attention == 6 * (pairs + deltas * states), name


def test_windows_count_the_keys_that_they_leave() -> None:
    """Every other layer sees 4 of 24 positions: pairs counted one by one."""
    sizes: dict[str, Any] = {"hidden_size": 48, "num_heads": 4, "head_dim": 16, "vocab_size": 100, "seq_len": 24}
    cfg = ModelConfig(num_layers=4, **sizes, window=4, window_pattern=2)
    plain = ModelConfig(num_layers=4, **sizes)
    flops, whole = flops_per_token(cfg), flops_per_token(plain)
    assert flops.attention == whole.attention * (4 + 24) / 48
    pairs = sum(min(i + 1, 4) for i in range(24)) + sum(i + 1 for i in range(24))
    # A diagonal counts by half here, as half of all pairs are causal without windows.
    assert flops.causal_attention / whole.causal_attention == pytest.approx((pairs - 24) / (24 * 24), rel=0.03)
    assert flops.causal == flops.matrices + flops.causal_attention + flops.head


def test_terms_are_printed() -> None:
    text = str(flops_per_token(LLAMA_8B))
    assert "5.14704e+10 causal" in text
    assert "5.79129e+10 full attention" in text
    assert "matrices 4.1876e+10, attention 6.4425e+09 or 1.2885e+10, head 3.1520e+09" in text


@pytest.mark.parametrize("arch", ["llama", "qwen3", "gpt2", "gpt_neox", "gemma2"])
def test_agrees_with_the_flop_counter_of_pytorch(arch: str) -> None:
    """The same matrices multiplied for real, on meta tensors, under torch's own counter (full attention)."""
    from torch.utils.flop_counter import FlopCounterMode

    cfg = ModelConfig.from_arch(
        arch, num_layers=3, hidden_size=48, num_heads=4, num_kv_heads=2, head_dim=16, vocab_size=100, seq_len=24
    )

    def meta(*shape: int) -> torch.Tensor:
        return torch.zeros(shape, device="meta", requires_grad=True)

    hidden, heads, kv, head, ffn = 48, 4, 2, 16, cfg.ffn_size
    x = meta(cfg.seq_len, hidden)
    counter = FlopCounterMode(display=False)
    with counter:
        for _ in range(cfg.num_layers):
            qkv = x @ meta(hidden, (heads + 2 * kv) * head)
            q = qkv[:, : heads * head].view(-1, heads, head).transpose(0, 1)
            k, v = meta(heads, cfg.seq_len, head), meta(heads, cfg.seq_len, head)  # key/value heads repeated
            out = ((q @ k.transpose(1, 2)) @ v).transpose(0, 1).reshape(cfg.seq_len, -1)
            x = out @ meta(heads * head, hidden)
            inner = x @ meta(hidden, (2 if cfg.gated else 1) * ffn)
            x = inner[:, :ffn] @ meta(ffn, hidden)
        (x @ meta(hidden, 100)).sum().backward()
    assert counter.get_total_flops() == cfg.seq_len * flops_per_token(cfg).full


def test_a_cpu_has_no_peak() -> None:
    assert peak_flops(torch.device("cpu")) is None
