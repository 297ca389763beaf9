"""Token files in the order of text: training on them reads the samples that training on the text reads."""

from __future__ import annotations

import gzip
import json
from pathlib import Path
from typing import Any

import pytest

from megalite.core.base.errors import UserError
from megalite.extras.prepare.command import preprocess
from megalite.extras.prepare.merge import merge
from megalite.runtime.data import Datasets, Rows, chat_template_of
from megalite.runtime.options import cli
from megalite.runtime.places.store import Store
from megalite.runtime.start.inputs import open_data, resolve_vocabulary
from tests.stores import S3
from tests.unit.data.stream.chats import conversations, lines
from tests.unit.data.stream.texts import write_folder

MODEL = ["--hidden-size", "16", "--num-layers", "1", "--num-heads", "2", "--seq-len", "16", "--seed", "5"]


def open_words(*words: str) -> Datasets:
    return open_data(*resolve_vocabulary(cli.parse([*MODEL, *words]).config))


def first(dataset: Any, count: int) -> list[Any]:
    samples = (dataset.sample(position) for position in range(count))
    return [
        [None if x is None else x.tolist() for x in vars(s).values()] if isinstance(s, Rows) else [*s] for s in samples
    ]


@pytest.mark.parametrize(
    "options", [[], ["--data-lanes", "3", "--shuffle-tokens", "320", "--document-mask"]], ids=["default", "chosen"]
)
def test_samples_are_those_of_the_text(small: None, tmp_path: Path, options: list[str]) -> None:
    """Of each part of --split too; and the run starts no worker, and needs no tokenizer."""
    write_folder(tmp_path / "text")
    cache, prefix = str(tmp_path / "cache"), str(tmp_path / "tokens")
    words = ["--input", str(tmp_path / "text"), "--tokenizer", "bytes", "--out", prefix, "--cache-dir", cache]
    preprocess([*words, "--order", "stream", "--workers", "2"])
    common = [*options, "--split", "80,20", "--eval-every", "1", "--cache-dir", cache]
    text = open_words("--data", str(tmp_path / "text"), "--tokenizer", "bytes", "--data-workers", "0", *common)
    files = open_words("--data", prefix, *common)
    assert first(files.train, 1500) == first(text.train, 1500)
    assert first(files.valid, 200) == first(text.valid, 200)
    assert files.workers is None
    assert files.train.shape == text.train.shape  # type: ignore[attr-defined]
    for datasets in (text, files):
        datasets.close()


@pytest.mark.parametrize(
    "options",
    [[], ["--loss-on", "last", "--loss-per", "sample", "--long-documents", "drop"]],
    ids=["default", "chosen"],
)
def test_samples_are_those_of_the_chats(small: None, tmp_path: Path, options: list[str]) -> None:
    """Packed alike, of each part of --split too; a mask that is gone or was changed is refused."""
    (tmp_path / "chats").mkdir()
    (tmp_path / "chats" / "a.jsonl").write_bytes(lines(conversations(1, 300)))
    (tmp_path / "chats" / "b.jsonl.gz").write_bytes(gzip.compress(lines(conversations(2, 40))))
    cache = ["--cache-dir", str(tmp_path / "cache")]
    prefix = made_of(tmp_path, "chats", "--chat", "--chat-template", "chatml", "--workers", "1")
    common = [*options, *cache, "--split", "80,20", "--eval-every", "1", "--seq-len", "160"]
    of_chats = ["--tokenizer", "bytes", "--chat-template", "chatml", "--data-workers", "1"]
    chats = open_words("--data", str(tmp_path / "chats"), *of_chats, *common)
    files = open_words("--data", prefix, *common)
    assert first(files.train, 300) == first(chats.train, 300)
    assert first(files.valid, 60) == first(chats.valid, 60)
    assert files.workers is None
    assert files.train.has_documents
    (template,) = chats.chat_templates().values()
    assert chat_template_of([prefix]) == template, "what an export gets"
    before = files.train.content_hash()
    for datasets in (chats, files):
        datasets.close()
    mask = Path(f"{prefix}.mask.bin")
    marks = mask.read_bytes()
    mask.write_bytes(b"\1" * len(marks))
    with pytest.raises(UserError, match="mask.bin"):
        first(open_words("--data", prefix, *common).train, 300)
    mask.unlink()
    with pytest.raises(UserError, match="says which tokens are learned, and cannot be read"):
        open_words("--data", prefix, *common)
    mask.write_bytes(marks)
    assert open_words("--data", prefix, *common).train.content_hash() == before


def test_chats_in_token_files_are_blended_with_text(small: None, tmp_path: Path) -> None:
    write_folder(tmp_path / "text")
    (tmp_path / "chats").mkdir()
    (tmp_path / "chats" / "a.jsonl").write_bytes(lines(conversations(1, 300)))
    made = made_of(tmp_path, "chats", "--chat", "--chat-template", "chatml", "--workers", "1")
    found = []
    for word, template in ((str(tmp_path / "chats"), ["--chat-template", "chatml"]), (made, [])):
        blend = ["--data", "0.3", word, "0.7", str(tmp_path / "text"), "--tokenizer", "bytes", "--data-workers", "1"]
        datasets = open_words(*blend, *template, "--cache-dir", str(tmp_path / "cache"))
        found.append(first(datasets.train, 300))
        datasets.close()
    assert found[0] == found[1]


