"""What a guard has of its rank: copies in its memory, and the same on another host. Standard library only."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence

from megalite.runtime.recover.connections import EventLoop
from megalite.runtime.recover.messages import Address, Commit, Killed, Loaded, Slots, Void
from megalite.runtime.recover.offsite import NUM_SLOTS, Keeper, Sender, fetch, first_number


class Held:
    """The copies of a rank.

    Args:
        loop: where everything is called back.
        kept: called with the number of each copy that is whole on another host.
        failed: called with the reason when the guard that keeps them cannot be reached any more.

    Attributes:
        copies: commits of the whole ones, the oldest first.
        slots: descriptors of the memory that they are in.
        run_id: of the run that they are from; "" without any.
        keeper: of the copies of others; None where copies stay on their host.
        layout: that the rank is of.
        rank: whose copies these are; -1 in reserve.
    """

    def __init__(self, loop: EventLoop, kept: Callable[[int], None], failed: Callable[[str], None]) -> None:
        self._loop = loop
        self._kept = kept
        self._failed = failed
        self.copies: list[Commit] = []
        self.slots: list[int] = []
        self.run_id = ""
        self.keeper: Keeper | None = None
        self._hub = self._token = ""
        self._sender: Sender | None = None
        self._alone, self._round = False, 0
        self.layout, self.rank = 0, -1
        # Copies since the round began.
        self._count = 0
        # Number of the last copy that was given to the sender.
        self._sent = -1

    @property
    def token(self) -> str:
        """What all keepers want to hear; "" where copies stay on their host."""
        return self._token

    def open(self, hub: str, token: str, rank: int = -1) -> int:
        """Keep copies of other hosts' ranks, too.

        Args:
            hub: host of the hub, where keepers are whose address is "".
            token: of all keepers.
            rank: that of this guard.

        Returns:
            The keeper's port.
        """
        self._hub = hub
        self._token = token
        self.rank = rank
        self.keeper = Keeper(token)
        return self.keeper.port

    def answer(self, round_: int) -> Killed:
        """Return which copies there are, for the hub."""
        held = [(copy.number, copy.step) for copy in self.copies]
        if self.keeper is None:
            return Killed(round_, held, [])
        there = self.keeper.held()
        own = self.rank if self.copies else None
        kept = [(rank, copies) for (layout, rank), copies in there.items() if layout == self.layout and rank != own]
        return Killed(round_, held, kept, [(*place, copies) for place, copies in there.items()])

    def lend(self) -> None:
        """Let the keeper hand out this rank's copies, which nobody writes to before the next round begins."""
        if self.keeper is not None and self.copies:
            self.keeper.lend((self.layout, self.rank), self.copies, self.slots)

    def hear(self, message: Slots | Void | Loaded | Commit, descriptors: list[int]) -> None:
        """Take in what a process says of copies."""
        match message:
            case Slots():
                self.slots = descriptors  # once: later processes get these
            case Void():
                self.copies = [copy for copy in self.copies if copy.number != message.number]
            case Loaded(last):
                self.copies = [copy for copy in self.copies if copy.number <= last]
                self._sent = last - 1  # that one again: its keeper may be another now
                if self.keeper is not None:
                    # All ranks have loaded this one; what they have sent since is of the new round.
                    self.keeper.forget(lambda number: last < number < first_number(self._round))
            case Commit():
                self.copies.append(message)
                self._count += 1
                self.run_id, oldest = message.run_id, self.copies[0].number
                # Those of an earlier layout serve until one of this is whole everywhere: it is when the third is made.
                first = 0 if self._count >= NUM_SLOTS else first_number(self.layout)
                if self.keeper is not None:
                    # No round can begin from what this rank itself has not got.
                    self.keeper.forget(lambda number: first <= number < oldest)
        self._send()

    def find_buddy(self, rank: int, address: Address | None) -> None:
        """Learn which keeper has this rank's copies from here on; None: all guards are on one host."""
        if self._sender is not None:
            self._sender.close()
        self._sender, self._alone = None, address is None
        if address is not None:
            place = self.locate(address), self._token, rank, self._round
            self._sender = Sender(self._loop, *place, self._kept, self._failed, self.layout)
        self._send()

    def go_back(self, round_: int, numbers: Sequence[int], layout: int = 0, rank: int = -1) -> None:
        """Begin a round: drop all copies but those with these numbers, from one of which the run continues.

        Args:
            round_, numbers: of the round, and of the copies.
            layout, rank: what this guard's rank is from here on. In another layout the keeper alone has the copies,
                for whoever needs parts of them.
        """
        moves, self._count = layout != self.layout, 0
        self._round, self._sent = round_, max(numbers, default=-1)
        self.copies = [copy for copy in self.copies if copy.number in numbers and not moves]
        if self.keeper is not None:
            self.keeper.take_back((self.layout, self.rank), gives=moves)
            # Others may have begun, and sent copies, already.
            self.keeper.forget(lambda number: number not in numbers and number < first_number(round_))
        if moves:
            if self._sender is not None:
                self._sender.close()
            for slot in self.slots:
                os.close(slot)
            self.slots = []
        self.layout, self.rank = layout, rank

    def fetch(self, rank: int, address: Address, numbers: Sequence[int], done: Callable[[], None]) -> None:
        """Bring a rank's copies from the keeper that has them, and call `done`, unless another round has begun."""
        round_ = self._round

        def take(copies: list[Commit], slots: list[int]) -> None:
            late = self._round != round_
            for slot in slots if late else self.slots:
                os.close(slot)
            if late:
                return
            self.copies = copies
            self.slots = slots
            self.run_id = copies[-1].run_id if copies else ""
            done()

        fetch(self._loop, self.locate(address), self._token, rank, numbers, take, self.layout)

    def _send(self) -> None:
        if self.keeper is None or (self._sender is None and not self._alone):
            return
        for copy in self.copies:
            if copy.number <= self._sent:
                continue
            self._sent = copy.number
            if self._sender is None:
                self._kept(copy.number)
            else:
                self._sender.put(copy, self.slots[copy.slot])

    def find_hub(self, host: str) -> None:
        """Learn where the hub is from here on."""
        self._hub = host

    def locate(self, address: Address) -> Address:
        """Return the address of a keeper, of which the hub has told."""
        return address[0] or self._hub, address[1]
