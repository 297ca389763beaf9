"""Attention block by block: which keys which queries see, and the sum over blocks, forward and backward.

Shapes: B micro-batch, N query heads, G key/value heads, D head size, s this rank's tokens, K those of the keys at hand.
Keys and values travel and wait as one tensor [K, B, 2, G, D].
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable

from megalite.core.batch import Documents, Mask, runs_of
from megalite.core.mesh.context import Axis
from megalite.core.ops import Ops, bands
from megalite.core.ops.dropout import HeadDropout
from megalite.core.parts.context.bands import bands_of

_ROWS = 512
"""Queries of a block that needs a mask: its keys are those from the first that one of the queries sees."""
_ROWS_ON_CPU = 128
"""The same with dropout on a CPU, where all scores of a block exist: few stay in its cache."""


class Block(NamedTuple):
    """Queries and keys of one call, as slices of the tensors at hand; `begins`: position of the first of each."""

    queries: slice
    keys: slice
    begins: tuple[int, int]
    causal: bool = False
    masked: bool = False


def blocks_of(
    query_runs: tuple[range, ...],
    key_runs: tuple[range, ...],
    window: int,
    documents: Documents | None,
    dropped: int | None = None,
) -> Iterator[Block]:
    """List the blocks in which some query sees a key; the runs are the positions of the tensors' tokens, in order.

    A run of keys holds a run of queries, or has none of its positions. With dropout, every block needs a mask, and has
    `dropped` queries.
    """
    at = 0
    for run in query_runs:
        rows = dropped or (len(run) if documents is None and run.stop <= window else _ROWS)
        for first in range(run.start, run.stop, rows):
            queries = run[first - run.start : first - run.start + rows]
            yield from _blocks_of(queries, at + first - run.start, key_runs, window, documents, dropped is not None)
        at += len(run)


def _blocks_of(
    queries: range, at: int, key_runs: tuple[range, ...], window: int, documents: Documents | None, dropout: bool
) -> Iterator[Block]:
    begin, last = queries.start, queries.stop - 1
    sees, last_sees = begin - window + 1, last - window + 1  # first keys of the first query and of the last
    if documents is not None:
        starts = documents.host_starts(queries)
        sees, last_sees = max(sees, int(starts[:, 0].min())), max(last_sees, int(starts[:, -1].max()))
    rows, before = slice(at, at + len(queries)), 0
    for run in key_runs:
        keys = range(max(run.start, sees), min(run.stop, queries.stop))
        offset = before - run.start
        before += len(run)
        if not keys:
            continue
        if dropout or keys.start < last_sees:
            yield Block(rows, _slice(keys, offset), (begin, keys.start), masked=True)
            continue
        # Two calls without a mask: all of the keys before the queries, and the queries' own.
        earlier, own = range(keys.start, min(begin, keys.stop)), range(max(begin, keys.start), keys.stop)
        if earlier:
            yield Block(rows, _slice(earlier, offset), (begin, earlier.start))
        if own:
            yield Block(rows, _slice(own, offset), (begin, begin), causal=True)


def _slice(positions: range, offset: int) -> slice:
    return slice(positions.start + offset, positions.stop + offset)


def pack(k: Tensor, v: Tensor) -> Tensor:
    """Copy k and v [B, G, K, D] into one message [K, B, 2, G, D]."""
    return torch.stack((k.permute(2, 0, 1, 3), v.permute(2, 0, 1, 3)), 2)


def unpack(kv: Tensor) -> tuple[Tensor, Tensor]:
    """Return k and v [B, G, K, D] of a message, as views."""
    k, v = kv.permute(2, 1, 3, 0, 4)
    return k, v


@dataclass(frozen=True)
class Case:
    """One call of attention over blocks.

    Attributes:
        ops: the kernels in use.
        queries: positions of this rank's tokens.
        mask, documents: as of `ops.attention`; documents are of whole samples.
        options: "scale" and "softcap" of the scores.
        dropout: of the probabilities; None: none.
    """

    ops: Ops
    queries: tuple[range, ...]
    mask: Mask
    documents: Documents | None
    options: dict[str, float | None]
    dropout: HeadDropout | None = None

    def attend(self, total: Total, q: Tensor, kv: Tensor, key_runs: tuple[range, ...]) -> None:
        """Add what the queries get from these keys to the total."""
        k, v = unpack(kv)
        for samples, queries, keys, options in self._calls(key_runs, q):
            rows, seen = (samples, slice(None), queries), (samples, slice(None), keys)
            total.add(rows, *self.ops.attend(q[rows], k[seen], v[seen], **options))

    def gradients(
        self, dq: Tensor, dout: Tensor, q: Tensor, kv: Tensor, out: Tensor, lse: Tensor, key_runs: tuple[range, ...]
    ) -> Tensor:
        """Add the queries' gradient from these keys to dq; return the keys' and values', like kv in fp32 or wider."""
        dkv = kv.new_zeros(kv.shape, dtype=dq.dtype)
        (k, v), (dk, dv) = unpack(kv), unpack(dkv)
        for samples, queries, keys, options in self._calls(key_runs, q):
            rows, seen = (samples, slice(None), queries), (samples, slice(None), keys)
            parts = self.ops.attend_backward(dout[rows], q[rows], k[seen], v[seen], out[rows], lse[rows], **options)
            for grad, at, part in zip((dq, dk, dv), (rows, seen, seen), parts):
                grad[at] += part
        return dkv

    def _calls(self, key_runs: tuple[range, ...], q: Tensor) -> Iterator[tuple[slice, slice, slice, dict[str, Any]]]:
        """List samples, queries, keys and options of each call of the kernel."""
        end = max(run.stop for run in self.queries)
        window = end if self.mask.window is None else self.mask.window
        if self.dropout is None and self.options.get("softcap") is None and bands.takes_bands(q):
            for call in bands_of(self.queries, key_runs, window, self.documents, q.device):
                yield call.samples, call.queries, call.keys, {"band": call.band, **self.options}
            return
        for block, options in self._blocks(key_runs, q, end, window):
            yield slice(None), block.queries, block.keys, options

    def _blocks(
        self, key_runs: tuple[range, ...], q: Tensor, end: int, window: int
    ) -> Iterator[tuple[Block, dict[str, Any]]]:
        drop = self.dropout
        dropped = None if drop is None else _ROWS if q.is_cuda else _ROWS_ON_CPU
        positions = None  # all of them, once for all masks
        for block in blocks_of(self.queries, key_runs, window, self.documents, dropped):
            sizes = (x.stop - x.start for x in (block.queries, block.keys))
            rows, columns = (range(begin, begin + size) for begin, size in zip(block.begins, sizes))
            visible = None
            if block.masked:
                positions = torch.arange(end, device=q.device) if positions is None else positions
                queries, keys = (positions[at.start : at.stop] for at in (rows, columns))
                visible = self.visible(queries, keys, window)
            kept = {} if drop is None else {"keep": drop.keep(rows, columns, q.shape[1]), "rate": drop.rate}
            yield block, {"visible": visible, "causal": block.causal, **self.options, **kept}

    def visible(self, queries: Tensor, keys: Tensor, window: int) -> Tensor:
        """Return bool [B or 1, 1, queries, keys], given their positions."""
        first = queries[None] - (window - 1)
        if self.documents is not None:
            first = torch.maximum(first, self.documents.starts_SB[queries].t())
        return ((keys <= queries[:, None]) & (keys >= first[..., None])).unsqueeze(1)


