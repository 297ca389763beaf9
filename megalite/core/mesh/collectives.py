"""Every collective of a step, and the conjugate pairs that autograd requires. An axis of one rank is handled here.

Conjugates (Shoeybi et al. 2019, section 3; Korthikanti et al. 2022, section 4.2):

    forward            backward
    copy               all-reduce
    all-reduce         copy
    all-gather         reduce-scatter
    reduce-scatter     all-gather
    all-to-all         all-to-all
"""

from __future__ import annotations

import hashlib
import time
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import Any, TypeAlias, TypeVar

import torch
import torch.distributed as dist

from megalite.core.mesh.by_messages import AllGather, SumOfSlices
from megalite.core.mesh.context import Axis
from megalite.core.mesh.turns import Side

T = TypeVar("T")
MAX = dist.ReduceOp.MAX
Splits = list[int]
"""Number of rows for each rank of an axis."""
Starts: TypeAlias = Callable[[torch.Tensor], tuple[torch.Tensor, "Work"]]
"""Starts a collective of a tensor: (result, work)."""

# torch 2.13 renamed both; the old names warn there, and the new ones do not exist in 2.11.
_gather_into: Callable[..., Any] = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
_reduce_scatter: Callable[..., Any] = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor


class FinishedWork:
    """A finished work handle."""

    sent = 0

    def wait(self) -> None:
        """Return at once: nothing is left to wait for."""

    drop = wait


class Waits:
    """Measures how long this process waits for its peers, in `PendingWork.wait` and in `to_host`.

    Attributes:
        seconds: total so far.
        mark: makes the context that surrounds each wait, such as a range in a profile.
        gaps: CUDA events around each wait of the current stream, while somebody collects them; else None.
    """

    def __init__(self) -> None:
        self.seconds = 0.0
        self.gaps: list[tuple[torch.cuda.Event, torch.cuda.Event]] | None = None
        self.mark: Callable[[], AbstractContextManager[Any]] = nullcontext

    def measure(self, wait: Callable[[], T]) -> T:
        """Run `wait` and add up its time."""
        started = time.perf_counter()
        with self.mark():
            result = wait()
        self.seconds += time.perf_counter() - started
        return result

    def on_stream(self, wait: Callable[[], Any]) -> None:
        """Run a `wait` that only orders the current CUDA stream, where the host's time is no measure."""
        if self.gaps is None:
            self.measure(wait)
            return
        begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        begin.record()
        self.measure(wait)
        end.record()
        self.gaps.append((begin, end))


waits = Waits()


class PendingWork:
    """A collective under way. `wait()` makes the result safe to read; the inputs are kept alive until then.

    Attributes:
        sent: bytes that leave this rank; where the library chooses how they travel, those of a ring.
    """

    def __init__(self, work: Any, *keep: torch.Tensor, sent: int = 0) -> None:
        self._work = work
        self._keep = keep
        self.sent = sent

    def wait(self) -> None:
        """Block (CPU) or order the current stream after the collective (CUDA)."""
        if self._work is not None:
            waits.on_stream(self._work.wait)
            self._work, self._keep = None, ()

    def drop(self) -> None:
        """Wait as well: until then the collective reads and writes the memory of its tensors."""
        self.wait()


Work = FinishedWork | PendingWork


def to_host(x: torch.Tensor) -> list[float]:
    """Return the numbers of a tensor that came from a collective. On CUDA the process waits for its peers here."""
    return waits.measure(x.tolist)


def all_reduce(x: torch.Tensor, axis: Axis, op: Any = dist.ReduceOp.SUM) -> Work:
    """Start an in-place all-reduce of `x` over the axis."""
    if axis.size == 1:
        return FinishedWork()
    sent = 2 * (axis.size - 1) * x.nbytes // axis.size
    return PendingWork(dist.all_reduce(x, op=op, group=axis.group, async_op=True), x, sent=sent)


