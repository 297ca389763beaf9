"""Attention over ranks that share samples, forward and backward, against the plain formula in one process."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from megalite.core.batch import Documents, Mask, by_rank, in_order, runs_of
from megalite.core.mesh.context import ParallelContext
from megalite.core.mesh.grid import Grid
from megalite.core.ops import attend as attend_op
from megalite.core.ops import bands, resolve
from megalite.core.ops.dropout import HeadDropout, SampleWords, keep_mask
from megalite.core.parts.context import blocks, share_attention
from megalite.core.parts.context.bands import bands_of
from megalite.core.parts.context.blocks import blocks_of
from tests.unit.context_parallel.flash_by_hand import flash_on_cpu
from tests.workers import WorkerPool

S, B = 48, 2
# Two samples; in the second the documents come in the opposite order.
LENGTHS = (1, 1, 7, 8, 14, 9, 8)
STARTS = torch.tensor(
    [[sum(order[:i]) for i, n in enumerate(order) for _ in range(n)] for order in (LENGTHS, LENGTHS[::-1])]
)
# (--cp-comm, neighbors that exchange heads)
VARIANTS = {"gather": 1, "ring": 1, "a2a": 4, "a2a+gather": 2, "a2a+ring": 2}

# (query heads, key heads, window, soft cap, documents)
Drawn = tuple[int, int, int | None, float | None, bool]
CASES: list[Drawn] = [
    (4, 2, None, None, False),
    (4, 2, None, None, True),
    (8, 4, 11, None, False),
    (4, 4, 5, None, True),
    (8, 1, None, 0.7, False),
    (4, 2, 11, 0.7, True),
]
UNCAPPED = CASES[:4]
# Scores of heads that have no value, some of which outweigh every key.
SINKS = torch.tensor([-2.0, 0.5, 3.0, 9.0, 1.0, 0.0, -9.0, 2.0], dtype=torch.float64)
# Of heads 3 and on, as if a tensor-parallel rank had those before.
SAMPLES = SampleWords(torch.tensor([[5, -7], [11, 13]], dtype=torch.int32))
DROPOUT = HeadDropout(0.25, SAMPLES, (17, -19), 3, keep_mask)


def drawn(heads: int, kv_heads: int) -> list[Tensor]:
    """q, k, v and the gradient of the output, fp64 [B, heads, S, 16], positions first in memory."""
    g = torch.Generator().manual_seed(heads + kv_heads)
    sizes = (heads, kv_heads, kv_heads, heads)
    return [torch.randn(S, B, n, 16, generator=g, dtype=torch.float64).permute(1, 2, 0, 3) for n in sizes]


def formula(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    window: int | None,
    softcap: float | None,
    documents: bool,
    sinks: Tensor | None = None,
    dropout: HeadDropout | None = None,
) -> Tensor:
    k, v = (x.repeat_interleave(q.shape[1] // k.shape[1], 1) for x in (k, v))
    scores = q @ k.transpose(2, 3) / q.shape[3] ** 0.5
    scores = scores if softcap is None else softcap * (scores / softcap).tanh()
    at = torch.arange(S)
    seen = (at <= at[:, None]) & (at > at[:, None] - (window or S))
    if documents:
        seen = (seen & (at >= STARTS[..., None])).unsqueeze(1)
    scores = scores.masked_fill(~seen, float("-inf"))
    if sinks is not None:
        scores = torch.cat((scores, sinks[:, None, None].expand(B, -1, S, 1)), -1)
    p = scores.softmax(-1)[..., :S]
    if dropout is not None:
        p = p * dropout.keep(range(S), range(S), q.shape[1]) / (1 - dropout.rate)
    return p @ v


def gradient_of(x: Tensor) -> Tensor:
    assert x.grad is not None
    return x.grad


def part(x: Tensor, size: int, rank: int) -> Tensor:
    """A rank's tokens of [B, heads, S, D], positions first in memory as in the model."""
    return torch.cat([x[:, :, run.start : run.stop] for run in runs_of(S, size, rank)], 2).permute(2, 0, 1, 3)


