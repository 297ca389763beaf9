"""What every place of checkpoints promises, held against a folder, fsspec's own stores and a server that speaks S3.

A process may be killed before any change that it makes. Here the kill is an exception that nothing catches, before the
first change of an act, then before the second, and so on until the act is done.
"""

from __future__ import annotations

import itertools
import json
import os
import secrets
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest

from megalite.core.base.errors import UserError
from megalite.runtime.places.folder_place import FolderPlace
from megalite.runtime.places.lock import RunLock
from megalite.runtime.places.names import model_name, step_name
from megalite.runtime.places.place import COMMIT, MANIFEST, Place, Save
from megalite.runtime.places.store import Store, StoreError
from megalite.runtime.places.store_place import StorePlace

KINDS = ("folder", "file", "memory", "s3")
SHARD = "rank_00000.safetensors"
# Functions of `os` by which a folder is changed.
CHANGES = ("rename", "replace", "symlink", "unlink", "rmdir", "write")


class Killed(BaseException):
    """The process is no more."""


@pytest.fixture(params=KINDS)
def make(request: pytest.FixtureRequest, tmp_path: Path) -> Callable[[], Place]:
    """Make an empty place of one kind, each time another one."""
    kind = request.param
    if kind == "s3":
        request.getfixturevalue("s3")

    def new() -> Place:
        name = secrets.token_hex(4)
        if kind == "folder":
            (tmp_path / name).mkdir()
            return FolderPlace(tmp_path / name)
        above = {"file": f"file://{tmp_path}", "memory": "memory://m", "s3": "s3://bucket/places"}[kind]
        return StorePlace(Store(f"{above}/{name}"))

    return new


def newest(count: int, *others: str) -> Callable[[Sequence[str]], set[str]]:
    """Keep so many, and others by name."""
    return lambda names: {*names[:count], *others}


def put_parts(place: Place, save: Save) -> None:
    """What the ranks of a save leave in the place."""
    if isinstance(place, FolderPlace):
        (place.root / place.parts_of(save)).mkdir()
    place.put(f"{place.parts_of(save)}/{SHARD}", content(save, SHARD))


def content(save: Save, file: str) -> bytes:
    """What a file of a save holds, which no other file does."""
    return f"{file} of {save.name} {save.id}".encode()


def publish(place: Place, save: Save, aside: Iterable[str] = ()) -> list[str]:
    return place.publish(save, content(save, MANIFEST), content(save, COMMIT), list(aside))


def save_of(step: int, save_id: str = "0" * 16) -> Save:
    return Save(step_name(step), save_id)


def name_of(place: Place, save: Save) -> str:
    """The name of its checkpoint."""
    return save.name if isinstance(place, FolderPlace) else place.parts_of(save)


def published(place: Place, *steps: int) -> list[str]:
    """Publish checkpoints of the steps; their names."""
    for step in steps:
        put_parts(place, save_of(step))
        publish(place, save_of(step))
    return [name_of(place, save_of(step)) for step in steps]


def contents(place: Place) -> dict[str, bytes]:
    """Every object of the place that lies in a folder."""
    if isinstance(place, FolderPlace):
        files = [path for path in place.root.rglob("*") if path.is_file() and "latest" not in path.parts]
        return {str(path.relative_to(place.root)): path.read_bytes() for path in files}
    assert isinstance(place, StorePlace)
    store = place.store
    folders = [name for name in store.names() if name.endswith("/")]
    names = [folder + file for folder in folders for file in store.names(folder.rstrip("/"))]
    return {name: store.read(name) for name in names}


def assert_whole(place: Place, name: str, save: Save) -> None:
    for file in (SHARD, MANIFEST, COMMIT):
        assert place.read(f"{name}/{file}") == content(save, file)


def assert_nothing_lost(place: Place, *saves: Save) -> None:
    """All that was saved is in the place, whatever it is called by now."""
    kept = set(contents(place).values())
    assert {content(save, file) for save in saves for file in (SHARD, MANIFEST, COMMIT)} <= kept


def killed_before(place: Place, number: int, act: Callable[[], Any]) -> bool:
    """Do something, and be killed before a change, counted from 1; return whether there are so many."""
    left = number

    def count() -> None:
        nonlocal left
        left -= 1
        if left <= 0:
            raise Killed

    def counted(real: Callable[..., Any]) -> Callable[..., Any]:
        def change(*args: Any, **kwargs: Any) -> Any:
            count()
            return real(*args, **kwargs)

        return change

    def delete(self: Store, names: Iterable[str], real: Callable[..., None] = Store.delete) -> None:
        for name in names:
            count()
            real(self, [name])

    with pytest.MonkeyPatch.context() as patch:
        if isinstance(place, FolderPlace):
            for name in CHANGES:
                patch.setattr(os, name, counted(getattr(os, name)))
        else:
            patch.setattr(Store, "write", counted(Store.write))
            patch.setattr(Store, "delete", delete)
        try:
            act()
        except Killed:
            return True
    return False


