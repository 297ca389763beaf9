"""Copies of a rank's state in the memory of its guard: three whole ones, or two and a third that is being written.

A copy is the tensors of `DistributedOptimizer.states`, also those that another rank owns, one after the other, then the
run's other state as JSON. Weights are made from the masters. With `--elastic` the JSON says what the tensors hold, so
that ranks of another layout can load from it (`relayout`).
"""

from __future__ import annotations

import json
import mmap
import zlib
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch

from megalite.core.mesh.collectives import gather_texts
from megalite.core.mesh.context import ParallelContext
from megalite.core.mesh.device import lock_pages
from megalite.core.sharding import StateTensor
from megalite.runtime.base.untrusted import BadFile
from megalite.runtime.recover.bit_sums import sums_of_bits
from megalite.runtime.recover.member import GuardedRank
from megalite.runtime.recover.messages import Commit, Loaded, Void
from megalite.runtime.recover.offsite import NUM_SLOTS, first_number, free_slot, make_slots
from megalite.runtime.recover.relayout import borrow, describe, load_borrowed, room
from megalite.runtime.recover.side_stream import SideStream

# For the JSON, which grows with the number of saves; memory that is not written to is not allocated.
_JSON_BYTES = 16 << 20


class _Started(NamedTuple):
    """A copy that is being written; `text` is its JSON without sums and tensors."""

    step: int
    slot: int
    text: str
    run_id: str


