"""Text and chats as data under kills: a run ends in the bits of one left alone; changed text is refused."""

from __future__ import annotations

import json
import random
from collections.abc import Sequence
from pathlib import Path

import pytest

from tests.faults.harness import RECOVER, codes, events, kill, metrics, outcome, waits_at
from tests.faults.zygote import Zygote

STEPS = 16
RUN = [
    *("--num-layers", "1", "--hidden-size", "16", "--num-heads", "2", "--seq-len", "16", "--global-batch-size", "4"),
    *("--device", "cpu", "--lr", "1e-3", "--train-steps", str(STEPS), "--save-every", "2", "--tokenizer", "bytes"),
    *("--data-lanes", "3", "--shuffle-tokens", "64", "--data-workers", "1", "--micro-batch-size", "2"),
]
# Two conversations fit into a sample.
CHATS = ["--chat-template", "chatml", "--seq-len", "64"]


def record(kind: str, file: int, line: int) -> dict[str, object]:
    """A record; four lines of text have a few more tokens than two chats."""
    if kind == "text":
        return {"text": f"file {file} line {line} " + "ab" * line}
    return {"prompt": f"line {line}", "completion": f"{file}"}


@pytest.mark.full
@pytest.mark.parametrize(
    ("kind", "options"),
    [("text", ["--document-mask"]), ("chats", [*CHATS, "--loss-per", "sample"])],
    ids=["text", "chats"],
)
def test_kills_in_later_epochs_and_a_second_resume_change_no_bit(
    zygote: Zygote, tmp_path: Path, kind: str, options: list[str]
) -> None:
    """16 steps of 4 samples, of four files with some 5 or 1 each: the kills are in the second epoch or later."""
    (tmp_path / "text").mkdir()
    for number in range(4):
        lines = [json.dumps(record(kind, number, i)) for i in range(4 if kind == "text" else 2)]
        (tmp_path / "text" / f"{number}.jsonl").write_text("\n".join(lines))
    flags = [*RUN, *options, "--data", str(tmp_path / "text")]

    def start(name: str, world: int, *faults: dict[str, object], more: Sequence[str] = ()) -> list[int]:
        # Each run tokenizes for itself.
        where = ["--run-dir", str(tmp_path / name), "--cache-dir", str(tmp_path / f"cache_{name}")]
        return codes(zygote.start([*flags, *where, *more], world, tmp_path, *faults).end())

    assert start("whole", 2) == [0, 0]
    assert start("killed", 2, kill(0, 6, tmp_path)) != [0, 0]
    assert start("killed", 2, kill(1, 11, tmp_path)) != [0, 0]
    assert start("killed", 2) == [0, 0]
    assert outcome(tmp_path / "killed") == outcome(tmp_path / "whole")
    assert start("recovered", 2, kill(1, 8, tmp_path), more=RECOVER) == [0, 0]
    assert outcome(tmp_path / "recovered") == outcome(tmp_path / "whole")
    meta = json.loads((tmp_path / "whole" / "checkpoints" / "latest" / "manifest.json").read_text())["meta"]
    assert len(meta["windows"]) == 3
    assert min(epoch for _, _, _, epoch, *_ in meta["windows"]) >= 2

    # Another number of ranks: the same samples, in sums of another order.
    assert start("other", 2, kill(0, 7, tmp_path)) != [0, 0]
    assert start("other", 1) == [0]
    losses = [[line["loss"] for line in metrics(tmp_path / n) if "event" not in line] for n in ("whole", "other")]
    assert losses[1][-10:] == pytest.approx(losses[0][-10:], rel=1e-5)

    text = (tmp_path / "text" / "2.jsonl").read_text()
    (tmp_path / "text" / "2.jsonl").write_text(text.replace("line 1", "line 7"))
    left = zygote.start([*flags, "--run-dir", str(tmp_path / "whole"), "--train-steps", "20"], 1, tmp_path).end()
    assert codes(left) == [2]
    assert "the training data: checkpoint" in left[0].err
    assert "the files have changed" in left[0].err


@pytest.mark.full
def test_a_recovery_reads_the_files_that_the_run_began_with(zygote: Zygote, tmp_path: Path) -> None:
    """A file arrives while the run goes on: processes that recover leave it, and the next start reads it."""
    (tmp_path / "text").mkdir()
    for number in range(4):
        lines = [json.dumps(record("text", number, i)) for i in range(4)]
        (tmp_path / "text" / f"{number}.jsonl").write_text("\n".join(lines))
    flags = [*RUN, "--data", str(tmp_path / "text"), "--cache-dir", str(tmp_path / "cache"), "--data-grows", *RECOVER]
    run, whole = tmp_path / "run", tmp_path / "whole"
    assert codes(zygote.start([*flags, "--run-dir", str(whole)], 2, tmp_path).end()) == [0, 0]
    job = zygote.start([*flags, "--run-dir", str(run)], 2, tmp_path, waits_at(5, tmp_path), kill(1, 8, tmp_path))
    zygote.until(lambda: (run / "metrics.jsonl").exists() and any("loss" in line for line in metrics(run)))
    (tmp_path / "text" / "9.jsonl").write_text(json.dumps(record("text", 9, 9)))
    (tmp_path / "go on").touch()
    assert codes(job.end()) == [0, 0]
    assert outcome(run) == outcome(whole)
    assert events(run, "data_grows") == []
    assert codes(zygote.start([*flags, "--run-dir", str(run), "--train-steps", "20"], 2, tmp_path).end()) == [0, 0]
    assert [event["step"] for event in events(run, "data_grows")] == [STEPS]


KILLS, LONG = 10, ["--global-batch-size", "8", "--train-steps", "33"]


@pytest.mark.full
def test_twenty_kills_of_a_blend_change_no_bit(zygote: Zygote, tmp_path: Path) -> None:
    """Ten kills are each followed by a start, ten by a recovery; packs of some four windows of each lane are read."""
    rng, words = random.Random(2), []
    for kind in ("chats", "text"):
        (tmp_path / kind).mkdir()
        words += ["0.5", str(tmp_path / kind)]
        for number in range(4):
            lines = [json.dumps(record(kind, number, i)) for i in range(rng.randint(3, 9))]
            (tmp_path / kind / f"{number}.jsonl").write_text("\n".join(lines))
    flags = [*RUN, *LONG, *CHATS, "--data", *words]

    def start(name: str, *faults: dict[str, object], more: Sequence[str] = ()) -> list[int]:
        where = ["--run-dir", str(tmp_path / name), "--cache-dir", str(tmp_path / f"cache_{name}")]
        return codes(zygote.start([*flags, *where, *more], 2, tmp_path, *faults).end())

    assert start("whole") == [0, 0]
    kills = [kill(rng.randrange(2), 3 * number + rng.randint(2, 4), tmp_path) for number in range(KILLS)]
    for fault in kills:
        assert start("killed", fault) != [0, 0]
    assert start("killed") == [0, 0]
    assert outcome(tmp_path / "killed") == outcome(tmp_path / "whole")
    kills = [kill(rng.randrange(2), 3 * number + rng.randint(1, 3), tmp_path) for number in range(KILLS)]
    for fault in kills:
        fault["once"] = f"{fault['once']}_recovered"
    assert start("recovered", *kills, more=RECOVER) == [0, 0]
    assert len(list(tmp_path.glob("kill_*_recovered"))) == KILLS
    assert outcome(tmp_path / "recovered") == outcome(tmp_path / "whole")
