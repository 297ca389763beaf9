"""`--data-grows`: files that arrive while a run goes on are read from the next start on; kills change nothing."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from megalite.core.base.errors import UserError
from megalite.core.mesh.context import ParallelContext
from megalite.core.mesh.grid import Grid
from megalite.runtime.options import cli
from megalite.runtime.places.store import Store
from megalite.runtime.start.growth import Growth
from megalite.runtime.start.inputs import open_data, resolve_vocabulary
from tests.conftest import leading_to
from tests.parity.runs import MODEL, losses, train
from tests.stores import S3
from tests.workers import WorkerPool

Words = list[str]


def write(folder: Path, name: str, kind: str, documents: int = 12) -> None:
    texts = [f"{name} number {i} " + "ab" * i for i in range(documents)]
    rows = [{"text": t} if kind == "text" else {"prompt": t[:9], "completion": t[9:]} for t in texts]
    (folder / name).write_text("\n".join(map(json.dumps, rows)) + "\n")


def flags(folder: Path, kind: str) -> Words:
    model = [word for word in MODEL if word != "--mock-data"]
    chats = ["--chat-template", "chatml", "--seq-len", "64"] if kind == "chats" else []
    lanes = ["--data-lanes", "2", "--shuffle-tokens", "64", "--split", "1", "--data-workers", "1"]
    data = ["--tokenizer", "bytes", "--vocab-size", "258", "--data", str(folder), "--cache-dir", f"{folder}_cache"]
    return [*model, *chats, *lanes, *data]


@pytest.mark.full
def test_files_that_arrive_in_a_store(pool: WorkerPool, s3: S3, tmp_path: Path) -> None:
    """In new folders too: a run goes on as one on the same folder of a disk does, on one rank and on two."""
    disk, store = tmp_path / "text", Store(s3.url("growing"))
    found = []
    for place in (disk, f"{store.url}/"):
        words = flags(disk, "text")
        words[words.index("--data") + 1] = str(place)
        run = ["--run-dir", f"{tmp_path}/{'disk' if place == disk else 'store'}"]
        for steps, names in ((3, ["2026/a.jsonl", "2026/b.jsonl"]), (6, ["2027/c.jsonl"]), (9, ["2027/d/e.jsonl"])):
            for name in names:
                (disk / name).parent.mkdir(parents=True, exist_ok=True)
                write(disk, name, "text")
                store.write(name, (disk / name).read_bytes())
            arguments = [*words, *run, "--train-steps", str(steps), "--data-grows"]
            pool.run(2, train_beside, arguments, 2, s3.port) if steps == 6 else train(0, arguments, 1)
        meta = meta_of(Path(run[1]))
        found.append((losses(Path(run[1])), meta["files"], meta["passes"], meta["data_hash"]))
        shutil.rmtree(disk)
        if place == disk:
            store.delete(["2026/a.jsonl", "2026/b.jsonl", "2027/c.jsonl", "2027/d/e.jsonl"])
    assert found[0] == found[1]
    assert found[0][1] == [["2026/b.jsonl", "2027/c.jsonl", "2027/d/e.jsonl"]]


def train_beside(rank: int, arguments: list[str], world: int, port: int) -> tuple[list[Any], str]:
    """Train in an environment that leads to a store; the workers' may be older."""
    with leading_to(port):
        return train(rank, arguments, world)


def test_a_file_that_only_some_ranks_have_found_waits(pool: WorkerPool, tmp_path: Path) -> None:
    assert pool.run(2, listed_with_delay, str(tmp_path)) == [["b.jsonl", "c.jsonl"]] * 2


def listed_with_delay(rank: int, folder: str) -> list[str]:
    """Rank 0 lists last, and has found one file more than the others."""
    text = Path(folder) / f"of_rank_{rank}"
    text.mkdir()
    for name in ("a.jsonl", "b.jsonl", "c.jsonl", *(["d.jsonl"] if rank == 0 else [])):
        write(text, name, "text")
    cfg, tokenizer = resolve_vocabulary(cli.parse([*flags(text, "text"), "--data-grows"]).config)
    ctx = ParallelContext.create(Grid.of(2), torch.device("cpu"))
    recorded = {"files": [["b.jsonl"]], "passes": [], "consumed_samples": 0}
    growth = Growth(open_data(cfg, tokenizer), ctx, recorded)
    after, _ = growth.after(growth.before(), recorded)
    after.close()
    return after.files_meta()["files"][0]


def meta_of(run_dir: Path) -> dict[str, Any]:
    return json.loads((run_dir / "checkpoints" / "latest" / "manifest.json").read_text())["meta"]


@pytest.mark.parametrize("kind", ["text", pytest.param("chats", marks=pytest.mark.full)])
def test_files_that_arrive_are_read_after_a_resume(pool: WorkerPool, tmp_path: Path, kind: str) -> None:
    text = tmp_path / "text"
    text.mkdir()
    for name in ("a.jsonl", "b.jsonl"):
        write(text, name, kind)
    words = flags(text, kind)

    def run(name: str, steps: int, *more: str, world: int = 1) -> None:
        arguments = [*words, *more, "--train-steps", str(steps), "--run-dir", str(tmp_path / name)]
        if world == 1:
            train(0, arguments, 1)
        else:
            pool.run(world, train, arguments, world)

    run("alone", 9)
    run("whole", 3)
    write(text, "c.jsonl", kind)
    with pytest.raises(UserError, match="the files have changed"):
        run("whole", 6)
    shutil.copytree(tmp_path / "whole", tmp_path / "killed", symlinks=True)
    run("whole", 9, "--data-grows")
    grown = losses(tmp_path / "whole")
    assert grown[:3] == losses(tmp_path / "alone")[:3]
    assert grown != losses(tmp_path / "alone")
    meta = meta_of(tmp_path / "whole")
    assert meta["files"] == [["b.jsonl", "c.jsonl"]]
    assert [row[:2] for row in meta["passes"]] == [[0, 1]]
    assert len(meta["passes"][0]) == 4
    events = [json.loads(line) for line in (tmp_path / "whole" / "metrics.jsonl").read_text().splitlines()]
    assert ["c.jsonl" in e["added"] for e in events if e.get("event") == "data_grows"] == [True]

    # The same in two goes, the second without the option, and on two ranks.
    run("killed", 5, "--data-grows", world=2)
    run("killed", 7)
    run("killed", 9, "--data-grows")
    np.testing.assert_allclose(losses(tmp_path / "killed"), grown, rtol=1e-4)
    assert meta_of(tmp_path / "killed")["passes"] == meta["passes"]
    assert meta_of(tmp_path / "killed")["data_hash"] == meta["data_hash"]

    # A second addition; a name that sorts before the others, and a change of what was read, are refused.
    write(text, "d.jsonl", kind)
    run("whole", 12, "--data-grows")
    assert meta_of(tmp_path / "whole")["files"] == [["b.jsonl", "c.jsonl", "d.jsonl"]]
    write(text, "bb.jsonl", kind)
    with pytest.raises(UserError, match="the files have changed"):
        run("whole", 15, "--data-grows")
    (text / "bb.jsonl").unlink()
    write(text, "c.jsonl", kind, 11)
    with pytest.raises(UserError, match="the files have changed"):
        run("whole", 15, "--data-grows")
