"""The gated delta rule (Yang et al. 2024, "Gated Delta Networks", arXiv:2412.06464, equation 10): linear attention.

gated_delta_rule(q, k, v, decay, beta, starts=None, state=None) -> out
    Each value head has a state M [K, V], zeros before the first token t of a document; then, token after token,
        M <- exp(decay_t) M;   M <- M + k_t (beta_t (v_t - k_t M));   out_t = q_t M / sqrt(K)
    with q and k scaled to length 1 (x / sqrt(sum(x^2) + 1e-6)).
    q, k [S, B, G, K]; v [S, B, N, V], N a multiple of G: key head i serves the N / G value heads from i N / G on;
    decay [S, B, N] <= 0, beta [S, B, N]; out [S, B, N, V] like v. starts int64 [S, B]: position at which each token's
    document starts, below 0: before the first token here. state [B, N, K, V], fp32 or fp64: M there, of the document
    that goes on; None: zeros, and without starts all tokens are of that document.
gated_delta_transition(k, v, decay, beta, starts=None) -> T | U
    The same tokens turn a state M into T M + U: [B, N, K, K + V], fp32 or fp64.
Products and sums are fp32, or fp64 where the inputs are; in kernels in Triton the products with a state are tf32 where
the inputs are bf16 or fp16. Backward keeps the inputs alone and computes the forward pass again. Both work in slices of
the heads.

The reference works in chunks of 64 tokens (section 3.3 and appendix A: what a chunk adds to the state solves a
triangular system); `recurrent` below is the definition, token by token, and no backend.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable

from megalite.core.ops.op import TORCH, Op, triton
from megalite.core.parts.mixers.delta_net.delta_slices import CHUNK, heads_at_once

EPS = 1e-6
Slices = list[list[slice]]


class Scan(Protocol):
    """Computes the states of all chunks at once, for gradients too; a backend has one."""

    def __call__(
        self, written: Tensor, reads: Tensor, kept: Tensor, left: Tensor, held: Tensor
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Go from chunk to chunk, from the state `held` on: new = written - reads held, held <- kept held + left new.

        Args:
            written: [B, N, chunks, CHUNK, V].
            reads: [B, N, chunks, CHUNK, K].
            kept: [B, N, chunks, 1, 1].
            left: [B, N, chunks, K, CHUNK].
            held: [B, N, K, V].

        Returns:
            The states before the chunks [B, N, chunks, K, V], new [B, N, chunks, CHUNK, V], the state behind them.
        """
        ...


