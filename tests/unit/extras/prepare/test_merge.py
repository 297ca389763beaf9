"""Shares prepared apart and joined equal one run byte for byte; the parent hashes every byte once."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path

import numpy as np
import pytest

from megalite.core.base.errors import UserError
from megalite.extras.prepare.command import preprocess as command
from megalite.extras.prepare.merge import merge
from megalite.extras.prepare.preprocess import preprocess
from megalite.extras.prepare.token_writer import IndexedDatasetWriter
from megalite.runtime.data import sidecar

ENDS = ("bin", "idx", "json", "mask.bin")


def files(prefix: Path) -> dict[str, bytes]:
    return {end: path.read_bytes() for end in ENDS if (path := Path(f"{prefix}.{end}")).exists()}


@pytest.fixture
def texts(tmp_path: Path) -> list[str]:
    """Files of several chunks, of one, and an empty one."""
    rng = np.random.default_rng(1)
    for name, lines in (("a", 9000), ("b", 3), ("c", 0), ("d", 5000)):
        words = (" ".join(map(str, rng.integers(0, 999, rng.integers(0, 40)))) for _ in range(lines))
        (tmp_path / f"{name}.jsonl").write_text("".join(json.dumps({"text": text}) + "\n" for text in words))
    return [str(tmp_path / f"{name}.jsonl") for name in "abcd"]


@pytest.mark.parametrize("shares", [1, 3])
def test_joined_shares_equal_one_run(texts: list[str], tmp_path: Path, shares: int) -> None:
    preprocess(texts, "bytes", str(tmp_path / "whole"))
    parts = []
    for i in range(1, shares + 1):
        out = tmp_path / f"part{i}"
        command(
            ["--input", *texts, "--tokenizer", "bytes", "--out", str(out), "--workers", "1", "--share", f"{i}/{shares}"]
        )
        parts.append(str(out))
    command(["--merge", *parts, "--out", str(tmp_path / "joined")])
    assert files(tmp_path / "joined") == files(tmp_path / "whole")
    assert len({len(files(Path(part))["bin"]) for part in parts}) == shares


def test_marked_answers_are_joined(tmp_path: Path) -> None:
    turns = [{"role": "user", "content": "2 + 2"}, {"role": "assistant", "content": "4"}]
    for name, count in (("x", 700), ("y", 900)):
        lines = (json.dumps({"messages": [*turns, turns[0], {**turns[1], "content": str(i)}]}) for i in range(count))
        (tmp_path / f"{name}.jsonl").write_text("\n".join(lines))
    both = [str(tmp_path / "x.jsonl"), str(tmp_path / "y.jsonl")]
    for out, inputs in (("whole", both), ("x", both[:1]), ("y", both[1:])):
        preprocess(inputs, "bytes", str(tmp_path / out), chat=True, chat_template="chatml")
    merge([str(tmp_path / "x"), str(tmp_path / "y")], str(tmp_path / "joined"))
    assert files(tmp_path / "joined") == files(tmp_path / "whole")
    assert len(files(tmp_path / "joined")) == 4


def test_data_without_a_description_are_joined(tmp_path: Path) -> None:
    for name, sizes in (("whole", [3, 0, 5, 2, 4]), ("a", [3, 0]), ("b", [5, 2, 4])):
        start = 3 if name == "b" else 0
        with IndexedDatasetWriter(tmp_path / name, np.dtype("<i4")) as writer:
            writer.add_documents(np.arange(start, start + sum(sizes)), sizes)
            writer.finalize()
    assert merge([str(tmp_path / "a"), str(tmp_path / "b")], str(tmp_path / "joined")) == (5, 14)
    assert files(tmp_path / "joined") == files(tmp_path / "whole")


def test_what_does_not_belong_together(texts: list[str], tmp_path: Path) -> None:
    preprocess(texts[:1], "bytes", str(tmp_path / "a"))
    with IndexedDatasetWriter(tmp_path / "b", np.dtype("<i4")) as writer:
        writer.add_documents(np.arange(9), [9])
        writer.finalize()
    with pytest.raises(UserError, match="b: was made in another way than .*a .*tokenizer_sha256"):
        merge([str(tmp_path / "a"), str(tmp_path / "b")], str(tmp_path / "c"))
    for arguments, words in (
        (["--merge", str(tmp_path / "a"), "--out", str(tmp_path / "a")], "which is an input"),
        (["--merge", str(tmp_path / "a"), "--input", texts[0], "--out", str(tmp_path / "c")], "--merge with --input"),
        (["--input", texts[0], "--tokenizer", "bytes", "--share", "3/2", "--out", str(tmp_path / "c")], "--share 3/2"),
    ):
        with pytest.raises(UserError, match=words):
            command(arguments)
    assert not (tmp_path / "c.idx").exists()


def test_every_byte_is_hashed_once(texts: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Twice before: the SHA-256 of the file, and that of each block."""
    hashed, sha256 = [0], hashlib.sha256

    class Counted:
        def __init__(self, data: bytes = b"") -> None:
            self._hash = sha256()
            self.update(data)

        def update(self, data: bytes) -> None:
            hashed[0] += len(data)
            self._hash.update(data)

        def __getattr__(self, name: str) -> object:
            return getattr(self._hash, name)

    monkeypatch.setattr(sidecar.hashlib, "sha256", Counted)
    with IndexedDatasetWriter(tmp_path / "d", np.dtype("<u2")) as writer:
        for _ in range(40):
            writer.add_documents(np.arange(50_000), [20_000, 30_000])
        writer.finalize({})
    written = sum(len(data) for end, data in files(tmp_path / "d").items() if end != "json")
    assert written <= hashed[0] <= 1.01 * written
