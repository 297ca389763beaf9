"""SIGTERM in an evaluation of tasks: it ends between two passes, and the run saves and exits after its next step."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.faults.harness import codes, committed, events
from tests.faults.zygote import Zygote
from tests.parity.task_files import COMMON

TASK = """task: long
output_type: loglikelihood_rolling
doc_to_text: ""
doc_to_target: "{{question}}"
"""
RUN = [
    *("--num-layers", "2", "--hidden-size", "16", "--num-heads", "2", "--seq-len", "16", "--global-batch-size", "4"),
    *("--device", "cpu", "--tokenizer", "bytes", "--split", "1,0,0", "--eval-every", "2", "--eval-steps", "0"),
    *("--train-steps", "1000000", "--lr-decay", "constant", "--pp", "2"),
]


@pytest.mark.full
def test_a_run_that_is_told_to_stop_while_it_evaluates_saves_and_ends(zygote: Zygote, tmp_path: Path) -> None:
    """The evaluation has thousands of passes left when the signal comes, and no figures."""
    lines = [json.dumps({"question": "the sea is deep. " * 40}) for _ in range(200)]
    (tmp_path / "docs.jsonl").write_text("\n".join(lines))
    (tmp_path / "text").mkdir()
    (tmp_path / "text" / "a.jsonl").write_text(json.dumps({"text": "the sea is deep. " * 40}))
    (tmp_path / "long.yaml").write_text(TASK + COMMON.format(file=tmp_path / "docs.jsonl"))
    where = [
        "--data",
        str(tmp_path / "text"),
        "--cache-dir",
        str(tmp_path / "cache"),
        "--run-dir",
        str(tmp_path / "run"),
    ]
    words = [*RUN, *where, "--eval-tasks", str(tmp_path / "long.yaml"), "--eval-limit", "200"]
    left = zygote.start(words, 2, tmp_path, {"rank": 1, "kind": "sigterm", "place": "eval", "at": 2}).end()
    assert codes(left) == [0, 0], left
    assert events(tmp_path / "run", "eval_tasks") == []
    assert committed(tmp_path / "run") == {"step_00000003"}
