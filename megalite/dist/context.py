"""Process groups of one run, as `Axis` objects that are passed explicitly. Nothing here is global."""

from __future__ import annotations

import os
import socket
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from datetime import timedelta
from functools import cached_property

import torch
import torch.distributed as dist

from megalite.dist.grid import Grid
from megalite.dist.rendezvous import fresh_store
from megalite.errors import LocalUserError
from megalite.log import env_int

# For ranks to find each other.
RENDEZVOUS_TIMEOUT = timedelta(minutes=10)
# A group's operations end the process after the longer of these. The watchdog, which names the culprit, must be first
# to act, and NCCL's clock starts when an operation is enqueued, well before the host has to wait for it.
_LEAST_TIMEOUT, _WATCHDOG_TIMEOUTS = timedelta(minutes=30), 2


def group_timeout(watchdog_timeout: float) -> timedelta:
    """Return the time limit of a group's operations, given that of the watchdog in seconds."""
    return max(_LEAST_TIMEOUT, _WATCHDOG_TIMEOUTS * timedelta(seconds=watchdog_timeout))


@dataclass(frozen=True)
class Axis:
    """One axis of the grid as seen by this rank.

    Attributes:
        name: "tp", "dp", "pp", "pp_grad", "ends" or "world"; a product of axes is "dpxcp".
        size: number of ranks on it.
        rank: this rank's place on it.
        ranks: global ranks on it, in order.
        group: process group; None when size is 1.
        dropped: messages that nobody waits for any more; the next all-gather on the group does.
    """

    name: str
    size: int = 1
    rank: int = 0
    ranks: tuple[int, ...] = (0,)
    group: dist.ProcessGroup | None = None
    dropped: list[dist.Work] = field(default_factory=list, repr=False, compare=False)

    @cached_property
    def on_gloo(self) -> bool:
        """Whether gloo carries its collectives; asked before each of them, so looked up once."""
        return dist.get_backend(self.group) == "gloo"


# The groups of a run and the order in which all ranks make them, each a product of axes of some grid.
GROUPS: tuple[tuple[str, ...], ...] = (("tp",), ("dp",), ("pp",))


