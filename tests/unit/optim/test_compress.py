"""Compressed gradients: each codec against NumPy on real ranks, what it leaves behind, and what it sends."""

from __future__ import annotations

import math
import re
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch

from megalite.core.base.errors import UserError
from megalite.core.mesh.context import ParallelContext
from megalite.core.mesh.grid import Grid
from megalite.core.mesh.seeding import philox
from megalite.core.ops import resolve
from megalite.core.optim.codec import BucketParam
from megalite.core.optim.make_buckets import make_buckets
from megalite.core.optim.optimizer import DistributedOptimizer
from megalite.core.optim.shares import Sharding
from megalite.core.options.compression import CODECS, Gradients, read_compression
from megalite.core.options.optim import OptimConfig
from megalite.core.parts.codecs.exchange import Exchange
from megalite.core.parts.codecs.int8 import INT8_BLOCK, dequantize, quantize
from megalite.core.parts.codecs.int8_stochastic import noise
from megalite.core.parts.codecs.powersgd.powersgd_codec import PowerSGD, orthonormalize
from megalite.core.parts.codecs.threshold import THRESHOLD_BLOCK, pack, to_signs, unpack
from megalite.core.parts.codecs.topk import TopK, largest
from megalite.core.sharding import Layout, ParamSpec, Shard
from megalite.core.sharding.parameter import ShardedParameter
from megalite.runtime.checkpoint.load import load_checkpoint
from megalite.runtime.checkpoint.save import Checkpointer
from megalite.runtime.options.cli import parse
from tests.codecs import specs_of
from tests.workers import WorkerPool

CPU = torch.device("cpu")
SHAPES: dict[str, tuple[int, ...]] = {"a.weight": (30, 11), "b.weight": (40, 30), "c.bias": (30,)}
STEPS, SCALE, WORLD = 4, 64.0, 3
SPECS = ("int8", "int8-stochastic", "topk:0.1", "threshold:0.5", "powersgd:2")
# So large that messages, and not their padding, are what counts.
WIDE: dict[str, tuple[int, ...]] = {"a.weight": (60, 110), "b.weight": (200, 160), "c.bias": (60,)}
Grads = dict[str, np.ndarray]


def gradient(name: str, rank: int, step: int, shapes: dict[str, tuple[int, ...]] = SHAPES) -> np.ndarray:
    return philox(5, name, rank, step).standard_normal(shapes[name], dtype=np.float32)


def test_int8_rounds_to_even_and_keeps_zeros() -> None:
    codes, scales = quantize(torch.tensor([[1.0, -2.0, 0.5, 127.0]]))
    assert (codes.tolist(), scales.tolist()) == ([[1, -2, 0, 127]], [[1.0]])
    codes, scales = quantize(torch.zeros(2, 300))
    assert not codes.any()
    assert dequantize(codes[0], scales[0]).tolist() == [0.0] * 300
    # The scale of the smallest numbers rounds to 0, or so far down that codes would not fit.
    for tiny in (1e-45, 2.2e-43):
        codes, scales = quantize(torch.full((1, 3), tiny))
        assert dequantize(codes[0], scales[0]).isfinite().all()


def test_rounding_by_chance_is_right_on_average() -> None:
    """The mean of 2,000 roundings lies within 5 of its standard errors; nearest rounding is off by 0.3."""
    target = torch.tensor([0.3, -0.3, 0.5, 12.7, -126.1, 1.0, 0.0])
    x = torch.cat([torch.tensor([127.0]), target])
    total, times = torch.zeros(8, dtype=torch.float64), 2000
    for i in range(times):
        codes, scales = quantize(x[None], noise(x * (1 + i), 0)[None])
        assert scales.item() == 1.0
        total += codes[0]
    mean = total / times
    assert mean[0] == 127
    assert mean[-2:].tolist() == [1.0, 0.0], "what 8 bits hold stays"
    share = (x - x.floor()).double()
    error = (share * (1 - share) / times).sqrt()
    assert ((mean - x).abs() <= 5 * error + 1e-6).all()
    assert (quantize(x[None])[0][0] - x).abs().max() > 0.29