def broadcast(x: torch.Tensor, axis: Axis) -> Work:
    """Start replacing `x` by that of the first rank of the axis."""
    if axis.size == 1:
        return FinishedWork()
    work = dist.broadcast(x, axis.ranks[0], group=axis.group, async_op=True)
    return PendingWork(work, x, sent=(axis.size - 1) * x.nbytes // axis.size)


def all_to_all(
    out: torch.Tensor,
    x: torch.Tensor,
    axis: Axis,
    received: list[int] | None = None,
    sent: list[int] | None = None,
) -> Work:
    """Start sending row i of `x` to rank i of the axis; row i of `out` is what rank i has sent.

    `received` and `sent` give the number of rows from and to each rank; None: one row each.
    """
    if axis.size == 1:
        out.copy_(x)
        return FinishedWork()
    work = dist.all_to_all_single(out, x, received, sent, group=axis.group, async_op=True)
    return PendingWork(work, out, x, sent=(axis.size - 1) * x.nbytes // axis.size)


def all_gather(out: torch.Tensor, x: torch.Tensor, axis: Axis) -> Work:
    """Start gathering `x` of every rank into `out`, stacked along dimension 0. `x` may be its slice of `out`."""
    if axis.size == 1:
        if out.data_ptr() != x.data_ptr():
            out.copy_(x)
        return FinishedWork()
    work = AllGather(out, x, axis) if axis.on_gloo else _gather_into(out, x, group=axis.group, async_op=True)
    return PendingWork(work, out, x, sent=(axis.size - 1) * x.nbytes)


def reduce_scatter(out: torch.Tensor, x: torch.Tensor, axis: Axis) -> Work:
    """Start summing `x` over the axis, leaving this rank's slice (along dimension 0) in `out`.

    Where `out` has a wider dtype, `x` is sent as it is and summed in fp32.
    """
    if axis.size == 1:
        if out.data_ptr() != x.data_ptr():
            out.copy_(x)
        return FinishedWork()
    by_messages = axis.on_gloo or out.dtype != x.dtype
    work = SumOfSlices(out, x, axis) if by_messages else _reduce_scatter(out, x, group=axis.group, async_op=True)
    return PendingWork(work, out, x, sent=(axis.size - 1) * x.nbytes // axis.size)


def start_all_gather(x: torch.Tensor, axis: Axis) -> tuple[torch.Tensor, Work]:
    """Start an all-gather along dimension 0; returns (result, work)."""
    if axis.size == 1:
        return x, FinishedWork()
    x = x.contiguous()
    out = x.new_empty(x.shape[0] * axis.size, *x.shape[1:])
    return out, all_gather(out, x, axis)


def start_reduce_scatter(x: torch.Tensor, axis: Axis) -> tuple[torch.Tensor, Work]:
    """Start a reduce-scatter along dimension 0; returns (result, work)."""
    if axis.size == 1:
        return x, FinishedWork()
    x = x.contiguous()
    out = x.new_empty(x.shape[0] // axis.size, *x.shape[1:])
    return out, reduce_scatter(out, x, axis)


def start_exchange(x: torch.Tensor, axis: Axis, sent: Splits, received: Splits) -> tuple[torch.Tensor, Work]:
    """Start sending the first `sent[0]` rows of `x` to rank 0 of the axis, and so on; returns (what arrives, work)."""
    out = x.new_empty(sum(received), *x.shape[1:])
    return out, all_to_all(out, x.contiguous(), axis, received, sent)


def start_shift(x: torch.Tensor, axis: Axis) -> tuple[torch.Tensor, Work]:
    """Start sending `x` to the next rank of a ring; returns (what the previous one sends, work)."""
    if axis.size == 1:
        return x, FinishedWork()
    x = x.contiguous()
    received = [0] * axis.size
    sent = [0] * axis.size
    sent[(axis.rank + 1) % axis.size] = received[(axis.rank - 1) % axis.size] = len(x)
    out = torch.empty_like(x)
    work = dist.all_to_all_single(out, x, received, sent, group=axis.group, async_op=True)
    return out, PendingWork(work, out, x, sent=x.nbytes)


class _Copy(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, axis: Axis) -> torch.Tensor:
        ctx.axis = axis
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, None]:
        grad = grad.clone(memory_format=torch.contiguous_format)
        all_reduce(grad, ctx.axis).wait()
        return grad, None


class _Reduce(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, axis: Axis) -> torch.Tensor:
        x = x.clone(memory_format=torch.contiguous_format)
        all_reduce(x, axis).wait()
        return x

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, None]:
        return grad, None


class _ScatterSequence(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, axis: Axis) -> torch.Tensor:
        ctx.axis = axis
        out, work = start_reduce_scatter(x, axis)
        work.wait()
        return out

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, None]:
        full, work = start_all_gather(grad, ctx.axis)
        work.wait()
        return full, None


class _GatherSequence(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, axis: Axis) -> torch.Tensor:
        ctx.axis = axis
        out, work = start_all_gather(x, axis)
        work.wait()
        return out

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, None]:
        out, work = start_reduce_scatter(grad, ctx.axis)
        work.wait()
        return out, None


class Transfer:
    """Something on its way over an axis: started, and waited for after work that does not need it.

    In the backward pass its gradient starts where it was waited for, and is waited for where it was started: what ran
    between the two hides both ways. Where two passes take turns (`Axis.turns`), they do so while they wait.

    Args:
        axis: the axis.
        there, back: start the way there of a tensor, and that of its gradient: (result, work).
        in_turns: whether it takes long enough for another pass to run meanwhile.
    """

    def __init__(self, axis: Axis, there: Starts, back: Starts, in_turns: bool = True) -> None:
        self._axis, self._there, self._back, self._in_turns = axis, there, back, in_turns
        self._work: Work = FinishedWork()
        self._gradient: torch.Tensor | None = None

    def start(self, x: torch.Tensor) -> torch.Tensor:
        """Start the way of a tensor; the result is for `wait` alone."""
        return x if self._axis.size == 1 else _Start.apply(x, self)

    def wait(self, started: torch.Tensor) -> torch.Tensor:
        """Wait for what `start` has returned."""
        return started if self._axis.size == 1 else _Wait.apply(started, self)

    def go(self, x: torch.Tensor) -> torch.Tensor:
        """Start `there`."""
        out, self._work = self._there(x)
        return out

    def go_back(self, grad: torch.Tensor) -> None:
        """Start `back`."""
        self._gradient, self._work = self._back(grad)

    def gradient(self) -> torch.Tensor | None:
        """Return what has come back; once."""
        gradient, self._gradient = self._gradient, None
        return gradient

    def finish(self, side: Side) -> None:
        """Wait for what was started last, in a pass of this kind."""
        if self._in_turns:
            self._axis.turns.hand_over(side)
        self._work.wait()
        # It keeps what was sent, and this is kept for the backward pass.
        self._work = FinishedWork()


