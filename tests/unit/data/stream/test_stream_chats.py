"""Chats as text: what is learned of them is what `megalite preprocess --chat` marks, whoever tokenizes them."""

from __future__ import annotations

import gzip
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from megalite.core.base.errors import UserError
from megalite.extras.prepare.command import preprocess
from megalite.extras.prepare.preprocess import preprocess as preprocess_files
from megalite.runtime.data import IndexedDataset, LossMask, Rows
from megalite.runtime.data.packing import pack
from megalite.runtime.data.stream.catalogue import Catalogue
from megalite.runtime.data.stream.dataset import StreamDataset
from megalite.runtime.data.stream.packs import LEAST
from tests.unit.data.stream.chats import Record, conversations, lines
from tests.unit.data.stream.texts import json_lines, opened

SEQ = 16
CHATML: dict[str, Any] = {"chat_template": "chatml", "workers": 1}
IN_ORDER: dict[str, Any] = {**CHATML, "shuffle": False}


def write_chats(folder: Path) -> list[Record]:
    """Write lines, compressed lines and tables; return the records in the order of the names."""
    (folder / "sub").mkdir(parents=True)
    plain, packed, rows = conversations(1, 90), conversations(2, 20), conversations(3, 60)
    tables = [[r for r in rows if "messages" in r], [r for r in rows if "instruction" in r]]
    (folder / "a.jsonl").write_bytes(lines(plain))
    (folder / "b.jsonl.gz").write_bytes(gzip.compress(lines(packed)))
    for name, table in zip(("c.parquet", "sub/d.parquet"), tables):
        names = dict.fromkeys(name for record in table for name in record)
        columns = {name: [record.get(name) for record in table] for name in names}
        pq.write_table(pa.table(columns), folder / name, row_group_size=7)
    return [*plain, *packed, *tables[0], *tables[1]]


def prepared(folder: Path, records: Sequence[Record]) -> IndexedDataset:
    """What the tool makes of these records."""
    source = folder / "all.jsonl"
    source.write_bytes(lines(records))
    preprocess_files([str(source)], "bytes", str(folder / "made"), chat=True, chat_template="chatml")
    return IndexedDataset(str(folder / "made"))


def test_the_tool_reads_tables_of_chats_and_of_pairs(tmp_path: Path) -> None:
    made = prepared(tmp_path, write_chats(tmp_path / "chats"))
    preprocess_files([str(tmp_path / "chats")], "bytes", str(tmp_path / "own"), chat=True, chat_template="chatml")
    for name in ("bin", "idx", "mask.bin"):
        assert (tmp_path / f"own.{name}").read_bytes() == (tmp_path / f"made.{name}").read_bytes()
    assert made.num_documents == 140
    pairs = [{"prompt": f"{n}?", "chosen": f"{n}!", "rejected": "no", "score": n} for n in range(20)]
    (tmp_path / "pairs.jsonl").write_bytes(lines(pairs))
    pq.write_table(pa.Table.from_pylist(pairs), tmp_path / "pairs.parquet")
    for kind in ("jsonl", "parquet"):
        out = str(tmp_path / f"of_{kind}")
        preprocess_files([str(tmp_path / f"pairs.{kind}")], "bytes", out, pairs=True, chat_template="chatml")
    assert (tmp_path / "of_jsonl.bin").read_bytes() == (tmp_path / "of_parquet.bin").read_bytes()
    assert (tmp_path / "of_jsonl.mask.bin").read_bytes() == (tmp_path / "of_parquet.mask.bin").read_bytes()


def samples_of(made: IndexedDataset, on: Any, seq_len: int = SEQ) -> list[tuple[Any, ...]]:
    """Inputs, targets, starts, weights and padding of the samples of one epoch in order."""
    mask, out, window, filled = LossMask(made, on), list[tuple[Any, ...]](), list[int](), 0
    places = np.minimum(made.sizes - 1, seq_len)
    for document in range(made.num_documents):
        window.append(document)
        filled += int(places[document])
        if filled < LEAST * seq_len:
            continue
        for chosen in pack(places[window], seq_len):
            row: dict[str, list[Any]] = {name: [] for name in ("inputs", "targets", "starts", "weights")}
            for number in (window[i] for i in chosen):
                tokens, learned = made.document(number).tolist(), mask.of(number).tolist()
                tokens, learned, at = tokens[: seq_len + 1], learned[1 : seq_len + 1], len(row["inputs"])
                row["inputs"] += tokens[:-1]
                row["targets"] += [token if is_learned else -1 for token, is_learned in zip(tokens[1:], learned)]
                row["starts"] += [at] * len(learned)
                row["weights"] += [np.float32(1 / max(sum(learned), 1))] * len(learned)
            at = len(row["inputs"])
            fillers = {"inputs": 0, "targets": -1, "starts": at, "weights": 0}
            filled_up = [row[name] + [filler] * (seq_len - at) for name, filler in fillers.items()]
            out.append((*filled_up, [place >= at for place in range(seq_len)]))
        window, filled = [], 0
    return out


