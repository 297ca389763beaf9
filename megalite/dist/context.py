"""Process groups of one run, as `Axis` objects that are passed to whoever needs one. Nothing here is global."""

from __future__ import annotations

import os
from dataclasses import dataclass
from datetime import timedelta

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh

from megalite.dist.rendezvous import fresh_store
from megalite.dist.grid import Topology
from megalite.errors import UserError

# A stopped peer is noticed after this long (on the mesh's groups after the backend's own limit); a dead one at once.
TIMEOUT = timedelta(minutes=10)


@dataclass(frozen=True)
class Axis:
    """One axis of the grid as seen by this rank.

    Attributes:
        name: "tp", "dp", "pp", "model", "world" or "embedding".
        size: number of ranks on it.
        rank: this rank's place on it.
        ranks: global ranks on it, in order.
        group: process group; None when size is 1.
    """

    name: str
    size: int = 1
    rank: int = 0
    ranks: tuple[int, ...] = (0,)
    group: dist.ProcessGroup | None = None


@dataclass(frozen=True)
class ParallelContext:
    """Everything a rank knows about its neighbours, built once by `ParallelContext.create`.

    `pp` and `pp_grad` are two groups over the same ranks: activations travel on one, gradients on the other, so that
    the two directions never share a queue (at pp = 2 the previous and the next rank are one peer). `embedding` joins
    the ranks of the first and the last stage that hold copies of a tied embedding.
    """

    topology: Topology
    rank: int
    device: torch.device
    tp: Axis
    dp: Axis
    pp: Axis
    pp_grad: Axis
    model: Axis
    world: Axis
    embedding: Axis

    @classmethod
    def single(cls, device: torch.device | None = None) -> ParallelContext:
        """One process, no process group."""
        names = ("tp", "dp", "pp", "pp_grad", "model", "world", "embedding")
        axes = {name: Axis(name) for name in names}
        return cls(Topology(1), 0, device or torch.device("cpu"), **axes)

    @classmethod
    def create(cls, topology: Topology, device: torch.device) -> ParallelContext:
        """Build the groups of every axis. The default process group must exist when the world is larger than one."""
        if topology.world == 1:
            return cls.single(device)
        rank = dist.get_rank()
        here = topology.coords(rank)
        shape = (topology.pp, topology.dp, topology.tp)
        mesh = init_device_mesh(device.type, shape, mesh_dim_names=("pp", "dp", "tp"))

        def of_mesh(name: str) -> Axis:
            ranks = next(g for g in topology.groups(name) if rank in g)
            group = mesh.get_group(name) if len(ranks) > 1 else None
            return Axis(name, len(ranks), ranks.index(rank), ranks, group)

        def extra(name: str, groups: list[tuple[int, ...]]) -> Axis:
            # Only a group's members make it, so that thousands of groups cost no rank more than its own. The groups of
            # one kind are disjoint, and every rank makes the kinds in one order: nobody waits for a later group.
            ranks = next((g for g in groups if rank in g), (rank,))
            if len(ranks) == 1:
                return Axis(name, ranks=ranks)
            group = dist.new_group(list(ranks), timeout=TIMEOUT, use_local_synchronization=True)
            return Axis(name, len(ranks), ranks.index(rank), ranks, group)

        ends: list[tuple[int, ...]] = [(g[0], g[-1]) for g in topology.groups("pp")] if topology.pp > 1 else []
        everyone = tuple(range(topology.world))
        tp, dp, pp = of_mesh("tp"), of_mesh("dp"), of_mesh("pp")
        assert (dp.rank, pp.rank, tp.rank) == here
        pp_grad, model = extra("pp_grad", topology.groups("pp")), extra("model", topology.groups("model"))
        embedding = extra("embedding", ends)
        world = Axis("world", topology.world, rank, everyone, dist.group.WORLD)
        # NCCL makes a communicator at its first use: here, in one order on all ranks, and not amid a step.
        for axis in (tp, dp, model, world, embedding):
            if axis.size > 1:
                dist.all_reduce(torch.zeros(1, device=device), group=axis.group)
        for axis in (pp, pp_grad):
            _meet_neighbours(axis, device)
        return cls(topology, rank, device, tp, dp, pp, pp_grad, model, world, embedding)


