"""Token files that were changed, cut or exchanged: found before a changed token is used, with file and bytes."""

from __future__ import annotations

import hashlib
import json
import os
import struct
from pathlib import Path

import numpy as np
import pytest

from megalite.core.base.errors import UserError
from megalite.extras.prepare.token_writer import IndexedDatasetWriter
from megalite.runtime.data import GPTDataset
from megalite.runtime.data.binary import TokenFile
from megalite.runtime.data.sidecar import BLOCK
from megalite.runtime.data.tokens import IndexedDataset

BLOCKS = 9
TOKENS = (BLOCKS * BLOCK - 1000) // 2
SIDECAR = {"tokenizer_sha256": "0" * 64, "vocab_size": 60_000}


def write(prefix: Path, first: int = 0, sidecar: dict[str, object] | None = SIDECAR) -> Path:
    """Ids counting up from `first`: nine blocks of data, the last one shorter."""
    with IndexedDatasetWriter(prefix, np.dtype("<u2")) as writer:
        for ids in np.array_split((first + np.arange(TOKENS)) % 60_000, 7):
            writer.add_documents(ids, [len(ids)])
        writer.finalize(sidecar)
    return Path(f"{prefix}.bin")


def overwrite(file: Path, at: int, data: bytes) -> None:
    with file.open("r+b") as f:
        f.seek(at)
        f.write(data)
    # Several writes within one tick of the kernel's clock leave the same time.
    os.utime(file, ns=(0, file.stat().st_mtime_ns + 1))


