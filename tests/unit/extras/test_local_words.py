"""Tools take URLs: what they name is downloaded first, and what they write is uploaded."""

from __future__ import annotations

import json
import re
import secrets
from contextlib import ExitStack
from pathlib import Path

import pytest

from megalite.core.base.errors import UserError
from megalite.core.base.log import logger
from megalite.extras.command import find_main
from megalite.extras.local_words import local_words
from megalite.runtime.places.store import Store, StoreError
from megalite.runtime.places.store_place import StorePlace
from tests.stores import S3
from tests.unit.checkpoint import hf_models
from tests.unit.checkpoint.parts import make_part, upload_parts


@pytest.fixture(autouse=True)
def _home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(tmp_path / "home"))


def local(command: str, words: list[str]) -> list[str]:
    """The words of a command that does nothing."""
    with local_words(command, words) as out:
        return out


def test_inspect_verifies_a_checkpoint_in_a_store(s3: S3, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = s3.url(f"runs/{secrets.token_hex(4)}")
    assert [
        r["error"]
        for r in upload_parts(
            f"{run}/checkpoints", *(make_part(tmp_path, f"{run}/checkpoints", 3, r, 2) for r in (1, 0))
        )
    ] == ["", ""]
    name = StorePlace(Store(f"{run}/checkpoints")).committed()[0]
    for url in (run, f"{run}/checkpoints/{name}"):
        find_main("inspect")([url, "--verify"])
        assert "step 3" in capsys.readouterr().out.lower()


def test_what_each_word_becomes(s3: S3, tmp_path: Path) -> None:
    run = s3.url(f"runs/{secrets.token_hex(4)}")
    Store(run).write("metrics.jsonl", b"{}\n")
    # Not the folder of the run itself, which may be writing to its files.
    home = tmp_path / "home/.cache/megalite/tools/s3" / s3.bucket
    words = local("plot", ["--out", "a.png", run, "runs/b"])
    assert words == ["--out", "a.png", str(home / run.split("/", 3)[3]), "runs/b"]
    assert (Path(words[2]) / "metrics.jsonl").read_bytes() == b"{}\n"
    Store(run).write("hf/config.json", b"{}")
    assert local("generate", [f"--hf={run}/hf"]) == [f"--hf={home / run.split('/', 3)[3]}/hf"]
    assert local("train", ["--run-dir", run]) == ["--run-dir", run]
    with pytest.raises(StoreError, match="holds no committed checkpoint"):
        local("evaluate", [run])


def test_what_is_text() -> None:
    """Text is text even if it begins as a URL does; the words after it are paths again."""
    words = ["--prompt", "https://example.com is", "--system=s3://b/x", "run"]
    assert local("generate", words) == words
    with pytest.raises(StoreError, match="does not exist|holds no committed"):
        local("inspect", ["--prompt", "x", "file:///nowhere/run"])


@pytest.mark.parametrize(
    ("command", "words"),
    [
        ("scaling", ["--out", "s3://b/x", "--", "--mock-data"]),
        ("check", ["--json=s3://b/x"]),
        ("check", ["--run-dir", "s3://b/x"]),
        ("plan", ["--preset", "llama-3-8b", "--png", "s3://b/x.png"]),
        ("plan", ["calibrate", "--out", "s3://b/x"]),
        ("schedule", ["--perfetto", "s3://b/x"]),
        ("launch", ["--log-dir", "s3://b/x"]),
        ("convert", ["import", "--megatron", "s3://b/x"]),
        ("lm-eval", ["runs/a", "--include-path", "s3://b/x"]),
    ],
)
def test_where_only_a_path_will_do(command: str, words: list[str]) -> None:
    """One line, instead of a folder `s3:` on this machine."""
    with pytest.raises(UserError, match=r"must be a path on this machine, not a URL"):
        local(command, words)


def test_what_was_uploaded_is_said(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Also by a command that logs nothing itself."""
    monkeypatch.setattr(logger, "handlers", [])
    with local_words("plot", ["--out", f"file://{tmp_path}/a.png"]) as words:
        Path(words[1]).write_bytes(b"1")
    assert f"uploaded file://{tmp_path}/a.png" in capsys.readouterr().err


def test_what_is_another_programs() -> None:
    words = ["--log-dir", "logs", "--", "my.py", "--out", "s3://b/x"]
    assert local("launch", words) == words


def read(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir()}


def test_preprocessing_from_and_into_a_store(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The same bytes as from a disk to a disk, in shares that are joined; what is there is not replaced unasked."""
    url, disk, there = f"file://{tmp_path}/far", tmp_path / "disk", tmp_path / "far/out"
    (tmp_path / "far/text/b").mkdir(parents=True)
    for name in ("text/a.jsonl", "text/b/c.jsonl"):
        lines = [json.dumps({"text": f"{name} {i} " * 1000}) for i in range(30)]
        (tmp_path / "far" / name).write_text("\n".join(lines))
    preprocess, how = find_main("preprocess"), ["--tokenizer", "bytes", "--workers", "1"]
    preprocess(["--input", f"{tmp_path}/far/text", *how, "--out", f"{disk}/whole"])
    preprocess(["--input", f"{url}/text", *how, f"--out={url}/out/whole"])
    assert read(there) == read(disk)
    for share in ("1/2", "2/2"):
        preprocess(["--input", f"{url}/text", *how, "--share", share, "--out", f"{url}/out/{share[0]}"])
    preprocess(["--merge", f"{url}/out/1", f"{url}/out/2", "--out", f"{url}/out/merged"])
    for end in ("bin", "idx", "json"):
        assert (there / f"merged.{end}").read_bytes() == (disk / f"whole.{end}").read_bytes()
    before = read(there)
    with pytest.raises(UserError, match=r"whole\.\w+ exists"):
        preprocess(["--input", f"{url}/text/a.jsonl", *how, "--out", f"{url}/out/whole"])
    assert read(there) == before
    (there / "whole.mask.bin").write_bytes(b"of other data")
    preprocess(["--input", f"{url}/text/a.jsonl", *how, "--overwrite", "--out", f"{url}/out/whole"])
    assert not (there / "whole.mask.bin").exists()
    (tmp_path / "far/text/a.jsonl").unlink()  # the copy of the folder forgets it too
    preprocess(["--input", f"{url}/text", *how, "--out", f"{url}/out/rest"])
    preprocess(["--input", f"{tmp_path}/far/text", *how, "--out", f"{disk}/rest"])
    for end in ("bin", "idx", "json"):
        assert (there / f"rest.{end}").read_bytes() == (disk / f"rest.{end}").read_bytes()
    assert not list((tmp_path / "home").glob("**/out_*"))


@pytest.mark.parametrize("breaks", ["text.bin", "text.json", "text.idx"])
def test_an_upload_that_breaks_leaves_no_data(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, breaks: str) -> None:
    """Neither new data nor a mixture with what they replace: without .idx a run refuses them."""
    far = tmp_path / "far"
    far.mkdir()
    for name in ("text.bin", "text.json", "text.idx"):
        (far / name).write_text("old")
    real = Store.upload

    def upload(self: Store, name: str, path: str, size: int) -> None:
        if name == breaks:
            raise StoreError(name, "is away")
        real(self, name, path, size)

    monkeypatch.setattr(Store, "upload", upload)
    ends = ExitStack()
    words = ends.enter_context(local_words("preprocess", ["--overwrite", "--out", f"file://{far}/text"]))
    for name in ("text.bin", "text.json", "text.idx"):
        Path(words[2]).with_name(name).write_text("new")
    with pytest.raises(StoreError):
        ends.close()
    assert not (far / "text.idx").exists()
    assert not list((tmp_path / "home").glob("**/out_*"))


def test_a_command_that_fails_uploads_nothing(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="no such file"):
        find_main("preprocess")(["--input", "/nowhere", "--tokenizer", "bytes", "--out", f"file://{tmp_path}/far/x"])
    assert not (tmp_path / "far").exists()


def test_every_tool_on_urls(s3: S3, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A folder of Hugging Face goes through a store and back, and each tool says of it what it says of a disk."""
    pytest.importorskip("transformers")
    disk, url = str(tmp_path), s3.url(f"tools/{secrets.token_hex(4)}")
    hf_models.make_model("llama", tmp_path / "hf")
    for path in (tmp_path / "hf").iterdir():
        Store(f"{url}/hf").write(path.name, path.read_bytes())
    Store(f"{url}/run").write("metrics.jsonl", b'{"step": 1, "loss": 2.0, "lr": 0.1, "grad_norm": 1.0}\n')
    (tmp_path / "text.txt").write_text("ABCABC")
    said = []
    for place in (disk, url):
        model = ["--device", "cpu", "--tokenizer", "bytes"]
        for command, words in (
            ("convert", ["import", "--hf", f"{place}/hf", "--out", f"{place}/made"]),
            ("convert", ["export", "--checkpoint", f"{place}/made", f"--out={place}/back"]),
            ("inspect", [f"{place}/made", "--verify", "--flatten", f"{place}/flat"]),
            ("generate", [f"{place}/made", *model, "--prompt", "AB", "--max-new-tokens", "5", "--seed", "3"]),
            ("generate", [f"{place}/back", *model, "--prompt", "AB", "--max-new-tokens", "5", "--seed", "3"]),
            ("evaluate", [f"{place}/made", *model, "--text", f"{tmp_path}/text.txt"]),
        ):
            find_main(command)(words)
        said.append(re.sub(r"\S*/(made|back|flat|text.txt)|import-\w+", r"\1", capsys.readouterr().out))
    assert said[0] == said[1]
    for path in (tmp_path / "back").iterdir():
        assert Store(f"{url}/back").read(path.name) == path.read_bytes()
    shard = (tmp_path / "flat/rank_00000.safetensors").read_bytes()
    assert Store(f"{url}/flat").read("rank_00000.safetensors") == shard
    find_main("plot")([f"{url}/run", "--out", f"{url}/a.png"])
    assert Store(url).read("a.png").startswith(b"\x89PNG")
    with pytest.raises(UserError, match="made exists"):
        find_main("convert")(["import", "--hf", f"{url}/hf", "--out", f"{url}/made"])
