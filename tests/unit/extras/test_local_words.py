"""Tools take URLs: what they name is downloaded first."""

from __future__ import annotations

import secrets
from pathlib import Path

import pytest

from megalite.base.errors import UserError
from megalite.base.store import Store, StoreError
from megalite.checkpoint import remote
from megalite.extras.command import find_main
from megalite.extras.local_words import local_words
from tests.stores import S3
from tests.unit.checkpoint.test_upload import make_part, upload_parts


@pytest.fixture(autouse=True)
def _home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(tmp_path / "home"))


def test_inspect_verifies_a_checkpoint_in_a_store(s3: S3, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = s3.url(f"runs/{secrets.token_hex(4)}")
    assert [
        r["error"]
        for r in upload_parts(
            f"{run}/checkpoints", *(make_part(tmp_path, f"{run}/checkpoints", 3, r, 2) for r in (1, 0))
        )
    ] == ["", ""]
    name = remote.committed(Store(f"{run}/checkpoints"))[0]
    for url in (run, f"{run}/checkpoints/{name}"):
        find_main("inspect")([url, "--verify"])
        assert "step 3" in capsys.readouterr().out.lower()


def test_what_each_word_becomes(s3: S3, tmp_path: Path) -> None:
    run = s3.url(f"runs/{secrets.token_hex(4)}")
    Store(run).write("metrics.jsonl", b"{}\n")
    # Not the folder of the run itself, which may be writing to its files.
    home = tmp_path / "home/.cache/megalite/tools/s3" / s3.bucket
    words = local_words("plot", ["--out", "a.png", run, "runs/b"])
    assert words == ["--out", "a.png", str(home / run.split("/", 3)[3]), "runs/b"]
    assert (Path(words[2]) / "metrics.jsonl").read_bytes() == b"{}\n"
    Store(run).write("hf/config.json", b"{}")
    assert local_words("generate", [f"--hf={run}/hf"]) == [f"--hf={home / run.split('/', 3)[3]}/hf"]
    assert local_words("train", ["--run-dir", run]) == ["--run-dir", run]
    with pytest.raises(StoreError, match="holds no committed checkpoint"):
        local_words("evaluate", [run])


def test_what_is_text_or_written() -> None:
    """Text is text even if it begins as a URL does; what is written, and what preparing data reads, is local."""
    words = ["--prompt", "https://example.com is", "--system=s3://b/x", "run"]
    assert local_words("generate", words) == words
    for command, given in (
        ("plot", ["--out", "s3://b/a.png"]),
        ("convert", ["--out=s3://b/c"]),
        ("lm-eval", ["--json", "s3://b/c"]),
        ("preprocess", ["--out", "s3://b/x"]),
        ("tokenizer", ["s3://b/text.jsonl"]),
    ):
        with pytest.raises(UserError, match=f"megalite {command}.*must be a path on this machine"):
            local_words(command, given)
    # The words after them are paths again.
    with pytest.raises(StoreError, match="does not exist|holds no committed"):
        local_words("inspect", ["--prompt", "x", "file:///nowhere/run"])