def test_chance_is_uniform_and_another_on_each_rank_and_for_each_gradient() -> None:
    x = torch.from_numpy(philox(2, "noise").standard_normal(40_000, dtype=np.float32))
    other = x.clone()
    other[17] += 1e-3
    draws = [noise(x, 0), noise(x, 1), noise(other, 0), noise(x.flip(0), 0)]
    assert torch.equal(draws[0], noise(x.clone(), 0))
    for draw in draws:
        assert draw.min() >= 0
        assert draw.max() < 1
        # 20 bins of 2,000: chi-squared with 19 degrees of freedom is above 50 once in 7,000.
        assert ((draw.histc(20, 0, 1) - 2000).square() / 2000).sum() < 50
    assert torch.corrcoef(torch.stack(draws)).triu(1).abs().max() < 0.025
    assert abs(torch.corrcoef(torch.stack([draws[0][1:], draws[0][:-1]]))[0, 1]) < 0.025


def test_signs_from_a_threshold_on_travel_in_two_bits() -> None:
    rows = torch.tensor([[4.0, -2.0, 1.9, -6.0, 0.0], [0.0] * 5])
    rows[0] /= 1.5
    signs, magnitudes = to_signs(rows, 0.5)
    assert signs.tolist() == [[1, 0, 0, -1, 0], [0] * 5]
    assert magnitudes.flatten().tolist() == pytest.approx([5 / 1.5, 0.0])
    assert to_signs(rows, 1 / 3)[0].tolist()[0] == [1, -1, 0, -1, 0], "the threshold itself travels"
    packed = pack(signs)
    assert (packed.shape, packed.dtype) == ((2, 2), torch.uint8)
    assert packed[0].tolist() == [2 | 1 << 2 | 1 << 4 | 0 << 6, 1]
    for n in (1, 4, 7, 64):
        values = torch.from_numpy(philox(1, n).integers(-1, 2, (3, n)).astype(np.int8))
        assert torch.equal(torch.stack([unpack(row, n) for row in pack(values)]), values)


def test_of_equal_elements_the_first_are_sent_and_the_rest_waits() -> None:
    x = torch.tensor([[3.0, -3.0, 1.0, -3.0]])
    assert largest(x, 2).tolist() == [[0, 1]]
    codec = TopK(0.5).codec([], 4, ParallelContext.single().dp, CPU)
    grad = x[0].clone()
    codec.start(grad, slice(0, 4), 1.0)
    codec.wait()
    codec.commit()
    assert grad.tolist() == [3.0, -3.0, 0.0, 0.0]
    assert codec.residual is not None
    assert codec.residual.tolist() == [0.0, 0.0, 1.0, -3.0]
    grad.fill_(0.5)
    codec.start(grad, slice(0, 4), 1.0)
    codec.wait()
    assert grad.tolist() == [0.0, 0.0, 1.5, -2.5]


def test_the_largest_are_those_of_a_stable_sort() -> None:
    x = torch.from_numpy(philox(3, "ties").integers(-3, 4, (4, 500)).astype(np.float32))
    for k in (1, 7, 250, 500):
        expected = x.abs().sort(dim=1, descending=True, stable=True).indices[:, :k].sort(dim=1).values
        assert torch.equal(largest(x, k), expected)


