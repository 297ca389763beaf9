"""Text and chats in a store: downloaded at the start, and read as on a disk."""

from __future__ import annotations

import gzip
import random
from pathlib import Path

from megalite.core.rows import Rows
from megalite.runtime.options import cli
from megalite.runtime.places.store import Store
from megalite.runtime.start.inputs import open_data, resolve_vocabulary
from tests.stores import S3
from tests.unit.data.plain import ids_of
from tests.unit.data.stream.chats import conversations, lines
from tests.unit.data.stream.texts import document, json_lines

MODEL = [
    *("--hidden-size", "16", "--num-layers", "1", "--num-heads", "2", "--seq-len", "16"),
    *("--tokenizer", "bytes", "--data-workers", "0"),
]


def test_a_folder_of_a_store_is_the_data_of_the_same_folder_on_a_disk(s3: S3, tmp_path: Path) -> None:
    rng, url = random.Random(1), s3.url("texts")
    (tmp_path / "text").mkdir()
    for name in ("a.jsonl", "b.jsonl", "test.jsonl"):
        content = json_lines([document(rng) for _ in range(9)])
        (tmp_path / "text" / name).write_bytes(content)
        Store(url).write(name, content)
    found = []
    for word in (f"{tmp_path}/text", f"{url}/"):
        flags = [*MODEL, "--data", word, "--cache-dir", str(tmp_path / "cache")]
        cfg, tokenizer = resolve_vocabulary(cli.parse(flags).config)
        datasets = open_data(cfg, tokenizer)
        found.append(([ids_of(datasets.train, p).tolist() for p in range(100)], datasets.content_hashes()))
        datasets.close()
    assert found[0] == found[1]
    other = [*MODEL, "--data", f"{url}/:test", "--cache-dir", str(tmp_path / "other")]
    datasets = open_data(*resolve_vocabulary(cli.parse(other).config))
    assert datasets.train.content_hash() != found[0][1]["data_hash"]
    datasets.close()
    assert sorted(p.name for p in (tmp_path / "cache").rglob("[!.]*.jsonl")) == ["a.jsonl", "b.jsonl", "test.jsonl"]


def test_chats_and_text_of_a_store_are_blended_as_those_of_a_disk(s3: S3, tmp_path: Path) -> None:
    contents = {
        "chats/a.jsonl": lines(conversations(1, 40)),
        "chats/b.jsonl.gz": gzip.compress(lines(conversations(2, 20))),
        "text/a.jsonl": json_lines(["one two three"] * 200),
    }
    for name, content in contents.items():
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_bytes(content)
        Store(s3.url("blended")).write(name, content)
    found = []
    for root in (str(tmp_path), s3.url("blended")):
        data = ["--data", "0.5", f"{root}/chats/", "0.5", f"{root}/text/", "--cache-dir", str(tmp_path / "cache")]
        flags = [*MODEL[:-1], "1", "--chat-template", "chatml", *data]
        datasets = open_data(*resolve_vocabulary(cli.parse(flags).config))
        rows = [datasets.train.sample(position) for position in range(60)]
        arrays = [vars(s) if isinstance(s, Rows) else {"inputs": s} for s in rows]
        found.append([{n: x.tolist() for n, x in row.items() if x is not None} for row in arrays])
        assert {len(row) for row in found[-1]} == {1, 4}, "text, and packed chats"
        datasets.close()
    assert found[0] == found[1]