def read(data: StreamDataset, positions: Sequence[int]) -> list[Rows]:
    samples = [data.sample(position) for position in positions]
    assert all(isinstance(sample, Rows) for sample in samples)
    return samples  # type: ignore[return-value]


def same(left: Sequence[Rows], right: Sequence[Rows]) -> bool:
    return all(
        (a is None and b is None) or np.array_equal(a, b)
        for x, y in zip(left, right, strict=True)
        for a, b in zip(vars(x).values(), vars(y).values())
    )


def test_tokens_and_masks_are_those_of_prepared_chats(small: None, tmp_path: Path, caplog: Any) -> None:
    caplog.set_level("INFO")
    made = prepared(tmp_path, write_chats(tmp_path / "chats"))
    on: Any
    for on in ("answers", "last", "all"):
        want = samples_of(made, on)
        caplog.clear()
        with opened([tmp_path / "chats"], tmp_path / "cache", loss_on=on, loss_per="sample", **IN_ORDER) as data:
            assert data.has_documents
            rows = read(data, range(len(want)))
        for sample, expected in zip(rows, want):
            arrays = (sample.inputs, sample.targets, sample.starts, sample.weights, sample.padding)
            assert tuple(array.tolist() for array in arrays if array is not None) == expected
        assert caplog.text.count("conversations with answers that are not learned, as their weight is 0") == 1
    assert len(want) > 100
    with opened([tmp_path / "chats"], tmp_path / "cache", **IN_ORDER) as data:
        rows = read(data, range(50))
        assert all(sample.weights is None for sample in rows), "each token counts alike by default"
        hashed = data.content_hash()
    with opened([tmp_path / "chats"], tmp_path / "cache", long_documents="drop", seq_len=SEQ * 8, **IN_ORDER) as data:
        kept = {tuple(ids[:-1]) for ids in map(made.document, range(made.num_documents)) if len(ids) <= SEQ * 8 + 1}
        assert 0 < len(kept) < made.num_documents
        found = set()
        for sample in read(data, range(200)):
            assert sample.starts is not None
            assert sample.padding is not None
            for start in np.unique(sample.starts[~sample.padding]):
                found.add(tuple(sample.inputs[(sample.starts == start) & ~sample.padding]))
        assert found == kept, "whole conversations"
        assert data.content_hash() != hashed


def test_a_run_of_an_earlier_commit_keeps_conversations_end_to_end(small: None, tmp_path: Path) -> None:
    made = prepared(tmp_path, write_chats(tmp_path / "chats"))
    ids = np.concatenate([made.document(number) for number in range(made.num_documents)])
    mask = np.concatenate([LossMask(made, "answers").of(number) for number in range(made.num_documents)])
    with opened([tmp_path / "chats"], tmp_path / "cache", **IN_ORDER) as data:
        packed = data.content_hash()
        data.version = 3
        assert data.content_hash() != packed
        for position in range(100):
            rows, at = read(data, [position])[0], position * SEQ
            assert rows.inputs.tolist() == ids[at : at + SEQ].tolist()
            assert rows.padding is None
            assert rows.starts is not None
            learned = mask[at + 1 : at + SEQ + 1] & (np.append(rows.starts[1:], 0) == rows.starts)
            assert (rows.targets >= 0)[:-1].tolist() == learned[:-1].tolist()
        assert {len(row) for row in data.order.state(100, [])["windows"]} == {8}


def test_kills_resumes_and_another_cache_give_the_same_bits(small: None, tmp_path: Path) -> None:
    write_chats(tmp_path / "chats")
    options = {**CHATML, "lanes": 3, "shuffle_tokens": 20 * SEQ}
    with opened([tmp_path / "chats"], tmp_path / "cache", **options) as data:
        want = read(data, range(1500))
        epochs = [row[3] for row in data.order.state(1500)["windows"]]
        assert max(epochs) >= 2, "of several epochs"
    state: dict[str, Any] = {}
    for begin, stop in ((0, 700), (700, 1100), (1100, 1500)):
        with opened([tmp_path / "chats"], tmp_path / f"cache {begin}", **options) as data:
            data.order.resume(state)
            rows = read(data, range(begin, begin + 1))
            for process in list(data.sources[0]._workers._processes):  # type: ignore[attr-defined]
                process.kill()
            rows += read(data, range(begin + 1, stop))
            assert same(rows, want[begin:stop])
            state = json.loads(json.dumps(data.order.state(stop, [])))


