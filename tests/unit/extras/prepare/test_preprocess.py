from __future__ import annotations

import contextlib
import fcntl
import gzip
import json
import os
import pty
import signal
import struct
import subprocess
import sys
import termios
import time
import tracemalloc
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path

import pyarrow
import pyarrow.parquet
import pytest
import zstandard

import megalite
from megalite.core.base.errors import UserError
from megalite.extras.prepare.preprocess import preprocess
from megalite.extras.prepare.workers import Workers
from megalite.runtime.data.documents import Chunk, expand_inputs, read_chunks
from megalite.runtime.data.encode import TextEncoder
from megalite.runtime.data.tokenizer import load_tokenizer
from megalite.runtime.data.tokens import IndexedDataset

TOOL = Path(__file__).parents[4] / "tools" / "preprocess_data.py"
TEXTS = ["first document\n", "zweites, mit Ümläuten 🙂", "\r\nthird \u2028 one\n\n"]


def jsonl(texts: list[str], key: str = "text") -> bytes:
    return "".join(json.dumps({"id": i, key: t}, ensure_ascii=i % 2 == 0) + "\n" for i, t in enumerate(texts)).encode()


def write_inputs(folder: Path) -> dict[str, str]:
    """The same three documents in every kind of input; the value is what --input gets."""
    lines = jsonl(TEXTS)
    (folder / "a.jsonl").write_bytes(lines)
    (folder / "b.jsonl.gz").write_bytes(gzip.compress(lines[:50]) + gzip.compress(lines[50:]))
    compressor = zstandard.ZstdCompressor()
    (folder / "c.jsonl.zst").write_bytes(compressor.compress(lines[:50]) + compressor.compress(lines[50:]))
    pyarrow.parquet.write_table(pyarrow.table({"n": [1, 2, 3], "text": TEXTS}), folder / "d.parquet", row_group_size=2)
    for i, text in enumerate(TEXTS):
        (folder / f"e{i}.txt").write_bytes(text.encode())
        (folder / f"f{i}.txt.gz").write_bytes(gzip.compress(text.encode()))
        (folder / f"g{i}.txt.zst").write_bytes(compressor.compress(text.encode()))
    names = ["a.jsonl", "b.jsonl.gz", "c.jsonl.zst", "d.parquet", "e*.txt", "f?.txt.gz", "g*.zst"]
    return {name: str(folder / name) for name in names}


def test_every_kind_of_input_gives_the_same_documents_each_with_one_end(tmp_path: Path) -> None:
    for name, given in write_inputs(tmp_path).items():
        out = tmp_path / "out" / name.replace("*", "").replace("?", "")
        report = preprocess([given], "bytes", str(out))
        data = IndexedDataset(out)
        assert [data.document(i).tolist() for i in range(3)] == [[*t.encode(), 256] for t in TEXTS], name
        assert (report.documents, report.tokens, report.empty, report.bad) == (3, data.num_tokens, 0, 0)
        assert report.text_bytes == data.num_tokens - 3


@pytest.mark.parametrize("name", ["wiki_00", "part-00000.txt", "a.ndjson", "b.gz", "c.zst"])
def test_json_lines_are_read_whatever_the_file_is_called(tmp_path: Path, name: str) -> None:
    """As WikiExtractor and Spark call theirs; alone and in a folder, with a long first line."""
    texts = ["x" * (3 << 20), *TEXTS]
    pack: dict[str, Callable[[bytes], bytes]] = {".gz": gzip.compress, ".zst": zstandard.ZstdCompressor().compress}
    (tmp_path / "in").mkdir()
    path = tmp_path / "in" / name
    path.write_bytes(pack.get(path.suffix, bytes)("\ufeff".encode() + jsonl(texts)))
    for given in (path, path.parent):
        assert preprocess([str(given)], "bytes", str(tmp_path / "o"), overwrite=True).documents == 4
        data = IndexedDataset(tmp_path / "o")
        assert [data.document(i).tolist() for i in range(4)] == [[*t.encode(), 256] for t in texts]
    path.write_bytes(pack.get(path.suffix, bytes)(jsonl(TEXTS, "content")))
    with pytest.raises(UserError, match=f"{name} line 1: .*must be a JSON object with the key 'text'"):
        preprocess([str(path)], "bytes", str(tmp_path / "p"))
    assert preprocess([str(path)], "bytes", str(tmp_path / "p"), key="content").documents == 3


