"""The gated delta rule (Yang et al. 2024, "Gated Delta Networks", arXiv:2412.06464, equation 10): linear attention.

gated_delta_rule(q, k, v, decay, beta, starts=None) -> out
    Each value head has a state M [K, V], zeros before the first token t of a document; then, token after token,
        M <- exp(decay_t) M;   M <- M + k_t (beta_t (v_t - k_t M));   out_t = q_t M / sqrt(K)
    with q and k scaled to length 1 (x / sqrt(sum(x^2) + 1e-6)).
    q, k [S, B, G, K]; v [S, B, N, V], N a multiple of G: key head i serves the N / G value heads from i N / G on;
    decay [S, B, N] <= 0, beta [S, B, N]; out [S, B, N, V] like v. starts int64 [S, B]: position at which each token's
    document starts; None: all at 0. Products and sums are fp32, or fp64 where the inputs are.
    Backward keeps the inputs alone and computes the forward pass again. Both work in slices of the heads.

The reference works in chunks of 64 tokens (section 3.3 and appendix A: what a chunk adds to the state solves a
triangular system); `recurrent` below is the definition, token by token, and no backend.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable

from megalite.base.delta_slices import CHUNK, heads_at_once
from megalite.ops.op import TORCH, Op

EPS = 1e-6


def recurrent(q: Tensor, k: Tensor, v: Tensor, decay: Tensor, beta: Tensor, starts: Tensor | None = None) -> Tensor:
    """Compute `gated_delta_rule` as it is defined, one token after the other."""
    wide = torch.promote_types(v.dtype, torch.float32)
    queries, keys = (_unit(x.to(wide)).repeat_interleave(v.shape[2] // k.shape[2], 2) for x in (q, k))
    state = v.new_zeros(*v.shape[1:3], k.shape[-1], v.shape[-1], dtype=wide)
    out = []
    for t in range(len(v)):
        kept = decay[t].to(wide).exp()
        if starts is not None:
            kept = kept.masked_fill((starts[t] == t)[:, None], 0.0)
        state = state * kept[..., None, None]
        read = torch.einsum("bnk,bnkv->bnv", keys[t], state)
        written = beta[t].to(wide).unsqueeze(-1) * (v[t].to(wide) - read)
        state = state + keys[t].unsqueeze(-1) * written.unsqueeze(-2)
        out.append(torch.einsum("bnk,bnkv->bnv", queries[t], state) * k.shape[-1] ** -0.5)
    return torch.stack(out).to(v.dtype)


def _unit(x: Tensor) -> Tensor:
    return x * (x.square().sum(-1, keepdim=True) + EPS).rsqrt()


def _in_chunks(x: Tensor, wide: torch.dtype) -> Tensor:
    """Put [S, B, N, ...] in chunks, filled up with zeros: [B, N, chunks, CHUNK, ...]."""
    x = F.pad(x.to(wide), (0, 0) * (x.ndim - 1) + (0, -len(x) % CHUNK))
    return x.unflatten(0, (-1, CHUNK)).movedim((0, 1), (2, 3))


def _decays(decay: Tensor, starts: Tensor | None) -> tuple[Tensor, Tensor, Tensor]:
    """Return what is left, within a chunk, at each token of each one before it, of the state before the chunk at each
    token, and of each token behind the chunk: [B, N, chunks, CHUNK, CHUNK], and twice [B, N, chunks, CHUNK].
    """
    total = decay.cumsum(-1)
    causal = torch.ones(CHUNK, CHUNK, dtype=torch.bool, device=decay.device).tril()
    # The exponents of what is not seen may be large: they are masked before.
    exponents = (total.unsqueeze(-1) - total.unsqueeze(-2)).masked_fill(~causal, float("-inf"))
    before = total.exp()
    if starts is not None:
        tokens, chunks = len(starts), decay.shape[2]
        # What fills the last chunk up belongs to the last document.
        at = torch.cat((starts, starts[-1:].expand(chunks * CHUNK - tokens, -1))).t().unflatten(1, (chunks, CHUNK))
        other = at.unsqueeze(-1) != at.unsqueeze(-2)
        exponents = exponents.masked_fill(other.unsqueeze(1), float("-inf"))
        first = torch.arange(0, chunks * CHUNK, CHUNK, device=decay.device)[:, None]
        before = before.masked_fill((at >= first).unsqueeze(1), 0.0)
    between = exponents.exp()
    return between, before, between[..., -1, :]


def _chunked(q: Tensor, k: Tensor, v: Tensor, decay: Tensor, beta: Tensor, starts: Tensor | None) -> Tensor:
    """Torch reference of `gated_delta_rule`, differentiable by autograd."""
    wide, tokens = torch.promote_types(v.dtype, torch.float32), len(v)
    q, k = (_unit(_in_chunks(x, wide)).repeat_interleave(v.shape[2] // x.shape[2], 1) for x in (q, k))
    q = q * k.shape[-1] ** -0.5
    values, beta = _in_chunks(v, wide), _in_chunks(beta, wide).unsqueeze(-1)
    between, before, after = _decays(_in_chunks(decay, wide), starts)
    # Each token writes beta (v - what the state holds for its key), of which tokens of the chunk before it are a part.
    system = (k * beta) @ k.mT * between
    right = torch.cat((values * beta, k * beta * before.unsqueeze(-1)), -1)
    right = torch.linalg.solve_triangular(system, right, upper=False, unitriangular=True)
    written, reads = right.split((values.shape[-1], k.shape[-1]), -1)
    seen, q = q @ k.mT * between, q * before.unsqueeze(-1)
    k, kept = (k * after.unsqueeze(-1)).mT, before[..., -1, None, None]
    state = values.new_zeros(*values.shape[:2], k.shape[-2], values.shape[-1])
    out = []
    for i in range(values.shape[2]):
        new = written[:, :, i] - reads[:, :, i] @ state
        out.append(q[:, :, i] @ state + seen[:, :, i] @ new)
        state = state * kept[:, :, i] + k[:, :, i] @ new
    return torch.cat(out, 2).permute(2, 0, 1, 3)[:tokens].to(v.dtype)


def _slices(q: Tensor, v: Tensor) -> Iterator[tuple[slice, slice]]:
    """Yield the key heads and the value heads of each slice: heads are independent of each other."""
    (length, samples, heads, key_size), (values, value_size) = q.shape, v.shape[2:]
    per_key = values // heads
    step = heads_at_once(heads, length * samples, per_key, key_size, value_size)
    for first in range(0, heads, step):
        last = min(first + step, heads)
        yield slice(first, last), slice(first * per_key, last * per_key)


class _GatedDeltaRule(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, *inputs: Any) -> Tensor:
        ctx.save_for_backward(*inputs)
        q, k, v, decay, beta, starts = inputs
        out = torch.empty_like(v, memory_format=torch.contiguous_format)
        for keys, values in _slices(q, v):
            of_values = v[:, :, values], decay[:, :, values], beta[:, :, values]
            out[:, :, values] = _chunked(q[:, :, keys], k[:, :, keys], *of_values, starts)
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dout: Tensor) -> tuple[Tensor | None, ...]:
        *given, starts = ctx.saved_tensors
        grads = [torch.empty_like(x, memory_format=torch.contiguous_format) for x in given]
        for keys, values in _slices(given[0], given[2]):
            places = keys, keys, values, values, values
            q, k, v, decay, beta = inputs = [x[:, :, at].detach().requires_grad_() for x, at in zip(given, places)]
            with torch.enable_grad():
                out = _chunked(q, k, v, decay, beta, starts)
            for grad, at, part in zip(grads, places, torch.autograd.grad(out, inputs, dout[:, :, values])):
                grad[:, :, at] = part
            del out, part
        return (*grads, None)


def gated_delta_rule(
    q: Tensor, k: Tensor, v: Tensor, decay: Tensor, beta: Tensor, starts: Tensor | None = None
) -> Tensor:
    """Torch reference of `gated_delta_rule`; see the module's contract."""
    return _GatedDeltaRule.apply(q, k, v, decay, beta, starts)


OP = Op("delta_rule", (gated_delta_rule,), (TORCH,))
