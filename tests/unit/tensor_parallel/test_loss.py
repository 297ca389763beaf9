"""Vocabulary-parallel cross-entropy on four ranks: figures, and torch's own cross_entropy on the whole logits."""

from __future__ import annotations

import pytest
import torch
from torch.nn import functional as F
from torch.utils.flop_counter import FlopCounterMode

from megalite.core import ops as kernels
from megalite.core.mesh.context import Axis, ParallelContext
from megalite.core.mesh.grid import Grid
from megalite.core.sharding import Layout, ParamSpec, Shard
from megalite.core.sharding.parameter import ShardedParameter
from megalite.core.tensor_parallel.linear import ColumnParallelLinear, WgradQueue
from megalite.core.tensor_parallel.loss import linear_cross_entropy, vocab_parallel_cross_entropy
from tests.workers import WorkerPool

CPU = torch.device("cpu")


def loss_of(
    logits: torch.Tensor, targets: torch.Tensor, tp: Axis, vocab: int, smoothing: float, scale: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """(loss of each row, gradient of this rank's columns) when row i's loss has weight scale[i]."""
    width = logits.shape[1] // tp.size
    mine = logits[:, tp.rank * width : (tp.rank + 1) * width].contiguous().requires_grad_()
    ops = kernels.resolve(None, CPU, logits.dtype)
    # A copy in between: backward overwrites what it was given.
    loss = vocab_parallel_cross_entropy(mine.clone(), targets, tp, vocab, ops, smoothing)
    loss.backward(scale)
    assert mine.grad is not None
    return loss.detach(), mine.grad


def case(dtype: torch.dtype = torch.float32) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    g = torch.Generator().manual_seed(5)
    # Far from zero and with far outliers: the maximum must be taken out over all ranks.
    logits = torch.randn(12, 128, generator=g) * 4 + 30
    logits[3, 100] = 90.0
    targets = torch.randint(0, 120, (12,), generator=g)
    targets[5] = -100
    return logits.to(dtype), targets, torch.rand(12, generator=g) + 0.5


def figures(rank: int) -> list[float]:
    tp = ParallelContext.create(Grid.of(4, tp=4), CPU).tp
    logits = torch.arange(8.0).repeat(16).expand(16, 128)
    loss, _ = loss_of(logits, torch.arange(0, 32, 2), tp, 128, 0.0, torch.ones(16))
    return loss.tolist()


def test_figures(pool: WorkerPool) -> None:
    for got in pool.run(4, figures):
        assert got == pytest.approx([10.2309283, 8.2309283, 6.2309283, 4.2309283] * 4, abs=1e-5)


def with_padding(rank: int, dtype: torch.dtype) -> dict[float, tuple[torch.Tensor, torch.Tensor, torch.Tensor]]:
    """Per smoothing: (loss, gradient) with 120 true columns, and the loss with garbage in the others."""
    tp = ParallelContext.create(Grid.of(4, tp=4), CPU).tp
    logits, targets, scale = case(dtype)
    garbage = logits.clone()
    garbage[:, 120:] = torch.tensor([float("inf"), float("nan"), 6e4, -6e4]).repeat(2)
    out = {}
    for smoothing in (0.0, 0.1):
        loss, grad = loss_of(logits, targets, tp, 120, smoothing, scale)
        spoilt, spoilt_grad = loss_of(garbage, targets, tp, 120, smoothing, scale)
        assert torch.equal(grad, spoilt_grad)
        out[smoothing] = loss, grad, spoilt
    return out


@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 1e-5), (torch.bfloat16, 1e-2), (torch.float16, 1e-3)])
def test_equals_torch_on_the_whole_vocabulary(pool: WorkerPool, dtype: torch.dtype, tolerance: float) -> None:
    logits, targets, scale = case(dtype)
    ranks = pool.run(4, with_padding, dtype)
    for smoothing in (0.0, 0.1):
        whole = logits[:, :120].float().requires_grad_()
        loss = F.cross_entropy(whole, targets, reduction="none", label_smoothing=smoothing)
        loss.backward(scale)
        grad = torch.cat([r[smoothing][1] for r in ranks], 1)
        assert not grad[:, 120:].any()
        assert not grad[5].any()
        assert whole.grad is not None
        # The loss is fp32 whatever the logits are; the gradient is rounded to their type.
        torch.testing.assert_close(grad[:, :120].float(), whole.grad, rtol=tolerance, atol=tolerance * 0.01)
        for mine, _, spoilt in (r[smoothing] for r in ranks):
            torch.testing.assert_close(mine, loss.detach(), rtol=1e-5, atol=1e-5)
            assert torch.equal(mine, ranks[0][smoothing][0])
            assert torch.equal(mine, spoilt)