@pytest.mark.parametrize(
    "text", ['{"version": 3, "mappings": "AAAA"}\n', "{\n}\n", "{x}\n{y}\n", '{"text": "cut', "[{}]\n{}"]
)
def test_text_that_only_resembles_json_lines_is_a_document(tmp_path: Path, text: str) -> None:
    (tmp_path / "a.map").write_text(text)
    preprocess([str(tmp_path / "a.map")], "bytes", str(tmp_path / "o"))
    assert IndexedDataset(tmp_path / "o").document(0).tolist() == [*text.encode(), 256]


@pytest.mark.parametrize("in_list", [False, True])
def test_a_json_file_of_any_length_is_read_in_little_memory(tmp_path: Path, in_list: bool) -> None:
    """C4's and Dolma's `.json.gz` hold lines, and unpack to more than a record may have."""
    line = json.dumps({"text": "y" * (1 << 20)}).encode()
    with gzip.open(tmp_path / "c4.json.gz", "wb", 1) as f:
        f.write(b"[" * in_list + line)
        for _ in range(139):
            f.write(b",\n"[not in_list :] + line)
        f.write(b"]" * in_list)
    tracemalloc.start()
    records = [len(record or b"") for chunk in read_chunks(tmp_path / "c4.json.gz", "text") for record in chunk.records]
    assert tracemalloc.get_traced_memory()[1] < 100 << 20
    tracemalloc.stop()
    assert records == [len(line)] * 140


def test_inputs_keep_the_order_given_and_globs_are_sorted(tmp_path: Path) -> None:
    for name in ("b.txt", "a.txt", "c.jsonl"):
        (tmp_path / name).write_text("x")
    given = [str(tmp_path / "c.jsonl"), str(tmp_path / "*.txt")]
    assert [p.name for p in expand_inputs(given)] == ["c.jsonl", "a.txt", "b.txt"]


