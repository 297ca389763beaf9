"""Two models in plain torch on one GPU, put together as torchtitan does, for benchmarks/gpu_rows.py.

Weights and AdamW's states in fp32, products in bf16 by autocast, every block and the loss compiled by torch.compile,
fused AdamW. The same steps as megalite's rows of the same name: two micro-batches, gradients clipped at 1.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from benchmarks.gpu_steps import MICROBATCHES

_STEPS, _UNMEASURED = 5, 3


@dataclass(frozen=True)
class Sizes:
    """A model's sizes; `ffn` is that of one expert where there are experts."""

    layers: int
    hidden: int
    heads: int
    kv_heads: int
    head: int
    ffn: int
    vocab: int
    seq: int
    theta: float
    experts: int = 0
    topk: int = 0
    tied: bool = False
    qk_norm: bool = False


LLAMA_1B = Sizes(16, 2048, 32, 8, 64, 8192, 128256, 4096, 5e5, tied=True)
QWEN3_30B = Sizes(4, 2048, 32, 4, 128, 768, 151936, 4096, 1e6, 16, 8, qk_norm=True)
TINY = Sizes(2, 64, 4, 2, 16, 96, 512, 32, 1e4)
TINY_EXPERTS = replace(TINY, experts=4, topk=2, qk_norm=True)


class Attention(nn.Module):
    def __init__(self, s: Sizes) -> None:
        super().__init__()
        self.s = s
        widths = (s.heads, s.kv_heads, s.kv_heads)
        self.q, self.k, self.v = (nn.Linear(s.hidden, n * s.head, bias=False) for n in widths)
        self.o = nn.Linear(s.heads * s.head, s.hidden, bias=False)
        self.norms = nn.ModuleList(nn.RMSNorm(s.head) for _ in range(2)) if s.qk_norm else None

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        q, k, v = (p(x).unflatten(-1, (-1, self.s.head)).transpose(1, 2) for p in (self.q, self.k, self.v))
        if self.norms is not None:
            q, k = self.norms[0](q).to(v.dtype), self.norms[1](k).to(v.dtype)
        q, k = rotate(q, cos, sin), rotate(k, cos, sin)
        out = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
        return self.o(out.transpose(1, 2).flatten(2))


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Turn the halves of each head, [B, N, S, D]."""
    first, second = x.chunk(2, dim=-1)
    return (x * cos + torch.cat((-second, first), dim=-1) * sin).to(x.dtype)


class MLP(nn.Module):
    def __init__(self, s: Sizes) -> None:
        super().__init__()
        self.gate, self.up = (nn.Linear(s.hidden, s.ffn, bias=False) for _ in range(2))
        self.down = nn.Linear(s.ffn, s.hidden, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(F.silu(self.gate(x)) * self.up(x))


class Experts(nn.Module):
    """Rows sorted by expert, one grouped product for each matrix, weights on the way back."""

    def __init__(self, s: Sizes) -> None:
        super().__init__()
        self.s = s
        self.router = nn.Linear(s.hidden, s.experts, bias=False)
        self.gate, self.up = (nn.Parameter(torch.empty(s.experts, s.hidden, s.ffn)) for _ in range(2))
        self.down = nn.Parameter(torch.empty(s.experts, s.ffn, s.hidden))

    def forward(self, x: Tensor) -> Tensor:
        tokens = x.flatten(0, 1).bfloat16()
        weights, chosen = self.router(tokens).float().softmax(-1).topk(self.s.topk)
        weights = (weights / weights.sum(-1, keepdim=True)).flatten()
        order = chosen.flatten().argsort(stable=True)
        ends = torch.bincount(chosen.flatten(), minlength=self.s.experts).cumsum(0).to(torch.int32)
        rows = order // self.s.topk
        given = tokens[rows]
        gate, up, down = (w.bfloat16() for w in (self.gate, self.up, self.down))
        hidden = F.silu(torch._grouped_mm(given, gate, offs=ends)) * torch._grouped_mm(given, up, offs=ends)
        out = torch._grouped_mm(hidden, down, offs=ends).float() * weights[order, None]
        return torch.zeros_like(tokens, dtype=torch.float32).index_add(0, rows, out).view(x.shape).to(x.dtype)


class Block(nn.Module):
    def __init__(self, s: Sizes) -> None:
        super().__init__()
        self.before, self.after = (nn.RMSNorm(s.hidden) for _ in range(2))
        self.attention, self.mlp = Attention(s), Experts(s) if s.experts else MLP(s)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        x = x + self.attention(self.before(x), cos, sin)
        return x + self.mlp(self.after(x))


class Model(nn.Module):
    def __init__(self, s: Sizes, compiled: bool) -> None:
        super().__init__()
        self.embedding = nn.Embedding(s.vocab, s.hidden)
        self.blocks = nn.ModuleList(Block(s) for _ in range(s.layers))
        self.norm = nn.RMSNorm(s.hidden)
        self.head = nn.Linear(s.hidden, s.vocab, bias=False)
        if s.tied:
            self.head.weight = self.embedding.weight
        for parameter in self.parameters():
            nn.init.normal_(parameter, 0.0, 0.02)
        angles = torch.arange(s.seq)[:, None] * s.theta ** -(torch.arange(0, s.head, 2) / s.head)
        angles = torch.cat((angles, angles), -1)
        self.register_buffer("cos", angles.cos())
        self.register_buffer("sin", angles.sin())
        if compiled:
            for block in self.blocks:
                block.compile()

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embedding(tokens).bfloat16()
        for block in self.blocks:
            x = block(x, self.cos, self.sin)
        return self.head(self.norm(x).bfloat16())


def loss_of(logits: Tensor, targets: Tensor) -> Tensor:
    """Mean cross-entropy in fp32."""
    return F.cross_entropy(logits.flatten(0, 1).float(), targets.flatten())


def measure(s: Sizes, micro_batch: int, device: torch.device) -> dict[str, Any]:
    """Return the median milliseconds of a step, and tokens per second."""
    cuda = device.type == "cuda"
    with torch.device(device):
        model = Model(s, compiled=cuda)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, betas=(0.9, 0.95), weight_decay=0.1, fused=True)
    loss_fn: Callable[[Tensor, Tensor], Tensor] = torch.compile(loss_of) if cuda else loss_of

    def step() -> None:
        for _ in range(MICROBATCHES):
            tokens = torch.randint(s.vocab, (micro_batch, s.seq + 1), device=device)
            with torch.autocast(device.type, torch.bfloat16):
                loss = loss_fn(model(tokens[:, :-1]), tokens[:, 1:]) / MICROBATCHES
            loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()

    times = []
    for _ in range(_UNMEASURED + _STEPS):
        began = time.perf_counter()
        step()
        if cuda:
            torch.cuda.synchronize()
        times.append(time.perf_counter() - began)
    seconds = statistics.median(times[_UNMEASURED:])
    found = {"ms": seconds * 1e3, "tokens_per_s": MICROBATCHES * micro_batch * s.seq / seconds}
    return {**found, "peak_gib": torch.cuda.max_memory_allocated() / 2**30} if cuda else found


def llama(device: torch.device) -> dict[str, Any]:
    """Measure Llama-3.2-1B."""
    return measure(LLAMA_1B, 4, device) if device.type == "cuda" else measure(TINY, 1, device)


def experts(device: torch.device) -> dict[str, Any]:
    """Measure four layers of Qwen3-30B-A3B with 16 experts, the rows of a rank at ep 8."""
    return measure(QWEN3_30B, 1, device) if device.type == "cuda" else measure(TINY_EXPERTS, 1, device)