@dataclass(frozen=True)
class ParallelContext:
    """Everything a rank knows about its neighbors, built once by `ParallelContext.create`.

    Attributes:
        grid: the run's grid.
        rank: this rank.
        device: where its tensors live.
        axes: by the names of `GROUPS`; ("ends",) joins the first and the last stage of a pipeline, which may hold copies
            of a tied embedding.
        world: all ranks.
        pp_grad: a second group over pp: activations travel on one, gradients on the other, so that the two directions
            never share a queue (at pp = 2 the previous and the next rank are one peer).
        timeout: time limit of an operation of any group.
    """

    grid: Grid
    rank: int
    device: torch.device
    axes: Mapping[tuple[str, ...], Axis]
    world: Axis
    pp_grad: Axis
    timeout: timedelta = _LEAST_TIMEOUT
    _splits: dict[tuple[str | int, ...], tuple[Axis, Axis]] = field(default_factory=dict, repr=False, compare=False)

    def axis(self, *names: str) -> Axis:
        """The axis, or the product of axes, of these names; it must stand in the table of groups."""
        return self.axes[names]

    def split(self, *names: str, size: int | None) -> tuple[Axis, Axis]:
        """Cut an axis into groups of `size` neighbors (None: one group), for hybrid sharding.

        All ranks cut the same axes in one order: new groups are made at the first call.

        Returns:
            This rank's group, and the ranks at its place in all groups.
        """
        axis = self.axis(*names)
        if size is None or size == axis.size:
            return axis, Axis("replicas", ranks=(self.rank,))
        key: tuple[str | int, ...] = (*names, size)
        if key not in self._splits:
            groups = [axis.ranks[i : i + size] for i in range(0, axis.size, size)]
            shards = _make_axis("shards", self.rank, groups, self.timeout)
            both = shards, _make_axis("replicas", self.rank, list(zip(*groups)), self.timeout)
            for made in both:
                _meet(made, self.device)
            self._splits[key] = both
        return self._splits[key]

    @property
    def tp(self) -> Axis:
        """Tensor-parallel axis."""
        return self.axis("tp")

    @property
    def dp(self) -> Axis:
        """Data-parallel axis."""
        return self.axis("dp")

    @property
    def pp(self) -> Axis:
        """Pipeline axis; activations travel on its group."""
        return self.axis("pp")

    @classmethod
    def single(cls, device: torch.device | None = None) -> ParallelContext:
        """One process, no process group."""
        return cls.create(Grid.of(1), device or torch.device("cpu"))

    @classmethod
    def create(
        cls,
        grid: Grid,
        device: torch.device,
        *others: Grid,
        groups: Sequence[tuple[str, ...]] = GROUPS,
        timeout: timedelta = _LEAST_TIMEOUT,
    ) -> ParallelContext:
        """Build the groups of a run. The default process group must exist when the world is larger than one.

        Args:
            grid: the run's grid.
            device: this rank's device.
            others: further grids over the same ranks, whose axes `groups` may name too (experts).
            groups: what to build.
            timeout: time limit of an operation, from `group_timeout`.
        """
        rank = dist.get_rank() if grid.world > 1 else 0

        axes = {}
        for names in groups:
            owner = next(g for g in (grid, *others) if set(names) <= set(g.names))
            axes[names] = _make_axis("x".join(names), rank, owner.groups(*names), timeout)
        pp_grad = _make_axis("pp_grad", rank, grid.groups("pp"), timeout)
        ends = [(g[0], g[-1]) for g in grid.groups("pp")] if grid["pp"] > 1 else []
        axes[("ends",)] = _make_axis("ends", rank, ends, timeout)
        everyone = tuple(range(grid.world))
        world = Axis("world", grid.world, rank, everyone, dist.group.WORLD if grid.world > 1 else None)
        # NCCL creates a communicator at its first use: do it here, in the same order on all ranks, not during a step.
        for axis in (*(axis for names, axis in axes.items() if names != ("pp",)), world):
            _meet(axis, device)
        for axis in (axes[("pp",)], pp_grad):
            _meet_neighbors(axis, device)
        return cls(grid, rank, device, axes, world, pp_grad, timeout)


def _make_axis(name: str, rank: int, candidates: Sequence[tuple[int, ...]], timeout: timedelta) -> Axis:
    """Make the one of the groups that this rank is in."""
    # Only a group's members make it, so that thousands of groups cost no rank more than its own. The groups of one kind
    # are disjoint, and every rank makes the kinds in one order: no rank waits for a later group.
    ranks = next((g for g in candidates if rank in g), (rank,))
    if len(ranks) == 1:
        return Axis(name, ranks=ranks)
    group = dist.new_group(list(ranks), timeout=timeout, use_local_synchronization=True, group_desc=name)
    return Axis(name, len(ranks), ranks.index(rank), ranks, group)


def _meet(axis: Axis, device: torch.device) -> None:
    if axis.size > 1:
        dist.all_reduce(torch.zeros(1, device=device), group=axis.group)


def _meet_neighbors(axis: Axis, device: torch.device) -> None:
    """Exchange one element with each pipeline neighbor.

    NCCL creates a separate communicator for each pair, at its first message.
    """
    for pair in neighbor_pairs(axis.size):
        if axis.rank in pair:
            peer = axis.ranks[pair[0] if axis.rank == pair[1] else pair[1]]
            element = torch.zeros(1, device=device)
            # One side sends first: two sends that wait for each other would hang.
            for transfer in (dist.send, dist.recv) if axis.rank == pair[0] else (dist.recv, dist.send):
                transfer(element, peer, group=axis.group)


def neighbor_pairs(size: int) -> list[tuple[int, int]]:
    """List the pairs of neighbors on a ring in the order in which they meet: three rounds, whatever the size."""
    pairs = sorted(((i, i + 1) for i in range(size - 1)), key=lambda pair: pair[0] % 2)
    return pairs + [(0, size - 1)] * (size > 2)


