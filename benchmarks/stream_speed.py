"""Tokens per second of training data that are read from text, over those of token files, side by side in one run. JSON.

Reading: batches alone, from token files, from tokens of text that are in the cache, and from text that workers
tokenize meanwhile; per second of the reader's processor time, as workers have cores of their own where these suffice.
Training: steps of a small Llama on one thread, a step on token files and a step on text in turns, so that other work on
the machine meets both; by the clock and by the trainer's processor time. Medians of ratios of neighbors; the first
steps, which wait for the first windows, are left out.

python -m benchmarks.stream_speed --mb 16 --steps 30
"""

from __future__ import annotations

import argparse
import json
import tempfile
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from statistics import median
from typing import Any

import torch

import megalite
from benchmarks.step import machine
from benchmarks.stream_memory import write_texts
from megalite.extras.prepare.preprocess import preprocess
from megalite.runtime.data.loader import BatchLoader
from megalite.runtime.options import cli
from megalite.runtime.start.inputs import open_data, resolve_vocabulary

SEQ_LEN = 256
MODEL = {"num_layers": 2, "hidden_size": 128, "num_heads": 4, "seq_len": SEQ_LEN, "split": "1", "tokenizer": "bytes"}
BATCH, TURNS, WARMUP = 8, 5, 3


@contextmanager
def loader_of(words: list[str], batch: int) -> Iterator[BatchLoader]:
    """Batches of data, read as a run reads them."""
    flags = [word for name, x in MODEL.items() for word in (f"--{name.replace('_', '-')}", str(x))]
    datasets = open_data(*resolve_vocabulary(cli.parse([*flags, *words]).config))
    try:
        with BatchLoader(datasets.train, batch, 0, 1) as loader:
            yield loader
    finally:
        datasets.close()


def read(loader: BatchLoader, batches: int) -> float:
    """Read batches; returns tokens per second of processor time."""
    started, tokens = time.process_time(), 0
    for _ in range(batches):
        tokens += loader.next_batch().inputs.size
    return tokens / (time.process_time() - started)


def reading(folder: Path, batches: int) -> dict[str, Any]:
    """Read in turns; a cache of its own for each turn of the text that is tokenized meanwhile."""
    text, names = str(folder / "text"), ("token files", "text, cached", "text, tokenized meanwhile")
    rates: dict[str, list[float]] = {name: [] for name in names}
    for turn in range(-1, TURNS):
        cold = str(folder / f"cold_{turn}")
        for name, words in zip(names, (["--data", str(folder / "files")], *(["--data", text] for _ in range(2)))):
            cache = cold if name == names[2] else str(folder / "cache")
            with loader_of([*words, "--cache-dir", cache], 4 * BATCH) as loader:
                loader.next_batch()  # the first windows
                rate = read(loader, batches)
            if turn >= 0:  # the first turn fills the cache
                rates[name].append(rate)
    ratios = {name: median(a / b for a, b in zip(rates[name], rates[names[0]])) for name in names[1:]}
    return {"tokens_per_s": {name: median(x) for name, x in rates.items()}, "over_token_files": ratios}


def training(folder: Path, steps: int) -> dict[str, Any]:
    """Train two runs in turns; the second has its text tokenized meanwhile."""
    times: dict[str, list[dict[str, float]]] = {"token files": [], "text": []}
    options = {**MODEL, "global_batch_size": BATCH, "micro_batch_size": BATCH, "train_steps": steps, "device": "cpu"}
    with ExitStack() as ends:
        runs = []
        for name, data in zip(times, (folder / "files", folder / "text")):
            where = {
                "data": str(data),
                "run_dir": str(folder / f"run_{name}"),
                "cache_dir": str(folder / "of_training"),
            }
            runs.append(megalite.steps(ends.enter_context(megalite.start(megalite.configure(**options, **where)))))
        for _ in range(steps):
            for found, run in zip(times.values(), runs):
                before = time.process_time()
                record = next(run)
                found.append(record | {"processor_s": time.process_time() - before})
    files, text = (found[WARMUP:] for found in times.values())
    kinds = {"clock": "step_time_s", "processor": "processor_s"}
    tokens = BATCH * SEQ_LEN
    return {
        "tokens_per_s": {name: tokens / median(x["step_time_s"] for x in found) for name, found in times.items()},
        "data_wait_s": {name: median(x["data_wait_s"] for x in found[WARMUP:]) for name, found in times.items()},
        "text_over_token_files": {kind: median(a[x] / b[x] for a, b in zip(files, text)) for kind, x in kinds.items()},
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--mb", type=float, default=16.0)
    parser.add_argument("--steps", type=int, default=30)
    parser.add_argument("--batches", type=int, default=40)
    args = parser.parse_args()
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch)
        (folder / "text").mkdir()
        size = int(args.mb * 1e6)
        write_texts(folder / "text", size, size // 4)
        preprocess([str(folder / "text")], "bytes", str(folder / "files"))
        rows = {"reading": reading(folder, args.batches), "training": training(folder, args.steps)}
    print(json.dumps({"machine": machine(torch.device("cpu")), **vars(args), **rows}, indent=1))


if __name__ == "__main__":
    main()
