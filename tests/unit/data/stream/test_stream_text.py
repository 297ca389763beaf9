"""Streams over files: their samples are those of the description, whoever tokenizes and however many ranks read."""

from __future__ import annotations

import base64
import contextlib
import json
import os
import random
import re
import resource
from contextlib import ExitStack
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from megalite.core.base.errors import UserError
from megalite.extras.prepare.token_writer import IndexedDatasetWriter
from megalite.runtime.data import BatchLoader, Rows, binary
from megalite.runtime.data.stream import sources
from megalite.runtime.data.stream import workers as workers_module
from megalite.runtime.data.stream.catalogue import Catalogue, split_by_name
from megalite.runtime.data.stream.dataset import StreamDataset
from megalite.runtime.data.tokenizer import ByteTokenizer, Tokenizer, load_tokenizer
from megalite.runtime.places.downloads import locked
from tests.unit.data.plain import ids_of
from tests.unit.data.stream.reference import Pieces, World, samples
from tests.unit.data.stream.texts import (
    document,
    ids,
    json_lines,
    opened,
    write_folder,
    write_parquet,
)


def of_letters(folder: Path, letters: str, eos: str) -> Tokenizer:
    """A tokenizer.json with an id for each letter, `</s>` 2 and `<pad>` 3."""
    tokenizers = pytest.importorskip("tokenizers")
    folder.mkdir(exist_ok=True)
    vocabulary = {letter: number for number, letter in enumerate((*letters, "</s>", "<pad>"))}
    model = tokenizers.Tokenizer(tokenizers.models.BPE(vocab=vocabulary, merges=[]))
    model.add_special_tokens(["</s>", "<pad>"])
    model.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text(json.dumps({"eos_token": eos}))
    return load_tokenizer(str(folder))


def read(data: StreamDataset, count: int) -> list[list[int]]:
    return [ids_of(data, position).tolist() for position in range(count)]