def kills(make: Callable[[], Place], prepare: Callable[[Place], Callable[[], Any]]) -> Iterator[Place]:
    """Prepare a place, and be killed in an act that `prepare` returns: one place for each of its changes."""
    for number in itertools.count(1):
        place = make()
        if not killed_before(place, number, prepare(place)):
            assert number > 1, "the act changes nothing"
            return
        yield place


def test_an_object_is_there_as_a_whole(make: Callable[[], Place]) -> None:
    place = make()
    assert place.read("a/b") is None
    assert not place.exists("a/b")
    assert place.committed() == []
    put_parts(place, save_of(1))
    name = f"{place.parts_of(save_of(1))}/{SHARD}"
    assert place.exists(name)
    for data in (b"", b"12345", b"1"):
        place.put(name, data)
        assert place.read(name) == data


def test_a_kill_in_a_put_leaves_the_old_object_or_the_new_one(make: Callable[[], Place]) -> None:
    save = save_of(1)

    def prepare(place: Place) -> Callable[[], Any]:
        put_parts(place, save)
        return lambda: place.put(f"{place.parts_of(save)}/{SHARD}", b"new")

    for place in kills(make, prepare):
        assert place.read(f"{place.parts_of(save)}/{SHARD}") == content(save, SHARD)


def test_checkpoints_are_listed_by_step(make: Callable[[], Place]) -> None:
    """Neither unfinished saves nor weights alone are."""
    place = make()
    names = published(place, 2, 10, 3)
    put_parts(place, save_of(11))
    weights = Save(model_name(12), "1" * 16)
    put_parts(place, weights)
    publish(place, weights)
    assert place.committed() == [names[1], names[2], names[0]]
    assert_whole(place, names[1], save_of(10))
    assert_whole(place, name_of(place, weights), weights)
    assert not place.exists(f"{name_of(place, save_of(11))}/{COMMIT}")


def test_a_save_that_is_killed_is_not_listed(make: Callable[[], Place]) -> None:
    """And neither lost nor mixed is what was there before; the next save of that step goes through."""
    first, left, new, again = save_of(1), save_of(2), save_of(3), save_of(3, "a" * 16)

    def prepare(place: Place) -> Callable[[], Any]:
        names = published(place, 1, 2)
        put_parts(place, new)
        return lambda: publish(place, new, [names[1]])

    for place in kills(make, prepare):
        before = [name_of(place, left), name_of(place, first)]
        # Before the new one is there, the one that the run does not continue may have given way.
        assert place.committed() in (before, before[1:])
        assert_whole(place, before[1], first)
        assert_nothing_lost(place, first, left)
        assert content(new, SHARD) in contents(place).values()
        put_parts(place, again)
        publish(place, again, [name for name in place.committed() if name == before[0]])
        assert place.committed() == [name_of(place, again), before[1]]
        assert_whole(place, name_of(place, again), again)
        assert_nothing_lost(place, first, left)


def test_the_order_of_a_publish(make: Callable[[], Place], monkeypatch: pytest.MonkeyPatch) -> None:
    """What is abandoned gives way after the manifest is on the disk, but before the new checkpoint exists."""
    place = make()
    published(place, 1, 2)
    put_parts(place, save_of(3))
    said = list[str]()

    def hear(owner: Any, name: str, say: Callable[..., str]) -> None:
        real = getattr(owner, name)

        def heard(*args: Any) -> Any:
            said.append(say(*args))
            return real(*args)

        monkeypatch.setattr(owner, name, heard)

    if isinstance(place, FolderPlace):
        hear(os, "fsync", lambda fd: f"flush {Path(os.readlink(f'/proc/self/fd/{fd}')).name}")
        hear(os, "rename", lambda old, new: f"{Path(old).name} -> {Path(new).name}")
        parts = place.parts_of(save_of(3))
        order = [f"flush {name}" for name in (MANIFEST, COMMIT, parts)]
        order += ["step_00000002 -> aside_1_step_00000002", f"{parts} -> step_00000003"]
    else:
        hear(Store, "write", lambda store, name, data: f"write {name}")
        hear(Store, "delete", lambda store, names: f"delete {', '.join(names)}")
        old, new = (place.parts_of(save_of(step)) for step in (2, 3))
        order = [f"write {old}/ASIDE", f"delete {old}/COMMIT", f"write {new}/{MANIFEST}", f"write {new}/{COMMIT}"]
    publish(place, save_of(3), [name_of(place, save_of(2))])
    assert said == order


