"""Measure the memory of training data that are read from text, over folders of different sizes. JSON.

For each size a process reads one sample of each window of an epoch, so that all of the text is tokenized and each piece
is opened, in the order of a run. Peaks of resident memory are those of that process and of its largest worker, in MiB,
beside what the process had before it opened the data.

With --windows: the files of a folder are links to one, and only so many windows of each lane are read, for sizes that
take hours to tokenize.

With --files: a folder of so many small files of documents of three tokens, where a piece is a file, opened one after
the other in this process; a rank keeps at most 4,096 open.

python -m benchmarks.stream_memory --gb 1 4 --folder /scratch
python -m benchmarks.stream_memory --gb 10 100 --windows 2
python -m benchmarks.stream_memory --files 5000
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import random
import re
import shutil
import tempfile
import time
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from megalite.runtime.data.stream.catalogue import Catalogue
from megalite.runtime.data.stream.dataset import StreamDataset
from megalite.runtime.data.stream.opening import TextOptions, open_text
from megalite.runtime.data.stream.sources import TextSource
from megalite.runtime.data.stream.workers import Workers
from megalite.runtime.data.tokenizer import ByteTokenizer
from megalite.runtime.options import cli
from megalite.runtime.start.inputs import open_data, resolve_vocabulary

FILE_BYTES = 64_000_000
MODEL = ("--hidden-size", "16", "--num-layers", "1", "--num-heads", "2", "--seq-len", "2048", "--tokenizer", "bytes")


def write_texts(folder: Path, size: int, file_bytes: int = FILE_BYTES, linked: bool = False) -> None:
    """Write JSON lines of some 1,000 bytes each; if `linked`, one file and links to it."""
    rng = random.Random(size)
    words = ["".join(rng.choices("abcdefghijklmnopqrstuvwxyz", k=rng.randint(1, 10))) for _ in range(5000)]
    lines = [json.dumps({"text": " ".join(rng.choices(words, k=rng.randint(20, 300)))}) + "\n" for _ in range(20_000)]
    for number in range(size // file_bytes):
        if linked and number:
            os.link(folder / f"{0:05}.jsonl", folder / f"{number:05}.jsonl")
            continue
        with (folder / f"{number:05}.jsonl").open("w") as f:
            written = 0
            while written < file_bytes:
                written += f.write(rng.choice(lines))


def write_short_texts(folder: Path, files: int) -> None:
    """Write files of 300 documents of two letters."""
    for number in range(files):
        lines = (json.dumps({"text": f"{chr(97 + number % 26)}{chr(97 + i % 26)}"}) for i in range(300))
        (folder / f"{number:06}.jsonl").write_text("\n".join(lines))


def peak_mib(pid: int | str = "self") -> float:
    """Peak of a process since it began its program; that of `getrusage` counts the memory of who forked it."""
    status = Path(f"/proc/{pid}/status").read_text()
    return int(re.findall(r"^VmHWM:\s+(\d+) kB", status, re.MULTILINE)[0]) / 1024


def read_all(pipe: Connection, folder: str, cache: str, most: int | None) -> None:
    """Read one sample of each window of an epoch, or of the first, and send the peaks."""
    flags = [*MODEL, "--data", folder, "--cache-dir", cache, "--cache-gb", "2", "--data-workers", "1"]
    before, started = peak_mib(), time.monotonic()
    datasets = open_data(*resolve_vocabulary(cli.parse(flags).config))
    data = datasets.train
    assert isinstance(data, StreamDataset)
    opened, shape = peak_mib(), data.shape
    windows = sum(source.tokens for source in data.sources) // (shape.lanes * shape.window * shape.seq_len)
    windows = min(windows, most or windows)
    for window in range(windows):
        for lane in range(shape.lanes):
            data.sample(window * shape.window * shape.lanes + lane)
    assert datasets.workers is not None
    workers = [peak_mib(process.pid) for process in datasets.workers._processes]
    datasets.close()
    pipe.send(
        {
            "before_mib": before,
            "opened_mib": opened,
            "reader_mib": peak_mib(),
            "worker_mib": max(workers),
            "pieces": sum(source.num_pieces for source in data.sources),
            "open_pieces": sum(len(source._open) for source in data.sources if isinstance(source, TextSource)),
            "lanes": shape.lanes,
            "windows_of_a_lane": windows,
            "seconds": time.monotonic() - started,
        }
    )


def measure(size: int, scratch: Path, windows: int | None) -> dict[str, Any]:
    """Measure one size in a new process."""
    folder = Path(tempfile.mkdtemp(prefix="stream_memory_", dir=scratch))
    try:
        (folder / "text").mkdir()
        write_texts(folder / "text", size, linked=windows is not None)
        ours, theirs = multiprocessing.Pipe()
        arguments = (theirs, str(folder / "text"), str(folder / "cache"), windows)
        process = multiprocessing.get_context("spawn").Process(target=read_all, args=arguments)
        process.start()
        theirs.close()
        result: dict[str, Any] = ours.recv()
        process.join()
        return result
    finally:
        shutil.rmtree(folder)


def open_all(files: int, scratch: Path) -> dict[str, Any]:
    """Open each piece of many small files; the peaks by the number of pieces that were opened."""
    with tempfile.TemporaryDirectory(prefix="stream_memory_", dir=scratch) as name:
        folder, tokenizer = Path(name), ByteTokenizer()
        (folder / "text").mkdir()
        write_short_texts(folder / "text", files)
        options, workers = (
            TextOptions(tokenizer, cache_dir=str(folder / "cache"), cache_bytes=10**9),
            Workers(0, tokenizer),
        )
        source = open_text(Catalogue(str(folder / "text"), "text"), options, tokenizer, workers)
        peaks = {"0": peak_mib()}
        for piece in range(source.num_pieces):
            source.sizes(piece, 0)
            if (piece + 1) % 1000 == 0 or len(source._open) == piece + 1 == 4096:
                peaks[f"{piece + 1}"] = peak_mib()
        return {"peak_mib_by_pieces": peaks, "open_pieces": len(source._open)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--gb", type=float, nargs="+", default=[1.0, 4.0])
    parser.add_argument("--windows", type=int)
    parser.add_argument("--files", type=int, default=0)
    parser.add_argument("--folder", type=Path, default=Path(tempfile.gettempdir()))
    args = parser.parse_args()
    if args.files:
        print(json.dumps(open_all(args.files, args.folder), indent=1))
        return
    rows = {f"{gb:g} GB": measure(int(gb * 1e9), args.folder, args.windows) for gb in args.gb}
    first, last = list(rows.values())[0], list(rows.values())[-1]
    ratios = {name: last[name] / first[name] for name in ("opened_mib", "reader_mib", "worker_mib")}
    print(json.dumps({"sizes": rows, "last_over_first": ratios}, indent=1))


if __name__ == "__main__":
    main()
