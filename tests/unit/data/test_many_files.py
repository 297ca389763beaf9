"""Large data and many sources: what a rank reads, opens and keeps at the start does not grow with them."""

from __future__ import annotations

import json
import os
import tracemalloc
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from megalite.core.base.errors import UserError
from megalite.extras.prepare.token_writer import IndexedDatasetWriter
from megalite.runtime.data import binary, sidecar
from megalite.runtime.data.blend import BlendedDataset
from megalite.runtime.data.build import Datasets, build_datasets
from megalite.runtime.data.sidecar import BlockHasher
from tests.unit.data.plain import ids_of

SIDECAR = {"vocab_size": 60_000, "tokenizer_sha256": "0"}


def write(prefix: Path, documents: int, length: int = 2, sums: bool = True) -> str:
    with IndexedDatasetWriter(prefix, np.dtype("<u2")) as writer:
        writer.add_documents(np.arange(documents * length) % 50_000, np.full(documents, length))
        writer.finalize(SIDECAR if sums else None)
    return str(prefix)


def open_all(prefixes: list[str], rank: int, world: int, seq_len: int = 16) -> Datasets:
    words = (
        [word for i, prefix in enumerate(prefixes) for word in (str(1 + i % 7), prefix)] if prefixes[1:] else prefixes
    )
    return build_datasets(words, split="90,10", seq_len=seq_len, seed=0, share=(rank, world))


@pytest.fixture
def reads(monkeypatch: pytest.MonkeyPatch) -> dict[str, int]:
    """Bytes read of files by the end of their name."""
    count: dict[str, int] = {"bin": 0, "idx": 0}
    peek = binary.TokenFile.peek

    def counted(self: binary.TokenFile, begin: int, size: int) -> bytes:
        count[self.path.name.rpartition(".")[2]] += size
        return peek(self, begin, size)

    monkeypatch.setattr(binary.TokenFile, "peek", counted)
    return count


def test_ranks_share_the_index(tmp_path: Path, reads: dict[str, int]) -> None:
    kept = []
    for documents in (100_000, 1_000_000):
        prefix = write(tmp_path / f"d{documents}", documents)
        reads["idx"] = 0
        for rank in range(4):
            tracemalloc.start()
            opened = open_all([prefix], rank, 4)
            identity = opened.identity()
            kept.append(tracemalloc.get_traced_memory()[0])
            tracemalloc.stop()
        assert reads["idx"] <= 1.1 * os.path.getsize(prefix + ".idx") + 4 * (1 << 20)
        assert len(identity) > 128
        assert len(opened.content_hashes()["data_hash"] or "") == 64
    assert max(kept[4:]) - min(kept[:4]) < 1_000_000


def test_damage_to_the_index_is_found_by_one_rank(tmp_path: Path) -> None:
    prefix = write(tmp_path / "d", 100_000)
    with open(prefix + ".idx", "r+b") as f:
        f.seek(1_000_001)
        f.write(b"\xff")
    finder = (1_000_001 // sidecar.BLOCK) % 4
    for rank in {0, 1, 2, 3} - {finder}:
        open_all([prefix], rank, 4)
    with pytest.raises(UserError, match=r"d\.idx, bytes 983040 to 1015808: differ from what preprocessing wrote"):
        open_all([prefix], finder, 4)


def test_without_checksums_one_rank_reads(tmp_path: Path, reads: dict[str, int]) -> None:
    prefixes = [write(tmp_path / f"s{i:03}", 100 + i, sums=False) for i in range(100)]
    first = open_all(prefixes, 0, 2)
    assert reads["idx"] >= sum(os.path.getsize(prefix + ".idx") - 34 for prefix in prefixes)
    first.content_hashes()
    assert reads["bin"] > 0
    reads.update(bin=0, idx=0)
    assert open_all(prefixes, 1, 2).identity() == first.identity()
    assert reads["bin"] == 0
    assert reads["idx"] < 100 * 200


@pytest.mark.full
@pytest.mark.usefixtures("few_files")
def test_more_sources_than_files_may_be_open(tmp_path: Path) -> None:
    opened = open_all([write(tmp_path / f"s{i:03}", 100, sums=i % 2 == 0) for i in range(600)], 0, 1)
    assert isinstance(opened.train, BlendedDataset)
    names = set()
    for position in range(1200):
        sample = ids_of(opened.train, position)
        assert sample.tolist() == list(range(sample[0], sample[0] + 17))
        names.add(opened.train.order.locate(position)[0])
    assert len(names) == 600


def test_the_check_at_the_start_is_capped_for_all_sources(
    tmp_path: Path, reads: dict[str, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("megalite.runtime.data.build.AT_START", 4 * sidecar.BLOCK)
    open_all([write(tmp_path / f"s{i}", 50_000, 4) for i in range(4)], 0, 1)
    assert 0 < reads["bin"] <= 4 * sidecar.BLOCK


def test_a_shuffled_sample_reads_twice_its_bytes(tmp_path: Path, reads: dict[str, int]) -> None:
    """8,192 ids of 4 bytes, with checksums: a block at each end is read beyond the sample."""
    with IndexedDatasetWriter(tmp_path / "d", np.dtype("<i4")) as writer:
        writer.add_documents(np.arange(8_192 * 64 + 1), [8_192 * 64 + 1])
        writer.finalize(SIDECAR)
    for position in range(16):
        # A rank that reads alone, and has read nothing yet.
        data = build_datasets([str(tmp_path / "d")], split="1", seq_len=8192, seed=0, share=(1000, 1001)).train
        before = reads["bin"]
        data.sample(position)
        assert reads["bin"] - before <= 2.5 * 8192 * 4


def test_blocks_of_older_data(tmp_path: Path) -> None:
    """Checksums of 256 KiB, as they were written before, are read and found wrong as before."""
    prefix = write(tmp_path / "d", 100_000, 4, sums=False)
    sums: dict[str, Any] = {"block_bytes": 256 << 10}
    for name in ("bin", "idx"):
        hasher = BlockHasher(256 << 10)
        hasher.update(Path(f"{prefix}.{name}").read_bytes())
        entry = hasher.to_json()
        sums[name] = {"sha256": entry.pop("root"), **entry}
    Path(prefix + ".json").write_text(json.dumps({**SIDECAR, "checksums": sums}))
    open_all([prefix], 0, 1).train.sample(3)
    with open(prefix + ".bin", "r+b") as f:
        f.seek(300_000)
        f.write(b"\xff")
    with pytest.raises(UserError, match="bytes 262144 to 524288: differ"):
        open_all([prefix], 0, 1)