def test_orthonormal_columns_span_what_a_qr_spans() -> None:
    generator = torch.Generator().manual_seed(4)
    matrices = [torch.randn(m, 4, generator=generator) * scale for m, scale in ((30, 1e-9), (7, 1.0), (4, 1e9))]
    matrices[1][:, 1] = matrices[1][:, 0] * 3 + 1e-3 * matrices[1][:, 1]  # nearly dependent
    expected = [q @ q.t() for q in (torch.linalg.qr(p.double()).Q for p in matrices)]
    orthonormalize(matrices)
    for p, projection in zip(matrices, expected):
        # 6e-6 for the nearly dependent ones; orders of sums differ from machine to machine.
        assert (p.t() @ p - torch.eye(4)).abs().max() < 3e-5
        assert (p.double() @ p.double().t() - projection).abs().max() < 3e-5
    dependent = torch.randn(9, 1, generator=generator) * torch.ones(4)
    dependent[:, 3] = 0.0
    zero = torch.zeros(9, 4)
    orthonormalize([dependent, zero])
    assert dependent.isfinite().all()
    assert dependent.square().sum(0).max() < 1.1
    assert not zero.any()


def test_biases_of_experts_are_no_matrix() -> None:
    ctx, sharded_dims = ParallelContext.single(), (("ep", 0), ("tp", 1))
    params = [
        ShardedParameter.empty(Shard(ParamSpec(name, shape, sharded_dims), Layout(ctx.grid, 0)), torch.float32, CPU)
        for name, shape in {"up_proj.bias": (8, 12), "up_proj.weight": (8, 12, 6)}.items()
    ]
    entries = [BucketParam.of(param, start) for param, start in zip(params, (0, 96))]
    assert [p.name for p in PowerSGD(entries, 96 + 576, ctx.dp, CPU, 1).matrices] == ["up_proj.weight"]


def test_every_codec_reads_its_argument_and_no_other() -> None:
    assert {spec.partition(":")[0] for spec in SPECS} == {*CODECS}
    assert read_compression("none") is None
    for spec in SPECS:
        compression = read_compression(spec)
        assert compression == read_compression(spec)
        assert compression is not None
        kept, within = compression.memory(Gradients(1000, 400, 600, [(20, 30)]))
        assert kept >= 0 < within
        assert compression.element_bytes < 4
    forms = "int8, int8-stochastic, topk:F with 0 < F <= 1, threshold:F with 0 < F <= 1"
    rule = f"must be none, {forms}, or powersgd:R with a whole number R of at least 1"
    arguments = {
        "int8": ("", "1"),
        "int8-stochastic": ("", "1"),
        "topk": ("", "0", "1.5"),
        "threshold": ("", "0", "1.5"),
        "powersgd": ("", "0", "1.5"),
        "none": ("1",),
        "zip": ("1",),
    }
    wrongs = [f"{name}:{argument}" for name, given in arguments.items() for argument in given]
    for wrong in ("", "topk", "threshold", "powersgd", *wrongs):
        with pytest.raises(UserError, match=re.escape(f"--compress {wrong}: {rule}")):
            read_compression(wrong)


def optimizer_of(
    ctx: ParallelContext, compress: str, zero: int, shapes: dict[str, tuple[int, ...]] = SHAPES
) -> DistributedOptimizer:
    params = [
        ShardedParameter.empty(
            Shard(ParamSpec(name, shape), Layout(ctx.grid, ctx.rank)), torch.float32, CPU, adds_to_main_grad=True
        )
        for name, shape in shapes.items()
    ]
    for param in params:
        param.data.zero_()
    buckets = make_buckets(
        [params], ctx, sharded=Sharding.stage(zero), bucket_size=None, compression=read_compression(compress)
    )
    return DistributedOptimizer(buckets, OptimConfig(), ctx, resolve(None, CPU, torch.float32), overlap_gather=False)


