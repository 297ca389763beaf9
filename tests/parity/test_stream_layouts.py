"""Text and chats as data: in every layout, with any number of workers, a run reads the samples of the description."""

from __future__ import annotations

import random
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

import megalite
from megalite.extras.prepare.preprocess import preprocess
from megalite.runtime.data import IndexedDataset
from megalite.runtime.data.stream import catalogue
from megalite.runtime.data.stream.packs import LEAST
from tests.unit.data.stream.chats import conversations, lines
from tests.unit.data.stream.reference import Pieces, World, choices, packs_of, texts_of
from tests.unit.data.stream.texts import document, pieces_of_lines, write_folder, write_packed
from tests.workers import WorkerPool

pytest.importorskip("pyarrow")

WEIGHTS, SAMPLES, BATCH, PIECE_BYTES = (0.5, 0.3, 0.2), 2000, 40, 2048
WORLD = World(seed=5, lanes=3, window=20, seq_len=16)


def write_compressed(folder: Path) -> Pieces:
    """As many files as lanes, each one piece of several parts."""
    rng, out = random.Random(7), []
    for number in range(WORLD.lanes + 1):
        texts = [document(rng) for _ in range(30)]
        write_packed(folder / f"{number}.jsonl.zst", texts)
        out.append([part for (part,) in pieces_of_lines(texts, PIECE_BYTES)])
    return out


def write_chats(folder: Path) -> Pieces:
    """Conversations, whose ids are those of `megalite preprocess --chat`."""
    (folder / "chats").mkdir()
    records = conversations(1, 120)
    (folder / "chats" / "a.jsonl").write_bytes(lines(records))
    preprocess([str(folder / "chats" / "a.jsonl")], "bytes", str(folder / "made"), chat=True, chat_template="chatml")
    made, begins = IndexedDataset(str(folder / "made")), [0]
    for record in records:
        begins.append(begins[-1] + len(lines([record])))
    of = [begin // PIECE_BYTES for begin in begins[:-1]]  # a line is of the piece in which it begins
    firsts = [*(of.index(piece) for piece in range(of[-1] + 1)), len(of)]
    return [[[made.document(i).tolist() for i in range(first, stop)]] for first, stop in pairwise(firsts)]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("stream")


@pytest.fixture(scope="module")
def expected(folder: Path) -> list[list[int]]:
    """Inputs of the first samples, by the description alone, one lane after the other."""
    text, compressed = write_folder(folder / "text"), write_compressed(folder / "compressed")
    chats = write_chats(folder)
    streams = {}
    for lane in range(WORLD.lanes):
        for source, pieces in enumerate((text, compressed)):
            streams[source, lane] = (sample[:-1] for sample in texts_of(WORLD, source, lane, pieces))
        packs = packs_of(WORLD, 2, lane, chats, LEAST)
        rows = ([t for d in pack for t in d[: WORLD.seq_len + 1][:-1]] for pack in packs)
        streams[2, lane] = (row + [0] * (WORLD.seq_len - len(row)) for row in rows)
    turns, out = choices(WEIGHTS, SAMPLES), []
    for position in range(SAMPLES):
        turn, lane = divmod(position, WORLD.lanes)
        out.append(next(streams[turns[turn + lane], lane]))
    return out


def read(rank: int, folder: str, workers: int, name: str, layout: dict[str, Any]) -> tuple[int, list[list[Any]]]:
    """A rank's place among the replicas, and the inputs that it reads: [batch][row][token]."""
    data = [
        word
        for weight, name in zip(WEIGHTS, ("text", "compressed", "chats"))
        for word in (f"{weight}", f"{folder}/{name}")
    ]
    options: dict[str, Any] = {"num_layers": 2, "hidden_size": 16, "num_heads": 2, "seq_len": WORLD.seq_len}
    options |= {"global_batch_size": BATCH, "micro_batch_size": 1, "train_steps": 50, "device": "cpu"}
    options |= {"data": data, "split": "1,0,0", "tokenizer": "bytes", "chat_template": "chatml", "seed": WORLD.seed}
    options |= {"data_lanes": WORLD.lanes, "shuffle_tokens": WORLD.window * WORLD.seq_len, "data_workers": workers}
    where = {"run_dir": f"{folder}/{name}", "cache_dir": f"{folder}/cache_{workers}"}
    with pytest.MonkeyPatch.context() as patch:
        for bound, value in (("_LEAST", PIECE_BYTES), ("_PIECES", 1), ("_MOST", PIECE_BYTES)):
            patch.setattr(catalogue, bound, value)
        with megalite.start(megalite.configure(**options, **where, **layout)) as run:
            assert run.loader.reads
            batches = [run.loader.next_batch().inputs.tolist() for _ in range(SAMPLES // BATCH)]
            return run.engine.ctx.dp.rank, batches


ROWS: list[tuple[int, int, dict[str, Any]]] = [
    (1, 7, {}),
    (2, 1, {}),
    (4, 2, {"tp": 2, "cp": 2}),
    (2, 1, {"pp": 2}),
    (4, 7, {}),
    (8, 2, {"tp": 2, "pp": 2, "cp": 2}),
    (8, 1, {"tp": 2}),
]


@pytest.mark.parametrize(
    ("world", "workers", "layout"), [*ROWS[:2], *(pytest.param(*row, marks=pytest.mark.full) for row in ROWS[2:])]
)
def test_samples_are_those_of_the_description(
    pool: WorkerPool, folder: Path, expected: list[list[int]], world: int, workers: int, layout: dict[str, Any]
) -> None:
    name = f"run_{world}_{'_'.join(layout)}"
    replicas: dict[int, list[list[Any]]] = {}
    for replica, batches in pool.run(world, read, str(folder), workers, name, layout):
        assert replicas.setdefault(replica, batches) == batches, "ranks of a replica read the same"
    rows = [row for parts in zip(*(replicas[i] for i in range(len(replicas)))) for part in parts for row in part]
    assert rows == expected