class Total:
    """The output of queries over the keys so far, fp32 or wider, and its log-sum-exp.

    Attributes:
        out: [B, N, s, D], in memory [s, B, N, D].
        lse: [B, N, s].
    """

    def __init__(self, q: Tensor) -> None:
        batch, heads, tokens, width = q.shape
        wide = torch.promote_types(q.dtype, torch.float32)
        self.out = q.new_empty(tokens, batch, heads, width, dtype=wide).permute(1, 2, 0, 3)
        self.lse = q.new_empty((batch, heads, tokens), dtype=wide)
        self._empty = True

    def add(self, rows: tuple[slice, slice, slice], out: Tensor, lse: Tensor) -> None:
        """Merge the result of some samples' queries for further keys; rows are [samples, heads, queries]."""
        if self._empty:
            self._empty = False
            if lse.shape == self.lse.shape:
                self.out.copy_(out)
                self.lse.copy_(lse)
                return
            self.out.zero_()
            self.lse.fill_(float("-inf"))
        before = self.lse[rows]
        merged = torch.logaddexp(before, lse)
        # A query that has seen no key yet stays 0: -inf less -inf is not a number.
        base = merged.masked_fill(merged.isinf(), 0.0)
        kept, added = ((x - base).exp_().unsqueeze(-1) for x in (before, lse))
        self.out[rows].mul_(kept).add_(out * added)
        self.lse[rows] = merged

    def add_sinks(self, sinks: Tensor) -> None:
        """Merge a score for each head [N] that has no value: it takes its share of every query's weights."""
        before, scores = self.lse, sinks.to(self.lse.dtype)[:, None]
        self.lse = torch.logaddexp(before, scores)
        self.out.mul_((before - self.lse).exp_().unsqueeze(-1))