class _Start(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, transfer: Transfer) -> torch.Tensor:
        ctx.transfer = transfer
        return transfer.go(x)

    @staticmethod
    def backward(ctx: Any, _: torch.Tensor) -> tuple[torch.Tensor | None, None]:
        ctx.transfer.finish("B")
        return ctx.transfer.gradient(), None


class _Wait(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, started: torch.Tensor, transfer: Transfer) -> torch.Tensor:
        ctx.transfer = transfer
        transfer.finish("F")
        return started.view_as(started)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, None]:
        ctx.transfer.go_back(grad)
        # A gradient must have the shape of what it is for: what comes back has that of x, and goes by the transfer.
        return grad, None


def copy_to(x: torch.Tensor, axis: Axis) -> torch.Tensor:
    """Use a replicated tensor in a parallel region: identity; backward sums the gradient over the axis."""
    return x if axis.size == 1 else _Copy.apply(x, axis)


def reduce_from(x: torch.Tensor, axis: Axis) -> torch.Tensor:
    """Leave a parallel region: sum over the axis; backward is the identity."""
    return x if axis.size == 1 else _Reduce.apply(x, axis)


def scatter_sequence(x: torch.Tensor, axis: Axis) -> torch.Tensor:
    """Leave a parallel region to sequence shards (dimension 0): reduce-scatter; backward all-gathers."""
    return x if axis.size == 1 else _ScatterSequence.apply(x, axis)


def gather_sequence(x: torch.Tensor, axis: Axis) -> torch.Tensor:
    """Enter a parallel region from sequence shards (dimension 0): all-gather; backward reduce-scatters."""
    return x if axis.size == 1 else _GatherSequence.apply(x, axis)


def exchange_rows(x: torch.Tensor, axis: Axis, sent: Splits, received: Splits) -> torch.Tensor:
    """Send the first `sent[0]` rows of x to rank 0 of the axis, and so on; backward sends the gradients back.

    Returns:
        What the ranks have sent here, `received[i]` rows from rank i.
    """
    exchange = exchange_of(axis, sent, received, in_turns=False)
    return exchange.wait(exchange.start(x))


def exchange_of(axis: Axis, sent: Splits, received: Splits, in_turns: bool = True) -> Transfer:
    """Make an exchange of rows; for the arguments see `exchange_rows` and `Transfer`."""
    there, back = (
        partial(start_exchange, axis=axis, sent=s, received=r) for s, r in ((sent, received), (received, sent))
    )
    return Transfer(axis, there, back, in_turns)


def gather_of(axis: Axis, in_turns: bool = True) -> Transfer:
    """Make an all-gather along dimension 0, whose gradient is reduced and scattered."""
    return Transfer(axis, partial(start_all_gather, axis=axis), partial(start_reduce_scatter, axis=axis), in_turns)


def scatter_of(axis: Axis) -> Transfer:
    """Make a reduce-scatter along dimension 0, whose gradient is gathered."""
    return Transfer(axis, partial(start_reduce_scatter, axis=axis), partial(start_all_gather, axis=axis))


def gather_texts(text: str, axis: Axis, device: torch.device) -> Sequence[str]:
    """Gather every rank's text on every rank, in rank order (as bytes: nothing is pickled)."""
    if axis.size == 1:
        return [text]
    data = torch.tensor(list(text.encode()), dtype=torch.uint8, device=device)
    sizes = torch.zeros(axis.size, dtype=torch.int64, device=device)
    all_gather(sizes, torch.tensor([len(data)], device=device), axis).wait()
    width = int(sizes.max())
    if width == 0:
        return [""] * axis.size
    mine = torch.zeros(width, dtype=torch.uint8, device=device)
    mine[: len(data)] = data
    out = torch.empty(width * axis.size, dtype=torch.uint8, device=device)
    all_gather(out, mine, axis).wait()
    rows = out.cpu().reshape(axis.size, width)
    return [bytes(row[:n].tolist()).decode() for row, n in zip(rows, sizes.tolist())]


def gather_digests(texts: Sequence[str], axis: Axis, device: torch.device) -> list[list[int]]:
    """Gather hashes of every rank's texts, 8 bytes of each, in rank order; every rank has as many."""
    hashes = [hashlib.blake2b(text.encode(), digest_size=8).digest() for text in texts]
    mine = torch.tensor([int.from_bytes(value, "big", signed=True) for value in hashes], device=device)
    out = torch.empty(axis.size * len(mine), dtype=torch.int64, device=device)
    all_gather(out, mine, axis).wait()
    return out.view(axis.size, -1).tolist()