class Copies:
    """Writes and reads the copies of this rank.

    On a GPU a copy is made beside the step that follows, and is whole before the ranks agree on that step's outcome.

    Args:
        guard: who keeps them.
        states: what this rank holds.
        elsewhere: whether they are kept on another host too.
        elastic: whether ranks of another layout may load from them.
        device: of this rank; None: the CPU.

    Attributes:
        restored: the run's other state, as in the copy that was loaded last; None if there was none.
        brought: bytes that came from copies of another layout; 0 where that is of this one.
    """

    def __init__(
        self,
        guard: GuardedRank,
        states: Sequence[StateTensor],
        elsewhere: bool,
        elastic: bool = False,
        device: torch.device | None = None,
    ) -> None:
        self._guard, self._elsewhere, self._states = guard, elsewhere, states
        self._device = device or torch.device("cpu")
        self._tensors = f', "tensors": {describe(states)}}}' if elastic else "}"
        self.brought = 0
        self._flats = [state.flat.detach() for state in states]
        self._size = sum(map(room, self._flats))
        self._held = list(guard.turn.copies)
        self._number = 0
        self._side = SideStream(self._device)
        self._started: _Started | None = None
        self.restored: dict[str, Any] | None = None
        total = self._size + _JSON_BYTES
        if not guard.slots:
            guard.keep(make_slots(total))
        self._maps = [mmap.mmap(slot, total) for slot in guard.slots]
        self._tried_to_lock = set[int]()
        self._parts = [self._parts_of(memory) for memory in self._maps]

    @torch.no_grad()
    def take(self, step: int, state: dict[str, Any]) -> None:
        """Copy the state after `step`: at once, or on a GPU until `finish`, before which no state may change.

        Args:
            step: completed steps.
            state: what `restored` will be, as JSON content; with a "run_id".
        """
        self.finish()
        if len(self._held) == NUM_SLOTS:
            self._guard.say(Void(self._held.pop(0).number))
        slot = free_slot(self._held)
        self._lock(slot)
        self._side.start(zip(self._parts[slot], self._flats))
        self._started = _Started(step, slot, json.dumps(state), state["run_id"])
        if not self._side.is_beside:
            self.finish()

    def finish(self) -> None:
        """Wait for the copy that was started last, if any, and tell the guard that it is whole.

        Every step calls it before its ranks agree. So they are at most one copy apart, and so are copies on other
        hosts: none counts before the one before it has arrived there. Of the last three there is always one that is
        whole everywhere.
        """
        if self._started is None:
            return
        step, slot, state, run_id = self._started
        self._started, sums = None, self._side.finish()
        if self._elsewhere and self._held:
            self._guard.wait_kept(self._held[-1].number)
        text = f'{state[:-1]}, "sums": {json.dumps(sums)}{self._tensors}'.encode()
        if len(text) > _JSON_BYTES:
            raise RuntimeError(f"{len(text)} bytes of JSON do not fit beside a copy")
        self._maps[slot][self._size : self._size + len(text)] = text
        self._number = max(self._number + 1, first_number(self._guard.round))
        size, used = len(self._maps[slot]), self._size + len(text)
        copy = Commit(self._number, step, slot, size, used, zlib.crc32(text), run_id, len(text))
        self._held.append(copy)
        self._guard.say(copy)

    def _lock(self, slot: int) -> None:
        """Page-lock a slot's memory for the GPU, once: only those that are used, as it takes time."""
        if self._size and self._side.is_beside and slot not in self._tried_to_lock:
            self._tried_to_lock.add(slot)
            memory = torch.frombuffer(self._maps[slot], dtype=torch.uint8, count=self._size)
            lock_pages(memory, self._device, "a copy of the state")

    @torch.no_grad()
    def load(self, ctx: ParallelContext) -> list[str]:
        """Load the newest copy that is sound on all ranks into the states, and drop later ones; every rank calls it.

        Returns:
            What was wrong with the copies that were not used; empty where there were none. If it was all of them, the
            states are zero.
        """
        problems = []
        if self._guard.turn.go.lenders:
            return self._load_borrowed(ctx)
        # One that could not be brought from its keeper in time is on some ranks alone.
        held = gather_texts(json.dumps([copy.number for copy in self._held]), ctx.world, ctx.device)
        common = set.intersection(*(set(json.loads(numbers)) for numbers in held))
        for copy in sorted(self._held, key=lambda copy: -copy.number):
            if copy.number not in common:
                continue
            problem = self._check(copy, ctx.rank, loads=True)
            found = list(filter(None, gather_texts(problem, ctx.world, ctx.device)))
            if not found:
                self._number = copy.number
                break
            problems += found
            self._forget()
        else:
            self._number = -1
        self._held = [copy for copy in self._held if copy.number <= self._number]
        self._guard.say(Loaded(self._number))
        return problems

    def _forget(self) -> None:
        """Undo what a copy that is not used has brought: a fresh start writes the masters alone."""
        self.restored, self.brought = None, 0
        for flat in self._flats:
            flat.zero_()

    def _load_borrowed(self, ctx: ParallelContext) -> list[str]:
        """As `load`, from copies of another layout."""
        go, problems = self._guard.turn.go, list[str]()
        for number in go.numbers:
            problem = ""
            try:
                with borrow(go, self._guard.turn.token, number) as copies:
                    self.restored, self.brought = load_borrowed(copies, self._states, ctx.rank)
            except BadFile as e:
                problem = str(e)
            except OSError as e:
                self._guard.may_be_killed()  # where a host is lost, others may have the same
                problem = str(e)
            found = list(filter(None, gather_texts(problem, ctx.world, ctx.device)))
            if not found:
                self._number = number
                break
            problems += found
            self._forget()
        self._guard.say(Loaded(self._number if self.restored else -1))
        return problems

    @torch.no_grad()
    def reload(
        self, ctx: ParallelContext, num_steps: int, rewinds: dict[str, int]
    ) -> tuple[bool | None, dict[int, str]]:
        """Load the newest copy once more; every rank calls it.

        Args:
            ctx: this rank's axes.
            num_steps: updates so far.
            rewinds: number of rewinds so far to each checkpoint: as many updates may belong to an abandoned history.

        Returns:
            Whether the states had other bits by then; None if nothing was loaded, as that copy is not of these updates,
            or damaged on some rank. And what is wrong with it, by rank.
        """
        self.finish()
        problem, answer = "".join(self._check(copy, ctx.rank) for copy in self._held[-1:]), ""
        if self._held and not problem and self.restored is not None:
            same = self.restored["scalars"]["num_steps"] == num_steps and self.restored["rewinds"] == rewinds
            answer = "same" if same else ""
        answers = gather_texts(problem or answer, ctx.world, ctx.device)
        problems = {rank: text for rank, text in enumerate(answers) if text not in ("", "same")}
        if set(answers) != {"same"}:
            return None, problems
        parts = self._parts[self._held[-1].slot]
        changed = sums_of_bits(self._flats).tolist() != sums_of_bits(parts).tolist()
        for part, flat in zip(parts, self._flats):
            flat.copy_(part)
        return changed, {}

    def _check(self, copy: Commit, rank: int, loads: bool = False) -> str:
        """Read what a copy holds besides tensors, and sum those; return what is wrong with it.

        Args:
            copy: the copy.
            rank: this rank.
            loads: copy them into the states first, and sum those, on their device; otherwise no state changes.
        """
        text = self._maps[copy.slot][self._size : copy.bytes]
        damaged = f"the copy of step {copy.step} in the memory of rank {rank} is damaged"
        if zlib.crc32(text) != copy.crc:
            return damaged
        self.restored = json.loads(text)
        assert self.restored is not None
        self.restored.pop("tensors", None)
        parts = self._parts[copy.slot]
        if loads:
            self._lock(copy.slot)
            for part, flat in zip(parts, self._flats):
                flat.copy_(part, non_blocking=True)
        return "" if sums_of_bits(self._flats if loads else parts).tolist() == self.restored.pop("sums") else damaged

    def _parts_of(self, memory: mmap.mmap) -> list[torch.Tensor]:
        """Return the parts of a slot's memory, of the states' types and lengths."""
        slot = torch.frombuffer(memory, dtype=torch.uint8, count=self._size)
        parts = []
        at = 0
        for flat in self._flats:
            part = slot[at : at + flat.numel() * flat.element_size()]
            parts.append(part.view(flat.dtype))
            at += room(flat)
        return parts
