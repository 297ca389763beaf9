"""What a stream reads at a resume, and what it keeps in memory, does not grow with what was read or is there."""

from __future__ import annotations

import os
import tracemalloc
from pathlib import Path

import pytest

from megalite.runtime.data.stream import sources
from megalite.runtime.data.stream.dataset import StreamDataset
from tests.unit.data.plain import ids_of
from tests.unit.data.stream.texts import json_lines, opened

ROWS = 4  # samples of a step


def texts(count: int) -> list[str]:
    return [f"document {number} " + "ab" * (number % 300) for number in range(count)]


def test_a_resume_tokenizes_as_little_after_10_000_steps_as_after_10(small: None, tmp_path: Path) -> None:
    """With nothing in the cache: the pieces of the current windows, of more than a hundred."""
    (tmp_path / "text").mkdir()
    (tmp_path / "text" / "a.jsonl").write_bytes(json_lines(texts(1000)))
    options = {"lanes": 2, "shuffle_tokens": 2048}
    made = []
    for step in (10, 10_000):
        at = step * ROWS
        with opened([tmp_path / "text"], tmp_path / "whole", **options) as data:
            assert data.sources[0].num_pieces > 100
            state = data.order.state(at, [])
            want = [ids_of(data, at + row).tolist() for row in range(ROWS)]
        cache = tmp_path / f"after_{step}"
        with opened([tmp_path / "text"], cache, **options) as data:
            data.order.resume(state)
            assert [ids_of(data, at + row).tolist() for row in range(ROWS)] == want
        made.append(sum(path.stat().st_size for path in cache.glob("pieces/*/*.tokens")))
    assert min(row[3] for row in state["windows"]) >= 1, "in the second epoch or later"
    assert made[1] < 2 * made[0]
    assert made[0] < sum(path.stat().st_size for path in (tmp_path / "whole").glob("pieces/*/*.tokens")) / 10


def read_windows(data: StreamDataset, windows: int) -> None:
    """Read a sample of each of the first windows of the lanes."""
    for window in range(windows):
        for lane in range(data.shape.lanes):
            ids_of(data, window * data.shape.window * data.shape.lanes + lane)


@pytest.mark.parametrize("gigabytes", [10, pytest.param(100, marks=pytest.mark.full)])
def test_memory_does_not_grow_with_the_text(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, gigabytes: int) -> None:
    """The folders hold links to one file; what is tokenized of them is the same number of pieces."""
    monkeypatch.setattr(sources, "_OPEN", 8)
    content = json_lines(texts(1000)) * 200
    (tmp_path / "file").write_bytes(content)
    peaks = []
    for size in (1, gigabytes):
        folder = tmp_path / f"{size}_gb"
        folder.mkdir()
        for number in range(size * 10**9 // len(content)):
            os.link(tmp_path / "file", folder / f"{number:06}.jsonl")
        tracemalloc.start()
        try:
            options = {"lanes": 4, "shuffle_tokens": 1 << 16}
            with opened([folder], tmp_path / f"cache_{size}", seq_len=1024, **options) as data:
                assert sum(source.num_pieces for source in data.sources) > 900 * size
                read_windows(data, 20)
            peaks.append(tracemalloc.get_traced_memory()[1])
        finally:
            tracemalloc.stop()
    assert peaks[1] < 2 * peaks[0], peaks