def outside_the_samples(size: int) -> int:
    """A byte that is in none of the 64 blocks of 4 KiB that the hash of data without checksums covers."""
    begins = [(size - 4096) * i // 63 for i in range(64)]
    return next(begin for begin in begins if begin > 5 * BLOCK) + 4096 + 17


def test_a_change_of_one_byte_is_found_at_the_start_and_when_it_is_read(tmp_path: Path) -> None:
    file = write(tmp_path / "d")
    at = outside_the_samples(file.stat().st_size)
    overwrite(file, at, bytes([file.read_bytes()[at] ^ 1]))
    words = rf"d\.bin, bytes {5 * BLOCK} to {6 * BLOCK}: differ from what preprocessing wrote"
    with pytest.raises(UserError, match=words):
        IndexedDataset(tmp_path / "d").verify()
    data = IndexedDataset(tmp_path / "d")
    assert data.tokens(0, 5 * BLOCK // 2).tolist() == (np.arange(5 * BLOCK // 2) % 60_000).tolist()
    with pytest.raises(UserError, match=words):
        GPTDataset(data, 64, shuffle=False).sample(at // 128)
    # Ranks share the checking: of three, the one whose share it is.
    for rank in range(3):
        if rank == 5 % 3:
            with pytest.raises(UserError, match=words):
                data.verify(rank, 3)
        else:
            data.verify(rank, 3)


def test_what_is_checked_at_the_start_is_bounded_and_differs(tmp_path: Path) -> None:
    file = write(tmp_path / "d")
    overwrite(file, 5 * BLOCK, b"\xff")
    data, found = IndexedDataset(tmp_path / "d"), 0
    for _ in range(200):
        try:
            data.file.check(at_most=BLOCK)
        except UserError:
            found += 1
    # One of nine blocks each time: 22 expected; never, or always, is less likely than 1e-10.
    assert 0 < found < 100


def test_the_index_and_files_of_other_data_are_found(tmp_path: Path) -> None:
    write(tmp_path / "d")
    # A bound between documents moves: the tables still agree with each other.
    idx = tmp_path / "d.idx"
    at = 34 + 12 * 7 + 8 * 3
    overwrite(idx, at, struct.pack("<q", 2))
    with pytest.raises(UserError, match=r"d\.idx, bytes 0 to 182: differ from what preprocessing wrote"):
        IndexedDataset(tmp_path / "d").verify()
    with IndexedDatasetWriter(tmp_path / "other", np.dtype("<u2")) as writer:
        writer.add_documents(np.arange(100), [100])
        writer.finalize()
    for end in ("bin", "idx"):
        os.replace(tmp_path / f"other.{end}", tmp_path / f"d.{end}")
    with pytest.raises(UserError, match=r"d\.bin has 200 bytes: is not the file that PREFIX.json"):
        IndexedDataset(tmp_path / "d")


@pytest.mark.parametrize("sidecar", [SIDECAR, None], ids=["checksums", "none"])
def test_a_change_while_it_is_read_is_found(tmp_path: Path, sidecar: dict[str, object] | None) -> None:
    file = write(tmp_path / "d", sidecar=sidecar)
    data = IndexedDataset(tmp_path / "d")
    data.verify()
    before = data.tokens(0, 100).tolist()
    overwrite(file, 0, file.read_bytes())
    if sidecar is not None:
        assert data.tokens(0, 100).tolist() == before, "written anew, but the same bytes"
        overwrite(file, 0, np.arange(7, 107, dtype="<u2").tobytes())
    with pytest.raises(UserError, match="differ from what" if sidecar else r"d\.bin: was changed while"):
        data.tokens(0, 100)


@pytest.mark.parametrize("sidecar", [SIDECAR, None], ids=["checksums", "none"])
def test_a_file_that_is_cut_while_it_is_open_is_named(tmp_path: Path, sidecar: dict[str, object] | None) -> None:
    """A map of it would end the process by SIGBUS."""
    file = write(tmp_path / "d", sidecar=sidecar)
    data = IndexedDataset(tmp_path / "d")
    os.truncate(file, 4 * BLOCK + 2)
    with pytest.raises(UserError, match=rf"d\.bin: ends at byte {4 * BLOCK + 2} instead of"):
        data.tokens(2 * BLOCK - 10, 2 * BLOCK + 100)


def test_the_hash_is_of_every_byte_and_of_old_data_what_it_was(tmp_path: Path) -> None:
    file = write(tmp_path / "a")
    content = json.loads((tmp_path / "a.json").read_text())
    for name in ("bin", "idx"):
        whole = (tmp_path / f"a.{name}").read_bytes()
        blocks = [whole[at : at + BLOCK] for at in range(0, len(whole), BLOCK)]
        root = hashlib.sha256(b"".join(hashlib.sha256(block).digest() for block in blocks))
        assert content["checksums"][name]["root"] == root.hexdigest()
    with IndexedDatasetWriter(tmp_path / "b", np.dtype("<u2")) as writer:
        ids = np.arange(TOKENS) % 60_000
        ids[outside_the_samples(file.stat().st_size) // 2] ^= 1
        writer.add_documents(ids, [len(part) for part in np.array_split(ids, 7)])
        writer.finalize(SIDECAR)
    assert IndexedDataset(tmp_path / "a").content_hash() != IndexedDataset(tmp_path / "b").content_hash()
    for name in "ab":
        (tmp_path / f"{name}.json").unlink()
    old = IndexedDataset(tmp_path / "a").content_hash()
    size, digest = file.stat().st_size, hashlib.sha256((tmp_path / "a.idx").read_bytes())
    digest.update(struct.pack("<Q", size))
    for i in range(64):
        digest.update(file.read_bytes()[(size - 4096) * i // 63 :][:4096])
    assert old == digest.hexdigest() == IndexedDataset(tmp_path / "b").content_hash()


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ('{"a": ' * 100_000, "is not JSON"),
        ('{"a": ' * 70 + "1" + "}" * 70, "nested in more than 64 levels"),
        ("[1]", "in a JSON object"),
        (" " * (3 << 20), "has more than"),
        ('{"checksums": {"block_bytes": 1}}', "checksums are not as"),
        ('{"checksums": {"block_bytes": 262144, "bin": {"sha256": "", "blocks": "?"}}}', "checksums are not as"),
        ('{"checksums": {"block_bytes": 262144, "bin": {"sha256": "\\ud800", "blocks": ""}}}', "checksums are not as"),
        ('{"checksums": {"block_bytes": 262144, "idx": {"sha256": "ab", "blocks": ""}}}', "checksums are not as"),
        ('{"checksums": 1}', "checksums are not as"),
    ],
)
def test_a_sidecar_from_anywhere(tmp_path: Path, text: str, words: str) -> None:
    write(tmp_path / "d")
    (tmp_path / "d.json").write_text(text)
    with pytest.raises(UserError, match=rf"d\.json: .*{words}"):
        IndexedDataset(tmp_path / "d")


def test_a_sparse_index_of_empty_sequences(tmp_path: Path) -> None:
    """2 * 10^8 of them in 4 KiB on disk: refused before the tables are read, which would take gigabytes."""
    np.arange(100, dtype="<u2").tofile(tmp_path / "d.bin")
    count = 200_000_000
    with (tmp_path / "d.idx").open("wb") as f:
        f.write(b"MMIDIDX\x00\x00" + struct.pack("<QBQQ", 1, 8, count, 2))
        f.truncate(34 + 12 * count + 16)
    with pytest.raises(UserError, match=f"d.idx: {count} sequences, 2 document bounds: its .bin has 100 tokens"):
        IndexedDataset(tmp_path / "d")


def test_a_failing_disk_is_one_line(tmp_path: Path) -> None:
    """EIO by the kernel itself, for bytes 0 on of a process's memory."""
    write(tmp_path / "d")
    (tmp_path / "d.idx").unlink()
    (tmp_path / "d.idx").symlink_to("/proc/self/mem")
    with pytest.raises(UserError, match=r"d\.idx: cannot be read \(Input/output error\)"):
        IndexedDataset(tmp_path / "d")
    with pytest.raises(UserError, match=r"/proc/self/mem: cannot be read \(Input/output error\)"):
        TokenFile(Path("/proc/self/mem"), 100, None).read(0, 10)
