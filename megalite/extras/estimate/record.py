"""Process groups without peers: operations are recorded and not carried out.

A rank's program does not depend on what its peers send, so one process can run any rank of a world of any size.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch._subclasses.fake_tensor import FakeTensor

from megalite.core.mesh.grid import Grid


@dataclass(frozen=True)
class Communication:
    """An operation of a process group, logged when the host starts it.

    Attributes:
        kind: "all_reduce", "all_gather", "reduce_scatter", "all_to_all", "broadcast", "send" or "recv".
        axis: name of the axis.
        ranks: global ranks of the group.
        peer: global rank at the other end of a message, or the root of a broadcast; else None.
        numel: number of elements of the larger of its two tensors, the full one of a gather or a scatter.
        dtype: data type of its tensors.
    """

    kind: str
    axis: str
    ranks: tuple[int, ...]
    peer: int | None
    numel: int
    dtype: torch.dtype

    @property
    def nbytes(self) -> int:
        """Bytes of the larger tensor."""
        return self.numel * self.dtype.itemsize


@dataclass(frozen=True)
class Wait:
    """The compute stream waits for the end of a communication.

    Attributes:
        index: index of the communication in the log.
    """

    index: int


@dataclass(frozen=True)
class Kernel:
    """A kernel on the compute stream.

    Attributes:
        name: name of the torch operator.
        flops: FLOPs of a matrix product or of attention; 0 for all other kernels.
        nbytes: bytes read and written.
        output: whether it is a matrix product of the output layer.
    """

    name: str
    flops: int
    nbytes: int
    output: bool


Event = Communication | Wait | Kernel


# Called with each communication and its tensors; returns what its `wait` calls.
OnPost = Callable[[Communication, tuple[torch.Tensor, ...]], Callable[[], None]]


def _nothing() -> None:
    pass


class _Work(dist.Work):
    def __init__(self, log: list[Event], at: int, on_wait: Callable[[], None]) -> None:
        super().__init__()
        self._log = log
        self._at = at
        self._on_wait = on_wait

    def wait(self, timeout: Any = None) -> bool:
        self._log.append(Wait(self._at))
        self._on_wait()
        return True


def _receive(out: torch.Tensor, x: torch.Tensor) -> None:
    """Receive from every peer what this rank sends to itself: some programs use what they receive as indices."""
    if not isinstance(out, FakeTensor):
        out.copy_(x.clone())


# The type stubs declare several overloads of each method; `torch.distributed` calls one of them.
_ProcessGroup: Any = dist.ProcessGroup


class _Group(_ProcessGroup):
    """The methods of `torch.distributed.ProcessGroup` that training calls."""

    def __init__(self, rank: int, ranks: tuple[int, ...], everyone: str, log: list[Event], on_post: OnPost) -> None:
        super().__init__(rank, len(ranks))
        self._ranks = ranks
        self._everyone = everyone
        self._log = log
        self._on_post = on_post

    def getBackendName(self) -> str:
        return "recording"

    def size(self) -> int:
        return len(self._ranks)

    def _post(self, kind: str, *tensors: torch.Tensor, peer: int | None = None) -> _Work:
        numel = max(x.numel() for x in tensors)
        global_peer = None if peer is None else self._ranks[peer]
        axis = self._everyone if self.group_desc == "default_pg" else self.group_desc
        event = Communication(kind, axis, self._ranks, global_peer, numel, tensors[0].dtype)
        self._log.append(event)
        return _Work(self._log, len(self._log) - 1, self._on_post(event, tensors))

    def allreduce(self, tensors: list[torch.Tensor], opts: Any = None) -> _Work:
        return self._post("all_reduce", *tensors)

    def broadcast(self, tensors: list[torch.Tensor], opts: Any) -> _Work:
        return self._post("broadcast", *tensors, peer=opts.rootRank)

    def all_gather_single(self, out: torch.Tensor, x: torch.Tensor, opts: Any = None) -> _Work:
        _receive(out.view(len(self._ranks), -1), x.reshape(-1))
        return self._post("all_gather", out, x)

    def reduce_scatter_single(self, out: torch.Tensor, x: torch.Tensor, opts: Any = None) -> _Work:
        return self._post("reduce_scatter", out, x)

    def all_to_all_single(self, out: torch.Tensor, x: torch.Tensor, *splits_and_opts: Any) -> _Work:
        if isinstance(splits_and_opts[0], list) and splits_and_opts[0]:
            out.zero_()
        else:
            _receive(out.view(len(self._ranks), -1), x.reshape(len(self._ranks), -1)[self.rank()])
        return self._post("all_to_all", out, x)

    # Their names before torch 2.13.
    _allgather_base = all_gather_single
    _reduce_scatter_base = reduce_scatter_single
    alltoall_base = all_to_all_single

    def send(self, tensors: list[torch.Tensor], peer: int, tag: int) -> _Work:
        return self._post("send", *tensors, peer=peer)

    def recv(self, tensors: list[torch.Tensor], peer: int, tag: int) -> _Work:
        return self._post("recv", *tensors, peer=peer)


@contextmanager
def recorded_world(rank: int, grid: Grid, on_post: OnPost = lambda event, tensors: _nothing) -> Iterator[list[Event]]:
    """Simulate `rank` of a grid without peers; yields the log of all operations.

    Reductions and messages leave their tensors unchanged; a gather returns copies of this rank's tensor. Where an axis
    shares the world's communicator, operations over all ranks are listed under its name.
    """
    log: list[Event] = []
    world, factors = grid.world, tuple(name for name in grid.names if grid[name] > 1)
    shares_world = factors == grid.batch or (len(factors) == 1 and factors != ("pp",))
    everyone = "x".join(factors) if shares_world else "world"

    def make(options: Any, _: Any) -> _Group:
        ranks = tuple(options.global_ranks_in_group) or tuple(range(world))
        return _Group(options.group_rank, ranks, everyone, log, on_post)

    dist.Backend.register_backend("recording", make, extended_api=True, devices=["cpu", "cuda"])
    dist.init_process_group("recording", store=dist.HashStore(), rank=rank, world_size=world)
    try:
        yield log
    finally:
        dist.destroy_process_group()