def attended_in_bands(rank: int, size: int, variant: str, dtype: torch.dtype, sinks: bool) -> list[list[Tensor]]:
    """The same with the calls of a GPU, by formulas for FlashAttention, which caps no scores."""
    with pytest.MonkeyPatch.context() as patch, flash_on_cpu():
        for module in (bands, attend_op):
            patch.setattr(module, "takes_bands", lambda q: True)
        return attended(rank, size, variant, dtype, 5, sinks=sinks, cases=UNCAPPED)


def attended(
    rank: int,
    size: int,
    variant: str,
    dtype: torch.dtype,
    rows: int,
    dropout: bool = False,
    sinks: bool = False,
    cases: Sequence[Drawn] = CASES,
) -> list[list[Tensor]]:
    """By case: this rank's out, dq, dk and dv, and with sinks what it adds to their gradient."""
    ctx = ParallelContext.create(Grid.of(size, cp=size), torch.device("cpu"))
    ops, ranks = resolve("auto", "cpu", dtype), min(VARIANTS[variant], size)
    ways = [
        share_attention(variant, ranks, ctx, ops, sinks, dropout=dropout, recomputed=recomputed, long=S + 1)
        for recomputed in (False, True)
    ]
    documents = Documents(STARTS.t())
    out = []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(blocks, "_ROWS", rows)
        patch.setattr(blocks, "_ROWS_ON_CPU", rows)
        for i, (heads, kv_heads, window, softcap, packed) in enumerate(cases):
            attention = ways[i == 1]
            *leaves, dy = (part(x, size, rank).to(dtype).contiguous() for x in drawn(heads, kv_heads))
            leaves = [x.requires_grad_() for x in leaves]
            q, k, v = (x.permute(1, 2, 0, 3) for x in leaves)
            options: dict[str, Any] = {"softcap": softcap, **({"dropout": DROPOUT} if dropout else {})}
            if sinks:
                leaves.append(SINKS[:heads].to(dtype).requires_grad_())
                options["sinks"] = leaves[-1]
            y = attention(q, k, v, Mask(window), documents if packed else None, **options)
            y.backward(dy.permute(1, 2, 0, 3))
            out.append([y.detach().permute(2, 0, 1, 3), *map(gradient_of, leaves)])
    return out


LIMITS = {torch.float64: 1e-12, torch.float32: 1e-6, torch.bfloat16: 8e-3}


def largest_error(
    ranks: Sequence[Sequence[Sequence[Tensor]]], dtype: torch.dtype, dropout: HeadDropout | None = None
) -> tuple[float, str]:
    """The largest relative error of all cases, and where it is."""
    size, errors = len(ranks), []
    for i, case in enumerate(CASES[: len(ranks[0])]):
        *leaves, dy = drawn(*case[:2])
        leaves = [x.to(dtype).double().requires_grad_() for x in leaves]
        y = formula(leaves[0], leaves[1], leaves[2], *case[2:], dropout=dropout)
        y.backward(dy.to(dtype).double())
        results = zip(("out", "dq", "dk", "dv"), (y, *(x.grad for x in leaves)), zip(*(r[i] for r in ranks)))
        for what, whole, parts in results:
            assert whole is not None
            want = torch.stack([part(whole.detach(), size, rank) for rank in range(size)])
            error = ((torch.stack(parts).double() - want).norm() / want.norm()).item()
            errors.append((math.inf if math.isnan(error) else error, f"{what} of {case}"))
    return max(errors)


def check(pool: WorkerPool, size: int, variant: str, dtype: torch.dtype, rows: int) -> None:
    error, where = largest_error(pool.run(size, attended, size, variant, dtype, rows), dtype)
    assert error < LIMITS[dtype], where


@pytest.mark.parametrize("variant", VARIANTS)
def test_attention_is_the_formula(pool: WorkerPool, variant: str) -> None:
    check(pool, 4, variant, torch.float64, rows=5)


