"""Column- and row-parallel layers and the embedding against torch's own on one process."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch.nn import functional as F
from torch.utils._python_dispatch import TorchDispatchMode

from megalite.core import ops as kernels
from megalite.core.mesh.context import Axis, ParallelContext
from megalite.core.mesh.grid import Grid
from megalite.core.sharding import ParamSpec
from megalite.core.sharding.parameter import ShardedParameter
from megalite.core.tensor_parallel.embedding import VocabParallelEmbedding
from megalite.core.tensor_parallel.linear import ColumnParallelLinear, RowParallelLinear, WgradQueue
from tests.shards import tp_shard
from tests.workers import WorkerPool

CPU = torch.device("cpu")
S, B, IN, OUT, VOCAB = 8, 3, 12, 16, 20


def sharded(spec: ParamSpec, whole: torch.Tensor, tp: Axis, dtype: torch.dtype) -> ShardedParameter:
    """This rank's shard with a gradient buffer and a count of contributions."""
    shard = tp_shard(spec, tp.rank, tp.size)
    param = ShardedParameter.empty(shard, dtype, CPU, adds_to_main_grad=True)
    param.data.copy_(shard.take(whole))
    param.main_grad = torch.full(shard.shape, torch.nan)
    added: list[None] = []
    param.after_grad = lambda: added.append(None)  # noqa: PLW0108
    param.added = added  # type: ignore[attr-defined]
    return param


def tensors(dtype: torch.dtype = torch.float32) -> dict[str, torch.Tensor]:
    g = torch.Generator().manual_seed(11)
    shapes = {"x": (S, B, IN), "weight": (OUT, IN), "bias": (OUT,), "dy": (S, B, OUT)}
    return {name: torch.randn(shape, generator=g).to(dtype) for name, shape in shapes.items()}


def part(t: torch.Tensor, tp: Axis, dim: int) -> torch.Tensor:
    return t.chunk(tp.size, dim)[tp.rank].contiguous()


def layer_of(kind: str, tp: Axis, sequence_parallel: bool, queue: WgradQueue, dtype: torch.dtype) -> Any:
    t = tensors(dtype)
    dim = 0 if kind == "column" else 1
    weight = sharded(ParamSpec("w", (OUT, IN), (("tp", dim),)), t["weight"], tp, dtype)
    bias = sharded(ParamSpec("b", (OUT,), sharded_dims=(("tp", 0),) if kind == "column" else ()), t["bias"], tp, dtype)
    make = ColumnParallelLinear if kind == "column" else RowParallelLinear
    return make(weight, bias, tp, sequence_parallel, queue, kernels.resolve("torch", CPU, dtype))


def kept(work: Any) -> dict[int, int]:
    """Bytes by address of the tensors that a deferred closure holds, parameters aside."""
    if isinstance(work, torch.Tensor):
        return {} if isinstance(work, ShardedParameter) else {work.data_ptr(): work.nbytes}
    held = [work.func, *work.args] if isinstance(work, partial) else []
    held += [cell.cell_contents for cell in getattr(work, "__closure__", None) or ()]
    return {address: size for part in held for address, size in kept(part).items()}