def launched_together() -> bool:
    """Whether torchrun or Slurm started this rank: they end all ranks when one exits."""
    return under_torchrun() or "SLURM_PROCID" in os.environ


def under_torchrun() -> bool:
    """Whether torch elastic (torchrun, `megalite train`) is this rank's parent."""
    return "TORCHELASTIC_RUN_ID" in os.environ


def world_size(otherwise: int = 1) -> int:
    """Number of ranks: of the process group, or from torchrun's (or Slurm's) environment, or `otherwise`."""
    if dist.is_initialized():
        return dist.get_world_size()
    _adopt_slurm()
    return env_int("WORLD_SIZE", otherwise, low=1)


def local_world_size() -> int:
    """Number of ranks on this host, as its launcher says; all of them where none does."""
    text = os.environ.get("LOCAL_WORLD_SIZE") or os.environ.get("SLURM_NTASKS_PER_NODE", "")
    return int(text) if text.isdecimal() else world_size()


def init_process_group(device: torch.device, timeout: timedelta = _LEAST_TIMEOUT) -> None:
    """Join the default process group (gloo on CPU, NCCL on GPU) unless there is one; a world of one needs none.

    Args:
        device: of this rank.
        timeout: time limit of an operation, from `group_timeout`.
    """
    if world_size() == 1 or dist.is_initialized():
        return
    missing = [name for name in ("RANK", "MASTER_ADDR", "MASTER_PORT") if name not in os.environ]
    if missing:
        raise LocalUserError(
            f"WORLD_SIZE {world_size()}",
            f"requires {' and '.join(missing)}, which the environment does not set",
            "start the ranks with torchrun, or unset WORLD_SIZE for one process",
        )
    _check_rendezvous(world_size())
    backend = "nccl" if device.type == "cuda" else "gloo"
    try:
        store, rank, world = next(iter(dist.rendezvous("env://", timeout=RENDEZVOUS_TIMEOUT)))
        store = fresh_store(store, rank, world, RENDEZVOUS_TIMEOUT)
        # No `device_id`: with it all messages of a group would share one NCCL communicator, and one posted early would
        # delay those to the other neighbor.
        dist.init_process_group(backend, store=store, rank=rank, world_size=world, timeout=timeout)
    except dist.DistNetworkError as e:
        port = os.environ.get("MASTER_PORT", "")
        raise LocalUserError(
            f"MASTER_PORT {port}",
            f"rank 0 must be able to listen on it ({str(e).splitlines()[0][:160]})",
            "choose a free port (torchrun --master-port)",
        ) from None


def _check_rendezvous(world: int) -> None:
    """Check what torch would take as it is: it waits without end for a name that does not resolve."""
    env_int("RANK", 0, high=world - 1)
    port, host = env_int("MASTER_PORT", 0, low=1, high=65535), os.environ["MASTER_ADDR"]
    try:
        socket.getaddrinfo(host, port)
    except (OSError, UnicodeError) as e:
        rule = f"does not resolve on {socket.gethostname()} ({getattr(e, 'strerror', None) or e})"
        raise LocalUserError(f"MASTER_ADDR {host!r}", rule, "give the name or address of rank 0's host") from None


def shutdown() -> None:
    """Leave the process group, so that no background thread outlives the run."""
    if dist.is_available() and dist.is_initialized():
        dist.destroy_process_group()


def _adopt_slurm() -> None:
    """One Slurm task a rank (srun without torchrun): give its variables torchrun's names."""
    names = {"RANK": "SLURM_PROCID", "LOCAL_RANK": "SLURM_LOCALID", "WORLD_SIZE": "SLURM_NTASKS"}
    if "RANK" in os.environ or "SLURM_PROCID" not in os.environ or "MASTER_ADDR" not in os.environ:
        return
    for ours, slurm in names.items():
        os.environ[ours] = os.environ[slurm]
