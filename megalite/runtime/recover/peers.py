"""The guards as the hub sees them: who keeps whose copies, and which of these there are. Standard library only."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from megalite.runtime.recover.connections import Link
from megalite.runtime.recover.messages import Copy


@dataclass
class Peer:
    """A guard; `held` and `kept` are of the round that is broken, None before it has answered.

    Attributes:
        rank: -1 in reserve.
        port: of its keeper.
    """

    link: Link
    rank: int
    port: int
    network: str
    held: set[Copy] | None = None
    kept: dict[int, set[Copy]] | None = None


def buddies(hosts: Sequence[str]) -> list[int | None]:
    """Find who keeps each rank's copies: who has the same place on a host half of all hosts further on.

    Args:
        hosts: of each rank.

    Returns:
        For each rank another one; None where there is one host.
    """
    ranks = defaultdict[str, list[int]](list)
    for rank, host in enumerate(hosts):
        ranks[host].append(rank)
    found: list[int | None] = [None] * len(hosts)
    order = list(ranks.values())
    for i, here in enumerate(order if len(order) > 1 else []):
        there = order[(i + len(order) // 2) % len(order)]
        for place, rank in enumerate(here):
            found[rank] = there[place % len(there)]
    return found


def find_copies(guards: Mapping[int, Peer], world: int) -> tuple[list[Copy], dict[int, Peer]]:
    """Find the copies that all ranks have, the newest first.

    Args:
        guards: of the ranks that have one.
        world: number of ranks.

    Returns:
        They, and the keepers of those ranks that have no guard, or one that holds none.
    """
    held = {rank: peer.held for rank, peer in guards.items() if peer.held}
    kept: dict[int, list[tuple[set[Copy], int]]] = {rank: [] for rank in range(world) if rank not in held}
    for peer in guards.values():
        for rank, copies in (peer.kept or {}).items():
            if rank in kept:
                kept[rank].append((copies, peer.rank))
    anywhere = [set[Copy]().union(*(copies for copies, _ in wards)) for wards in kept.values()]
    common = set.intersection(*held.values(), *anywhere)
    if not common:
        shared = set.intersection(*held.values()) if held else set[Copy]()
        return [], {rank: guards[at] for rank, wards in kept.items() for copies, at in wards if copies & shared}
    # All from one keeper: of those with the newest, one with the most of the others.
    newest, keepers = max(common), dict[int, Peer]()
    for rank, wards in kept.items():
        copies, keeper = max(((copies & common, keeper) for copies, keeper in wards if newest in copies), key=_most)
        common &= copies
        keepers[rank] = guards[keeper]
    return sorted(common, reverse=True), keepers


def _most(ward: tuple[set[Copy], int]) -> tuple[int, int]:
    copies, keeper = ward
    return len(copies), keeper