@pytest.mark.parametrize("smoothing", [0.0, 0.3])
def test_gradient_by_finite_differences(smoothing: float) -> None:
    logits = torch.randn(4, 10, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    targets, scale = torch.tensor([0, 6, -1, 3]), torch.tensor([1.0, 2.0, 3.0, 4.0], dtype=torch.float64)

    def total(x: torch.Tensor) -> float:
        return (loss_of(x, targets, Axis("tp"), 7, smoothing, scale)[0] * scale).sum().item()

    _, grad = loss_of(logits, targets, Axis("tp"), 7, smoothing, scale)
    for i, j in ((0, 0), (0, 3), (1, 6), (2, 1), (3, 9)):
        step = torch.zeros_like(logits)
        step[i, j] = 1e-6
        slope = (total(logits + step) - total(logits - step)) / 2e-6
        assert grad[i, j].item() == pytest.approx(slope, abs=1e-7), (i, j)


def test_a_second_backward_is_refused() -> None:
    """The first one overwrote the logits; what a second one would give is garbage."""
    logits = torch.randn(2, 8, requires_grad=True)
    ops = kernels.resolve(None, CPU, torch.float32)
    loss = vocab_parallel_cross_entropy(logits * 1.0, torch.tensor([0, 1]), Axis("tp"), 8, ops).sum()
    loss.backward(retain_graph=True)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


def z_loss_of(rank: int, world: int, softcap: float | None) -> list[tuple[torch.Tensor, torch.Tensor, torch.Tensor]]:
    """(loss, gradients of hidden states and of the weight) with and without chunks, in a vocabulary with padding."""
    tp = ParallelContext.create(Grid.of(world, tp=world), CPU).tp
    rows, hidden, vocab = 12, 8, 128
    g = torch.Generator().manual_seed(3)
    x, weight = torch.randn(rows, 1, hidden, generator=g), torch.randn(vocab, hidden, generator=g)
    targets, dloss = torch.randint(0, 120, (rows, 1), generator=g), torch.rand(rows, 1, generator=g)
    targets[4] = -100
    width = vocab // world
    ops, out = kernels.resolve(None, CPU, torch.float32), []
    for chunk in (0, 5):
        param = ShardedParameter.empty(Shard(ParamSpec("w", (width, hidden)), Layout()), torch.float32, CPU, True)
        param.data.copy_(weight[rank * width : (rank + 1) * width])
        param.main_grad = torch.zeros(width, hidden)
        bias = ShardedParameter.empty(Shard(ParamSpec("b", (width,)), Layout()), torch.float32, CPU, True)
        bias.data.zero_()
        bias.main_grad = torch.zeros(width)
        layer = ColumnParallelLinear(param, bias, tp, False, WgradQueue(), ops)
        mine = x.clone().requires_grad_()
        if chunk:
            loss = linear_cross_entropy(mine, layer, targets, 120, chunk, softcap, 0.3, dloss)
        else:
            logits = layer(mine).flatten(0, 1)
            loss = vocab_parallel_cross_entropy(logits, targets.flatten(), tp, 120, ops, 0.0, 0.3, softcap)
        loss.backward(dloss if chunk else dloss.flatten())
        assert mine.grad is not None
        out.append((loss.detach().flatten(), mine.grad, param.main_grad))
    return out


@pytest.mark.parametrize("softcap", [None, 3.0])
def test_the_gradient_of_z_loss_is_that_of_torch(pool: WorkerPool, softcap: float | None) -> None:
    """The value stays the cross-entropy; the gradient is that of cross-entropy + 0.3 * log-sum-exp squared."""
    g = torch.Generator().manual_seed(3)
    x, weight = torch.randn(12, 1, 8, generator=g).requires_grad_(), torch.randn(128, 8, generator=g).requires_grad_()
    targets, dloss = torch.randint(0, 120, (12, 1), generator=g).flatten(), torch.rand(12, 1, generator=g).flatten()
    targets[4] = -100
    logits = (x.flatten(0, 1) @ weight.t())[:, :120]
    logits = logits if softcap is None else softcap * (logits / softcap).tanh()
    loss = F.cross_entropy(logits, targets, reduction="none")
    (loss + 0.3 * logits.logsumexp(1).square().masked_fill(targets < 0, 0.0)).backward(dloss)
    ranks = pool.run(4, z_loss_of, 4, softcap)
    for chunked in (0, 1):
        weights = torch.cat([rank[chunked][2] for rank in ranks])
        torch.testing.assert_close(weights, weight.grad, rtol=1e-5, atol=1e-5)
        for rank in ranks:
            torch.testing.assert_close(rank[chunked][0], loss.detach(), rtol=1e-5, atol=1e-5)
            torch.testing.assert_close(rank[chunked][1], x.grad, rtol=1e-5, atol=1e-5)


def test_all_rows_ignored_and_no_rows() -> None:
    ops = kernels.resolve(None, CPU, torch.float32)
    for rows in (0, 3):
        logits = torch.randn(rows, 8, requires_grad=True)
        loss = vocab_parallel_cross_entropy(logits * 1.0, torch.full((rows,), -1), Axis("tp"), 8, ops)
        loss.sum().backward()
        assert loss.tolist() == [0.0] * rows
        assert logits.grad is not None
        assert not logits.grad.any()


def test_chunks_take_three_products_and_no_more() -> None:
    """Loss and gradients of the output layer with and without chunks, whose gradients are ready before backward."""
    rows, hidden, vocab, real = 12, 16, 24, 22
    g = torch.Generator().manual_seed(3)
    x, weight = torch.randn(rows, 1, hidden, generator=g), torch.randn(vocab, hidden, generator=g)
    targets, dloss = torch.randint(0, real, (rows, 1), generator=g), torch.rand(rows, 1, generator=g)
    targets[4] = -100
    results = []
    for chunk in (0, 5):
        param = ShardedParameter.empty(Shard(ParamSpec("w", (vocab, hidden)), Layout()), torch.float32, CPU, True)
        param.data.copy_(weight)
        param.main_grad = torch.full_like(weight, torch.nan)
        ops = kernels.resolve(None, CPU, torch.float32)
        layer = ColumnParallelLinear(param, None, Axis("tp"), False, WgradQueue(), ops)
        mine = x.clone().requires_grad_()
        with FlopCounterMode(display=False) as counted:
            if chunk:
                loss = linear_cross_entropy(mine, layer, targets, real, chunk, dloss=dloss)
                before = param.main_grad.clone()
                loss.backward(dloss)
                assert torch.equal(param.main_grad, before)
            else:
                loss = vocab_parallel_cross_entropy(layer(mine).flatten(0, 1), targets.flatten(), layer.tp, real, ops)
                loss.backward(dloss.flatten())
        assert counted.get_total_flops() == 3 * 2 * rows * hidden * vocab
        results.append((loss.detach().flatten(), mine.grad, param.main_grad))
    for chunked, whole in zip(*results):
        torch.testing.assert_close(chunked, whole, rtol=1e-5, atol=1e-6)
