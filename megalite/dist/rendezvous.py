"""Meeting again after torchrun's restart: a corner of the store that no earlier life of the job has written in."""

from __future__ import annotations

import time
import uuid
from datetime import timedelta

import torch.distributed as dist

_OFFER = "megalite/rendezvous/offer"
_RETRY = timedelta(seconds=1)


def fresh_store(store: dist.Store, rank: int, world: int, timeout: timedelta) -> dist.Store:
    """A store in which all ranks of this start, and nobody else, meet.

    torchrun keeps one store over its restarts (pytorch#135712), and torch looks for its peers' addresses under the
    same keys in every life: a rank that comes early reads the address of a process that is gone, and is refused or
    waits for ever. torchrun's restart count cannot tell the lives apart, since every host counts for itself.

    So rank 0 offers a new name, and each other rank answers with a new name of its own and takes the offer only when
    rank 0 calls that name: an offer left by an earlier life calls nobody.

    Args:
        store: shared by all ranks; may hold the keys of earlier lives.
        timeout: for the slowest rank to come.

    Raises:
        DistStoreError: some rank has not come in time.
    """
    me = uuid.uuid4().hex
    if rank == 0:
        corner = f"megalite/{me}"
        store.set(_OFFER, corner)
        for peer in range(1, world):
            store.set(f"{corner}/called/{store.get(f'{corner}/here/{peer}').decode()}", "")
        return dist.PrefixStore(corner, store)
    deadline = time.monotonic() + timeout.total_seconds()
    while True:
        corner = store.get(_OFFER).decode()
        store.set(f"{corner}/here/{rank}", me)
        try:
            store.wait([f"{corner}/called/{me}"], _RETRY)
            return dist.PrefixStore(corner, store)
        except dist.DistStoreError:
            # A stale offer, or rank 0 still waits for another rank.
            if time.monotonic() > deadline:
                raise
