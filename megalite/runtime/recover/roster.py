"""Which guards a hub has, and which places they have. Standard library only."""

from __future__ import annotations

from megalite.runtime.recover import messages
from megalite.runtime.recover.peers import Peer, address_of, buddies, by_host


class Roster:
    """The guards of a run.

    Args:
        listen: the run's sizes and rules.

    Attributes:
        guards: those of ranks, by rank.
        reserves: those without a rank.
        vacant: ranks whose guards are gone.
        world: number of ranks.
        layout: number of the layout that ranks are of.
        worlds: number of ranks of each layout that there has been.
    """

    def __init__(self, listen: messages.Listen) -> None:
        self._unit, self._fewest = listen.unit, max(listen.unit, listen.fewest)
        self.guards, self.reserves, self.vacant = dict[int, Peer](), list[Peer](), list[int]()
        self.world, self.layout, self.worlds = listen.world, 0, {0: listen.world}

    def everyone(self) -> list[Peer]:
        return [*self.guards.values(), *self.reserves]

    def waiting(self) -> list[Peer]:
        """Reserves that may take a place."""
        return [peer for peer in self.reserves if not peer.leaves]

    def fitting(self) -> int:
        """How many of the ranks that are left make whole replicas; 0: too few, or the number of ranks stays."""
        if not self._unit:
            return 0
        left = sum(not peer.leaves for peer in self.everyone())
        world = min(left // self._unit * self._unit, self.worlds[0])
        return world if world >= self._fewest else 0

    def tell(self, message: messages.FromHub) -> None:
        for peer in self.everyone():
            peer.link.send(message)

    def buddies(self) -> list[messages.Address | None]:
        """Where the keeper of each rank's copies is, as `peers.buddies` finds it."""
        found = buddies([self.guards[rank].network for rank in range(self.world)])
        return [None if buddy is None else address_of(self.guards[buddy]) for buddy in found]

    def restore(self, state: messages.HubState) -> None:
        """Have the sizes of another hub; its ranks have no guard until they are given new places."""
        self.layout, self.worlds = state.layout, dict(state.worlds)
        self.world = self.worlds[state.layout]
        self.vacant = [*range(self.world)]
        for peer in self.reserves:
            peer.held = None

    def take_places(self, world: int, layout: int, own: messages.Address) -> list[Peer]:
        """Give the guards that stay new ranks, host by host, the others wait; return those that have waited before.

        Args:
            world, layout: number of ranks, and number of the layout that they are of.
            own: address of the guard with the hub, which is the first where the hub is new.
        """
        # Where the hub is new, who waits had places.
        waiting = sorted(self.waiting(), key=lambda p: (address_of(p) != own, p.was < 0, p.was))
        peers = by_host([*(self.guards[rank] for rank in sorted(self.guards)), *waiting])
        joined = [peer for peer in peers[:world] if peer.rank < 0 and peer.was < 0]
        for rank, peer in enumerate(peers):
            peer.rank = rank if rank < world else -1
        leavers = [peer for peer in self.reserves if peer.leaves]
        self.guards, self.reserves, self.vacant = dict(enumerate(peers[:world])), [*peers[world:], *leavers], []
        self.world, self.layout = world, layout
        self.worlds[layout] = world
        return joined
