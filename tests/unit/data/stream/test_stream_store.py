"""Text and chats in a store: downloaded at the start, and read as on a disk."""

from __future__ import annotations

import gzip
import random
from pathlib import Path

from megalite.core.rows import Rows
from megalite.runtime.options import cli
from megalite.runtime.places.downloads import bring_tree
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
    names = ("a.jsonl", "b/c.jsonl", "b/d/e.jsonl", "b/d.jsonl", "test/f.jsonl", ".hidden/g.jsonl", "b/.h.jsonl")
    for name in names:
        content = json_lines([document(rng) for _ in range(9)])
        (tmp_path / "text" / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / "text" / name).write_bytes(content)
        Store(url).write(name, content)
    Store(url).write("b/", b"")  # as some tools mark a folder
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
    here = tmp_path / "cache" / "s3" / s3.bucket / "texts"
    assert {p.relative_to(here).as_posix() for p in here.rglob("[!.]*.jsonl")} == {
        n for n in names if "/." not in f"/{n}"
    }


def test_what_is_gone_from_a_folder_of_a_store_is_gone_here_and_nothing_else(s3: S3, tmp_path: Path) -> None:
    url, store = s3.url("fewer"), Store(s3.url("fewer"))
    for name in ("a.jsonl", "b/c.jsonl", "d/e/f.jsonl", "d/g.jsonl"):
        store.write(name, b"{}")
    here = bring_tree(url, str(tmp_path), deep=True)
    times = {p: p.stat().st_mtime_ns for p in here.rglob("[!.]*.jsonl")}
    (here / "other.bin.units").mkdir()
    (here / "other.bin.units" / "0").write_bytes(b"of token files")
    store.delete(["a.jsonl", "d/e/f.jsonl", "b/c.jsonl"])
    store.write("d/h.jsonl", b"{}")
    bring_tree(url, str(tmp_path), deep=True)
    left = {p.relative_to(here).as_posix() for p in here.rglob("*") if p.is_file() and not p.name.startswith(".")}
    assert left == {"d/g.jsonl", "d/h.jsonl", "other.bin.units/0"}
    assert (here / "d/g.jsonl").stat().st_mtime_ns == times[here / "d/g.jsonl"], "not downloaded again"


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