def recurrent(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    decay: Tensor,
    beta: Tensor,
    starts: Tensor | None = None,
    state: Tensor | None = None,
) -> Tensor:
    """Compute `gated_delta_rule` as it is defined, one token after the other."""
    wide = torch.promote_types(v.dtype, torch.float32)
    queries, keys = (_unit(x.to(wide)).repeat_interleave(v.shape[2] // k.shape[2], 2) for x in (q, k))
    if state is None:
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
    causal = torch.ones(CHUNK, CHUNK, dtype=torch.bool, device=decay.device).tril()
    # Sums are products with ones: `cumsum` has no deterministic kernel on a GPU.
    ones = causal.to(decay.dtype)
    # Each sum from its own first token: a difference of sums loses the digits of mild decays behind a strong one.
    sums = ones @ decay.unsqueeze(-1).masked_fill(~causal.tril(-1), 0.0)
    exponents = sums.masked_fill(~causal, float("-inf"))
    before = (decay @ ones.t()).exp()
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


def _within_chunks(k: Tensor, v: Tensor, decay: Tensor, beta: Tensor, starts: Tensor | None) -> tuple[Tensor, ...]:
    """Return, in chunks: k of unit length, `between` and `before` of `_decays`, what each token writes but for what it
    reads of the state before the chunk, what it reads of it, and what writes and that state leave behind the chunk.
    """
    wide = torch.promote_types(v.dtype, torch.float32)
    k = _unit(_in_chunks(k, wide)).repeat_interleave(v.shape[2] // k.shape[2], 1)
    values, beta = _in_chunks(v, wide), _in_chunks(beta, wide).unsqueeze(-1)
    between, before, after = _decays(_in_chunks(decay, wide), starts)
    # Each token writes beta (v - what the state holds for its key), of which tokens of the chunk before it are a part.
    system = (k * beta) @ k.mT * between
    right = torch.cat((values * beta, k * beta * before.unsqueeze(-1)), -1)
    right = torch.linalg.solve_triangular(system, right, upper=False, unitriangular=True)
    written, reads = right.split((values.shape[-1], k.shape[-1]), -1)
    return k, between, before, written, reads, (k * after.unsqueeze(-1)).mT, before[..., -1, None, None]


def _chunks(*tensors: Tensor) -> Iterator[tuple[Tensor, ...]]:
    """Yield each chunk of tensors [B, N, chunks, ...].

    All are taken at once: the backward of an index makes zeros for the whole sample, for every chunk.
    """
    return zip(*(x.unbind(2) for x in tensors))


def _outputs(
    starts: Tensor | None,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    decay: Tensor,
    beta: Tensor,
    state: Tensor | None = None,
    *,
    scan: Scan | None,
) -> Tensor:
    """Compute `gated_delta_rule` of some heads, differentiable by autograd; state [K, B, N, V]."""
    k, between, before, written, reads, left, kept = _within_chunks(k, v, decay, beta, starts)
    q = _unit(_in_chunks(q, k.dtype)).repeat_interleave(v.shape[2] // q.shape[2], 1) * k.shape[-1] ** -0.5
    seen, q = q @ k.mT * between, q * before.unsqueeze(-1)
    held = k.new_zeros(*k.shape[:2], k.shape[-1], v.shape[-1]) if state is None else state.permute(1, 2, 0, 3)
    if scan is not None:
        states, new, _ = scan(written, reads, kept, left, held)
        out = (q @ states).add_(seen @ new).flatten(2, 3)
    else:
        parts = []
        for written_i, reads_i, q_i, seen_i, kept_i, left_i in _chunks(written, reads, q, seen, kept, left):
            new = written_i - reads_i @ held
            parts.append(q_i @ held + seen_i @ new)
            held = held * kept_i + left_i @ new
        out = torch.cat(parts, 2)
    return out.permute(2, 0, 1, 3)[: len(v)].to(v.dtype)


def _transition(
    starts: Tensor | None, k: Tensor, v: Tensor, decay: Tensor, beta: Tensor, *, scan: Scan | None
) -> Tensor:
    """Compute `gated_delta_transition` of some heads, [K, B, N, K + V], differentiable by autograd.

    The first columns are of a state that begins as the identity, and to which no values are written.
    """
    k, _, _, written, reads, left, kept = _within_chunks(k, v, decay, beta, starts)
    held = torch.eye(k.shape[-1], k.shape[-1] + v.shape[-1], dtype=k.dtype, device=k.device).expand(
        *k.shape[:2], -1, -1
    )
    written = F.pad(written, (k.shape[-1], 0))
    if scan is not None:
        _, _, held = scan(written, reads, kept, left, held)
    else:
        for written_i, reads_i, kept_i, left_i in _chunks(written, reads, kept, left):
            held = held * kept_i + left_i @ (written_i - reads_i @ held)
    return held.permute(2, 0, 1, 3)


class _InSlices(torch.autograd.Function):
    """Compute the heads (dimension 2) slice by slice, as they are independent of each other, and again in backward."""

    @staticmethod
    def forward(ctx: Any, run: Callable[..., Tensor], slices: Slices, starts: Tensor | None, *inputs: Tensor) -> Tensor:
        ctx.save_for_backward(starts, *inputs)
        ctx.run = run
        ctx.slices = slices
        out = None
        for at, *places in slices:
            part = run(starts, *(x[:, :, place] for x, place in zip(inputs, places)))
            if out is None:
                out = part.new_empty(*part.shape[:2], slices[-1][0].stop, part.shape[3])
            out[:, :, at] = part
        assert out is not None
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dout: Tensor) -> tuple[Tensor | None, ...]:
        starts, *given = ctx.saved_tensors
        grads = [torch.empty_like(x, memory_format=torch.contiguous_format) for x in given]
        for at, *places in ctx.slices:
            inputs = [x[:, :, place].detach().requires_grad_() for x, place in zip(given, places)]
            with torch.enable_grad():
                out = ctx.run(starts, *inputs)
            for grad, place, part in zip(grads, places, torch.autograd.grad(out, inputs, dout[:, :, at])):
                grad[:, :, place] = part
            del out, part
        return (None, None, None, *grads)


def _slices(k: Tensor, v: Tensor, heads: Sequence[int]) -> Slices:
    """Return the places of each slice among the value heads, and among each of some numbers of heads."""
    (length, samples, keys, key_size), (values, value_size) = k.shape, v.shape[2:]
    step = heads_at_once(keys, length * samples, values // keys, key_size, value_size)
    firsts = range(0, keys, step)
    return [[slice(i * n // keys, min(i + step, keys) * n // keys) for n in (values, *heads)] for i in firsts]


def gated_delta_rule(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    decay: Tensor,
    beta: Tensor,
    starts: Tensor | None = None,
    state: Tensor | None = None,
    *,
    scan: Scan | None = None,
) -> Tensor:
    """Torch reference of `gated_delta_rule`, but for a `scan`; see the module's contract."""
    inputs = [q, k, v, decay, beta, *([] if state is None else [state.permute(2, 0, 1, 3)])]
    return _InSlices.apply(partial(_outputs, scan=scan), _slices(k, v, [x.shape[2] for x in inputs]), starts, *inputs)


def gated_delta_transition(
    k: Tensor, v: Tensor, decay: Tensor, beta: Tensor, starts: Tensor | None = None, *, scan: Scan | None = None
) -> Tensor:
    """Torch reference of `gated_delta_transition`, but for a `scan`; see the module's contract."""
    inputs = k, v, decay, beta
    out = _InSlices.apply(partial(_transition, scan=scan), _slices(k, v, [x.shape[2] for x in inputs]), starts, *inputs)
    return out.permute(1, 2, 0, 3)


OP = Op("delta_rule", (gated_delta_rule, gated_delta_transition), (triton("delta"), TORCH))
