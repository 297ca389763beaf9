"""How the ranks of a run find each other: what their launcher says, and the default process group."""

from __future__ import annotations

import os
import socket
import time
import uuid
from collections.abc import Iterable
from contextlib import suppress
from datetime import timedelta

import torch
import torch.distributed as dist

from megalite.core.base.errors import LocalUserError
from megalite.core.base.log import env_int

# Time limit for ranks to find each other.
RENDEZVOUS_TIMEOUT = timedelta(minutes=10)
# A group's operations end the process after the longer of these. The watchdog, which names the culprit, must be first
# to act, and NCCL's clock starts when an operation is enqueued, well before the host has to wait for it.
MIN_TIMEOUT, _WATCHDOG_TIMEOUTS = timedelta(minutes=30), 2
# Key under which rank 0 offers a part of the store, and how long another waits to be called before it looks again.
_OFFER = "megalite/rendezvous/offer"
_RETRY = timedelta(seconds=1)
# Other launchers' names of RANK, LOCAL_RANK, WORLD_SIZE and LOCAL_WORLD_SIZE, as far as they have one. MPI's come
# first: in a job of Slurm, its daemons are Slurm's tasks.
_LAUNCHERS = [
    names.split()
    for names in (
        "OMPI_COMM_WORLD_RANK OMPI_COMM_WORLD_LOCAL_RANK OMPI_COMM_WORLD_SIZE OMPI_COMM_WORLD_LOCAL_SIZE",
        "MV2_COMM_WORLD_RANK MV2_COMM_WORLD_LOCAL_RANK MV2_COMM_WORLD_SIZE MV2_COMM_WORLD_LOCAL_SIZE",
        "PMI_RANK MPI_LOCALRANKID PMI_SIZE MPI_LOCALNRANKS",
        "PMI_RANK PMI_LOCAL_RANK PMI_SIZE PMI_LOCAL_SIZE",
        "SLURM_PROCID SLURM_LOCALID SLURM_NTASKS",
        "FLUX_TASK_RANK FLUX_TASK_LOCAL_ID FLUX_JOB_SIZE",
        "PMIX_RANK",
    )
]
_MEETING_PLACE = {"MASTER_ADDR": "HOST_OF_RANK_0", "MASTER_PORT": "29500"}


def group_timeout(watchdog_timeout: float) -> timedelta:
    """Return the time limit of a group's operations, given that of the watchdog in seconds."""
    return max(MIN_TIMEOUT, _WATCHDOG_TIMEOUTS * timedelta(seconds=watchdog_timeout))


def launched_together() -> bool:
    """Whether torchrun, Slurm or MPI started this rank: they end all ranks when one exits."""
    return under_torchrun() or any(names[0] in os.environ for names in _LAUNCHERS)


def under_torchrun() -> bool:
    """Whether torch elastic (torchrun, `megalite train`) is this rank's parent."""
    return "TORCHELASTIC_RUN_ID" in os.environ


def world_size(otherwise: int = 1) -> int:
    """Number of ranks: of the process group, or from the launcher's environment, or `otherwise`."""
    if dist.is_initialized():
        return dist.get_world_size()
    _adopt_ranks()
    return env_int("WORLD_SIZE", otherwise, low=1)


def store_host() -> str:
    """Name the host where ranks meet, as their launcher says; rank 0 runs there."""
    return os.environ.get("MASTER_ADDR", "localhost")


def store_address() -> dict[str, str | int]:
    """Say where torch elastic's agents meet, and under which name: what another agent needs."""
    port, name = env_int("MASTER_PORT", 0), os.environ["TORCHELASTIC_RUN_ID"]
    return {"master_addr": store_host(), "master_port": port, "run_id": name}


def local_world_size() -> int:
    """Number of ranks on this host, as its launcher says; all of them where none does."""
    text = os.environ.get("LOCAL_WORLD_SIZE") or os.environ.get("SLURM_NTASKS_PER_NODE", "")
    return int(text) if text.isdecimal() else world_size()


def _unset(names: Iterable[str]) -> list[str]:
    return [name for name in names if name not in os.environ]


def _adopt_ranks() -> None:
    """Give another launcher's variables torchrun's names, where it sets all and the ranks know where they meet."""
    for names in _LAUNCHERS:
        if "RANK" not in os.environ and len(names) > 1 and not _unset((*names, *_MEETING_PLACE)):
            ours = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE")
            os.environ.update({name: os.environ[theirs] for name, theirs in zip(ours, names)})


def check_adopted() -> None:
    """Adopt a launcher's ranks; refuse to be one of several that do not know each other: each would train alone.

    Raises:
        LocalUserError: a launcher says so.
    """
    if dist.is_initialized():
        return
    _adopt_ranks()
    for rank, *others in _LAUNCHERS if "RANK" not in os.environ else []:
        if rank in os.environ and (env_int(rank, 0) or env_int(others[1] if others else "", 1) > 1):
            given = (f"{name} {os.environ[name]}" for name in (rank, *others[1:2]) if name in os.environ)
            missing = _unset(_MEETING_PLACE) or _unset(others) or ["RANK", "WORLD_SIZE"]
            words = " ".join(f"{name}={_MEETING_PLACE.get(name, 'N')}" for name in missing)
            raise LocalUserError(
                " ".join(given),
                f"ranks of one launcher meet by {' and '.join(missing)}, which the environment does not set",
                f"export {words}, or start the ranks with torchrun; for one process alone, unset {rank}",
            )