def kept_for_w(rank: int, kind: str, sequence_parallel: bool) -> int:
    tp = ParallelContext.create(Grid.of(2, tp=2), CPU).tp
    queue = WgradQueue()
    layer = layer_of(kind, tp, sequence_parallel, queue, torch.float32)
    rows = S // 2 if sequence_parallel else S
    wide_in, wide_out = (S, IN // 2), (S, OUT // 2)
    (s_in, width_in), (s_out, width_out) = ((rows, IN), wide_out) if kind == "column" else (wide_in, (rows, OUT))
    y = layer(torch.randn(s_in, B, width_in, requires_grad=True))
    with queue.defer(0):
        y.backward(torch.randn(s_out, B, width_out))
    return sum(size for work in queue._kept[0] for size in kept(work).values())


@pytest.mark.parametrize("kind", ["column", "row"])
def test_what_is_kept_until_w_is_cut_over_ranks(pool: WorkerPool, kind: str) -> None:
    """With sequence parallelism, both the layer's input and its output gradient are shards."""
    half = (IN + OUT) * S * B // 2 * 4
    whole = (OUT // 2 + IN if kind == "column" else IN // 2 + OUT) * S * B * 4
    assert pool.run(2, kept_for_w, kind, True) == [half] * 2
    assert pool.run(2, kept_for_w, kind, False) == [whole] * 2


def run_layer(rank: int, world: int, kind: str, sequence_parallel: bool, dtype: torch.dtype) -> dict[str, torch.Tensor]:
    """Output and gradients of two micro-batches, fused and (in the second run) with the weight gradient kept back."""
    tp = ParallelContext.create(Grid.of(world, tp=world), CPU).tp if world > 1 else Axis("tp")
    t = tensors(dtype)
    queue = WgradQueue()
    results = []
    for split in (False, True):
        layer = layer_of(kind, tp, sequence_parallel, queue, dtype)
        cut_in, cut_out = (part(t["x"], tp, 0), part(t["dy"], tp, 2)), (part(t["x"], tp, 2), part(t["dy"], tp, 0))
        x, dy = cut_in if kind == "column" else cut_out
        if not sequence_parallel:
            x, dy = (t["x"], dy) if kind == "column" else (x, t["dy"])
        grads: list[torch.Tensor] = []
        for microbatch in range(2):
            x = x.detach().clone().requires_grad_()
            y = layer(x)
            if split:
                with queue.defer(microbatch):
                    y.backward(dy)
                assert len(layer.weight.added) == microbatch
                queue.run(microbatch)
            else:
                y.backward(dy)
            assert len(layer.weight.added) == len(layer.bias.added) == microbatch + 1
            assert layer.weight.grad is None
            assert x.grad is not None
            grads.append(x.grad)
        assert torch.equal(grads[0], grads[1])
        results.append({"y": y.detach(), "dx": grads[0], "dw": layer.weight.main_grad, "db": layer.bias.main_grad})
    for name, value in results[0].items():
        assert torch.equal(value, results[1][name]), f"{name} differs when the weight gradient is kept back"
    return results[0]


def torch_linear(dtype: torch.dtype) -> dict[str, torch.Tensor]:
    """The same by nn.functional.linear; weight gradients of two equal micro-batches, summed in fp32."""
    t = {name: value.float().requires_grad_(name != "dy") for name, value in tensors(dtype).items()}
    y = F.linear(t["x"], t["weight"], t["bias"])
    y.backward(t["dy"])
    grads = {name: grad for name in ("x", "weight", "bias") if (grad := t[name].grad) is not None}
    return {"y": y.detach(), "dx": grads["x"], "dw": 2 * grads["weight"], "db": 2 * grads["bias"]}


@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 1e-5), (torch.bfloat16, 4e-2)])
@pytest.mark.parametrize("sequence_parallel", [False, True])
@pytest.mark.parametrize("kind", ["column", "row"])
@pytest.mark.parametrize("world", [1, 2])
def test_linear_is_torch_linear(
    pool: WorkerPool, world: int, kind: str, sequence_parallel: bool, dtype: torch.dtype, tolerance: float
) -> None:
    ranks = pool.run(world, run_layer, world, kind, sequence_parallel, dtype)
    whole: dict[str, Callable[[str], torch.Tensor]] = {
        "cat0": lambda n: torch.cat([r[n] for r in ranks], 0),
        "cat1": lambda n: torch.cat([r[n] for r in ranks], 1),
        "cat2": lambda n: torch.cat([r[n] for r in ranks], 2),
        "same": lambda n: ranks[0][n],
        "sum": lambda n: torch.stack([r[n] for r in ranks]).sum(0),
    }
    sequence = "cat0" if sequence_parallel else "same"
    if kind == "column":
        how = {"y": "cat2", "dx": sequence, "dw": "cat0", "db": "cat0"}
    else:
        # Under sequence parallelism each rank sees the bias gradient of its part of the sequence.
        how = {"y": sequence, "dx": "cat2", "dw": "cat1", "db": "sum" if sequence_parallel else "same"}
    for name, expected in torch_linear(dtype).items():
        got = whole[how[name]](name).float()
        torch.testing.assert_close(
            got, expected, rtol=tolerance, atol=tolerance * 2, msg=partial("{}: {}".format, name)
        )
        if how[name] == "same":
            assert all(torch.equal(r[name], ranks[0][name]) for r in ranks)


def test_weight_gradients_are_not_rounded_to_bf16() -> None:
    """512 micro-batches of gradient 1 + 2^-7: a bf16 sum would stop growing at 256."""
    tp = Axis("tp")
    layer = layer_of("column", tp, False, WgradQueue(), torch.bfloat16)
    x = torch.ones(1, 1, IN, dtype=torch.bfloat16)
    dy = torch.full((1, 1, OUT), 1 + 2**-7, dtype=torch.bfloat16)
    for _ in range(512):
        layer(x.requires_grad_()).backward(dy)
    assert torch.equal(layer.weight.main_grad, torch.full((OUT, IN), 512 * (1 + 2**-7)))
    assert torch.equal(layer.bias.main_grad, torch.full((OUT,), 512 * (1 + 2**-7)))


