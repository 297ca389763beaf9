"""Checkpoints in a store, `RUN_URL/checkpoints`.

`step_NNNNNNNN-ID/` holds what a checkpoint in a folder holds. `owner` names the run that writes there, the last one
that started. `latest` names the last commit, for listings that lag behind.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence

from megalite.runtime.base.untrusted import BadFile, parse_json
from megalite.runtime.base.urls import join
from megalite.runtime.places.names import step_of, store_name
from megalite.runtime.places.place import COMMIT, MANIFEST, Save
from megalite.runtime.places.store import MissingObject, Store, StoreError

OWNER, LATEST, ASIDE = "owner", "latest", "ASIDE"


class StorePlace:
    """Checkpoints in a store; see `Place`. A checkpoint has the name and the ID of its save.

    Args:
        store: the folder of checkpoints.
    """

    def __init__(self, store: Store) -> None:
        self.store = store

    def committed(self) -> list[str]:
        """List the names of committed full checkpoints, newest first."""
        found = {name.rstrip("/") for name in self.store.names() if name.endswith("/")}
        found.add((self.read(LATEST) or b"").decode(errors="replace"))
        steps = [name for name in found if step_of(name) >= 0]
        steps.sort(key=lambda name: (step_of(name), name), reverse=True)
        # Listings may be old: the object itself decides.
        return [name for name in steps if self.exists(f"{name}/{COMMIT}")]

    def exists(self, name: str) -> bool:
        """Return whether there is such an object."""
        try:
            self.store.size(name)
        except MissingObject:
            return False
        return True

    def read(self, name: str) -> bytes | None:
        """Return an object; None if there is none."""
        try:
            return self.store.read(name)
        except MissingObject:
            return None

    def put(self, name: str, data: bytes) -> None:
        """Write a small object; it appears as a whole."""
        self.store.write(name, data)

    def snapshot(self, name: str, sha256: str) -> str:
        """Return the committed snapshot of weights with a name and a SHA-256 of its manifest; "" if there is none."""
        commit = f"{sha256}\n".encode()
        for found in sorted(n.rstrip("/") for n in self.store.names() if n.startswith(f"{name}-")):
            if self.read(f"{found}/{COMMIT}") == commit:
                return found
        return ""

    def take(self, owner: str) -> None:
        """Become the owner, whoever was it before.

        Raises:
            StoreError: the place cannot be written, or does not keep what is written.
        """
        sent = owner.encode()
        self.store.write(OWNER, sent)
        # Some endpoints, as of a proxy, call everything a success.
        if (there := self.store.read(OWNER)) != sent:
            rule = f"does not keep what is written: {len(there)} bytes come back, which are not the {len(sent)} sent"
            raise StoreError(join(self.store.url, OWNER), rule)

    def taken_by(self, owner: str) -> str:
        """Describe the run that has taken the place; "" if it is still the owner's.

        Raises:
            StoreError: the store cannot tell, or nobody has ever taken the place.
        """
        other = self.store.read(OWNER).decode(errors="replace")
        return "" if other == owner else f"run {_describe(other)}"

    def parts_of(self, save: Save) -> str:
        """Return the name that the checkpoint will have too."""
        return store_name(save.name, save.id)

    def publish(self, save: Save, manifest: bytes, commit: bytes, aside: Sequence[str]) -> list[str]:
        """Write manifest and COMMIT beside the parts; the checkpoint exists with COMMIT."""
        # Before COMMIT: a later one that is abandoned must not be what the next start takes.
        moved = [self.set_aside(other) for other in aside]
        self.store.write(f"{self.parts_of(save)}/{MANIFEST}", manifest)
        self.store.write(f"{self.parts_of(save)}/{COMMIT}", commit)
        return moved

    def set_aside(self, name: str) -> str:
        """Rename a checkpoint's COMMIT: without it no run resumes from the checkpoint, with ASIDE none deletes it."""
        self.store.write(f"{name}/{ASIDE}", self.store.read(f"{name}/{COMMIT}"))
        self.store.delete([f"{name}/{COMMIT}"])
        return f"{name} -> {name}/{ASIDE}"

    def tidy(self, newest: str, staying: Callable[[Sequence[str]], Collection[str]]) -> list[str]:
        """Point `latest` at the newest checkpoint, and delete older ones and what is left of their saves."""
        try:
            self.store.write(LATEST, newest.encode())
            kept = {*staying(self.committed()), newest}
            for other in {n.rstrip("/") for n in self.store.names() if n.endswith("/")} - kept:
                # Of a later one other ranks may be uploading their parts already.
                if 0 <= step_of(other) < step_of(newest) and ASIDE not in (files := self.store.names(other)):
                    self.store.delete(f"{other}/{n}" for n in sorted(files, key=lambda n: n != COMMIT))
        except (OSError, StoreError) as e:
            return [f"older ones remain ({e})"]
        return []


def _describe(owner: str) -> str:
    try:
        content = parse_json(owner.encode())
        return f"{content['run_id']} on {content['host']}"
    except (BadFile, KeyError, TypeError):
        return "of an unknown owner"
