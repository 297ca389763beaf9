"""Streams and memory of real training steps, without a GPU: conflicting accesses out of order, and use after free.

Kernels run on the compute stream or on one that the program makes, communication on a stream of its communicator, as
NCCL's does: one for the collectives of an axis, one for the messages with each peer.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any
from unittest import mock

import torch

from megalite.core.build import build_engine
from megalite.core.engine import Engine
from megalite.core.mesh import collectives
from megalite.core.mesh.context import ParallelContext
from megalite.core.mesh.grid import Grid
from megalite.core.parts.memory import host_share
from megalite.core.step import eval_step, train_step
from megalite.extras.estimate.backends import target_backends
from megalite.extras.estimate.fake_cuda import fake_cuda
from megalite.extras.estimate.order import COMPUTE, HOST, Order, Range
from megalite.extras.estimate.rank import plausible_status, zeros
from megalite.extras.estimate.record import Communication, Event, recorded_world
from megalite.extras.estimate.rows import assumed_rows
from megalite.extras.estimate.tracker import Tracker, arguments, launches, operands
from megalite.runtime.options.run import Config

# Which of its tensors a communication reads, and which it writes.
_USES: dict[str, tuple[int | None, int | None]] = {
    "all_reduce": (0, 0),
    "broadcast": (0, 0),
    "all_gather": (1, 0),
    "reduce_scatter": (1, 0),
    "all_to_all": (1, 0),
    "send": (0, None),
    "recv": (None, 0),
}


def check_rank(
    cfg: Config, grid: Grid, rank: int, before_step: Callable[[Engine, int], None] = lambda engine, step: None
) -> Order:
    """Run two training steps and an evaluation of a rank on fake CUDA tensors; returns their order, with its faults.

    Args:
        cfg: the run's config, vocabulary resolved, without a schedule of batch sizes.
        grid: sizes of all axes.
        rank: any rank of the grid.
        before_step: called with the engine and the number of the step, from 1.
    """
    order = Order()
    storages = _Storages(order)
    with ExitStack() as exit_stack:
        log = exit_stack.enter_context(recorded_world(rank, grid, partial(_post, order, storages)))
        device = exit_stack.enter_context(fake_cuda())
        exit_stack.enter_context(target_backends(cfg.train.ops))
        exit_stack.enter_context(_fake_streams(order, storages))
        exit_stack.enter_context(_Accesses(log, order, storages))
        exit_stack.enter_context(plausible_status(cfg))
        exit_stack.enter_context(_waiting_to_host(order))
        ctx = ParallelContext.create(grid, device)
        engine = build_engine(cfg, ctx)
        exit_stack.enter_context(assumed_rows(cfg, ctx))
        engine.optimizer.gather()
        batch = zeros(engine)
        for step in (1, 2):
            before_step(engine, step)
            train_step(engine, batch, step)
        engine.optimizer.wait_weights()
        eval_step(engine, batch)
        storages.close()
    return order


class _Storages:
    """The storages in use, by their addresses."""

    def __init__(self, order: Order) -> None:
        self._order = order
        self._alive: dict[int, weakref.ref[torch.UntypedStorage]] = {}

    def place(self, x: torch.Tensor) -> Range:
        """Return the range of a tensor; a storage that was not seen before belongs to the current stream."""
        storage = x.untyped_storage()
        key = storage._cdata
        if key not in self._alive:
            self._alive[key] = weakref.ref(storage, lambda _: self._drop(key))
            self._order.allocate(key, self._order.current if x.device.type == "cuda" else HOST)
        if x.numel() == 0:
            return key, 0, 0
        low = int(x.storage_offset()) * x.element_size()
        last = int(sum((size - 1) * stride for size, stride in zip(x.shape, x.stride())))
        return key, low, low + (last + 1) * x.element_size()

    def resize(self, storage: torch.UntypedStorage, nbytes: int) -> None:
        """Free the memory of a storage, or give it new one."""
        key = storage._cdata
        if nbytes < storage.nbytes():
            self._order.free(key, "resize_")
        if key in self._alive:
            self._order.allocate(key, self._order.current)

    def close(self) -> None:
        """Check no storage that is dropped from here on."""
        self._alive.clear()

    def _drop(self, key: int) -> None:
        if self._alive.pop(key, None) is not None:
            self._order.free(key, "the last reference")


class _Accesses(Tracker):
    """Launches every torch operator inside it on the current stream, or on the host."""

    def __init__(self, log: list[Event], order: Order, storages: _Storages) -> None:
        super().__init__(log)
        self._order, self._storages = order, storages

    def _count(self, func: Any, name: str, args: tuple[Any, ...], kwargs: dict[str, Any], results: list[Any]) -> None:
        made = [x for x in results if isinstance(x, torch.Tensor)]
        if not launches(func):
            for x in made:
                self._storages.place(x)  # the current stream owns its memory, wherever it is used first
            return
        values = arguments(func, args, kwargs)
        read, written = operands(func, values, made)
        order, place = self._order, self._storages.place
        on_device = any(x.device.type == "cuda" for x in (*read, *written))
        stream = order.current if on_device else HOST
        order.launch(stream, name.rpartition(":")[2], {place(x) for x in read}, {place(x) for x in written})
        copies = any(x.device.type == "cpu" and x.dim() for x in (*read, *written))
        if on_device and copies and not values.get("non_blocking", False):
            order.wait(HOST, order.clock(stream))


def _post(
    order: Order, storages: _Storages, event: Communication, tensors: tuple[torch.Tensor, ...]
) -> Callable[[], None]:
    """Launch a communication; returns its `wait`, which keeps the tensors alive as NCCL's does."""
    stream = f"{event.axis} {event.peer}" if event.kind in ("send", "recv") else event.axis
    order.wait(stream, order.clock(order.current))
    read, written = ({storages.place(tensors[i])} if i is not None else set() for i in _USES[event.kind])
    order.launch(stream, event.kind, read, written)
    end = order.clock(stream)

    def wait(_: tuple[torch.Tensor, ...] = tensors) -> None:
        order.wait(order.current, end)

    return wait


