"""Text in a store: downloaded at the start, and read as on a disk."""

from __future__ import annotations

import random
from pathlib import Path

from megalite.runtime.options import cli
from megalite.runtime.places.store import Store
from megalite.runtime.start.inputs import open_data, resolve_vocabulary
from tests.stores import S3
from tests.unit.data.plain import ids_of
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
