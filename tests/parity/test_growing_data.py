"""`--data-grows`: files that arrive while a run goes on are read from the next start on; kills change nothing."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from megalite.core.base.errors import UserError
from tests.parity.runs import MODEL, losses, train
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