class FakeEvent:
    """The methods of `torch.cuda.Event` that training calls."""

    def __init__(self, order: Order, **options: Any) -> None:
        self._order = order
        self.clock: dict[str, int] = {}

    def record(self, stream: FakeStream | None = None) -> None:
        self.clock = self._order.clock(self._order.current if stream is None else stream.name)

    def synchronize(self) -> None:
        self._order.wait(HOST, self.clock)


class FakeStream:
    """The methods of `torch.cuda.Stream` that training calls."""

    def __init__(self, order: Order, device: Any = None, *, name: str = "") -> None:
        self._order, self.name = order, name or f"stream {len(order.streams)}"
        order.wait(self.name, {})

    def wait_stream(self, other: FakeStream) -> None:
        self._order.wait(self.name, self._order.clock(other.name))

    def wait_event(self, event: FakeEvent) -> None:
        self._order.wait(self.name, event.clock)

    def record_event(self) -> FakeEvent:
        event = FakeEvent(self._order)
        event.record(self)
        return event


@contextmanager
def _fake_streams(order: Order, storages: _Storages) -> Iterator[None]:
    """Replace torch's streams and events, and follow what frees memory or keeps it without an operator."""
    resize, empty = torch.UntypedStorage.resize_, torch.empty
    upload = FakeStream(order, name="upload")

    @contextmanager
    def on(stream: FakeStream) -> Iterator[None]:
        before, order.current = order.current, stream.name
        yield
        order.current = before

    def resize_(storage: torch.UntypedStorage, nbytes: int) -> torch.UntypedStorage:
        storages.resize(storage, nbytes)
        return resize(storage, nbytes)

    def record_stream(x: torch.Tensor, stream: FakeStream) -> None:
        order.record(storages.place(x)[0], stream.name)

    replaced: list[tuple[Any, str, Any]] = [
        (torch.cuda, "Stream", partial(FakeStream, order)),
        (torch.cuda, "Event", partial(FakeEvent, order)),
        (torch.cuda, "stream", on),
        (torch.cuda, "current_stream", lambda device=None: FakeStream(order, name=order.current)),
        (torch, "empty", lambda *sizes, pin_memory=False, **options: empty(*sizes, **options)),
        (torch.Tensor, "record_stream", record_stream),
        (torch.UntypedStorage, "resize_", resize_),
        (host_share, "_upload_stream", lambda device: upload),
    ]
    with ExitStack() as exit_stack:
        for where, name, instead in replaced:
            exit_stack.enter_context(mock.patch.object(where, name, instead))
        yield


@contextmanager
def _waiting_to_host(order: Order) -> Iterator[None]:
    """Let the host wait for the compute stream where it reads the status of a step."""
    read = collectives.to_host

    def to_host(x: torch.Tensor) -> list[float]:
        order.wait(HOST, order.clock(COMPUTE))
        return read(x)

    with mock.patch.object(collectives, "to_host", to_host):
        yield