def test_kept_work_runs_by_micro_batch_and_once_while_the_next_input_travels() -> None:
    queue, done = WgradQueue(), []

    def work(name: str) -> Any:
        def start() -> Any:
            done.append(f"gather {name}")
            return lambda: done.append(f"add {name}")

        return start

    for microbatch in (0, 1):
        with queue.defer(microbatch):
            for name in "abc":
                queue.put(work(f"{name}{microbatch}"))
    queue.put(work("now"))
    assert done == ["gather now", "add now"]
    for microbatch in (1, 0):
        done.clear()
        queue.run(microbatch)
        order = ["gather a", "gather b", "add a", "gather c", "add b", "add c"]
        assert done == [f"{event}{microbatch}" for event in order]
    with pytest.raises(KeyError):
        queue.run(0)


def test_each_collective_of_a_backward_pass_hides_a_weight_gradient() -> None:
    """An output layer, two row and two column layers; the gathers of row layers follow `catch_up`."""
    queue, done = WgradQueue(one_behind=True), list[str]()

    def put(name: str, collective_in_flight: bool) -> None:
        queue.put(lambda: lambda: done.append(name), collective_in_flight)

    with queue.backward():
        put("output", True)
        assert done == ["output"]  # nothing else hides the sum of its input gradient
        for block in "ab":
            done.clear()
            queue.catch_up()
            assert done == ([] if block == "a" else ["column a"])
            put(f"row {block}", False)
            put(f"column {block}", True)
            assert done[-1] == f"row {block}"
        done.clear()
    assert done == ["column b"]

    def interrupted() -> None:
        with queue.backward():
            put("interrupted", False)
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        interrupted()
    with queue.backward():
        pass
    assert done == ["column b"]


def embedding(rank: int, world: int, sequence_parallel: bool) -> tuple[torch.Tensor, torch.Tensor, int]:
    tp = ParallelContext.create(Grid.of(world, tp=world), CPU).tp if world > 1 else Axis("tp")
    g = torch.Generator().manual_seed(2)
    whole = torch.randn(VOCAB, IN, generator=g)
    tokens = torch.randint(0, VOCAB, (S, B), generator=g)
    dy = torch.randn(S, B, IN, generator=g)
    weight = sharded(ParamSpec("e", (VOCAB, IN), sharded_dims=(("tp", 0),)), whole, tp, torch.float32)
    before = tokens.clone()
    y = VocabParallelEmbedding(weight, tp, sequence_parallel)(tokens)
    y.backward(part(dy, tp, 0) if sequence_parallel else dy)
    assert torch.equal(tokens, before)
    return y.detach(), weight.main_grad, len(weight.added)  # type: ignore[attr-defined]


class Named(TorchDispatchMode):
    """The names of what runs, but for views."""

    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if not func.is_view:
            self.names.append(func.overloadpacket.__name__)
        return func(*args, **(kwargs or {}))


def test_a_whole_table_masks_nothing() -> None:
    """All tokens are here: rows used to be zeroed, forward and backward, in four passes over [S, B, H]."""
    tp, whole = Axis("tp"), torch.randn(VOCAB, IN)
    weight = sharded(ParamSpec("e", (VOCAB, IN), sharded_dims=(("tp", 0),)), whole, tp, torch.float32)
    tokens = torch.randint(0, VOCAB, (S, B))
    with Named() as forward:
        y = VocabParallelEmbedding(weight, tp, False)(tokens)
    with Named() as backward:
        y.backward(torch.ones_like(y))
    assert forward.names == ["embedding"]
    assert not {"masked_fill", "masked_fill_"} & {*backward.names}


@pytest.mark.parametrize(("world", "sequence_parallel"), [(1, False), (2, False), (2, True)])
def test_embedding_is_torch_embedding(pool: WorkerPool, world: int, sequence_parallel: bool) -> None:
    g = torch.Generator().manual_seed(2)
    table = torch.randn(VOCAB, IN, generator=g).requires_grad_()
    tokens = torch.randint(0, VOCAB, (S, B), generator=g)
    y = F.embedding(tokens, table)
    y.backward(torch.randn(S, B, IN, generator=g))
    assert table.grad is not None
    ranks = pool.run(world, embedding, world, sequence_parallel)
    for got, _, uses in ranks:
        assert uses == 1
        if not sequence_parallel:
            assert torch.equal(got, y)
    if sequence_parallel:
        assert torch.equal(torch.cat([r[0] for r in ranks]), y)
    torch.testing.assert_close(torch.cat([r[1] for r in ranks]), table.grad, rtol=1e-5, atol=1e-6)