def sums(rank: int, compress: str, zero: int) -> Any:
    """(sums as far as this rank has them, by step; residual; bytes sent) with a NaN on rank 1 in step 2, skipped."""
    ctx = ParallelContext.create(Grid.of(WORLD), CPU)
    optimizer = optimizer_of(ctx, compress, zero)
    (bucket,) = optimizer.buckets
    out, starts = [], {p.shard.spec.name: (s, p.numel()) for p, s in zip(bucket.params, bucket.starts)}
    for step in range(STEPS):
        scale = SCALE / 2**step
        before = [s.flat.clone() for s in optimizer.states()]
        optimizer.start_step(1, scale)
        for param in bucket.params:
            grad = torch.from_numpy(gradient(param.shard.spec.name, rank, step)) * scale
            if (rank, step) == (1, 2):
                grad[-1] = torch.nan
            param.add_grad(grad)
        square = optimizer.finish_grads()
        if step == 2:
            assert compress == "none" or square.isnan() == (rank == 1)
            assert all(torch.equal(a, s.flat) for a, s in zip(before, optimizer.states()))
            continue
        whole = torch.full((bucket.numel,), torch.nan)
        whole[bucket.owned] = bucket.grad_share / scale
        out.append({name: whole[s : s + n].view(SHAPES[name]).numpy() for name, (s, n) in starts.items()})
        optimizer.step(0.0, torch.tensor(1.0))
    residual = None if bucket.codec is None else bucket.codec.residual
    return out, residual, optimizer.grad_bytes_sent, bucket.numel, starts


def flat_of(grads: Grads, numel: int, starts: dict[str, tuple[int, int]]) -> np.ndarray:
    flat = np.zeros(numel, np.float32)
    for name, (start, size) in starts.items():
        flat[start : start + size] = grads[name].ravel()
    return flat


def int8_twin(rows: np.ndarray) -> np.ndarray:
    """What [d, n] becomes on the way, block by block."""
    out = np.empty_like(rows)
    for row, sent in zip(rows, out):
        for at in range(0, len(row), INT8_BLOCK):
            block = row[at : at + INT8_BLOCK]
            scale = np.float32(np.abs(block).max() / np.float32(127)) or np.float32(1)
            sent[at : at + INT8_BLOCK] = np.rint(block / scale).astype(np.int8).astype(np.float32) * scale
    return out