@pytest.mark.full
@pytest.mark.parametrize("dtype", LIMITS)
@pytest.mark.parametrize(("size", "variant"), [(2, "ring"), *((4, variant) for variant in VARIANTS)])
def test_attention_in_every_type(pool: WorkerPool, size: int, variant: str, dtype: torch.dtype) -> None:
    check(pool, size, variant, dtype, rows=512)


@pytest.mark.parametrize("dropout", [False, True])
@pytest.mark.parametrize(
    ("size", "variant", "dtype"),
    [
        (1, "gather", torch.float64),
        *(pytest.param(4, v, torch.float64, marks=pytest.mark.full) for v in VARIANTS),
        pytest.param(4, "a2a+ring", torch.float32, marks=pytest.mark.full),
    ],
)
def test_sinks_are_a_column_of_the_softmax(
    pool: WorkerPool, size: int, variant: str, dtype: torch.dtype, dropout: bool
) -> None:
    check_sinks(pool.run(size, attended, size, variant, dtype, 5, dropout, True), dtype, dropout)


def check_sinks(ranks: Sequence[Sequence[Sequence[Tensor]]], dtype: torch.dtype, dropout: bool) -> None:
    size = len(ranks)
    for i, case in enumerate(CASES[: len(ranks[0])]):
        *leaves, dy = drawn(*case[:2])
        leaves = [x.to(dtype).double().requires_grad_() for x in [*leaves, SINKS[: case[0]]]]
        y = formula(leaves[0], leaves[1], leaves[2], *case[2:], leaves[3], DROPOUT if dropout else None)
        y.backward(dy.to(dtype).double())
        own = [rank[i] for rank in ranks]
        pairs = [(torch.stack([got[-1] for got in own]).double().sum(0), gradient_of(leaves[3]))]
        for at, whole in enumerate((y, *map(gradient_of, leaves[:3]))):
            want = torch.stack([part(whole.detach(), size, rank) for rank in range(size)])
            pairs.append((torch.stack([got[at] for got in own]).double(), want))
        for mine, whole in pairs:
            assert (mine - whole).norm() <= LIMITS[dtype] * whole.norm(), case


@pytest.mark.parametrize("dtype", [torch.float64, pytest.param(torch.bfloat16, marks=pytest.mark.full)])
@pytest.mark.parametrize(
    ("size", "variant", "sinks"),
    [
        (1, "gather", True),
        (4, "gather", False),
        (4, "ring", True),
        *(pytest.param(4, v, v != "a2a+ring", marks=pytest.mark.full) for v in VARIANTS if "a2a" in v),
    ],
)
def test_calls_of_a_gpu_are_the_formula(
    pool: WorkerPool, size: int, variant: str, sinks: bool, dtype: torch.dtype
) -> None:
    """Windows, documents and sinks in FlashAttention's own terms, its bounds and windows that count from the end."""
    ranks = pool.run(size, attended_in_bands, size, variant, dtype, sinks)
    if sinks:
        check_sinks(ranks, dtype, False)
    else:
        error, where = largest_error(ranks, dtype)
        assert error < LIMITS[dtype], where


@pytest.mark.parametrize("documents", [False, True])
@pytest.mark.parametrize("window", [None, 11])
def test_a_run_of_queries_is_one_call(window: int | None, documents: bool) -> None:
    """Not one for each block of queries; a rank's head and tail are one where nothing tells how far apart they are."""
    packed = Documents(STARTS.t()) if documents else None

    def calls(queries: tuple[range, ...], keys: tuple[range, ...]) -> int:
        return len(list(bands_of(queries, keys, window or S, packed, torch.device("cpu"))))

    assert calls((range(S),), (range(S),)) == 1
    assert calls(runs_of(S, 4, 1), (range(S),)) == 2
    assert calls(runs_of(S, 4, 1), runs_of(S, 4, 1)) == (1 if window is None and not documents else 2)


