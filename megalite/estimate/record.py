"""Process groups without peers: every operation is recorded, none is done.

A rank's program is the same whatever its peers send, so one process can run any rank of a world of any size.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch._subclasses.fake_tensor import FakeTensor


@dataclass(frozen=True)
class Posted:
    """An operation of a process group, as the host started it.

    Attributes:
        kind: "all_reduce", "all_gather", "reduce_scatter", "all_to_all", "broadcast", "send" or "recv".
        axis: name of the axis.
        ranks: of the group.
        peer: global rank of the other end of a message; root of a broadcast; else None.
        numel: elements of the greater of its two tensors, which is the whole of what is gathered or scattered.
        dtype: of its tensors.
    """

    kind: str
    axis: str
    ranks: tuple[int, ...]
    peer: int | None
    numel: int
    dtype: torch.dtype

    @property
    def nbytes(self) -> int:
        """Bytes of its greater tensor."""
        return self.numel * self.dtype.itemsize


@dataclass(frozen=True)
class Waited:
    """What follows on the compute stream comes after the end of an operation.

    Attributes:
        posted: its place in the log.
    """

    posted: int


@dataclass(frozen=True)
class Ran:
    """A kernel on the compute stream.

    Attributes:
        name: the operation of torch.
        flops: of matrix products and attention; 0 for all others.
        nbytes: bytes read and written.
        output: a product of the output layer.
    """

    name: str
    flops: int
    nbytes: int
    output: bool


Event = Posted | Waited | Ran


class _Work(dist.Work):
    def __init__(self, log: list[Event], at: int) -> None:
        super().__init__()
        self._log, self._at = log, at

    def wait(self, timeout: Any = None) -> bool:
        self._log.append(Waited(self._at))
        return True


def _receive(out: torch.Tensor, x: torch.Tensor) -> None:
    """Let every peer have sent what this rank sends: some programs take what they receive for indices."""
    if not isinstance(out, FakeTensor):
        out.copy_(x.clone())


# What `torch.distributed` calls is one overload of each method that is declared.
_ProcessGroup: Any = dist.ProcessGroup


class _Group(_ProcessGroup):
    """Methods: those of `torch.distributed.ProcessGroup`."""

    def __init__(self, rank: int, ranks: tuple[int, ...], log: list[Event]) -> None:
        super().__init__(rank, len(ranks))
        self._ranks, self._log = ranks, log

    def getBackendName(self) -> str:
        return "recording"

    def size(self) -> int:
        return len(self._ranks)

    def _post(self, kind: str, *tensors: torch.Tensor, peer: int | None = None) -> _Work:
        numel = max(x.numel() for x in tensors)
        whom = None if peer is None else self._ranks[peer]
        axis = "world" if self.group_desc == "default_pg" else self.group_desc
        self._log.append(Posted(kind, axis, self._ranks, whom, numel, tensors[0].dtype))
        return _Work(self._log, len(self._log) - 1)

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
        _receive(out, x)
        return self._post("all_to_all", out, x)

    # Their names before torch 2.13.
    _allgather_base, _reduce_scatter_base, alltoall_base = all_gather_single, reduce_scatter_single, all_to_all_single

    def send(self, tensors: list[torch.Tensor], peer: int, tag: int) -> _Work:
        return self._post("send", *tensors, peer=peer)

    def recv(self, tensors: list[torch.Tensor], peer: int, tag: int) -> _Work:
        return self._post("recv", *tensors, peer=peer)


@contextmanager
def recorded_world(rank: int, world: int) -> Iterator[list[Event]]:
    """Be `rank` of a world of `world` ranks that has no other processes; yields the log of all operations.

    Sums and messages leave their tensors as they are, what is gathered is this rank's own.
    """
    log: list[Event] = []

    def make(given: Any, _: Any) -> _Group:
        ranks = tuple(given.global_ranks_in_group) or tuple(range(world))
        return _Group(given.group_rank, ranks, log)

    dist.Backend.register_backend("recording", make, extended_api=True, devices=["cpu", "cuda"])
    dist.init_process_group("recording", store=dist.HashStore(), rank=rank, world_size=world)
    try:
        yield log
    finally:
        dist.destroy_process_group()
