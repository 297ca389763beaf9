"""Rendezvous after a restart by torchrun: a part of the store that no earlier attempt has written to."""

from __future__ import annotations

import time
import uuid
from datetime import timedelta

import torch.distributed as dist

_OFFER = "megalite/rendezvous/offer"
_RETRY = timedelta(seconds=1)


def fresh_store(store: dist.Store, rank: int, world: int, timeout: timedelta) -> dist.Store:
    """Return a store that only the ranks of this attempt share.

    torchrun keeps one store across restarts (pytorch#135712), and torch looks for its peers' addresses under the same
    keys in every attempt: an early rank reads the address of a dead process, and is refused or waits forever. torchrun's
    restart count does not distinguish attempts, since every host counts separately.

    So rank 0 offers a new name, and each other rank answers with its own new name and accepts the offer only when rank 0
    calls that name: an offer left by an earlier attempt calls no one.

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
