"""A place of a run's checkpoints: a folder on a disk, or one in a store; both have the same verbs.

A checkpoint is a folder of objects, "NAME/FILE". It exists from the moment its COMMIT is visible; what a save has
written before that is no checkpoint, whatever ends the save. A disk raises `OSError`, a store `StoreError`.

How a place is claimed differs, so it is no verb: a folder has a lock (`lock.RunLock`), which refuses a second run while
its owner lives; a store knows no processes, and the last run to take it has it (`StorePlace.take`).
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from typing import NamedTuple, Protocol

MANIFEST, COMMIT = "manifest.json", "COMMIT"


class Save(NamedTuple):
    """A save in progress.

    Attributes:
        name: name of the checkpoint, "step_NNNNNNNN" or "model_NNNNNNNN".
        id: random ID of the save, 16 hexadecimal digits.
    """

    name: str
    id: str


class Place(Protocol):
    """Where checkpoints of a run are. Names are relative to it: "CHECKPOINT" or "CHECKPOINT/FILE"."""

    def committed(self) -> list[str]:
        """List the names of committed full checkpoints, newest first."""

    def exists(self, name: str) -> bool:
        """Return whether there is such an object."""

    def read(self, name: str) -> bytes | None:
        """Return an object; None if there is none."""

    def put(self, name: str, data: bytes) -> None:
        """Write a small object; it appears as a whole, and replaces one of that name."""

    def taken_by(self, owner: str) -> str:
        """Describe the run that has taken the place from an owner; "" if it is still the owner's."""

    def parts_of(self, save: Save) -> str:
        """Return the name of the folder that holds the parts of a save until it is published."""

    def publish(self, save: Save, manifest: bytes, commit: bytes, aside: Sequence[str]) -> list[str]:
        """Turn the parts of a save, all of which have arrived, into a checkpoint.

        Args:
            save: the save.
            manifest, commit: content of `MANIFEST` and `COMMIT`, which comes last.
            aside: checkpoints to set aside before that, because the run does not continue them.

        Returns:
            The checkpoints that were set aside, as `set_aside` describes them.
        """

    def set_aside(self, name: str) -> str:
        """Keep a checkpoint, but out of what runs resume from or delete; return "old -> new"."""

    def tidy(self, newest: str, staying: Callable[[Sequence[str]], Collection[str]]) -> list[str]:
        """Finish after full checkpoint `newest` was published: point `latest` at it, and delete older ones.

        The checkpoint exists by now, so nothing that fails here undoes it.

        Args:
            newest: name of the checkpoint.
            staying: returns those that stay, of the names of full checkpoints, newest first.

        Returns:
            What failed, one line each.
        """