def write_prefix(path: Path) -> Pieces:
    rng = random.Random(9)
    documents = [[rng.randrange(256) for _ in range(rng.choice((1, 30, 300)))] for _ in range(2000)]
    with IndexedDatasetWriter(path, np.dtype("<u2")) as writer:
        writer.add_documents(np.concatenate(documents), [len(d) for d in documents])
        writer.finalize()
    ends = np.append(0, np.cumsum([len(d) for d in documents]))
    step = 1 << 14
    of = [int(begin) // step for begin in ends[:-1]]  # a document is of the piece in which it begins
    firsts = [of.index(piece) for piece in range(of[-1] + 1)]
    return [[documents[first:stop]] for first, stop in pairwise([*firsts, len(documents)])]


@pytest.mark.parametrize("workers", [0, pytest.param(1, marks=pytest.mark.full), 3])
def test_samples_are_those_of_the_description_for_any_ranks_and_workers(
    small: None, tmp_path: Path, workers: int
) -> None:
    folder, other = write_folder(tmp_path / "text"), write_folder(tmp_path / "more", 2)
    prefix = write_prefix(tmp_path / "tokens")
    words: list[Any] = [0.6, tmp_path / "text", 0.3, tmp_path / "tokens", 0.1, tmp_path / "more"]
    want = samples(World(5, 3, 20, 16), [folder, prefix, other], [0.6, 0.3, 0.1], 2000)
    with opened(words, tmp_path / "cache", lanes=3, shuffle_tokens=320, workers=workers) as data:
        assert read(data, 2000) == want
        assert data.sources[0].num_pieces == len(folder)
    for ranks in (1, 2, 3, 4):
        rows: list[Any] = []
        with ExitStack() as stack:
            loaders = []
            for rank in range(ranks):
                data = stack.enter_context(opened(words, tmp_path / "cache", lanes=3, shuffle_tokens=320))
                loaders.append(BatchLoader(data, 24, rank, ranks))
            for _ in range(10):
                rows += [row for loader in loaders for row in loader.next_batch().inputs.tolist()]
            for loader in loaders:
                loader.close()
        assert rows == [sample[:-1] for sample in want[:240]]


def test_the_second_epoch_and_the_second_run_start_no_worker(small: None, tmp_path: Path) -> None:
    folder = write_folder(tmp_path / "text")
    count = 3 * sum(len(d) for piece in folder for part in piece for d in part) // 16
    with opened([tmp_path / "text"], tmp_path / "cache", lanes=2, workers=2) as data:
        workers: Any = data.sources[0]._workers  # type: ignore[attr-defined]
        first = read(data, count)
        assert 1 <= workers.started <= 2
        made = sorted((tmp_path / "cache").glob("pieces/*/*.tokens"))
        assert len(made) >= len(folder)
        times = [path.stat().st_mtime_ns for path in made]
    with opened([tmp_path / "text"], tmp_path / "cache", lanes=2, workers=2) as data:
        assert read(data, count) == first
        assert data.sources[0]._workers.started == 0  # type: ignore[attr-defined]
    assert times == [path.stat().st_mtime_ns for path in made]
    assert first == samples(World(5, 2, data.shape.window, 16), [folder], [1.0], count)


def test_a_reader_keeps_few_pieces_open_and_reads_the_same(
    small: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_folder(tmp_path / "text")
    with opened([tmp_path / "text"], tmp_path / "cache", lanes=3) as data:
        want = read(data, 500)
        source: Any = data.sources[0]
        assert len(source._open) > 4
    monkeypatch.setattr(sources, "_OPEN", 4)
    with opened([tmp_path / "text"], tmp_path / "cache", lanes=3) as data:
        source = data.sources[0]
        for position in range(500):
            assert ids_of(data, position).tolist() == want[position]
            assert len(source._open) <= 4


def test_short_documents_take_few_bytes_of_a_reader(tmp_path: Path) -> None:
    """Of each, its place in its piece and in the window: twice 8 bytes at the most, and not five numbers of 8."""
    (tmp_path / "text").mkdir()
    (tmp_path / "text" / "a.jsonl").write_bytes(json_lines(["ab"] * 20_000))
    with opened([tmp_path / "text"], tmp_path / "cache", lanes=1, shuffle_tokens=40_000, shuffle=True) as data:
        ids_of(data, 0)
        (window,) = data.order.lanes[0][0]._windows.values()
        documents = len(window.begins)
        assert documents > 10_000
        source: Any = data.sources[0]
        of_pieces = sum(tokens.starts.nbytes / len(tokens.starts) for tokens in source._open.values())
        assert of_pieces / len(source._open) <= 8
        held = [window.begins, window.rows, window.firsts]
        assert sum(x.nbytes for x in held) + 16 * len(window.places) <= 8.5 * documents


def test_a_long_wait_is_told_with_what_the_workers_make(
    small: None, tmp_path: Path, caplog: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_folder(tmp_path / "text")
    monkeypatch.setattr(workers_module, "_LOG_AFTER_S", -1.0)
    monkeypatch.setattr(workers_module, "_LOOK_EVERY_S", 0.001)
    caplog.set_level("INFO")
    with opened([tmp_path / "text"], tmp_path / "cache", lanes=2, workers=1) as data:
        read(data, 300)
    assert re.search(r"waiting for tokens of \S+: 1 workers make them", caplog.text)
    assert re.search(r"waiting for tokens of \S+: 1 workers make some [\d,]+ a second", caplog.text)


def test_a_killed_worker_is_replaced_and_its_piece_made_again(small: None, tmp_path: Path) -> None:
    write_folder(tmp_path / "text")
    with opened([tmp_path / "text"], tmp_path / "one", lanes=2) as data:
        want = read(data, 300)
    with opened([tmp_path / "text"], tmp_path / "two", lanes=2, workers=1) as data:
        workers: Any = data.sources[0]._workers  # type: ignore[attr-defined]
        got = []
        for position in range(300):
            got.append(ids_of(data, position).tolist())
            if position in (0, 40):
                for process in list(workers._processes):
                    process.kill()
        assert got == want
        assert workers.started >= 2


def test_an_end_of_text_that_was_corrected_finds_nothing_of_the_wrong_one(small: None, tmp_path: Path) -> None:
    """tokenizer.json is the same, so its hash is; how a tiktoken file is split is in a file beside it too."""
    (tmp_path / "text").mkdir()
    (tmp_path / "text" / "a.jsonl").write_bytes(json_lines(["aba"] * 50))
    hashes = []
    for eos in ("</s>", "<pad>"):
        tokenizer = of_letters(tmp_path / "hf", "ab", eos)
        with opened([tmp_path / "text"], tmp_path / "cache", tokenizer=tokenizer, vocab_size=4) as data:
            assert data.sample(0).tolist().count(tokenizer.eos_id) == 4  # type: ignore[union-attr]
            hashes.append(data.content_hash())
    assert hashes[0] != hashes[1]
    ranks = b"".join(base64.b64encode(bytes([i])) + f" {i}\n".encode() for i in range(256))
    (tmp_path / "own").write_bytes(ranks)
    described = []
    for pattern in (r"\S+|\s+", r"[\s\S]"):
        entries = {"pattern": pattern, "special_tokens": {"<e>": 256}, "eos": "<e>"}
        (tmp_path / "own.json").write_text(json.dumps(entries))
        described.append(load_tokenizer(str(tmp_path / "own")))
    assert described[0].sha256 == described[1].sha256
    assert described[0].identity != described[1].identity


@pytest.mark.parametrize("workers", [0, 1])
def test_a_tokenizer_that_was_replaced_since_the_start_is_not_used(small: None, tmp_path: Path, workers: int) -> None:
    (tmp_path / "text").mkdir()
    (tmp_path / "text" / "a.jsonl").write_bytes(json_lines(["aba"] * 50))
    first = of_letters(tmp_path / "hf", "ab", "</s>")
    options: dict[str, Any] = {"tokenizer": first, "vocab_size": 4, "workers": workers}
    with opened([tmp_path / "text"], tmp_path / "cache", **options) as data:
        of_letters(tmp_path / "hf", "ba", "</s>")
        if workers:  # which read the file when the first piece is asked for
            with pytest.raises(UserError, match="tokenizer .* was changed after the run had started"):
                data.sample(0)
        else:
            assert data.sample(0).tolist()[:3] == first.encode("aba")  # type: ignore[union-attr]


def test_a_worker_that_cannot_be_started_ends_the_run(
    small: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Here of open files; all threads live on."""
    write_folder(tmp_path / "text")
    monkeypatch.setattr(workers_module.time, "sleep", lambda seconds: None)
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    with opened([tmp_path / "text"], tmp_path / "cache", workers=1) as data:
        highest = max(int(path.name) for path in Path("/proc/self/fd").iterdir())
        resource.setrlimit(resource.RLIMIT_NOFILE, (highest, hard))
        held = []
        try:
            with contextlib.suppress(OSError):
                while True:
                    held.append(os.open("/dev/null", os.O_RDONLY))
            with pytest.raises(UserError, match="no process can be started that tokenizes it .*Too many open files"):
                data.sample(0)
        finally:
            resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
            for descriptor in held:
                os.close(descriptor)
        assert data.sample(0) is not None


def test_workers_of_several_ranks_make_different_pieces(small: None, tmp_path: Path) -> None:
    """They are asked for the same ones in the same order; who finds the first under way takes the next."""
    pieces = len(write_folder(tmp_path / "text"))
    with opened([tmp_path / "text"], tmp_path / "cache", lanes=1) as data:
        source: Any = data.sources[0]
        order, following = (source.catalogue.piece(number) for number in (0, 1))
        path = source.recipe.path(order, 0)
        path.parent.mkdir(parents=True)
        workers = workers_module.Workers(1, ByteTokenizer())
        with locked(path.with_name(f".lock_{path.name[:2]}")):
            waiting = workers.order(source.recipe, order, 0)
            workers.order(source.recipe, following, 0).result(120)
            assert not waiting.done()
        waiting.result(120)
        assert path.exists()
        workers.close()
    assert pieces > 2


def test_a_part_of_a_split_without_a_document_is_named(small: None, tmp_path: Path) -> None:
    (tmp_path / "text").mkdir()
    (tmp_path / "text" / "a.jsonl").write_bytes(json_lines(["abc"] * 12))
    with (
        opened([tmp_path / "text"], tmp_path / "cache", part=1, split="9999,1", shuffle=False) as data,
        pytest.raises(UserError, match="holds a token in this part of --split; give --valid-data"),
    ):
        data.sample(0)


def test_a_damaged_piece_is_made_again_and_never_used(small: None, tmp_path: Path, caplog: Any) -> None:
    write_folder(tmp_path / "text")
    with opened([tmp_path / "text"], tmp_path / "cache", lanes=2) as data:
        want = read(data, 500)
        files = sorted((tmp_path / "cache").glob("pieces/*/*.tokens"))
        for number, path in enumerate(files):
            content = bytearray(path.read_bytes())
            content[(3, -3, len(content) // 2, -200)[number % 4]] ^= 1
            path.write_bytes(content if number % 5 else content[:-50])
        assert read(data, 500) == want, "in the run that reads them"
    with opened([tmp_path / "text"], tmp_path / "cache", lanes=2) as data:
        assert read(data, 500) == want
    assert "is made again" in caplog.text


def test_a_piece_that_a_full_cache_deleted_is_made_again_and_not_called_damaged(
    small: None, tmp_path: Path, caplog: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_folder(tmp_path / "text")
    with opened([tmp_path / "text"], tmp_path / "cache", lanes=2) as data:
        want = read(data, 500)
    monkeypatch.setattr(binary, "_MAX_OPEN", 1)  # a file that is open can be read after it was deleted
    with opened([tmp_path / "text"], tmp_path / "small", lanes=2, cache_bytes=20_000) as data:
        assert read(data, 500) == want
    made = sum(path.stat().st_size for path in (tmp_path / "cache").glob("pieces/*/*.tokens"))
    left = sum(path.stat().st_size for path in (tmp_path / "small").glob("pieces/*/*.tokens"))
    assert left < 20_000 < made
    assert "damaged" not in caplog.text
    assert caplog.text.count("larger --cache-gb") == 1


def test_a_source_that_changes_under_a_run_ends_it_and_one_that_is_gone(small: None, tmp_path: Path) -> None:
    write_folder(tmp_path / "text")
    for name, change in (("changed", lambda f: f.write_bytes(f.read_bytes() + b"\n")), ("removed", Path.unlink)):
        with opened([tmp_path / "text"], tmp_path / name, lanes=2) as data:
            ids_of(data, 0)
            change(tmp_path / "text" / "a.jsonl")
            with pytest.raises(UserError, match=f"a.jsonl: was {name}.*while training was reading it"):
                read(data, 2000)


def test_the_hash_tells_another_file_of_the_same_size_and_not_a_copy(small: None, tmp_path: Path) -> None:
    write_folder(tmp_path / "text")
    file = tmp_path / "text" / "a.jsonl"

    def hashes() -> tuple[str, str]:
        with opened([tmp_path / "text"], tmp_path / "cache", lanes=2) as data:
            return data.content_hash(), data.identity()

    before, content = hashes(), file.read_bytes()
    with opened([tmp_path / "text"], tmp_path / "cache", lanes=1, shuffle=False) as data:
        read(data, 40)
    file.write_bytes(content)  # another time
    assert hashes() == before
    file.write_bytes(content.replace(b"a", b"b", 1))
    assert hashes()[0] != before[0]
    with opened([tmp_path / "text"], tmp_path / "cache", lanes=1, shuffle=False) as data:
        changed = b"".join(bytes(t for t in s[:-1] if t < 256) for s in read(data, 40))
        text = "".join(json.loads(line)["text"] for line in file.read_text().splitlines()).encode()
        assert changed == text[: len(changed)], "tokens of the earlier file are not its own"
    file.write_bytes(content + b"{}")
    assert hashes()[1] != before[1]
    with opened([1, tmp_path / "text", 2, tmp_path / "text"], tmp_path / "cache", lanes=2) as data:
        with pytest.raises(UserError, match="is the same data twice.*weight 3"):
            data.content_hash()


def test_bad_records_stop_the_run_or_are_counted_up_to_a_percent(small: None, tmp_path: Path, caplog: Any) -> None:
    folder = tmp_path / "text"
    folder.mkdir()
    rng = random.Random(2)
    lines = json_lines([document(rng) for _ in range(100)]).splitlines()
    lines[70] = b'{"text": 7}'
    (folder / "a.jsonl").write_bytes(b"\n".join(lines))
    with opened([folder], tmp_path / "cache", lanes=1) as data:
        with pytest.raises(UserError, match="a.jsonl line 71: .*must be a string.*--skip-bad"):
            read(data, 2000)
        hashed = data.content_hash()
    with opened([folder], tmp_path / "cache", lanes=1, skip_bad=True) as data:
        ids_of(data, 1500)
        assert data.content_hash() == hashed, "a run that ended there may go on with --skip-bad"
    with opened([folder], tmp_path / "cache", lanes=1) as data:
        with pytest.raises(UserError, match="a.jsonl: has 1 bad records, which an earlier run left out"):
            read(data, 2000)
    assert "1 bad records are skipped" in caplog.text
    with opened([folder], tmp_path / "cache", lanes=1, skip_bad=True, key="body") as data:
        with pytest.raises(UserError, match="more than the 1 % that --skip-bad skips|holds a token"):
            ids_of(data, 0)


def test_documents_are_marked_where_they_begin(small: None, tmp_path: Path) -> None:
    write_folder(tmp_path / "text")
    with (
        opened([tmp_path / "text"], tmp_path / "cache", lanes=2) as plain,
        opened([tmp_path / "text"], tmp_path / "cache", lanes=2, document_mask=True) as masked,
    ):
        for position in range(300):
            tokens, rows = ids_of(plain, position), masked.sample(position)
            assert isinstance(rows, Rows)
            assert rows.starts is not None
            begins = [i + 1 for i, token in enumerate(tokens.tolist()) if token == 256]
            assert rows.inputs.tolist() == tokens[:-1].tolist()
            assert [i for i in range(1, 16) if rows.starts[i] == i] == [b for b in begins if b < 16]
            assert [i for i in range(16) if rows.targets[i] < 0] == [b - 1 for b in begins if b < 17]


def test_a_split_parts_the_documents_and_evaluation_reads_in_order(small: None, tmp_path: Path) -> None:
    folder = tmp_path / "text"
    folder.mkdir()
    texts = [f"{number:04}" for number in range(1000)]
    (folder / "a.jsonl").write_bytes(json_lines(texts))

    def numbers(data: StreamDataset, samples_: int) -> list[int]:
        read = [int(t) for p in range(samples_) for t in ids_of(data, p)[:-1]]
        text = bytes(t for t in read if t < 256).decode()
        return [int(text[i : i + 4]) for i in range(0, len(text) - 3, 4)]

    with opened([folder], tmp_path / "c", part=1, split="80,20", shuffle=False) as valid:
        held = numbers(valid, 80)
    with opened([folder], tmp_path / "c", part=0, split="80,20", lanes=1, shuffle_tokens=16) as train:
        learned = set(numbers(train, 240))
    assert held[:60] == sorted(held[:60])
    assert not learned & set(held)
    assert 150 < len(set(held)) < 260


def test_names_of_other_splits_are_left_out_and_told(tmp_path: Path, caplog: Any) -> None:
    names = ["train-00.jsonl", "data/validation-01.jsonl", "test/x.jsonl", "dev.jsonl", "train/dev-1.jsonl", ".h.jsonl"]
    for name in names:
        (tmp_path / "f" / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / "f" / name).write_bytes(json_lines(["abc"]))
    (tmp_path / "f" / "README.md").write_text("about")
    caplog.set_level("INFO")
    assert [f.name for f in Catalogue(str(tmp_path / "f"), "text").files] == ["train-00.jsonl", "train/dev-1.jsonl"]
    assert "3 of 5 files are left out" in caplog.text
    valid = [f.name for f in Catalogue(f"{tmp_path / 'f'}:validation", "text").files]
    assert valid == ["data/validation-01.jsonl", "dev.jsonl"]
    assert split_by_name("contest.jsonl") is None
    with pytest.raises(UserError, match="is none of train"):
        Catalogue(f"{tmp_path / 'f'}:other", "text")


def test_what_cannot_be_read_is_refused_in_a_line(tmp_path: Path) -> None:
    (tmp_path / "arrow").mkdir()
    (tmp_path / "arrow" / "data.arrow").write_bytes(b"x")
    (tmp_path / "arrow" / "dataset_info.json").write_text("{}")
    (tmp_path / "hub").mkdir()
    (tmp_path / "hub" / "a.jsonl").write_bytes(json_lines(["abc"]))
    (tmp_path / "hub" / "README.md").write_text("---\nconfigs:\n- config_name: en\n- config_name: de\n---\nx")
    write_parquet(tmp_path / "p" / "a.parquet", ["abc"], 1)
    (tmp_path / "tokens").mkdir()
    write_prefix(tmp_path / "tokens" / "train")
    (tmp_path / "tokens" / "notes.txt").write_text("not to be trained on")
    for name, words in (
        ("arrow", "save_to_disk.*to_parquet"),
        ("hub", "several configurations.*en, de"),
        ("none/", "does not exist"),
        ("tokens", "is a folder, and token files are.*give .*tokens/train"),
        ("p", r"--key body.*columns \['n', 'text'\]"),
    ):
        with pytest.raises(UserError, match=words):
            Catalogue(f"{tmp_path}/{name}", "body")


def test_small_texts_are_documents_several_to_a_piece(small: None, tmp_path: Path) -> None:
    folder = tmp_path / "books"
    folder.mkdir()
    texts = [document(random.Random(n), 1500) + "." for n in range(20)]
    for number, text in enumerate(texts):
        (folder / f"{number:02}.txt").write_text(text)
    (folder / "picture.bin").write_bytes(b"\0\1\2")
    with opened([folder], tmp_path / "cache", shuffle=False) as data:
        assert data.sources[0].num_pieces < 20
        whole = [t for text in ids(texts) for t in text]
        assert ids_of(data, 3).tolist() == whole[48:65]


def test_lines_that_begin_and_end_where_pieces_do_come_once(small: None, tmp_path: Path) -> None:
    folder = tmp_path / "f"
    folder.mkdir()
    texts = [f"{number:05}" + "x" * 46 for number in range(101)]
    content = json_lines(texts)
    assert len(content) == 101 * 64, "32 lines are a piece"
    (folder / "a.jsonl").write_bytes(content)
    with opened([folder], tmp_path / "cache", shuffle=False) as data:
        assert data.sources[0].num_pieces == 4
        sizes = [len(data.sources[0].sizes(piece, 0).sizes) for piece in range(4)]
        assert sizes == [32, 32, 32, 5]
        whole = [t for document_ in ids(texts) for t in document_]
        assert [t for s in read(data, len(whole) // 16) for t in s[:-1]] == whole[: len(whole) // 16 * 16]


def test_what_a_killed_worker_left_is_removed_and_a_cache_that_is_a_file_refused(small: None, tmp_path: Path) -> None:
    write_folder(tmp_path / "text")
    with opened([tmp_path / "text"], tmp_path / "cache", lanes=1) as data:
        want = read(data, 2000)
    (made,) = sorted((tmp_path / "cache").glob("pieces/*/*.tokens"))[:1]
    left = made.with_name(f".part_1_{made.name}")
    left.write_bytes(b"half")
    made.unlink()
    with opened([tmp_path / "text"], tmp_path / "cache", lanes=1) as data:
        assert read(data, 2000) == want
    assert made.exists()
    assert not left.exists()
    (tmp_path / "file").write_bytes(b"")
    with opened([tmp_path / "text"], tmp_path / "file", lanes=1) as data:
        with pytest.raises(UserError, match="cannot be read, or .*/file/pieces/.* not be written.*--cache-dir"):
            read(data, 1)


def test_more_lanes_than_pieces_are_refused(small: None, tmp_path: Path) -> None:
    folder = tmp_path / "f"
    folder.mkdir()
    (folder / "a.jsonl").write_bytes(json_lines(["abc"]))
    with pytest.raises(UserError, match="--data-lanes 2: .* has 1 pieces"), opened([folder], tmp_path, lanes=2):
        pass