def test_a_damaged_mask_is_made_again_and_never_used(small: None, tmp_path: Path) -> None:
    write_chats(tmp_path / "chats")
    with opened([tmp_path / "chats"], tmp_path / "cache", **IN_ORDER) as data:
        want = read(data, range(100))
        for path in (tmp_path / "cache").glob("pieces/*/*.tokens"):
            if not path.name.startswith("."):  # as one that a worker is writing
                content = bytearray(path.read_bytes())
                content[len(content) * 2 // 5] ^= 3
                path.write_bytes(content)
        assert same(read(data, range(100)), want)


def test_another_template_finds_nothing_of_the_first(small: None, tmp_path: Path) -> None:
    write_chats(tmp_path / "chats")
    (tmp_path / "own.jinja").write_text(
        "{% for m in messages %}{{ m.role }}:{% if m.role == 'assistant' %}{% generation %}{{ m.content }};"
        "{% endgeneration %}{% else %}{{ m.content }};{% endif %}{% endfor %}"
    )
    with opened([tmp_path / "chats"], tmp_path / "cache", **IN_ORDER) as data:
        first, hashed = read(data, range(20)), data.content_hash()
    with opened(
        [tmp_path / "chats"], tmp_path / "cache", **{**IN_ORDER, "chat_template": str(tmp_path / "own.jinja")}
    ) as data:
        assert not same(read(data, range(20)), first)
        assert data.content_hash() != hashed
    with opened([tmp_path / "chats"], tmp_path / "cache", loss_on="all", **IN_ORDER) as data:
        assert data.content_hash() == hashed, "what is learned may change at a resume"


def test_a_template_that_writes_the_date_writes_the_same_one_on_every_day(
    small: None, tmp_path: Path, caplog: Any
) -> None:
    (tmp_path / "chats").mkdir()
    (tmp_path / "chats" / "a.jsonl").write_bytes(lines(conversations(1, 5)))
    (tmp_path / "dated.jinja").write_text(
        "{{ strftime_now('%d %b %Y') }}{% for m in messages %}{% if m.role == 'assistant' %}{% generation %}"
        "{{ m.content }};{% endgeneration %}{% else %}{{ m.content }}:{% endif %}{% endfor %}"
    )
    options = {**IN_ORDER, "chat_template": str(tmp_path / "dated.jinja")}
    with opened([tmp_path / "chats"], tmp_path / "cache", **options) as data:
        assert bytes(read(data, range(1))[0].inputs.tolist()).startswith(b"26 Jul 2024")
    assert "writes today's date, which here is always 26 July 2024" in caplog.text


def test_chats_are_blended_with_text(small: None, tmp_path: Path) -> None:
    write_chats(tmp_path / "chats")
    (tmp_path / "text").mkdir()
    (tmp_path / "text" / "a.jsonl").write_bytes(json_lines(["one two three"] * 400))
    blend: list[Any] = [0.5, tmp_path / "chats", 0.5, tmp_path / "text"]
    with opened(blend, tmp_path / "cache", lanes=2, **CHATML) as data:
        samples = [data.sample(position) for position in range(40)]
        assert {isinstance(sample, Rows) for sample in samples} == {True, False}
        assert Rows.stack([s if isinstance(s, Rows) else Rows.of(s) for s in samples]).inputs.shape == (40, SEQ)
    with pytest.raises(UserError, match="--loss-on answers with text as data .*text has no answers"):
        with opened(blend, tmp_path / "cache", loss_on="answers", **CHATML):
            pass


def test_a_conversation_that_is_none_is_named_or_skipped(small: None, tmp_path: Path) -> None:
    records = conversations(1, 60)
    records[40] = {"messages": [{"role": "user", "content": "alone"}]}
    (tmp_path / "chats").mkdir()
    (tmp_path / "chats" / "a.jsonl").write_bytes(lines(records))
    for skip_bad in (False, True):
        with opened([tmp_path / "chats"], tmp_path / "cache", skip_bad=skip_bad, **IN_ORDER) as data:
            if not skip_bad:
                with pytest.raises(UserError, match="a.jsonl line 41: .*no assistant turn.*--skip-bad"):
                    read(data, range(600))
            else:
                assert len(read(data, range(600))) == 600


def test_a_row_that_is_not_utf_8_is_a_bad_record(small: None, tmp_path: Path) -> None:
    (tmp_path / "chats").mkdir()
    good = pa.array([json.dumps(r["messages"]) for r in conversations(1, 12) if "messages" in r], pa.binary())
    bad = pa.array([b'[{"role": "user", "content": "\xff"}]'])
    column = pa.chunked_array([good, bad, good]).combine_chunks()
    text = pa.Array.from_buffers(pa.string(), len(column), column.buffers())
    pq.write_table(pa.table({"messages": text}), tmp_path / "chats" / "a.parquet")
    with opened([tmp_path / "chats"], tmp_path / "cache", **IN_ORDER) as data:
        with pytest.raises(UserError, match=f"a.parquet row {len(good) + 1}: .*does not parse as JSON"):
            read(data, range(200))


def test_first_records_say_what_a_folder_holds(tmp_path: Path) -> None:
    turns = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]
    cases: list[tuple[Record, str, bool]] = [
        ({"messages": turns}, "text", True),
        ({"messages": turns, "text": "as one text"}, "text", False),
        ({"prompt": "a", "completion": "b"}, "text", True),
        ({"prompt": "a"}, "text", False),
        ({"instruction": "a", "response": "b"}, "text", True),
        ({"dialog": turns}, "dialog", True),
        ({"dialog": "one text"}, "dialog", False),
        ({"dialog": 7}, "dialog", False),
    ]
    for number, (record, key, chats) in enumerate(cases):
        folder = tmp_path / str(number)
        folder.mkdir()
        (folder / "a.jsonl").write_bytes(b"\n" + lines([record]))
        assert Catalogue(str(folder), key).chats == chats, record
    (tmp_path / "3" / "b.jsonl").write_bytes(lines([{"text": "text"}]))
    assert not Catalogue(str(tmp_path / "3"), "text").chats
    (tmp_path / "3" / "c.jsonl").write_bytes(lines([{"messages": turns}]))
    with pytest.raises(UserError, match=r"holds chats \(c.jsonl\) and text \(a.jsonl\)"):
        Catalogue(str(tmp_path / "3"), "text")