def test_long_samples_have_no_mask_of_all_pairs(monkeypatch: pytest.MonkeyPatch) -> None:
    """On a CPU, with a window or documents, also where nothing is shared."""
    monkeypatch.setattr(blocks, "_ROWS", 5)
    ops = resolve("auto", "cpu", torch.float64)
    ctx = ParallelContext.create(Grid.of(1), torch.device("cpu"))
    without: Any = {"attention": None}
    attention = share_attention("gather", 1, ctx, replace(ops, **without), recomputed=False, long=S)
    for case in CASES:
        if case[2] is None and not case[4]:
            continue
        *leaves, dy = drawn(*case[:2])
        outs = []
        for attend in (formula, attention):
            leaves = [x.detach().requires_grad_() for x in leaves]
            if attend is formula:
                out = formula(leaves[0], leaves[1], leaves[2], *case[2:])
            else:
                documents = Documents(STARTS.t()) if case[4] else None
                out = attention(*leaves, Mask(case[2]), documents, softcap=case[3])
            out.backward(dy)
            outs.append([out.detach(), *(x.grad for x in leaves)])
        for want, got in zip(*outs):
            torch.testing.assert_close(got, want, rtol=1e-10, atol=1e-12)
    with pytest.raises(TypeError):  # shorter ones go to the usual kernel
        attention(*(x[:, :, :-1] for x in leaves), Mask(11))


class Calls(TorchDispatchMode):
    """How often an operation runs."""

    def __init__(self, name: str) -> None:
        super().__init__()
        self.name, self.number = name, 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.number += func.overloadpacket.__name__ == self.name
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize(("window", "made"), [(None, 0), (11, 1)])
def test_positions_are_made_once_for_all_masks(monkeypatch: pytest.MonkeyPatch, window: int | None, made: int) -> None:
    """On a GPU each is a launch; there were two for each block, with a mask or without."""
    monkeypatch.setattr(blocks, "_ROWS", 8)
    q, k, v, _ = drawn(4, 2)
    case = blocks.Case(resolve("torch", "cpu", q.dtype), (range(S),), Mask(window), None, {})
    with Calls("arange") as calls:
        case.attend(blocks.Total(q), q, blocks.pack(k, v), (range(S),))
    assert calls.number == made


@pytest.mark.parametrize("variant", VARIANTS)
def test_dropout_is_of_sample_head_query_and_key(pool: WorkerPool, variant: str) -> None:
    """Whichever rank has them, in whatever blocks: the formula with the mask of all."""
    error, where = largest_error(pool.run(4, attended, 4, variant, torch.float64, 5, True), torch.float64, DROPOUT)
    assert error < LIMITS[torch.float64], where


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_dropout_of_whole_samples(dtype: torch.dtype) -> None:
    error, where = largest_error([attended(0, 1, "gather", dtype, 7, True)], dtype, DROPOUT)
    assert error < 2 * LIMITS[dtype], where