def test_a_blend_with_text_and_other_files_is_one_stream(small: None, tmp_path: Path) -> None:
    for seed, name in enumerate(("a", "b")):
        write_folder(tmp_path / name, seed)
    cache, made = ["--cache-dir", str(tmp_path / "cache")], str(tmp_path / "made")
    order = [*cache, "--tokenizer", "bytes", "--order", "stream", "--workers", "0"]
    preprocess(["--input", str(tmp_path / "a"), "--out", made, *order])
    found = []
    for word in (str(tmp_path / "a"), made):
        blend = ["--data", "0.3", word, "0.7", str(tmp_path / "b"), "--tokenizer", "bytes", "--data-workers", "0"]
        datasets = open_words(*blend, *cache)
        found.append(first(datasets.train, 300))
        datasets.close()
    assert found[0] == found[1]


def made_of(tmp_path: Path, name: str, *words: str) -> str:
    prefix = str(tmp_path / f"made_of_{name}")
    order = ["--order", "stream", "--workers", "0", "--cache-dir", str(tmp_path / "cache"), *words]
    preprocess(["--input", str(tmp_path / name), "--tokenizer", "bytes", "--out", prefix, *order])
    return prefix


def test_files_of_other_names_are_other_data(tmp_path: Path) -> None:
    """They are split by the names of the text's files, though their tokens are the same."""
    found = set()
    for name in ("one", "two"):
        (tmp_path / name).mkdir()
        lines = "".join(json.dumps({"text": f"{i} of them"}) + "\n" for i in range(200))
        (tmp_path / name / f"{name}.jsonl").write_text(lines)
        prefix = made_of(tmp_path, name)
        datasets = open_words("--data", prefix)
        found |= {(Path(f"{prefix}.bin").read_bytes(), datasets.identity(), datasets.content_hashes()["data_hash"])}
    assert len(found) == 2
    assert len({tokens for tokens, *_ in found}) == 1


def test_many_small_files_fit_their_description(tmp_path: Path) -> None:
    folder = (
        tmp_path
        / "many"
        / "a_folder_with_a_name_of_some_length_as_data_sets_have_them"
        / ("deeper" * 25)
        / ("deeper" * 40)
    )
    folder.mkdir(parents=True)
    for i in range(2200):
        (folder / f"part-{i:05}.jsonl").write_text('{"text": "x"}\n')
    prefix = made_of(tmp_path, "many")
    assert Path(f"{prefix}.json").stat().st_size > 1 << 20
    assert len(first(open_words("--data", prefix).train, 20)) == 20


def test_a_folder_of_a_store(s3: S3, small: None, tmp_path: Path) -> None:
    write_folder(tmp_path / "text")
    for path in (tmp_path / "text").rglob("*.*"):
        Store(s3.url("for_files")).write(path.relative_to(tmp_path / "text").as_posix(), path.read_bytes())
    order = ["--tokenizer", "bytes", "--order", "stream", "--workers", "0", "--cache-dir", str(tmp_path / "cache")]
    preprocess(["--input", s3.url("for_files") + "/", "--out", str(tmp_path / "tokens"), *order])
    assert len(first(open_words("--data", str(tmp_path / "tokens")).train, 20)) == 20


def test_pieces_that_are_not_of_these_files_are_refused(small: None, tmp_path: Path) -> None:
    write_folder(tmp_path / "text")
    prefix = str(tmp_path / "tokens")
    words = ["--input", str(tmp_path / "text"), "--tokenizer", "bytes", "--out", prefix, "--order", "stream"]
    preprocess([*words, "--workers", "0", "--cache-dir", str(tmp_path / "cache")])
    sidecar = json.loads(Path(f"{prefix}.json").read_text())
    for pieces, says in (
        (sidecar["stream"]["pieces"][1:], r"and its .json pieces of \d+; preprocess the text again"),
        ([[[1]]], "its pieces are not as megalite preprocess writes them"),
        ([[]], "its pieces are not as megalite preprocess writes them"),
    ):
        Path(f"{prefix}.json").write_text(json.dumps({**sidecar, "stream": {"text_bytes": 9, "pieces": pieces}}))
        with pytest.raises(UserError, match=says):
            open_words("--data", prefix)
    Path(f"{prefix}.json").write_text(json.dumps(sidecar))
    with pytest.raises(UserError, match="was made with --order stream, .*; blend the prefixes in --data"):
        merge([prefix, prefix], str(tmp_path / "joined"))


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (["--order", "stream", "--pairs"], "--order stream with --pairs: "),
        (["--order", "stream", "--share", "1/2"], "--order stream with --share: "),
        (["--order", "stream", "--input", "a", "b"], "--order stream with 2 --input: takes the one folder or file"),
        (["--order", "stream", "--input", "absent"], "--input absent: does not exist"),
        (["--cache-dir", "x"], "--cache-dir x: applies to --order stream; add it"),
        (["--cache-gb", "9"], "--cache-gb 9.0: applies to --order stream; add it"),
    ],
)
def test_what_is_refused(tmp_path: Path, words: list[str], says: str) -> None:
    given = ["--input", "a", "--tokenizer", "bytes", "--out", str(tmp_path / "tokens"), *words]
    with pytest.raises(UserError) as e:
        preprocess(given)
    assert str(e.value).startswith(says)
    assert [*tmp_path.iterdir()] == []