def test_a_lane_whose_conversations_are_all_dropped_says_so(small: None, tmp_path: Path) -> None:
    (tmp_path / "chats").mkdir()
    (tmp_path / "chats" / "a.jsonl").write_bytes(lines([r for r in conversations(1, 90) if "text" not in r]))
    with opened([tmp_path / "chats"], tmp_path / "cache", long_documents="drop", **CHATML) as data:
        rule = rf"holds a conversation of 2 to {SEQ + 1} tokens, and longer ones are dropped; give --long-documents cut"
        with pytest.raises(UserError, match=rule):
            data.sample(0)


def test_what_cannot_be_done_with_chats_is_refused_in_a_line(small: None, tmp_path: Path) -> None:
    write_chats(tmp_path / "chats")
    (tmp_path / "text").mkdir()
    (tmp_path / "text" / "a.jsonl").write_bytes(json_lines(["abc"] * 50))
    for options, refused in (
        ({"chat_template": "chatml", "workers": 0}, "--data-workers 0 with chats"),
        ({"workers": 1}, "has no chat template"),
        ({"workers": 1, "chat_template": str(tmp_path / "none.jinja")}, "cannot be read"),
    ):
        with pytest.raises(UserError, match=refused), opened([tmp_path / "chats"], tmp_path / "cache", **options):
            pass
    (tmp_path / "wrong.jinja").write_text("{% for m in messages %}")
    with opened([tmp_path / "chats"], tmp_path / "c", workers=1, chat_template=str(tmp_path / "wrong.jinja")) as data:
        with pytest.raises(UserError, match="wrong.jinja: does not compile"):
            data.sample(0)
    for folder, words, refused in (
        ("chats", [], "--order stream with --input .*holds chats.*; add --chat"),
        ("text", ["--chat", "--chat-template", "chatml"], "--order stream with --input .*holds text.*; drop --chat"),
        ("text", ["--chat-template", "chatml"], "--order stream with --chat-template without --chat: "),
        ("chats", ["--chat", "--chat-template", "chatml", "--workers", "0"], "--order stream with --chat --workers 0"),
    ):
        command = ["--input", str(tmp_path / folder), "--tokenizer", "bytes", "--out", str(tmp_path / "out"), *words]
        with pytest.raises(UserError, match=refused):
            preprocess([*command, "--order", "stream", "--cache-dir", str(tmp_path / "cache")])
    assert not [*tmp_path.glob("out*")]