class Exchange(Protocol):
    """How keys and values reach the queries of other ranks, and gradients the way back; see gather.py and ring.py."""

    def attend(self, case: Case, total: Total, q: Tensor, kv: Tensor) -> None:
        """Add what the queries get from the keys of all ranks, given this rank's."""

    def gradients(self, case: Case, dq: Tensor, *saved: Tensor) -> Tensor:
        """Add to dq, and return the gradient of this rank's keys and values, [s, B, 2, G, D]; see `Case.gradients`."""


class _BlockAttention(torch.autograd.Function):
    """Saves what one process would, for this rank's tokens: keys of other ranks come again in backward."""

    @staticmethod
    def forward(
        ctx: Any, q: Tensor, k: Tensor, v: Tensor, sinks: Tensor | None, exchange: Exchange, case: Case
    ) -> Tensor:
        total = Total(q)
        exchange.attend(case, total, q, pack(k, v))
        if sinks is not None:
            total.add_sinks(sinks)
        out = total.out.to(q.dtype)
        ctx.save_for_backward(q, k, v, out, total.lse, sinks)
        ctx.exchange, ctx.case = exchange, case
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dout: Tensor) -> tuple[Tensor | None, ...]:
        q, k, v, out, lse, sinks = ctx.saved_tensors
        dq = torch.zeros_like(q, dtype=lse.dtype)
        dkv = ctx.exchange.gradients(ctx.case, dq, dout, q, pack(k, v), out, lse)
        dk, dv = unpack(dkv.to(k.dtype))
        dsinks = None
        if sinks is not None:
            # Its gradient is that of any score, p (dp - delta), and dp is 0: it has no value.
            p = (sinks.to(lse.dtype)[:, None] - lse).exp_()
            dsinks = -(p * (dout.to(lse.dtype) * out).sum(-1)).sum((0, 2)).to(sinks.dtype)
        return dq.to(q.dtype), dk, dv, dsinks, None, None


@dataclass(frozen=True)
class BlockAttention:
    """`ops.attention` of this rank's queries with the keys of all ranks of an axis.

    Attributes:
        exchange: how the keys come, an `Exchange`; latents are gathered only.
        cp: the axis whose ranks share samples as `batch.runs_of` says.
        ops: the kernels in use.
    """

    exchange: Any
    cp: Axis
    ops: Ops

    def __call__(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor | None,
        mask: Mask,
        documents: Documents | None = None,
        *,
        dropout: HeadDropout | None = None,
        scale: float | None = None,
        softcap: float | None = None,
        expand: Callable[[Tensor], tuple[Tensor, Tensor]] | None = None,
        sinks: Tensor | None = None,
    ) -> Tensor:
        """Attend; q, k and v are of this rank's tokens, documents of whole samples.

        sinks [N] are scores of each query head, one more column of the softmax, for which out has nothing.
        """
        tokens = q.shape[2] * self.cp.size
        runs = runs_of(tokens, self.cp.size, self.cp.rank)
        case = Case(self.ops, runs, mask, documents, {"scale": scale, "softcap": softcap}, dropout)
        if expand is not None:
            if self.cp.size > 1:
                return self.exchange.attend_latents(case, q, k, expand)
            k, v = expand(k)
        assert v is not None
        width = v.shape[-1]
        v = F.pad(v, (0, q.shape[-1] - width)) if width < q.shape[-1] else v
        out = _BlockAttention.apply(q, k, v, sinks, self.exchange, case)
        return out[..., :width] if width < q.shape[-1] else out


@dataclass(frozen=True)
class WholeSamples:
    """`ops.attention` over whole samples. What would need S x S of memory goes block by block: dropout, which needs a
    mask of the samples' own, and on a CPU long samples with a mask.

    Attributes:
        ops: the kernels in use.
        blocks: attention over blocks, of an axis with one rank.
        long: number of tokens of a sample from which it is long; None: no sample has as many.
    """

    ops: Ops
    blocks: BlockAttention
    long: int | None

    def __call__(
        self, q: Tensor, k: Tensor, v: Tensor | None, mask: Mask, documents: Documents | None = None, **options: Any
    ) -> Tensor:
        """Attend as `ops.attention`."""
        tokens = q.shape[2]
        masked = documents is not None or (mask.window or tokens) < tokens
        by_block = q.device.type == "cpu" and masked and self.long is not None and tokens >= self.long
        blocks = "dropout" in options or (by_block and v is not None)
        return (self.blocks if blocks else self.ops.attention)(q, k, v, mask, documents, **options)