def _meet_neighbours(axis: Axis, device: torch.device) -> None:
    """Exchange one element with each pipeline neighbour, pair by pair in one order.

    NCCL makes a communicator of its own for each pair, at its first message.
    """
    pairs = {frozenset((i, (i + 1) % axis.size)) for i in range(axis.size)} if axis.size > 1 else set()
    for pair in sorted(sorted(p) for p in pairs):
        if axis.rank in pair:
            peer = axis.ranks[pair[0] if axis.rank == pair[1] else pair[1]]
            word = torch.zeros(1, device=device)
            # One side speaks first: two sends that wait for each other would hang.
            for say in (dist.send, dist.recv) if axis.rank == pair[0] else (dist.recv, dist.send):
                say(word, peer, group=axis.group)


def pick_device(name: str, tp: int = 1) -> torch.device:
    """The device of this rank: `auto` takes CUDA where there is one, one GPU a local rank."""
    if tp > 1:
        # One hardware queue: a collective that was launched first also starts before the matrix product it overlaps
        # with. Only read when CUDA starts, which is below.
        os.environ.setdefault("CUDA_DEVICE_MAX_CONNECTIONS", "1")
    local_rank = int(os.environ.get("LOCAL_RANK", "0"))
    if name == "cpu" or (name == "auto" and not torch.cuda.is_available()):
        return torch.device("cpu")
    if not torch.cuda.is_available():
        rule = "needs a CUDA device and a CUDA build of torch"
        raise UserError("--device cuda", rule, "use --device cpu", only_here=True)
    if local_rank >= torch.cuda.device_count():
        raise UserError(
            f"local rank {local_rank}",
            f"needs a GPU of its own, and this host has {torch.cuda.device_count()}",
            "start fewer processes per node, or use --device cpu",
            only_here=True,
        )
    device = torch.device("cuda", local_rank)
    torch.cuda.set_device(device)
    return device


def launched_together() -> bool:
    """Whether torchrun or Slurm started this rank, which end all ranks when one has left."""
    return "TORCHELASTIC_RUN_ID" in os.environ or "SLURM_PROCID" in os.environ


def only_deterministic_kernels() -> None:
    """`--deterministic`. Before the process group: NCCL decides once, at its start, against reductions in the switch."""
    torch.use_deterministic_algorithms(True)
    # Filling every new tensor with NaN finds bugs, at the price of another pass over memory.
    torch.utils.deterministic.fill_uninitialized_memory = False  # type: ignore[attr-defined]


def world_size(otherwise: int = 1) -> int:
    """Number of ranks, from torchrun's (or Slurm's) environment; `otherwise` where it says nothing."""
    _adopt_slurm()
    return int(os.environ.get("WORLD_SIZE", otherwise))


def init_process_group(device: torch.device) -> None:
    """Join the default process group (gloo on CPU, NCCL on GPU); nothing to do in a world of one."""
    if world_size() == 1:
        return
    missing = [name for name in ("RANK", "MASTER_ADDR", "MASTER_PORT") if name not in os.environ]
    if missing:
        raise UserError(
            f"WORLD_SIZE {world_size()}",
            f"comes with {' and '.join(missing)}, which the environment does not have",
            "start the ranks with torchrun, or unset WORLD_SIZE for one process",
            only_here=True,
        )
    backend = "nccl" if device.type == "cuda" else "gloo"
    try:
        store, rank, world = next(iter(dist.rendezvous("env://", timeout=TIMEOUT)))
        store = fresh_store(store, rank, world, TIMEOUT)
        # No `device_id`: with it all messages of a group would share one NCCL communicator, and one that was posted
        # early would hold up those to the other neighbour.
        dist.init_process_group(backend, store=store, rank=rank, world_size=world, timeout=TIMEOUT)
    except dist.DistNetworkError as e:
        port = os.environ.get("MASTER_PORT", "")
        raise UserError(
            f"MASTER_PORT {port}",
            f"rank 0 must be able to listen on it ({str(e).splitlines()[0][:160]})",
            "choose a free port (torchrun --master-port)",
            only_here=True,
        ) from None


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