@pytest.mark.parametrize("size", [1, 2, 3, 4, 8])
def test_ranks_hold_heads_and_tails(size: int) -> None:
    """Each token is held once, in rising order, and all ranks have equal work; the two orders are inverse."""
    held = [[at for run in runs_of(S, size, rank) for at in run] for rank in range(size)]
    assert sorted(sum(held, [])) == list(range(S))
    assert all(positions == sorted(positions) and len(positions) == S // size for positions in held)
    work = [sum(positions) for positions in held]
    assert max(work) == min(work)
    by_ranks = torch.tensor(held)
    assert in_order(by_ranks).tolist() == list(range(S))
    assert torch.equal(by_rank(torch.arange(S), size), by_ranks)


@pytest.mark.parametrize("window", [None, 1, 6, 20])
@pytest.mark.parametrize("documents", [False, True])
@pytest.mark.parametrize("gathered", [False, True])
def test_blocks_are_every_pair_once(
    gathered: bool, documents: bool, window: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What blocks cover is what queries see, and nothing twice; whole blocks are left out."""
    monkeypatch.setattr(blocks, "_ROWS", 5)
    packed = Documents(STARTS.t()) if documents else None
    at = torch.arange(S)
    seen = ((at <= at[:, None]) & (at > at[:, None] - (window or S))).expand(B, S, S)
    seen = seen & (at >= STARTS[..., None]) if documents else seen
    for rank in range(4):
        queries = runs_of(S, 4, rank)
        positions = torch.tensor([p for run in queries for p in run])
        for source in range(1 if gathered else 4):
            keys = (range(S),) if gathered else runs_of(S, 4, source)
            key_positions = torch.tensor([p for run in keys for p in run])
            found = torch.zeros(B, len(positions), len(key_positions), dtype=torch.int64)
            for block in blocks_of(queries, keys, window or S, packed):
                mine, theirs = positions[block.queries], key_positions[block.keys]
                assert (mine[0].item(), theirs[0].item()) == block.begins
                pairs = torch.ones(B, len(mine), len(theirs), dtype=torch.bool)
                if block.causal:
                    pairs = (theirs <= mine[:, None]).expand_as(pairs)
                if block.masked:
                    pairs = seen[:, mine][:, :, theirs]
                    assert pairs.any()
                found[:, block.queries, block.keys] += pairs
            assert torch.equal(found, seen[:, positions][:, :, key_positions].long())


def options(**changed: Any) -> dict[str, Any]:
    return {"scale": 0.25, "softcap": None, **changed}


@pytest.mark.parametrize("softcap", [None, 0.7])
@pytest.mark.parametrize("dtype", LIMITS)
def test_op_merges_and_differentiates_block_by_block(dtype: torch.dtype, softcap: float | None) -> None:
    """Two blocks of keys, one of which some queries do not see at all; then the same keys at once."""
    ops = resolve("auto", "cpu", dtype)
    q, k, v, dout = (x.to(dtype)[:, :, :9] for x in drawn(4, 2))
    visible = torch.ones(B, 1, 9, 9, dtype=torch.bool).tril()
    visible[0, :, 4:, :4] = False
    whole, lse = ops.attend(q, k, v, visible, **options(softcap=softcap))
    halves = [slice(0, 4), slice(4, 9)]
    total = blocks.Total(q)
    for keys in halves:
        total.add(
            (slice(None), slice(None), slice(0, 9)),
            *ops.attend(q, k[:, :, keys], v[:, :, keys], visible[..., keys], **options(softcap=softcap)),
        )
    torch.testing.assert_close(total.out.to(dtype), whole, rtol=LIMITS[dtype], atol=LIMITS[dtype])
    torch.testing.assert_close(total.lse, lse, rtol=1e-5, atol=1e-5)
    unseen = ops.attend(q, k[:, :, halves[1]], v[:, :, halves[1]], visible[..., halves[1]], **options(softcap=softcap))
    assert not unseen[0][:, :, :4].any()
    assert (unseen[1][:, :, :4] == float("-inf")).all()

    leaves = [x.double().requires_grad_() for x in (q, k, v)]
    scores = leaves[0] @ leaves[1].repeat_interleave(2, 1).transpose(2, 3) * 0.25
    scores = scores if softcap is None else softcap * (scores / softcap).tanh()
    want = scores.masked_fill(~visible, float("-inf")).softmax(-1) @ leaves[2].repeat_interleave(2, 1)
    want.backward(dout.double())
    grads = [torch.zeros_like(x, dtype=torch.float64) for x in leaves]
    for keys in halves:
        parts = ops.attend_backward(
            dout, q, k[:, :, keys], v[:, :, keys], whole, lse, visible[..., keys], **options(softcap=softcap)
        )
        for grad, part_of, rows in zip(grads, parts, (slice(0, 9), keys, keys)):
            grad[:, :, rows] += part_of
    for got, leaf in zip((whole.double(), *grads), (want.detach(), *(x.grad for x in leaves))):
        assert leaf is not None
        assert (got - leaf).norm() / leaf.norm() < 2 * LIMITS[dtype]
