"""The guards as the hub sees them: who keeps whose copies, and which of these there are. Standard library only."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from megalite.runtime.recover.connections import Link
from megalite.runtime.recover.messages import Address, Copy, End, HubState, Killed, Refuse, Stop
from megalite.runtime.recover.processes import say

# Of one, and of several.
LOST, LEAVES, JOINS = ("is lost", "are lost"), ("leaves", "leave"), ("joins", "join")

# What is wrong with a host that the run has no use for.
OTHER = "has other options or another version of megalite than the run: make them the same, and start it again"
OTHER_DATA = "has other data than the run, or cannot open them: give every host the same files, and start it again"


@dataclass
class Peer:
    """A guard; what it has is of the round that is broken, None before it has answered.

    Attributes:
        rank: -1 in reserve.
        port: of its keeper.
        network, host: network stack of its host, and the host's name.
        held: copies of its rank.
        kept: copies of other ranks, by rank.
        lent: all copies that its keeper can hand out, by layout and rank.
        leaves: whether its host was told to stop.
        data: digest of what it would train on; "" if it has not said.
        was: its rank under the last hub, where this one is new; else -1.
        known: whether that hub knew it.
    """

    link: Link
    rank: int
    port: int
    network: str
    host: str = ""
    held: set[Copy] | None = None
    kept: dict[int, set[Copy]] | None = None
    lent: dict[tuple[int, int], set[Copy]] | None = None
    leaves: bool = False
    data: str = ""
    was: int = -1
    known: bool = False

    def answer(self, message: Killed) -> None:
        """Hear which copies there are."""
        self.held = {(number, step) for number, step in message.held}
        self.kept = {rank: {(number, step) for number, step in held} for rank, held in message.kept}
        lent = message.lent
        self.lent = {(layout, rank): {(number, step) for number, step in held} for layout, rank, held in lent}


class Failure(NamedTuple):
    """First failure of a round that is broken.

    Attributes:
        rank: of the guard that has told of it; -1 where all trainers have paused, for ranks that come or go, or where
            it has none.
        dead: all ranks that have died in the round.
        died: when it was told of, or the first trainer had paused, as `time.monotonic`.
    """

    rank: int
    dead: set[int]
    cause: str
    died: float


def has_other_data(peer: Peer, data: str) -> bool:
    """Whether a guard has other data than the run, as far as both have said what they have."""
    return peer.data != data and "" not in (peer.data, data)


def refuse(peer: Peer, why: str) -> None:
    """End a guard that asks to be in reserve, or is; `why` is for the user."""
    peer.link.heard = lambda _: None
    peer.link.send(Refuse(f"{peer.host} {why}"))
    say(0, f"host {peer.host} is not taken in reserve: it {why}")


def dismiss(peer: Peer, code: int) -> None:
    """End a guard that is in no list of the hub any more."""
    peer.link.heard = lambda _: None
    peer.link.send(End(code, "", kill=True))


def stop_with(peer: Peer) -> None:
    """Have the whole run stop, as this host was told to."""
    peer.leaves = False
    peer.link.send(Stop())


def address_of(peer: Peer) -> Address:
    """Where a guard's keeper is: at the hub's host, "" for short, if the guard is there itself."""
    return "" if peer.link.peer.startswith(("127.", "::1")) else peer.link.peer, peer.port


def by_host(peers: Sequence[Peer]) -> list[Peer]:
    """Order guards host by host; hosts, and the guards of each, stay in their order."""
    hosts: dict[str, list[Peer]] = {}
    for peer in peers:
        hosts.setdefault(peer.network, []).append(peer)
    return [peer for here in hosts.values() for peer in here]


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


def find_lenders(peers: Sequence[Peer], worlds: Mapping[int, int]) -> tuple[int, list[Copy], list[Peer]]:
    """Find the newest layout of which copies of one step are somewhere for every rank.

    Args:
        peers: all guards, those in reserve too.
        worlds: number of ranks of each layout.

    Returns:
        The layout; the copies that there are for all of its ranks, the newest first; and for each rank who has them.
        All empty, of layout 0, where there is none.
    """
    for layout in sorted(worlds, reverse=True):
        wards = [[(p, (p.lent or {}).get((layout, rank), set())) for p in peers] for rank in range(worlds[layout])]
        common = set.intersection(*(set[Copy]().union(*(held for _, held in there)) for there in wards))
        if not common:
            continue
        newest, lenders = max(common), list[Peer]()
        for there in wards:
            # All from one keeper: of those with the newest, one with the most of the others, and with least to send.
            lent = [(newest in held, len(held & common), -sum(p is peer for p in lenders)) for peer, held in there]
            at = lent.index(max(lent))
            common &= there[at][1]
            lenders.append(peers[at])
        return layout, sorted(common, reverse=True), lenders
    return 0, [], []


def missing(state: HubState, here: Sequence[Peer]) -> dict[int, Peer]:
    """Find whose guards were lost with a hub, by rank.

    Args:
        state: what the hub has told.
        here: the guards that have come to the next one.
    """
    come, (link, *_) = {peer.was for peer in here}, [peer.link for peer in here]
    gone = {}
    for rank in range(dict(state.worlds)[state.layout]):
        if rank not in come and rank < state.here:
            gone[rank] = Peer(link, rank, 0, state.network, state.host)
        elif rank not in come:  # which its host was, the hub alone has known
            gone[rank] = Peer(link, rank, 0, f"host of {rank}", f"of rank {rank}")
    return gone


def describe(peers: Mapping[int, Peer], others: Sequence[Peer], verb: tuple[str, str]) -> str:
    """Say what happens to which hosts, and of hosts with other guards to which ranks; "" if to none.

    Args:
        peers: guards to which it happens, by their ranks.
        others: guards to which it does not.
        verb: `LOST`, `LEAVES` or `JOINS`.
    """
    words, here = [], {peer.network for peer in others}
    for network in dict.fromkeys(peer.network for peer in peers.values()):
        own = sorted(rank for rank, peer in peers.items() if peer.network == network)
        host = next(peer.host for peer in peers.values() if peer.network == network)
        in_a_row = len(own) > 2 and own[-1] - own[0] == len(own) - 1
        span = f"{own[0]} to {own[-1]}" if in_a_row else ", ".join(map(str, own))
        several = "s" * (len(own) > 1)
        if network in here:
            words.append(f"the guard{several} of rank{several} {span} on host {host} {verb[len(several)]}")
        else:
            words.append(f"host {host} {verb[0]} (rank{several} {span})")
    return " and ".join(words)


def describe_change(
    gone: Mapping[int, Peer], left: Mapping[int, Peer], joined: Sequence[Peer], stay: Sequence[Peer]
) -> str:
    """Say which hosts are lost, leave, and join; "" where there are none.

    Args:
        gone, left: guards that are lost, and that leave, by the ranks that they had.
        joined: guards that have waited, and have a rank now.
        stay: all guards but those that are lost or leave.
    """
    told = [describe(gone, stay, LOST), describe(left, stay, LEAVES)]
    here = {peer.rank: peer for peer in joined}
    told.append(describe(here, [peer for peer in stay if peer not in joined], JOINS))
    return " and ".join(filter(None, told))


def _most(ward: tuple[set[Copy], int]) -> tuple[int, int]:
    copies, keeper = ward
    return len(copies), keeper