def init_process_group(device: torch.device, timeout: timedelta = MIN_TIMEOUT, listens: int = -1) -> None:
    """Join the default process group (gloo on CPU, NCCL on GPU) unless there is one; a world of one needs none.

    Args:
        device: device of this rank.
        timeout: time limit of an operation, from `group_timeout`.
        listens: see `join_store`.
    """
    if world_size() == 1 or dist.is_initialized():
        check_adopted()
        return
    missing = [name for name in ("RANK", "MASTER_ADDR", "MASTER_PORT") if name not in os.environ]
    if missing:
        raise LocalUserError(
            f"WORLD_SIZE {world_size()}",
            f"requires {' and '.join(missing)}, which the environment does not set",
            "start the ranks with torchrun, or unset WORLD_SIZE for one process",
        )
    _check_rendezvous(world_size())
    try:
        store, rank, world = join_store(listens)
    except dist.DistNetworkError as e:
        port = os.environ.get("MASTER_PORT", "")
        raise LocalUserError(
            f"MASTER_PORT {port}",
            f"rank 0 must be able to listen on it ({str(e).splitlines()[0][:160]})",
            "choose a free port (torchrun --master-port)",
        ) from None
    if backend_of(device) == "gloo":
        run_until_waiting()
    # What is lost from here on was there: no mistake of the user.
    store = fresh_store(store, rank, world, RENDEZVOUS_TIMEOUT)
    # No `device_id`: with it all messages of a group would share one NCCL communicator, and one posted early would
    # delay those to the other neighbor.
    dist.init_process_group(backend_of(device), store=store, rank=rank, world_size=world, timeout=timeout)


def run_until_waiting() -> None:
    """Keep this process's threads from preempting others when they wake up (Linux). Call it before gloo starts its own.

    A message wakes its receiver, who would preempt the sender while that holds its connection's lock; gloo's thread, to
    which the connection is still readable, then polls without a pause. Where there are more threads than cores, half of
    the processor time went there.
    """
    if hasattr(os, "SCHED_BATCH") and os.sched_getscheduler(0) == os.SCHED_OTHER:
        with suppress(OSError):
            os.sched_setscheduler(0, os.SCHED_BATCH, os.sched_param(0))


def join_store(listens: int = -1, timeout: timedelta = RENDEZVOUS_TIMEOUT) -> tuple[dist.Store, int, int]:
    """Connect to the store in which the launched ranks meet; return it, this rank, and the number of ranks.

    Args:
        listens: descriptor at which this process serves it; -1: another one does.
        timeout: for the connection, and each wait for a key.
    """
    if listens >= 0:
        port, rank, world = (env_int(name, 0) for name in ("MASTER_PORT", "RANK", "WORLD_SIZE"))
        store = dist.TCPStore(
            *("localhost", port, None, True), timeout, wait_for_workers=False, master_listen_fd=listens
        )
        return store, rank, world
    return next(iter(dist.rendezvous("env://", timeout=timeout)))


def backend_of(device: torch.device) -> str:
    """Name the backend of a device's collectives.

    From torch 2.15 on, "nccl" starts one communicator per group at once, binds the world to a device and makes groups
    by splitting it. The groups here are designed for the backend that torch then calls "nccl-legacy": a communicator
    for each pair of pipeline neighbors, made at its first message.
    """
    if device.type != "cuda":
        return "gloo"
    return "nccl-legacy" if "nccl-legacy" in dist.Backend.backend_list else "nccl"


def _check_rendezvous(world: int) -> None:
    """Check what torch does not: it waits forever for a host name that does not resolve."""
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


def fresh_store(store: dist.Store, rank: int, world: int, timeout: timedelta) -> dist.Store:
    """Return a store that only the ranks of this attempt share.

    torchrun keeps one store across restarts (pytorch#135712), and torch looks for its peers' addresses under the same
    keys in every attempt: an early rank reads the address of a dead process, and is refused or waits forever.
    torchrun's restart count does not distinguish attempts, since every host counts separately.

    So rank 0 offers a new name, and each other rank answers with its own new name and accepts the offer only when
    rank 0 calls that name: an offer left by an earlier attempt calls no one.

    Args:
        store: shared by all ranks; may hold the keys of earlier attempts.
        timeout: how long to wait for the slowest rank.

    Raises:
        DistStoreError: a rank did not arrive in time.
    """
    me = uuid.uuid4().hex
    if rank == 0:
        prefix = f"megalite/{me}"
        store.set(_OFFER, prefix)
        for peer in range(1, world):
            store.set(f"{prefix}/called/{store.get(f'{prefix}/here/{peer}').decode()}", "")
        return dist.PrefixStore(prefix, store)
    deadline = time.monotonic() + timeout.total_seconds()
    while True:
        prefix = store.get(_OFFER).decode()
        store.set(f"{prefix}/here/{rank}", me)
        try:
            store.wait([f"{prefix}/called/{me}"], _RETRY)
            return dist.PrefixStore(prefix, store)
        except dist.DistStoreError:
            # A stale offer, or rank 0 still waits for another rank.
            if time.monotonic() > deadline:
                raise
