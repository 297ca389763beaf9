"""What a guard has of its rank: copies in its memory, and the same on another host. Standard library only."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from megalite.train.recover.messages import EventLoop
from megalite.train.recover.offsite import Address, Keeper, Sender, fetch


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
    """

    def __init__(self, loop: EventLoop, kept: Callable[[int], None], failed: Callable[[str], None]) -> None:
        self._loop, self._kept, self._failed = loop, kept, failed
        self.copies: list[dict[str, Any]] = []
        self.slots: list[int] = []
        self.run_id = ""
        self.keeper: Keeper | None = None
        self._hub = self._token = ""
        self._sender: Sender | None = None
        self._unsent: list[dict[str, Any]] = []
        self._alone = False

    def open(self, hub: str, token: str) -> int:
        """Keep copies of other hosts' ranks, too.

        Args:
            hub: host of the hub, where keepers are whose address is "".
            token: of all keepers.

        Returns:
            The keeper's port.
        """
        self._hub, self._token, self.keeper = hub, token, Keeper(token)
        return self.keeper.port

    def answer(self) -> dict[str, Any]:
        """Say which copies there are, as the hub wants to hear it."""
        kept = {} if self.keeper is None else self.keeper.held()
        return {"held": [[copy["commit"], copy["step"]] for copy in self.copies], "kept": kept}

    def hear(self, message: dict[str, Any], descriptors: list[int]) -> None:
        """Take in what a process says of copies."""
        if "slots" in message:
            self.slots = descriptors  # once: later processes get these
        elif "void" in message:
            self.copies = [copy for copy in self.copies if copy["commit"] != message["void"]]
        elif "loaded" in message:
            self.copies = [copy for copy in self.copies if copy["commit"] <= message["loaded"]]
            self._unsent += self.copies[-1:]
        elif "commit" in message:
            self.copies.append(message)
            self.run_id = message["run_id"]
            self._unsent.append(message)
        self._send()

    def find_buddy(self, rank: int, address: list[Any] | None) -> None:
        """Learn which keeper has this rank's copies from here on; None: all guards are on one host."""
        if self._sender is not None:
            self._sender.close()
        self._sender, self._alone = None, address is None
        if address is not None:
            self._sender = Sender(self._loop, self._locate(address), self._token, rank, self._kept, self._failed)
        self._send()

    def go_back(self, numbers: list[int]) -> None:
        """Drop all copies but those with these numbers: the run continues from one of them."""
        self.copies, self._unsent = [copy for copy in self.copies if copy["commit"] in numbers], []
        if self.keeper is not None:
            self.keeper.forget(numbers)

    def fetch(self, rank: int, address: list[Any], numbers: list[int], done: Callable[[], None]) -> None:
        """Bring a rank's copies from the keeper that has them, and call `done`."""

        def take(copies: list[dict[str, Any]], slots: list[int]) -> None:
            self.copies, self.slots, self.run_id = copies, slots, copies[-1]["run_id"] if copies else ""
            done()

        fetch(self._loop, self._locate(address), self._token, rank, numbers, take)

    def _send(self) -> None:
        if self.keeper is None or (self._sender is None and not self._alone):
            return
        for copy in self._unsent:
            if self._sender is None:
                self._kept(copy["commit"])
            else:
                self._sender.put(copy, self.slots[copy["slot"]])
        self._unsent = []

    def _locate(self, address: list[Any]) -> Address:
        return address[0] or self._hub, address[1]
