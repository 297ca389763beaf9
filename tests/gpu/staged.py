"""A process group in which several ranks share one GPU, which NCCL refuses: gloo carries the data, in NCCL's order.

An operation starts when the stream that posted it has reached that point, runs on a stream of its own (one per group,
and one per peer for messages), and `wait` makes the current stream wait for its result. In between, neither the host
nor the current stream waits: what overwrites, frees or reads memory too early gets wrong numbers here, as with NCCL.
Unlike NCCL, `wait` blocks the host until the peers have come.

On a CPU a thread takes the place of the stream: it reads and writes the tensors themselves, after the post.
"""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist

NAME = "staged"


class _Work(dist.Work):
    def __init__(self) -> None:
        super().__init__()
        self.done, self.error = threading.Event(), None
        self.end: torch.cuda.Event | None = None

    def wait(self, timeout: Any = None) -> bool:
        self.done.wait()
        if self.error is not None:
            raise RuntimeError(f"staged collective: {self.error}")
        if self.end is not None:
            torch.cuda.current_stream().wait_event(self.end)
        return True


class _Lane:
    """Runs operations one after the other, in a thread and on a stream of its own."""

    def __init__(self, device: torch.device | None) -> None:
        self._device = device
        self._stream = torch.cuda.Stream(device) if device is not None else None
        self._jobs: queue.SimpleQueue[tuple[Any, ...]] = queue.SimpleQueue()
        threading.Thread(target=self._run, daemon=True).start()

    def post(self, run: Callable[..., None], read: list[torch.Tensor], written: list[torch.Tensor]) -> _Work:
        work = _Work()
        reached = None
        if self._stream is not None:
            reached = torch.cuda.Event()
            reached.record()
        self._jobs.put((work, reached, run, read, written))
        return work

    @torch.no_grad()
    def _run(self) -> None:
        while True:
            work, reached, run, read, written = self._jobs.get()
            try:
                work.end = self._execute(reached, run, read, written)
            except Exception as e:
                work.error = e
            work.done.set()
            del work, reached, run, read, written

    def _execute(
        self, reached: Any, run: Callable[..., None], read: list[torch.Tensor], written: list[torch.Tensor]
    ) -> torch.cuda.Event | None:
        if self._stream is None:
            sources, targets = [x.clone() for x in read], [torch.empty_like(x) for x in written]
            run(sources, targets)
            for x, target in zip(written, targets):
                x.copy_(target)
            return None
        with torch.cuda.device(self._device), torch.cuda.stream(self._stream):
            self._stream.wait_event(reached)
            sources = [torch.empty(x.shape, dtype=x.dtype, pin_memory=True) for x in read]
            targets = [torch.empty(x.shape, dtype=x.dtype, pin_memory=True) for x in written]
            for source, x in zip(sources, read):
                source.copy_(x, non_blocking=True)
            self._stream.synchronize()
            run(sources, targets)
            for x, target in zip(written, targets):
                x.copy_(target, non_blocking=True)
            end = torch.cuda.Event()
            end.record()
            # The pinned buffers may be reused only now; the thread has nothing else to do.
            end.synchronize()
            return end


# The type stubs declare several overloads of each method; `torch.distributed` calls one of them.
_ProcessGroup: Any = dist.ProcessGroup


class _Group(_ProcessGroup):
    """The methods of `torch.distributed.ProcessGroup` that training calls."""

    def __init__(self, options: Any) -> None:
        rank, size = options.group_rank, options.group_size
        super().__init__(rank, size)
        self._rank, self._size = rank, size
        # The stubs have the class without its methods.
        self._gloo: Any = dist.ProcessGroupGloo(options.store, rank, size, options.timeout)
        self._lanes: dict[Any, _Lane] = {}

    def getBackendName(self) -> str:
        return NAME

    def size(self) -> int:
        return self._size

    def _post(
        self, run: Callable[..., Any], read: list[torch.Tensor], written: list[torch.Tensor], peer: int | None = None
    ) -> _Work:
        on_gpu = (*read, *written)[0].is_cuda
        key = peer, on_gpu
        if key not in self._lanes:
            self._lanes[key] = _Lane(torch.device("cuda", torch.cuda.current_device()) if on_gpu else None)
        return self._lanes[key].post(run, read, written)

    def allreduce(self, tensors: list[torch.Tensor], opts: Any = None) -> _Work:
        op: Any = opts.reduceOp if opts is not None else dist.ReduceOp.SUM

        def run(sources: list[torch.Tensor], targets: list[torch.Tensor]) -> None:
            options = dist.AllreduceOptions()
            options.reduceOp = op
            self._gloo.allreduce(sources, options).wait()
            targets[0].copy_(sources[0])

        return self._post(run, tensors, tensors)

    def broadcast(self, tensors: list[torch.Tensor], opts: Any) -> _Work:
        root = opts.rootRank

        def run(sources: list[torch.Tensor], targets: list[torch.Tensor]) -> None:
            self._gloo.broadcast(sources[0], root).wait()
            targets[0].copy_(sources[0])

        return self._post(run, tensors, tensors)

    def all_gather_single(self, out: torch.Tensor, x: torch.Tensor, opts: Any = None) -> _Work:
        def run(sources: list[torch.Tensor], targets: list[torch.Tensor]) -> None:
            parts = list(targets[0].view(self._size, -1).unbind())
            self._gloo.allgather([parts], [sources[0].view(-1)]).wait()

        return self._post(run, [x], [out])

    def reduce_scatter_single(self, out: torch.Tensor, x: torch.Tensor, opts: Any = None) -> _Work:
        def run(sources: list[torch.Tensor], targets: list[torch.Tensor]) -> None:
            parts = torch.empty(self._size, targets[0].numel(), dtype=sources[0].dtype)
            self._gloo.alltoall_base(parts.view(-1), sources[0].view(-1), [], []).wait()
            targets[0].view(-1).copy_(parts.float().sum(0))

        return self._post(run, [x], [out])

    def all_to_all_single(self, out: torch.Tensor, x: torch.Tensor, *splits_and_opts: Any) -> _Work:
        received, sent = (*splits_and_opts, [], [])[:2]

        def run(sources: list[torch.Tensor], targets: list[torch.Tensor]) -> None:
            self._gloo.alltoall_base(targets[0], sources[0], received or [], sent or []).wait()

        return self._post(run, [x], [out])

    # Their names before torch 2.13.
    _allgather_base, _reduce_scatter_base, alltoall_base = all_gather_single, reduce_scatter_single, all_to_all_single

    def send(self, tensors: list[torch.Tensor], peer: int, tag: int) -> _Work:
        return self._post(lambda sources, _: self._gloo.send(sources, peer, tag).wait(), tensors, [], peer)

    def recv(self, tensors: list[torch.Tensor], peer: int, tag: int) -> _Work:
        return self._post(lambda _, targets: self._gloo.recv(targets, peer, tag).wait(), [], tensors, peer)


def init_process_group(store: dist.Store, rank: int, world: int) -> None:
    """Make the default process group, and from then on all groups, staged ones."""
    if NAME not in dist.Backend.backend_list:
        dist.Backend.register_backend(
            NAME, lambda options, _: _Group(options), extended_api=True, devices=["cpu", "cuda"]
        )
    dist.init_process_group(NAME, store=store, rank=rank, world_size=world)