def stochastic_twin(row: np.ndarray, rank: int) -> np.ndarray:
    """What a rank's [n] becomes on the way, given its noise (whose own tests are above)."""
    random, out = noise(torch.from_numpy(row), rank).numpy(), np.empty_like(row)
    share = len(row) // WORLD
    for at in (r * share + b for r in range(WORLD) for b in range(0, share, INT8_BLOCK)):
        part = slice(at, min(at + INT8_BLOCK, (at // share + 1) * share))
        scale = np.float32(np.abs(row[part]).max() / np.float32(127)) or np.float32(1)
        out[part] = np.clip(np.floor(row[part] / scale + random[part]), -127, 127) * scale
    return out


def threshold_twin(rows: np.ndarray, fraction: float) -> np.ndarray:
    out = np.zeros_like(rows)
    for row, sent in zip(rows, out):
        for at in range(0, len(row), THRESHOLD_BLOCK):
            block = row[at : at + THRESHOLD_BLOCK]
            chosen = [i for i, x in enumerate(block) if x and abs(x) >= fraction * np.abs(block).max()]
            size = np.mean([abs(block[i]) for i in chosen]) if chosen else 0
            for i in chosen:
                sent[at + i] = size if block[i] > 0 else -size
    return out


def topk_twin(rows: np.ndarray, fraction: float) -> np.ndarray:
    out = np.zeros_like(rows)
    for row, sent in zip(rows, out):
        chosen = sorted(range(len(row)), key=lambda i: (-abs(row[i]), i))[: round(fraction * len(row))]
        sent[chosen] = row[chosen]
    return out


def twin(compress: str, numel: int, starts: dict[str, tuple[int, int]]) -> tuple[list[np.ndarray], list[np.ndarray]]:
    """(sum of every step that is not skipped, residual of every rank), by NumPy in one process."""
    name, _, number = compress.partition(":")
    left = [np.zeros(numel, np.float32) for _ in range(WORLD)]
    right = {
        n: philox(0, "powersgd", n).standard_normal((s[1], 2), dtype="float32") for n, s in SHAPES.items() if s[1:]
    }
    totals = []
    for step in (0, 1, 3):
        inputs = [flat_of({n: gradient(n, r, step) for n in SHAPES}, numel, starts) + left[r] for r in range(WORLD)]
        if name == "powersgd":
            total = np.sum(inputs, 0)
            means = [np.copy(x) for x in inputs]
            for n, q in right.items():
                start, size = starts[n]
                ms = [x[start : start + size].reshape(SHAPES[n]) for x in inputs]
                p, _ = np.linalg.qr(sum(m @ q for m in ms))
                right[n] = np.asarray(sum(m.T @ p for m in ms))
                estimate = (p @ right[n].T).ravel()
                total[start : start + size] = estimate
                for x, mean in zip(inputs, means):
                    mean[start : start + size] = estimate / WORLD
                    assert x is not mean
            left = [x - mean for x, mean in zip(inputs, means)]
        else:
            by_share = {
                "int8": int8_twin,
                "topk": lambda x: topk_twin(x, float(number)),
                "threshold": lambda x: threshold_twin(x, float(number)),
            }
            if name == "int8-stochastic":
                sent = [stochastic_twin(x, rank) for rank, x in enumerate(inputs)]
            else:
                sent = [by_share[name](x.reshape(WORLD, -1)).ravel() for x in inputs]
            total = np.sum(sent, 0)
            left = [x - s if number else 0 * x for x, s in zip(inputs, sent)]
        totals.append(total)
    return totals, left


def formula(compress: str, numel: int, zero: int) -> int:
    """Bytes that one rank sends for a bucket of `numel` elements."""
    name, _, number = compress.partition(":")
    share, others = numel // WORLD, WORLD - 1
    gather = 0 if zero else others * 4 * share
    if name == "threshold":
        return others * (-(-share // 4) + 4 * -(-share // THRESHOLD_BLOCK)) + gather
    if name.startswith("int8"):
        return others * (share + 4 * -(-share // INT8_BLOCK)) + gather
    if name == "topk":
        return others * 8 * round(float(number) * share) + gather
    if name == "powersgd":
        left, right, dense = (4 * n for n in (2 * (30 + 40), 2 * (11 + 30), 30))
        return sum(2 * others * n // WORLD for n in (left + dense, right)) + others * left // WORLD
    return others * 4 * share * (1 if zero else 2)


@pytest.mark.parametrize("zero", [0, 1])
@pytest.mark.parametrize("compress", ["none", *SPECS])
def test_sums_residuals_and_bytes_are_those_of_numpy(pool: WorkerPool, compress: str, zero: int) -> None:
    ranks = pool.run(WORLD, sums, compress, zero)
    _, residual, _, numel, starts = ranks[0]
    assert [sent for _, _, sent, *_ in ranks] == [formula(compress, numel, zero)] * WORLD
    if compress == "none":
        return
    totals, left = twin(compress, numel, starts)
    for step, total in enumerate(totals):
        for name, (start, size) in starts.items():
            expected = total[start : start + size].reshape(SHAPES[name])
            seen = np.zeros(SHAPES[name], bool)
            for out, *_ in ranks:
                got = out[step][name]
                here = ~np.isnan(got)
                seen |= here
                assert np.abs(got - expected)[here].max(initial=0) < 2e-5, (name, step)
                # Each rank that has it has the same bits.
                assert zero or np.array_equal(got, ranks[0][0][step][name])
            assert seen.all()
    for (_, got, *_), expected in zip(ranks, left):
        assert (got is None) == compress.startswith("int8")
        if got is not None:
            np.testing.assert_allclose(got.numpy(), expected, atol=2e-5)


def carried(rank: int, world: int, folder: str, load: bool) -> dict[tuple[str, str], np.ndarray]:
    """Save after two steps, or load: what PowerSGD carries from step to step, whole, by (name, kind)."""
    ctx = ParallelContext.create(Grid.of(world), CPU)
    optimizer = optimizer_of(ctx, "powersgd:2", 1)
    states = optimizer.states()
    if load:
        load_checkpoint(folder, states, ctx)
        optimizer.finish_load()
    else:
        for step in range(2):
            optimizer.start_step(1)
            for param in optimizer.buckets[0].params:
                param.add_grad(torch.from_numpy(gradient(param.shard.spec.name, rank, step)))
            optimizer.finish_grads()
            optimizer.step(0.1, torch.tensor(1.0))
        saver = Checkpointer(Path(folder).parent, ctx)
        saver.save(2, states, {})
        saver.close()
    return {(s.name, s.kind): s.flat.numpy().copy() for s in states if s.summand is not None}


def test_another_dp_continues_with_an_equal_part_of_the_sum(pool: WorkerPool, tmp_path: Path) -> None:
    folder = str(tmp_path / "step_00000002")
    saved = {key: x for rank in pool.run(2, carried, 2, folder, False) for key, x in rank.items()}
    same = {key: x for rank in pool.run(2, carried, 2, folder, True) for key, x in rank.items()}
    assert all(np.array_equal(saved[key], x) for key, x in same.items())
    assert len(saved) == len(same) == 2 * 3 + 2
    three = {key: x for rank in pool.run(3, carried, 3, folder, True) for key, x in rank.items()}
    for name in SHAPES:
        whole = saved[name, "residual_0"] + saved[name, "residual_1"]
        assert whole.any() == (name != "c.bias")
        for part in range(3):
            np.testing.assert_allclose(three[name, f"residual_{part}"], whole / 3, rtol=1e-6)
    assert np.array_equal(three["b.weight", "powersgd_0"], saved["b.weight", "powersgd_0"])


class Sum(NamedTuple):
    """A step of one rank, flat; NaN where another rank has the sum.

    Attributes:
        given: its gradient, and what it had left before.
        total: the sum over the ranks.
        left: what it has left; None if its codec keeps nothing.
        kept: bytes that the codec carries over to the next step.
        sent: bytes that the rank has sent.
    """

    given: np.ndarray
    total: np.ndarray
    left: np.ndarray | None
    kept: int
    sent: int


def one_sum(optimizer: DistributedOptimizer, rank: int, step: int) -> Sum:
    (bucket,) = optimizer.buckets
    assert bucket.codec is not None
    left, given = bucket.codec.residual, torch.zeros(bucket.numel)
    if left is not None:
        given += left
    optimizer.start_step(1, SCALE)
    for param, start in zip(bucket.params, bucket.starts):
        grad = torch.from_numpy(gradient(param.shard.spec.name, rank, step, WIDE))
        given[start : start + grad.numel()] += grad.view(-1)
        param.add_grad(grad * SCALE)
    optimizer.finish_grads()
    total = torch.full((bucket.numel,), torch.nan)
    total[bucket.owned] = bucket.grad_share / SCALE
    optimizer.step(0.0, torch.tensor(1.0))
    kept = sum(state.flat.nbytes for state in optimizer.states() if state.summand is not None)
    residual = None if left is None else left.numpy().copy()
    return Sum(given.numpy(), total.numpy(), residual, kept, optimizer.grad_bytes_sent)


def all_sums(rank: int, compress: str, zero: int) -> list[Sum]:
    """By step. The last one is also that of an optimizer which has loaded what the first one has saved by then."""
    ctx = ParallelContext.create(Grid.of(WORLD), CPU)
    optimizer, resumed = (optimizer_of(ctx, compress, zero, WIDE) for _ in range(2))
    out = [one_sum(optimizer, rank, step) for step in range(STEPS - 1)]
    for saved, loaded in zip(optimizer.states(), resumed.states(), strict=True):
        loaded.flat.copy_(saved.flat)
    resumed.finish_load()
    out += [one_sum(each, rank, STEPS - 1) for each in (optimizer, resumed)]
    return out


def backlogs(rank: int, specs: list[str], steps: int) -> list[float]:
    """How many gradients of a rank are left after steps of one gradient; those of a codec that keeps nothing: 0."""
    ctx, out = ParallelContext.create(Grid.of(WORLD), CPU), []
    for compress in specs:
        optimizer = optimizer_of(ctx, compress, 1, WIDE)
        first, *_, last = [one_sum(optimizer, rank, 0) for _ in range(steps)]
        out.append(0.0 if last.left is None else float(np.linalg.norm(last.left) / np.linalg.norm(first.given)))
    return out


def test_every_element_travels_sooner_or_later(pool: WorkerPool) -> None:
    """Of codecs that exchange elements; PowerSGD takes as many steps as a matrix has directions."""
    specs = [specs_of(name)[0] for name, codec in CODECS.items() if issubclass(codec, Exchange)]
    for rank in pool.run(WORLD, backlogs, specs, 40):
        assert max(rank) < 8, dict(zip(specs, rank))


@pytest.mark.parametrize("zero", [0, 1])
@pytest.mark.parametrize("name", CODECS)
def test_whatever_a_codec_sends(pool: WorkerPool, name: str, zero: int) -> None:
    """What it drops is left, or little and random; all ranks have one sum; it keeps and sends what it says."""
    compress = specs_of(name)[0]
    compression = read_compression(compress)
    assert compression is not None
    *steps, resumed = zip(*pool.run(WORLD, all_sums, compress, zero), strict=True)
    numel, dropped, squares = len(steps[0][0].total), 0.0, 0.0
    total = sum(math.prod(shape) for shape in WIDE.values())
    grads = Gradients(total, numel, 0, [shape for shape in WIDE.values() if len(shape) == 2])
    # A rank sends each other one its part and, without shares, gathers the sums uncompressed; lengths of parts round.
    most = (WORLD - 1) * (numel // WORLD) * (1.02 * compression.element_bytes + (0 if zero else 4))
    for ranks in steps:
        totals = np.stack([rank.total for rank in ranks])
        assert (np.isfinite(totals).sum(0) == (1 if zero else WORLD)).all()
        summed = np.nanmin(totals, 0)
        assert (np.nanmax(totals, 0) == summed).all(), "ranks have different sums"
        given = np.sum([rank.given for rank in ranks], 0, dtype=np.float64)
        if ranks[0].left is None:
            lost = given - summed
            assert np.linalg.norm(lost) < 0.25 * np.linalg.norm(given)
            dropped, squares = dropped + float(np.vdot(lost, given)), squares + float(np.vdot(given, given))
        else:
            left = np.sum([rank.left for rank in ranks], 0, dtype=np.float64)
            np.testing.assert_allclose(summed + left, given, atol=5e-5)
        for rank in ranks:
            # PowerSGD sends as few elements as a matrix lets it.
            assert (0.9 * most if isinstance(compression, Exchange) else 0) < rank.sent <= most
            assert rank.kept == compression.memory(grads)[0]
    # What is left out for good must not shorten the gradient.
    assert abs(dropped) <= 0.005 * squares
    for rank, again in zip(steps[-1], resumed, strict=True):
        assert all(np.array_equal(a, b, equal_nan=True) for a, b in zip(rank[:2], again[:2])), "it forgets on resuming"


@pytest.mark.parametrize("name", CODECS)
def test_every_codec_tells_arguments_apart(name: str) -> None:
    read = [
        parse(["--vocab-size", "90", "--mock-data", "--compress", s]).config.train.compression for s in specs_of(name)
    ]
    assert read == [read_compression(spec) for spec in specs_of(name)]
    assert len({*read}) == len(read)