def test_what_is_set_aside_is_kept(make: Callable[[], Place]) -> None:
    """No run resumes from it, and none deletes it, also if a checkpoint of that step is set aside again."""
    place = make()
    names = published(place, 1, 2)
    described = place.set_aside(names[0])
    assert described.startswith(f"{names[0]} -> ")
    assert place.committed() == [names[1]]
    again = save_of(1, "a" * 16)
    put_parts(place, again)
    publish(place, again)
    place.set_aside(name_of(place, again))
    last = published(place, 3, 4)
    assert place.tidy(last[-1], newest(1)) == []
    assert place.committed() == [last[-1]]
    assert_nothing_lost(place, save_of(1), again, save_of(4))


def test_a_kill_while_setting_aside_loses_nothing(make: Callable[[], Place]) -> None:
    def prepare(place: Place) -> Callable[[], Any]:
        names = published(place, 1, 2)
        return lambda: place.set_aside(names[0])

    for place in kills(make, prepare):
        assert place.committed() == [name_of(place, save) for save in (save_of(2), save_of(1))]
        assert_nothing_lost(place, save_of(1), save_of(2))
        place.set_aside(name_of(place, save_of(1)))
        assert place.committed() == [name_of(place, save_of(2))]
        assert_nothing_lost(place, save_of(1), save_of(2))


def test_a_checkpoint_of_the_same_step_does_not_replace_one(make: Callable[[], Place]) -> None:
    place = make()
    published(place, 1)
    again = save_of(1, "a" * 16)
    put_parts(place, again)
    publish(place, again)
    assert_whole(place, name_of(place, again), again)
    assert_nothing_lost(place, save_of(1), again)


def test_older_ones_are_pruned(make: Callable[[], Place]) -> None:
    """But not those to keep, weights alone, nor what others are saving now."""
    place = make()
    weights = Save(model_name(1), "1" * 16)
    put_parts(place, weights)
    publish(place, weights)
    names = published(place, 1, 2, 3, 4, 5)
    put_parts(place, save_of(6))
    assert place.tidy(names[4], newest(2, names[1])) == []
    assert place.committed() == [names[4], names[3], names[1]]
    for step in (2, 4, 5):
        assert_whole(place, name_of(place, save_of(step)), save_of(step))
    assert_whole(place, name_of(place, weights), weights)
    left = contents(place)
    assert not {content(save_of(step), SHARD) for step in (1, 3)} & set(left.values())
    assert content(save_of(6), SHARD) in left.values()


def test_a_kill_while_pruning_leaves_no_half_of_a_checkpoint(make: Callable[[], Place]) -> None:
    def prepare(place: Place) -> Callable[[], Any]:
        names = published(place, 1, 2, 3, 4)
        return lambda: place.tidy(names[3], newest(2))

    for place in kills(make, prepare):
        names = {name_of(place, save_of(step)): save_of(step) for step in (1, 2, 3, 4)}
        committed = place.committed()
        assert committed[:2] == [*names][:1:-1]
        for name in committed:
            assert_whole(place, name, names[name])
        assert place.tidy(committed[0], newest(2)) == []
        assert place.committed() == committed[:2]


def test_pruning_that_fails_is_told(make: Callable[[], Place], monkeypatch: pytest.MonkeyPatch) -> None:
    """In a line, as the newest is saved by then."""
    place = make()
    names = published(place, 1, 2, 3)

    def refuse(*_: object, **__: object) -> Any:
        raise PermissionError(13, "Permission denied")

    def forbid(store: Store, *_: object) -> None:
        raise StoreError(store.url, "is forbidden")

    if isinstance(place, FolderPlace):
        monkeypatch.setattr(os, "rename", refuse)
    else:
        monkeypatch.setattr(Store, "delete", forbid)
    (problem,) = place.tidy(names[2], newest(2))
    assert "Permission denied" in problem or "is forbidden" in problem
    assert place.committed() == names[::-1]
    monkeypatch.undo()
    (problem,) = place.tidy(names[2], refuse)
    assert problem.startswith("older ones remain (")
    assert place.committed() == names[::-1], "nothing is deleted while it is not known what stays"


def test_a_place_knows_whose_it_is(make: Callable[[], Place]) -> None:
    """A folder refuses another run while its owner lives; from a store the owner hears that another one has come."""
    place = make()

    def claim(run_id: str) -> str:
        if isinstance(place, FolderPlace):
            lock = RunLock(place.root, run_id)
            lock.acquire()
            return lock.text
        assert isinstance(place, StorePlace)
        owner = json.dumps({"run_id": run_id, "host": "h"})
        place.take(owner)
        return owner

    first = claim("first")
    assert place.taken_by(first) == ""
    if isinstance(place, FolderPlace):
        with pytest.raises(UserError, match="is in use by run first"):
            claim("second")
        assert place.taken_by(first) == ""
        (place.root / "lock").unlink()
    second = claim("second")
    assert place.taken_by(second) == ""
    assert place.taken_by(first).startswith("run second")
    assert place.committed() == []
