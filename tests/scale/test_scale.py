"""What one rank, and rank 0, do in a world of thousands: counted for Llama-3.1-405B at two sizes, and compared."""

from __future__ import annotations

import gc
import re
import sys
import tracemalloc
from collections import Counter, deque
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from megalite.core.base.slices import Slice
from megalite.core.mesh.grid import Grid
from megalite.extras.launch import failure
from megalite.extras.launch.failure import FailedRank, RankTail, first_failure, is_explained
from megalite.runtime.checkpoint import manifest as manifest_module
from megalite.runtime.checkpoint.load import wanted_boxes
from megalite.runtime.checkpoint.manifest import Manifest, Part, committable, manifest_text
from megalite.runtime.places.folder_place import seal
from megalite.runtime.watch.straggler import slow_ranks
from tests.scale.world import manifest_of, states_of

SMALL, MIDDLE, LARGE = 128, 1024, 8192


class Counts(NamedTuple):
    """What was counted in one world.

    Attributes:
        calls: of functions, by the writer of rank 0 to commit.
        collections: full ones, meanwhile.
        boxes: boxes in the manifest.
        manifest_bytes: its size on disk.
        parsed: boxes that become objects on a rank that resumes, at most of those looked at.
        kept: bytes of memory that it keeps of the manifest, at most of those looked at.
        opened: shards that it opens to load, at most of those looked at.
    """

    calls: int
    collections: int
    boxes: int
    manifest_bytes: int
    parsed: int
    kept: int
    opened: int


def counted(world: int, folder: Path, patch: pytest.MonkeyPatch) -> Counts:
    """Save with tp 8 and pp 16, and load with tp 4 and pp 8."""
    saved, loaded = Grid.of(world, tp=8, pp=16), Grid.of(world, tp=4, pp=8)
    folder.mkdir()
    manifest = manifest_of(saved)
    with counting_calls() as calls:
        # Parses and checks all of it, as every commit does.
        seal(folder, *committable(manifest))
    boxes = sum(len(tensor.boxes) for tensors in manifest.tensors.values() for tensor in tensors.values())
    del manifest
    text, made = manifest_text(folder, 1 << 30), [0]
    parse = manifest_module.parse_tensor

    def counting(name: str, entry: Any, located: Any) -> Any:
        made[0] += len(located)
        return parse(name, entry, located)

    patch.setattr(manifest_module, "parse_tensor", counting)
    looked = []
    for rank in (0, world // 2 + 3):
        states = states_of(loaded, rank)
        wanted = wanted_boxes(states)
        made[0] = 0
        gc.collect()
        tracemalloc.start()
        part = Manifest.from_json(text, "here", Part(rank, world, wanted)).verified()
        gc.collect()
        kept = tracemalloc.get_traced_memory()[0]
        tracemalloc.stop()
        opened = set()
        for state in states:
            tensor = part.tensors[state.role][state.name]
            for region in state.slices:
                found = [(file, overlap[1]) for file, box in tensor.boxes if (overlap := box.intersect(region))]
                assert sum(Slice((0,) * len(shape), shape).numel for _, shape in found) == region.numel
                opened |= {file for file, _ in found}
        looked.append((made[0], kept, len(opened)))
    patch.undo()
    return Counts(calls["call"], calls["collection"], boxes, len(text), *map(max, zip(*looked)))


@contextmanager
def counting_calls() -> Iterator[Counter[str]]:
    """Count calls of functions and full garbage collections."""
    counts = Counter[str]()

    def on_call(frame: Any, event: str, arg: Any) -> None:
        counts[event] += 1

    def on_collection(phase: str, info: dict[str, int]) -> None:
        counts["collection"] += phase == "start" and info["generation"] == 2

    gc.collect()
    before = sys.getprofile()
    gc.callbacks.append(on_collection)
    sys.setprofile(on_call)
    try:
        yield counts
    finally:
        sys.setprofile(before)
        gc.callbacks.remove(on_collection)


@pytest.mark.full
def test_a_checkpoint_of_405b(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A rank of more ranks parses, keeps and opens no more; only what is written grows with the ranks, not faster.

    The writer of rank 0 calls few functions per box, and never looks for cycles among them all. Before: 87 calls,
    messages of errors included that nobody sees, and a full collection per 20,000 boxes.
    """
    small, large = (counted(world, tmp_path / str(world), monkeypatch) for world in (SMALL, 4 * SMALL))
    print(f"\nsmall: {small}\nlarge: {large}")
    factor = 4
    assert small.boxes < large.boxes <= factor * small.boxes
    assert large.manifest_bytes <= factor * small.manifest_bytes
    # Its share of the checks and its own boxes; before, all boxes, four times.
    assert large.parsed <= 1.5 * small.parsed
    assert large.kept <= 1.2 * small.kept
    assert max(small.opened, large.opened) <= 16
    for counts in (small, large):
        assert counts.calls <= 30 * counts.boxes
        assert counts.collections <= 1


class Seconds(list[float]):
    """Counts how often a time is looked at."""

    looked = 0

    def __getitem__(self, rank: Any) -> Any:
        Seconds.looked += 1
        return super().__getitem__(rank)


def test_a_report_of_stragglers() -> None:
    looks = []
    for world in (MIDDLE, LARGE):
        groups = Grid.of(world, tp=8, pp=16).groups("dp", "tp")
        seconds = Seconds([1.0 + (rank % 7) / 100 for rank in range(world)])
        seconds[world - 5] = 3.0
        Seconds.looked = 0
        assert [rank for rank, _, _ in slow_ranks(seconds, groups, 0.01)] == [world - 5]
        looks.append(Seconds.looked)
    assert looks[1] <= 8 * looks[0] <= 8 * 6 * MIDDLE


def test_the_groups_of_a_rank() -> None:
    """The product axes of a rank have members of their own; their lists are linear in the world."""
    for world in (MIDDLE, LARGE):
        grid = Grid.of(world, tp=8, pp=16)
        for names in (("tp",), ("pp",), ("dp",), ("dp", "tp")):
            groups = grid.groups(*names)
            assert sorted(rank for group in groups for rank in group) == list(range(world))


class Counting:
    """The pattern of a lost peer; counts the texts that it is looked for in."""

    def __init__(self, pattern: re.Pattern[str]) -> None:
        self.pattern, self.searched = pattern, 0

    def search(self, text: str) -> Any:
        self.searched += 1
        return self.pattern.search(text)


@pytest.mark.parametrize("world", [MIDDLE, LARGE])
def test_the_output_of_all_ranks_at_a_failure(monkeypatch: pytest.MonkeyPatch, world: int) -> None:
    """One rank fails, the others lose it: each tail is searched once, however often the launcher asks."""
    counting = Counting(failure._CONSEQUENCE)
    monkeypatch.setattr(failure, "_CONSEQUENCE", counting)
    tails, failed = {}, []
    for rank in range(world):
        words = "ValueError: bad sample" if rank == world - 9 else "RuntimeError: Connection closed by peer"
        tails[rank] = RankTail(deque(["Traceback (most recent call last):", words], maxlen=200))
        failed.append(FailedRank(f"host{rank // 8}", rank, rank % 8, 1, float(rank)))
    for host in range(0, world // 8, 16):
        is_explained(failed[: host * 8 + 8], tails)
    first = first_failure(failed, tails)
    assert first is not None
    assert first.rank == world - 9
    assert counting.searched <= world