def test_folders_give_their_text_files_and_say_what_they_leave_out(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    kept = ["README.md", "page.html", "src/a.py", "src/deep/b.rst", "src/empty.txt", "src/lines.jsonl", "t.txt.gz", "x"]
    left_out = ["data.json", "logo.png", "src/latin1.py", "src/utf16.txt", "table.csv"]
    texts = {name: b"text of " + name.encode() for name in [*kept, ".git/config", ".hidden"]}
    texts |= {"src/empty.txt": b"", "src/lines.jsonl": jsonl(["one", "two"]), "t.txt.gz": gzip.compress(b"text of t")}
    texts |= {
        "data.json": b"{}",
        "logo.png": b"\x89PNG\r\n\0",
        "src/latin1.py": "é".encode("latin-1"),
        "table.csv": b"a,b",
    }
    # Cut in the middle of a character by the first look at it, and still text.
    texts |= {"src/utf16.txt": "text".encode("utf-16-le"), "x": b"x" * 8191 + "é".encode()}
    for name, text in texts.items():
        (tmp_path / "in" / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / "in" / name).write_bytes(text)
    folder = tmp_path / "in"
    with caplog.at_level("INFO"):
        found = expand_inputs([str(folder)])
    assert sorted(str(path.relative_to(folder)) for path in found) == kept
    assert f"{len(kept)} files; {len(left_out)} skipped" in caplog.text
    assert f"the first {folder}/data.json" in caplog.text
    # A glob that matches a folder and what is in it gives each file once.
    assert expand_inputs([str(folder / "src/deep/**")]) == [folder / "src/deep/b.rst"]
    assert preprocess([str(folder)], "bytes", str(tmp_path / "o")).documents == len(kept) - 1 + 1
    with pytest.raises(UserError, match=r"in/src/utf16.txt: holds a zero byte"):
        preprocess([str(folder / "src/utf16.txt")], "bytes", str(tmp_path / "p"))


def test_an_existing_prefix_is_replaced_only_with_overwrite(tmp_path: Path) -> None:
    for name in "ab":
        (tmp_path / f"{name}.txt").write_text(name)
    preprocess([str(tmp_path / "a.txt")], "bytes", str(tmp_path / "o"))
    with pytest.raises(UserError, match=r"o.bin exists; choose another prefix, or give --overwrite"):
        preprocess([str(tmp_path / "b.txt")], "bytes", str(tmp_path / "o"))
    assert IndexedDataset(tmp_path / "o").document(0).tolist() == [97, 256]
    preprocess([str(tmp_path / "b.txt")], "bytes", str(tmp_path / "o"), overwrite=True)
    assert IndexedDataset(tmp_path / "o").document(0).tolist() == [98, 256]


def test_progress_off_a_terminal_is_a_line_that_rises_to_the_whole(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("megalite.extras.prepare.progress.LOG_EVERY_S", 0.0)
    lines = jsonl([os.urandom(3000).hex() for _ in range(300)])
    (tmp_path / "a.jsonl").write_bytes(lines)
    (tmp_path / "b.jsonl.gz").write_bytes(gzip.compress(lines))
    (tmp_path / "c.jsonl.zst").write_bytes(zstandard.ZstdCompressor().compress(lines))
    texts = [os.urandom(3000).hex() for _ in range(300)]
    pyarrow.parquet.write_table(pyarrow.table({"text": texts}), tmp_path / "d.parquet", row_group_size=50)
    with caplog.at_level("INFO"):
        preprocess([str(tmp_path / "*")], "bytes", str(tmp_path / "o" / "o"))
    shares = [float(m.split(": ")[1].split("%")[0]) for m in caplog.messages if m.startswith("tokenizing: ")]
    assert shares == sorted(shares)
    # Every kind of file has places in between, and each ends with its own size.
    sizes = [path.stat().st_size for path in sorted(tmp_path.glob("*.*"))]
    ends = [100 * sum(sizes[: i + 1]) / sum(sizes) for i in range(4)]
    assert shares[-1] == 100.0
    assert all(any(abs(share - end) < 0.1 for share in shares) for end in ends)
    assert sum(ends[0] + 0.1 < share < ends[1] - 0.1 for share in shares) >= 2


def test_ids_are_the_tokenizers_and_the_sidecar_describes_them(
    tmp_path: Path, corpus: Path, corpus_texts: list[str], tokenizer_dir: Path
) -> None:
    preprocess([str(corpus)], str(tokenizer_dir), str(tmp_path / "d"))
    data, tokenizer = IndexedDataset(tmp_path / "d"), load_tokenizer(tokenizer_dir)
    assert data.num_documents == len(corpus_texts)
    for i, text in enumerate(corpus_texts):
        assert data.document(i).tolist() == [*tokenizer.encode(text), 2]
    description = json.loads((tmp_path / "d.json").read_text())
    assert description.pop("checksums").keys() == {"block_bytes", "bin", "idx"}
    assert description == {
        "tokenizer_kind": "sentencepiece",
        "vocab_size": 1200,
        "tokenizer_sha256": tokenizer.sha256,
        "eos_id": 2,
        "documents": len(corpus_texts),
        "tokens": data.num_tokens,
        "megalite_version": megalite.__version__,
    }


def test_bytes_written_do_not_depend_on_workers(tmp_path: Path, corpus: Path, tokenizer_dir: Path) -> None:
    (tmp_path / "more.txt").write_text("one more document")
    inputs = [str(corpus), str(tmp_path / "more.txt"), str(corpus)]
    assert sum(1 for path in expand_inputs(inputs) for _ in read_chunks(path, "text")) >= 5
    for workers in (1, 3):
        preprocess(inputs, str(tokenizer_dir), str(tmp_path / f"w{workers}"), workers=workers)
    for suffix in ("bin", "idx", "json"):
        assert (tmp_path / f"w1.{suffix}").read_bytes() == (tmp_path / f"w3.{suffix}").read_bytes()


def test_empty_documents_are_dropped_and_counted_and_blank_lines_are_nothing(tmp_path: Path) -> None:
    (tmp_path / "d.jsonl").write_bytes(b'\n{"text": "a"}\n\n  \r\n{"text": ""}\n{"text": " "}')
    (tmp_path / "empty.txt").write_bytes(b"")
    report = preprocess([str(tmp_path / "d.jsonl"), str(tmp_path / "empty.txt")], "bytes", str(tmp_path / "o"))
    assert (report.documents, report.empty, report.bad) == (2, 2, 0)
    assert IndexedDataset(tmp_path / "o").document(1).tolist() == [32, 256]


BAD_LINES = [
    (b'{"text": "cut off', "does not parse as JSON"),
    (b"\xff\xfe\x00{", "does not parse as JSON"),
    (b'{"title": "x"}', "must be a JSON object with the key 'text'"),
    (b'"text"', "must be a JSON object with the key 'text'"),
    (b'{"text": null}', "must be a string, it is NoneType"),
    (b'{"text": 3}', "must be a string, it is int"),
    (b'{"text": "half a pair \\ud83d"}', "surrogates not allowed"),
    (b"[" * 100_000, "does not parse as JSON"),
]


@pytest.mark.parametrize(
    ("line", "reason", "workers"), [*((line, reason, 1) for line, reason in BAD_LINES), (*BAD_LINES[0], 2)]
)
def test_a_bad_line_stops_with_its_place_and_leaves_nothing(
    tmp_path: Path, line: bytes, reason: str, workers: int
) -> None:
    (tmp_path / "d.jsonl").write_bytes(b'{"text": "fine"}\n\n' + line + b'\n{"text": "fine"}\n')
    with pytest.raises(UserError) as e:
        preprocess([str(tmp_path / "d.jsonl")], "bytes", str(tmp_path / "out" / "o"), workers=workers)
    assert f"{tmp_path}/d.jsonl line 3: " in str(e.value)
    assert reason in str(e.value)
    assert "--skip-bad" in str(e.value)
    assert list((tmp_path / "out").iterdir()) == []


def test_the_first_80_characters_of_a_bad_line_are_shown(tmp_path: Path) -> None:
    (tmp_path / "d.jsonl").write_text("ä" * 79 + "ZY" + "x" * 1000)
    with pytest.raises(UserError, match="line 1: '" + "ä" * 79 + "Z'"):
        preprocess([str(tmp_path / "d.jsonl")], "bytes", str(tmp_path / "o"))


def test_skip_bad_leaves_out_and_counts(tmp_path: Path) -> None:
    lines = b"".join(line + b"\n" + b'{"text": "fine"}\n' for line, _ in BAD_LINES)
    (tmp_path / "d.jsonl").write_bytes(lines)
    (tmp_path / "latin1.txt").write_bytes("é".encode("latin-1"))
    pyarrow.parquet.write_table(pyarrow.table({"text": ["a", None]}), tmp_path / "n.parquet")
    inputs = [str(tmp_path / name) for name in ("d.jsonl", "latin1.txt", "n.parquet")]
    report = preprocess(inputs, "bytes", str(tmp_path / "o"), skip_bad=True)
    assert (report.documents, report.bad, report.empty) == (len(BAD_LINES) + 1, len(BAD_LINES) + 2, 0)
    assert "skipped: 0 empty, 10 bad" in str(report)


@pytest.mark.parametrize(
    ("name", "where"), [("latin1.txt", "latin1.txt: '�': does not parse as UTF-8"), ("n.parquet", "n.parquet row 2: ")]
)
def test_bad_records_of_other_kinds_are_named(tmp_path: Path, name: str, where: str) -> None:
    (tmp_path / "latin1.txt").write_bytes("é".encode("latin-1"))
    pyarrow.parquet.write_table(pyarrow.table({"text": ["a", None]}), tmp_path / "n.parquet")
    with pytest.raises(UserError, match=where):
        preprocess([str(tmp_path / name)], "bytes", str(tmp_path / "o"))


def cut(data: bytes) -> bytes:
    return data[: len(data) * 2 // 3]


def flip(data: bytes) -> bytes:
    return data[: len(data) // 2] + bytes([data[len(data) // 2] ^ 0xFF]) + data[len(data) // 2 + 1 :]


@pytest.mark.parametrize("damage", [cut, flip])
@pytest.mark.parametrize("kind", [".jsonl.gz", ".jsonl.zst", ".parquet"])
def test_a_damaged_compressed_file_is_refused_also_with_skip_bad(
    tmp_path: Path, kind: str, damage: Callable[[bytes], bytes]
) -> None:
    texts = [os.urandom(40).hex() for _ in range(2000)]
    path = tmp_path / f"d{kind}"
    if kind == ".parquet":
        pyarrow.parquet.write_table(pyarrow.table({"text": texts}), path, write_page_checksum=True)
    elif kind == ".jsonl.gz":
        path.write_bytes(gzip.compress(jsonl(texts)))
    else:
        path.write_bytes(zstandard.ZstdCompressor(write_checksum=True).compress(jsonl(texts)))
    path.write_bytes(damage(path.read_bytes()))
    with pytest.raises(UserError, match=rf"d\{kind}: (is damaged|is truncated|cannot be read as parquet)"):
        preprocess([str(path)], "bytes", str(tmp_path / "out" / "o"), skip_bad=True)
    assert list((tmp_path / "out").iterdir()) == []


@pytest.mark.parametrize(
    ("given", "message"),
    [
        (".", r"holds no text \(2 other files\)"),
        ("nothing*.txt", "no such file"),
        ("d.csv", ".csv files are not supported: where"),
        ("d.csv.gz", ".csv files are not supported: where"),
    ],
)
def test_inputs_that_cannot_be_read_are_refused(tmp_path: Path, given: str, message: str) -> None:
    for name in ("d.csv", "d.csv.gz"):
        (tmp_path / name).write_bytes(b"")
    with pytest.raises(UserError, match=message):
        preprocess([str(tmp_path / given)], "bytes", str(tmp_path / "o"))


def test_a_missing_parquet_column_lists_those_there_are(tmp_path: Path) -> None:
    pyarrow.parquet.write_table(pyarrow.table({"content": ["a"], "id": [1]}), tmp_path / "d.parquet")
    with pytest.raises(UserError, match="cannot be read as parquet .*int64"):
        preprocess([str(tmp_path / "d.parquet")], "bytes", str(tmp_path / "o"), key="id")
    with pytest.raises(UserError, match=r"has the columns \['content', 'id'\]; name one of them with --key"):
        preprocess([str(tmp_path / "d.parquet")], "bytes", str(tmp_path / "o"))


def test_no_document_at_all_is_an_error(tmp_path: Path) -> None:
    (tmp_path / "d.txt").write_text("")
    with pytest.raises(UserError, match=r"contain no document \(1 empty, 0 bad\)"):
        preprocess([str(tmp_path / "d.txt")], "bytes", str(tmp_path / "o"))
    assert not list(tmp_path.glob("o*"))


@pytest.mark.parametrize("end", ["/", "/.", "/.."])
def test_a_prefix_without_a_name_would_write_hidden_files(tmp_path: Path, end: str) -> None:
    (tmp_path / "d.txt").write_text("text")
    with pytest.raises(UserError, match="must end in a name"):
        preprocess([str(tmp_path / "d.txt")], "bytes", f"{tmp_path}{end}", workers=1)
    assert [path.name for path in tmp_path.iterdir()] == ["d.txt"]


@pytest.mark.parametrize("workers", [1, 2])
def test_inputs_without_records_are_an_error_with_any_number_of_workers(tmp_path: Path, workers: int) -> None:
    (tmp_path / "e.jsonl").write_bytes(b"")
    with pytest.raises(UserError, match=r"e.jsonl: contain no document \(0 empty, 0 bad\); check the files and --key"):
        preprocess([str(tmp_path / "e.jsonl")], "bytes", str(tmp_path / "o"), workers=workers)


def test_workers_that_all_finish_before_the_end_of_the_input_is_seen(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The last chunks of all workers are taken in one go, and only then does the source end."""

    class Prompt(Workers):
        def submit(self, number: int, chunk: Chunk) -> None:
            super().submit(number, chunk)
            if not self.idle:
                assert all(worker.poll(120) for worker in self._busy)

    monkeypatch.setattr("megalite.extras.prepare.workers.Workers", Prompt)
    for name in "abcd":
        (tmp_path / f"{name}.txt").write_text(name)
    assert preprocess([str(tmp_path / "*.txt")], "bytes", str(tmp_path / "o"), workers=2).documents == 4
    assert [IndexedDataset(tmp_path / "o").document(i)[0] for i in range(4)] == list(b"abcd")


def test_ctrl_c_ends_no_worker_that_is_still_starting(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("abc")
    (chunk,) = read_chunks(tmp_path / "a.txt", "text")
    workers = Workers(1, "bytes", partial(TextEncoder, key="text"))
    try:
        os.kill(workers.processes[0].pid or 0, signal.SIGINT)
        workers.submit(0, chunk)
        assert [number for number, _ in workers.collect()] == [0]
    finally:
        workers.close()


def test_the_tool_prints_its_report_and_no_bar_off_a_terminal(tmp_path: Path) -> None:
    (tmp_path / "d.jsonl").write_bytes(jsonl(TEXTS))
    command = [sys.executable, str(TOOL), "--input", "d.jsonl", "--tokenizer", "bytes", "--out", "o", "--workers", "1"]
    result = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=120)
    assert (result.returncode, result.stderr) == (0, "")
    size = sum(len(t.encode()) for t in TEXTS)
    assert f"o: 3 documents, {size + 3} tokens" in result.stdout
    assert f"{size / (size + 3):.2f} bytes per token" in result.stdout
    assert "MB/s; skipped: 0 empty, 0 bad" in result.stdout


def test_the_tool_shows_a_bar_on_a_terminal(tmp_path: Path) -> None:
    (tmp_path / "d.jsonl").write_bytes(jsonl(TEXTS))
    command = [sys.executable, str(TOOL), "--input", "d.jsonl", "--tokenizer", "bytes", "--out", "o", "--workers", "1"]
    ours, theirs = pty.openpty()
    fcntl.ioctl(theirs, termios.TIOCSWINSZ, struct.pack("HHHH", 24, 80, 0, 0))
    process = subprocess.Popen(command, cwd=tmp_path, stdout=subprocess.DEVNULL, stderr=theirs)
    os.close(theirs)
    shown = b""
    with contextlib.suppress(OSError):  # how Linux ends a terminal's output
        while block := os.read(ours, 4096):
            shown += block
    os.close(ours)
    assert process.wait(timeout=120) == 0
    assert b"tokenizing" in shown


class Running:
    """The tool in the middle of its work for as long as the test likes: its input is a pipe that stays open."""

    def __init__(self, folder: Path) -> None:
        os.mkfifo(folder / "endless.jsonl")
        command = [sys.executable, str(TOOL), "--input", "endless.jsonl", "--tokenizer", "bytes"]
        self.process = subprocess.Popen(
            [*command, "--out", "out/o", "--workers", "2"], cwd=folder, stderr=subprocess.PIPE, text=True
        )
        self.pipe = (folder / "endless.jsonl").open("wb")
        partial = folder / "out" / "o.bin.tmp"
        deadline = time.monotonic() + 120
        while not (partial.exists() and partial.stat().st_size > 0):
            assert time.monotonic() < deadline
            self.pipe.write(jsonl(["some text " * 1000] * 100))
        self.workers = [pid for pid in self._children() if b"spawn_main" in Path(f"/proc/{pid}/cmdline").read_bytes()]

    def _children(self) -> list[int]:
        found: list[int] = []
        for task in Path(f"/proc/{self.process.pid}/task").iterdir():
            with contextlib.suppress(OSError):  # a thread may end meanwhile
                found += map(int, (task / "children").read_text().split())
        return found


@pytest.fixture
def running(tmp_path: Path) -> Iterator[Running]:
    run = Running(tmp_path)
    yield run
    if run.process.poll() is None:
        run.process.kill()
    run.process.wait()
    with contextlib.suppress(BrokenPipeError):
        run.pipe.close()


def is_gone(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] == "Z"
    except (FileNotFoundError, ProcessLookupError):
        return True


def test_a_killed_run_leaves_nothing_that_loads_and_no_process(tmp_path: Path, running: Running) -> None:
    assert len(running.workers) == 2
    running.process.send_signal(signal.SIGKILL)
    assert running.process.wait(timeout=120) == -signal.SIGKILL
    with pytest.raises(UserError, match="does not exist"):
        IndexedDataset(tmp_path / "out" / "o")
    deadline = time.monotonic() + 120
    while not all(map(is_gone, running.workers)):
        assert time.monotonic() < deadline, "workers outlived their parent"
        time.sleep(0.02)
    # What it left does not stand in the way of the next run.
    (tmp_path / "d.txt").write_text("abc")
    preprocess([str(tmp_path / "d.txt")], "bytes", str(tmp_path / "out" / "o"))
    assert IndexedDataset(tmp_path / "out" / "o").document(0).tolist() == [97, 98, 99, 256]
    assert sorted(p.name for p in (tmp_path / "out").iterdir()) == ["o.bin", "o.idx", "o.json"]


def test_a_killed_worker_ends_the_run_with_a_message(tmp_path: Path, running: Running) -> None:
    os.kill(running.workers[0], signal.SIGKILL)
    with contextlib.suppress(BrokenPipeError):
        while running.process.poll() is None:
            running.pipe.write(jsonl(["some text " * 1000] * 100))
    _, stderr = running.process.communicate(timeout=120)
    assert running.process.returncode == 1
    assert stderr.splitlines()[-1].startswith("error: a preprocessing worker ended unexpectedly")
    assert "Traceback" not in stderr
    assert list((tmp_path / "out").iterdir()) == []


def test_a_worker_killed_while_it_writes_is_noticed(tmp_path: Path) -> None:
    """Half a result is in its pipe, and nobody will write the rest."""
    (tmp_path / "long.txt").write_text("some text " * 200_000)
    (chunk,) = read_chunks(tmp_path / "long.txt", "text")
    pool = Workers(2, "bytes", partial(TextEncoder, key="text"))
    try:
        worker, process = pool.idle[-1], pool.processes[-1]
        pool.submit(0, chunk)
        assert worker.poll(120), "it has begun to write, and the pipe holds less than all"
        process.kill()
        with pytest.raises(RuntimeError, match="a preprocessing worker ended unexpectedly"):
            list(pool.collect())
    finally:
        pool.close()


def test_a_line_or_a_text_without_end_is_refused_before_memory_is_spent(tmp_path: Path) -> None:
    """3 GB of one line: 13 MB compressed, or nothing on the disk."""
    piece = b"x" * (16 << 20)
    (tmp_path / "a.jsonl.gz").write_bytes(gzip.compress(piece, 1) * 190)
    (tmp_path / "b.txt.gz").write_bytes(gzip.compress(piece, 1) * 190)
    (tmp_path / "c.jsonl.zst").write_bytes(zstandard.ZstdCompressor().compress(b"{}\n" + piece * 10))
    with (tmp_path / "d.jsonl").open("wb") as f:
        f.write(b"{}\n{}\n")
        f.truncate(3 << 30)
    for name, words in (
        ("a.jsonl.gz", "line 1: has more than 128 MiB"),
        ("b.txt.gz", "holds a text of more than 128 MiB"),
        ("c.jsonl.zst", "line 2: has more than 128 MiB"),
        ("d.jsonl", "line 3: has more than 128 MiB"),
    ):
        tracemalloc.start()
        with pytest.raises(UserError, match=words):
            list(read_chunks(tmp_path / name, "text"))
        assert tracemalloc.get_traced_memory()[1] < 300 << 20
        tracemalloc.stop()
