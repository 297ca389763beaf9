"""Where the ranks of a save meet, a disk or a store: each leaves a fragment of the manifest; one waits for all."""

from __future__ import annotations

import json
import secrets
from pathlib import Path
from typing import Any

import pytest

from megalite.runtime.checkpoint.fragments import fragment_name, fragment_text, parse_fragment, wait_for_fragments
from megalite.runtime.checkpoint.safetensors_io import BadCheckpoint
from megalite.runtime.places.folder_place import FolderPlace
from megalite.runtime.places.place import Place, Save
from megalite.runtime.places.store import Store
from megalite.runtime.places.store_place import StorePlace

SAVE = Save("step_00000001", "0" * 16)


@pytest.fixture(params=["folder", "store"])
def place(request: pytest.FixtureRequest, tmp_path: Path) -> Place:
    if request.param == "store":
        return StorePlace(Store(f"memory://m/{secrets.token_hex(4)}"))
    folder = FolderPlace(tmp_path)
    (tmp_path / folder.parts_of(SAVE)).mkdir()
    return folder


def put(place: Place, rank: int, save_id: str = SAVE.id) -> None:
    place.put(fragment_name(place.parts_of(SAVE), rank), fragment_text({"save_id": save_id, "of": rank}))


def test_each_is_read_when_it_has_come(place: Place) -> None:
    asked = list[tuple[str, int]]()
    names = [fragment_name(place.parts_of(SAVE), rank) for rank in range(3)]

    def wait(name: str, attempt: int) -> None:
        asked.append((name, attempt))
        if attempt == 2:
            put(place, names.index(name))

    put(place, 1)
    read = wait_for_fragments(place, SAVE, 3, wait, ValueError)
    assert [(name, fragment["of"]) for name, fragment in read.items()] == list(zip(names, range(3)))
    assert asked == [(name, attempt) for name in (names[0], names[2]) for attempt in range(3)]


def test_one_of_another_save_is_refused(place: Place) -> None:
    put(place, 0)
    put(place, 1, "1" * 16)

    def wait(*_: Any) -> None:
        pytest.fail("waited for rank 2")

    with pytest.raises(ValueError, match=r"rank_00001\.json"):
        wait_for_fragments(place, SAVE, 3, wait, ValueError)


def test_a_damaged_one_is_never_taken() -> None:
    """A byte that differs in a checksum of a shard, say, would get into the manifest."""
    fragment = {"save_id": SAVE.id, "file": {"crc32": [1234567890], "size": 77}, "of": "ä"}
    text = fragment_text(fragment)
    assert parse_fragment(text) == fragment
    assert parse_fragment(json.dumps(fragment).encode()) == fragment  # of an earlier version
    for at in range(len(text)):
        flipped = text[:at] + bytes([text[at] ^ 1]) + text[at + 1 :]
        assert parse_fragment(flipped) is None
        assert parse_fragment(text[:at]) in (None, fragment)


@pytest.mark.parametrize("times", [2, 3])
def test_a_damaged_answer_is_asked_for_again(times: int) -> None:
    place = StorePlace(Store(f"memory://m/{secrets.token_hex(4)}"))
    put(place, 0)
    whole, left = place.read, [times]

    def damaged(name: str) -> bytes | None:
        left[0] -= 1
        data = whole(name)
        return data[:-1] if data is not None and left[0] >= 0 else data

    place.read = damaged  # type: ignore[method-assign]
    if times == 2:
        assert wait_for_fragments(place, SAVE, 1, lambda *_: None, ValueError)
    else:
        with pytest.raises(BadCheckpoint, match=r"rank_00000\.json.*is not what its process has written"):
            wait_for_fragments(place, SAVE, 1, lambda *_: None, ValueError)
