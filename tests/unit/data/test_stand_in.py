"""Token files in a store: the same samples in the same order as from a disk, each block brought once per host."""

from __future__ import annotations

import re
import secrets
import subprocess
import sys
import threading
from pathlib import Path

import numpy as np
import pytest

from megalite.core.base.errors import UserError
from megalite.extras.prepare.token_writer import IndexedDatasetWriter
from megalite.runtime.base import waits
from megalite.runtime.base.urls import cached_at
from megalite.runtime.data import build_datasets
from megalite.runtime.data.stand_in import UNIT, Units, bring_prefix
from megalite.runtime.places import store as store_module
from megalite.runtime.places.downloads import bring_tree
from megalite.runtime.places.store import Store, StoreError
from tests.ranks import ROOT
from tests.stores import S3, BreakingProxy, Fault, secrets_in

SIDECAR = {"tokenizer_sha256": "0" * 64, "vocab_size": 60_000}
# Six units and a bit.
TOKENS = 6 * UNIT // 2 + 1000
SEQ_LEN = 512
ALL = (TOKENS - 1) // SEQ_LEN


@pytest.fixture(autouse=True)
def _fast(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(store_module, "_FIRST_PAUSE_S", 0.002)
    monkeypatch.setattr(store_module, "_LONGEST_PAUSE_S", 0.05)


@pytest.fixture
def local(tmp_path: Path) -> str:
    return write(tmp_path / "disk" / "text")


def write(prefix: Path, first: int = 0, sidecar: dict[str, object] | None = SIDECAR) -> str:
    prefix.parent.mkdir(exist_ok=True)
    with IndexedDatasetWriter(prefix, np.dtype("<u2")) as writer:
        for ids in np.array_split((first + np.arange(TOKENS)) % 60_000, 7):
            writer.add_documents(ids, [len(ids)])
        writer.finalize(sidecar)
    return str(prefix)


def put(local: str, s3: S3) -> str:
    """Copy token files to a place of their own in the store; its URL."""
    url = s3.url(f"data/{secrets.token_hex(4)}")
    for path in Path(local).parent.iterdir():
        Store(url).write(path.name, path.read_bytes())
    return f"{url}/text"


def samples(prefix: str, count: int = 60) -> list[list[int]]:
    """The first samples of a run's order."""
    train = build_datasets([prefix], split="100", seq_len=SEQ_LEN, seed=3).train
    return [np.asarray(train.sample(i)).tolist() for i in range(count)]


def stand_in(url: str, cache: Path, limit: int = 1 << 40, patience: float = 30.0) -> str:
    bring_prefix(url, str(cache), limit, patience)
    return str(cached_at(url, str(cache)))


def put_file(local: str, folder: Path) -> str:
    """The same in a folder that stands for a store; its URL."""
    folder.mkdir()
    for path in Path(local).parent.iterdir():
        (folder / path.name).write_bytes(path.read_bytes())
    return f"file://{folder}/text"


def units(cache: Path) -> list[Path]:
    return sorted(cache.glob("**/*.units/[0-9]*"))


def test_same_samples_and_each_unit_once(local: str, s3: S3, proxy: BreakingProxy, tmp_path: Path) -> None:
    url, cache = put(local, s3), tmp_path / "cache"
    prefix = stand_in(url, cache)
    assert not units(cache)
    assert samples(prefix, 2) == samples(local, 2)
    few = len(units(cache))
    assert 1 <= few <= 4, "two samples of 1 KiB lie in two units, or on their borders"
    assert samples(prefix, ALL) == samples(local, ALL)
    reads = [line for line in proxy.requests if re.match(r"GET .*text\.bin", line)]
    assert len(reads) == len(units(cache)) == -(-TOKENS * 2 // UNIT)
    # Another process of this host, which opens the data again, downloads no unit.
    assert samples(stand_in(url, cache), 60) == samples(local, 60)
    assert len([line for line in proxy.requests if re.match(r"GET .*text\.bin", line)]) == len(reads)


@pytest.mark.full
def test_four_processes_share_the_cache(local: str, s3: S3, proxy: BreakingProxy, tmp_path: Path) -> None:
    url, cache = put(local, s3), tmp_path / "cache"
    code = (
        "import sys; from tests.unit.data.test_stand_in import *; "
        "print(sum(map(sum, samples(stand_in(sys.argv[1], Path(sys.argv[2])), 300))))"
    )
    command = [sys.executable, "-c", code, url, str(cache)]
    processes = [subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, text=True) for _ in range(4)]
    said = {process.communicate(timeout=500)[0].strip() for process in processes}
    assert said == {str(sum(map(sum, samples(local, 300))))}
    gets = [line for line in proxy.requests if re.match(r"GET .*text\.bin", line)]
    assert len(gets) == len(units(cache))


def test_the_cache_stays_below_its_limit(local: str, s3: S3, tmp_path: Path) -> None:
    url, cache = put(local, s3), tmp_path / "cache"
    prefix = stand_in(url, cache, limit=3 * UNIT)
    assert samples(prefix, 30) == samples(local, 30)
    assert 1 <= len(units(cache)) <= 3


BROKEN = ("503", "cut", "short", "corrupt", "hang", "drip")


def test_reads_that_break_on_their_way_are_repeated(
    local: str, s3: S3, proxy: BreakingProxy, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Throttled, cut in the middle, a byte too short, with another byte, never answered, in drops."""
    monkeypatch.setattr(waits, "_STALL_S", 3.0)
    options = store_module._OPTIONS["s3"]["config_kwargs"]
    monkeypatch.setitem(store_module._OPTIONS, "s3", {"config_kwargs": {**options, "read_timeout": 3}})
    store_module._open.cache_clear()
    url = put(local, s3)
    for kind in BROKEN:
        prefix = stand_in(url, tmp_path / kind)
        proxy.faults = [Fault(r"GET .*text\.bin", kind, 1)]
        assert samples(prefix) == samples(local)
        assert proxy.faults[0].happened == 1


def test_a_forbidden_bucket(local: str, s3: S3, proxy: BreakingProxy, tmp_path: Path) -> None:
    """One attempt, then a line without the credentials that the answer quotes."""
    url = put(local, s3)
    prefix = stand_in(url, tmp_path)
    proxy.faults, before = [Fault("/bucket/", "403")], len(proxy.requests)
    with pytest.raises(StoreError, match=r"s3://bucket/.*text\.bin: PermissionError"):
        samples(prefix)
    with pytest.raises(StoreError, match=r"s3://bucket/.*text\.idx: PermissionError") as e:
        stand_in(url, tmp_path / "other")
    assert len(proxy.requests) == before + 2
    assert secrets_in(str(e.value).encode()) == []


def test_damage_in_the_store_is_an_error(local: str, s3: S3, tmp_path: Path) -> None:
    url, cache = put(local, s3), tmp_path / "cache"
    folder = Store(url.rpartition("/")[0])
    data = bytearray(folder.read("text.bin"))
    data[len(data) // 2] ^= 1
    folder.write("text.bin", bytes(data))
    with pytest.raises(UserError, match="differ from what preprocessing wrote"):
        samples(stand_in(url, cache), ALL)


def test_a_damaged_cache_is_repaired(local: str, s3: S3, tmp_path: Path) -> None:
    url, cache = put(local, s3), tmp_path / "cache"
    prefix = stand_in(url, cache)
    expected = samples(prefix, ALL)
    for unit in units(cache):
        data = bytearray(unit.read_bytes())
        data[100] ^= 1
        unit.write_bytes(bytes(data))
    assert samples(prefix, ALL) == expected


@pytest.mark.parametrize("sidecar", [SIDECAR, None], ids=["checksums", "none"])
def test_an_object_that_is_replaced(s3: S3, tmp_path: Path, sidecar: dict[str, object] | None) -> None:
    """During a run that is an error; the next run reads the new one, and nothing of the old one's units."""
    old, new = (write(tmp_path / name / "text", first, sidecar) for name, first in (("old", 0), ("new", 7)))
    url, cache = put(old, s3), tmp_path / "cache"
    train = build_datasets([stand_in(url, cache)], split="100", seq_len=SEQ_LEN, seed=3).train
    train.sample(0)
    for path in Path(new).parent.iterdir():
        Store(url.rpartition("/")[0]).write(path.name, path.read_bytes())
    with pytest.raises(UserError, match="was changed while training was reading it"):
        [train.sample(i) for i in range(ALL)]
    assert samples(stand_in(url, cache)) == samples(new)


def test_an_object_that_is_replaced_again_and_again(tmp_path: Path) -> None:
    """Other runs of this host start on new data, and empty the cache: one that reads ends with that line, if at all."""
    made = [write(tmp_path / str(i) / "text", 7 * i) for i in range(2)]
    url, cache, done, said = put_file(made[0], tmp_path / "far"), tmp_path / "cache", threading.Event(), set[str]()
    path = Path(stand_in(url, cache) + ".bin")
    opened = [Units(path)]

    def read() -> None:
        while not done.is_set():
            try:
                opened[-1].read(0, 3 * UNIT)
            except UserError as e:
                said.add(str(e).partition("text.bin: ")[2][:11])
            except Exception as e:
                said.add(f"{type(e).__name__}: {e}")

    threads = [threading.Thread(target=read) for _ in range(3)]
    for thread in threads:
        thread.start()
    for i in range(1, 40):
        for new in Path(made[i % 2]).parent.iterdir():
            part = tmp_path / "far" / f".{new.name}"
            part.write_bytes(new.read_bytes())
            part.replace(tmp_path / "far" / new.name)
        stand_in(url, cache)
        opened.append(Units(path))
    done.set()
    for thread in threads:
        thread.join()
    assert said <= {"was changed"}


def test_a_store_that_is_away(local: str, s3: S3, proxy: BreakingProxy, tmp_path: Path) -> None:
    url, cache = put(local, s3), tmp_path / "cache"
    prefix = stand_in(url, cache, patience=0.5)
    proxy.faults = [Fault(r"GET .*text\.bin", "503")]
    with pytest.raises(StoreError, match=r"text\.bin: .*tried \d+ times"):
        samples(prefix)
    with pytest.raises(StoreError, match="does not exist"):
        stand_in(url + "x", cache)


def test_a_tokenizer_folder_and_a_file(s3: S3, tmp_path: Path) -> None:
    url = s3.url(f"tok/{secrets.token_hex(4)}")
    Store(url).write("tokenizer.json", b"{}")
    Store(url).write("tokenizer_config.json", b"[]")
    folder = bring_tree(url, str(tmp_path))
    assert (folder / "tokenizer.json").read_bytes() == b"{}"
    Store(url).write("tokenizer.json", b"{ }")
    assert bring_tree(f"{url}/tokenizer.json", str(tmp_path)).read_bytes() == b"{ }"
    assert (bring_tree(url, str(tmp_path)) / "tokenizer_config.json").read_bytes() == b"[]"
    # What is gone there would make another tokenizer of the rest.
    (folder / "of_mine").write_bytes(b"1")
    Store(url).delete(["tokenizer_config.json"])
    assert sorted(p.name for p in bring_tree(url, str(tmp_path)).glob("[!.]*")) == ["of_mine", "tokenizer.json"]
    assert bring_tree(f"{url}/tokenizer.json", str(tmp_path)).exists()
    assert bring_tree(str(tmp_path / "here"), "/c") == tmp_path / "here"


def test_a_full_disk_stops_no_run(local: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The data are read all the same; a count that was cut off is taken anew."""
    cache = tmp_path / "cache"
    prefix = stand_in(put_file(local, tmp_path / "far"), cache, limit=3 * UNIT)
    expected = samples(local, 30)

    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr("megalite.runtime.data.stand_in.os.replace", full)
        assert samples(prefix, 30) == expected
    assert not units(cache)
    assert not list(cache.glob("**/.part_*"))
    (cache / ".units_bytes").write_text("")
    assert samples(prefix, 30) == expected
    assert 1 <= len(units(cache)) <= 3


def test_units_are_checked_each_time(local: str, tmp_path: Path) -> None:
    """A unit may come again, damaged, after its blocks were found good; a short one is none."""
    cache = tmp_path / "cache"
    prefix = stand_in(put_file(local, tmp_path / "far"), cache)
    train = build_datasets([prefix], split="100", seq_len=SEQ_LEN, seed=3).train
    expected = [np.asarray(train.sample(i)).tolist() for i in range(ALL)]
    for unit in units(cache):
        unit.write_bytes(bytes(unit.stat().st_size))
    assert [np.asarray(train.sample(i)).tolist() for i in range(ALL)] == expected
    bare = stand_in(put_file(write(tmp_path / "bare" / "text", 0, None), tmp_path / "far2"), cache)
    assert samples(bare, ALL) == expected
    for unit in units(cache):
        unit.write_bytes(unit.read_bytes()[:1000])
    assert samples(bare, ALL) == expected


def test_a_new_limit_holds(local: str, tmp_path: Path) -> None:
    url, cache = put_file(local, tmp_path / "far"), tmp_path / "cache"
    stand_in(url, cache)
    samples(stand_in(url, cache, limit=3 * UNIT), ALL)
    assert 1 <= len(units(cache)) <= 3
