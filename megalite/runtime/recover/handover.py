"""From hub to hub: what one tells who may take its place, and what the next one knows of it. Standard library only."""

from __future__ import annotations

import time

from megalite.runtime.recover import messages, succession
from megalite.runtime.recover.peers import Peer, address_of, missing
from megalite.runtime.recover.roster import Roster

# Others may notice so much later that the hub's host is lost.
NOTICE_S = 15.0


class Handover:
    """A hub's part in it.

    Args:
        listen: the run's sizes and rules; without a folder nobody takes this hub's place.
        roster: the hub's guards.
        last: what the last hub has told, if this one takes its place.

    Attributes:
        number: which hub this is; 0 is the first one.
        last: what the last hub has told, until this one's first round has begun; None from then on.
    """

    def __init__(self, listen: messages.Listen, roster: Roster, last: messages.HubState | None) -> None:
        self._listen, self._roster = listen, roster
        self.last, self.number = last, last.number + 1 if last else 0
        # How many guards there were when no round was broken, but those that have ended; when others were lost.
        self._strength, self._losses = 0, list[float]()

    # ------------------------------------------------------------------------------------------- to the next hub

    def tell(self, round_: int, recoveries: int, data: str, whole: bool, leaves: bool = False) -> None:
        """Tell all what who takes this hub's place must know.

        Args:
            round_, recoveries, data, leaves: see `HubState`.
            whole: whether no round is broken.
        """
        roster, everyone = self._roster, self._roster.everyone()
        if not self._listen.folder or 0 not in roster.guards:
            return
        if whole:
            # One lost connection may have cut off several, which are missed one after the other.
            self._losses = [at for at in self._losses if time.monotonic() < at + 2 * NOTICE_S]
            self._strength = len(everyone) + len(self._losses)
        first = roster.guards[0]
        here = sum(peer.network == first.network for peer in roster.guards.values())
        others = sum(peer.network != first.network for peer in everyone)
        state = messages.HubState(
            *(self._listen, self.number, round_, roster.layout, [*roster.worlds.items()], recoveries, data),
            *(first.host, first.network, here, others),
            leaves=leaves,
        )
        for peer in everyone:
            peer.link.send(state._replace(address=address_of(peer)[0]))

    # ----------------------------------------------------------------------------------------- from the last hub

    def admit(self, peer: Peer) -> None:
        """Take the rank of a guard that comes: it is of the last hub's round."""
        if self.number:
            peer.rank, peer.was = -1, peer.rank if self.last else -1

    def greet(self, peer: Peer) -> None:
        """Tell a guard that the last hub has not known of that one, before the round begins."""
        if self.last and peer.was < 0:
            peer.link.send(self.last._replace(number=self.number, address=address_of(peer)[0]))

    def hear(self, peer: Peer, state: messages.HubState) -> bool:
        """Hear from a guard what the last hub has told it; return whether that is of a later round."""
        peer.known = True
        if self.last is None or state.round <= self.last.round:
            return False
        self.last = state
        return True

    def expected(self) -> int:
        """How many guards are to come."""
        if self.last is None:
            return 0
        # Where the last hub's host is told to leave, it comes, too.
        there = self.last.others + (self.last.here if self.last.leaves else 0)
        return max(0, there - sum(peer.known for peer in self._roster.reserves))

    def lost(self) -> dict[int, Peer]:
        """The guards that were lost with the last hub, by rank."""
        return missing(self.last, self._roster.reserves) if self.last else {}

    # ---------------------------------------------------------------------------------- one hub, and no other beside

    def lose(self, ended: bool) -> None:
        """A guard is gone; one that has not `ended` may live where this host cannot reach it."""
        if ended:
            self._strength -= 1
        else:
            self._losses.append(time.monotonic())

    def is_cut_off(self) -> bool:
        """Whether fewer than half of those that may live are left: a lost connection may have cut the run in two."""
        before = self.last.here + self.last.others if self.last else self._strength
        return 2 * len(self._roster.everyone()) < before

    def time_for_others(self, died: float) -> float:
        """How many seconds most hosts, which are gone, still have to begin the next round if they live.

        Args:
            died: when the round was broken, as `time.monotonic`.
        """
        return died + 2 * NOTICE_S - time.monotonic() if self.is_cut_off() else 0.0

    def may_begin(self, round_: int, is_new: bool) -> bool:
        """Whether no other hub has begun a round; told by the disk, which only a hub that is new cannot do without."""
        if not self._listen.folder:
            return True
        try:
            return succession.begin_round(self._listen.folder, round_)
        except OSError:
            return not is_new
