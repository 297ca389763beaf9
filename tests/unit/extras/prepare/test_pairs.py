"""Pairs of answers: which records are read, and what of them is learned."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from megalite.core.base.errors import UserError
from megalite.extras.convert.hf import _own_pad
from megalite.extras.prepare.preprocess import preprocess
from megalite.runtime.data import IndexedDataset, LossMask
from megalite.runtime.data.pairs import are_pairs
from megalite.runtime.data.tokenizer import load_tokenizer


def turn(role: str, content: str) -> dict[str, str]:
    return {"role": role, "content": content}


ASKED = [turn("user", "hi"), turn("assistant", "Hello."), turn("user", "again")]
SYSTEM = turn("system", "Be kind.")
YES, NO = turn("assistant", "yes"), turn("assistant", "no")


def prepared(tmp_path: Path, *records: Any, **options: Any) -> list[tuple[str, str]]:
    """(text, learned text) of every document."""
    (tmp_path / "in.jsonl").write_text("\n".join(json.dumps(record) for record in records))
    out = str(tmp_path / "out")
    preprocess([str(tmp_path / "in.jsonl")], "bytes", out, pairs=True, chat_template="chatml", **options)
    assert are_pairs(out)
    indexed = IndexedDataset(out)
    mask, found = LossMask(indexed, "answers"), []
    for document in range(indexed.num_documents):
        ids = indexed.tokens(*indexed.starts[document : document + 2].tolist())
        texts = [bytes(x[x < 256].astype(np.uint8)).decode() for x in (ids, ids[mask.of(document)])]
        found.append((texts[0], texts[1]))
    return found


@pytest.mark.parametrize(
    "record",
    [
        {"prompt": ASKED, "chosen": [YES], "rejected": [NO]},
        {"chosen": [*ASKED, YES], "rejected": [*ASKED, NO]},
        {"prompt": ASKED, "chosen": "yes", "rejected": "no"},
        {"prompt": ASKED, "chosen": [*ASKED, YES], "rejected": [*ASKED, NO]},
        {"prompt": None, "chosen": [*ASKED, YES], "rejected": [*ASKED, NO]},
        {"prompt": "hi", "chosen": [*ASKED, YES], "rejected": [*ASKED, NO]},
        {"prompt": "again", "chosen": [*ASKED, YES], "rejected": [*ASKED, NO]},
        {name: [json.dumps(turn) for turn in (*ASKED, answer)] for name, answer in (("chosen", YES), ("rejected", NO))},
    ],
    ids=["prompt", "in common", "texts", "both", "null", "first turn", "last turn", "turns as text"],
)
def test_forms_of_records(tmp_path: Path, record: Any) -> None:
    (chosen, of_chosen), (rejected, of_rejected) = prepared(tmp_path, record)
    assert chosen.replace("yes", "no") == rejected
    assert [chosen.count(content) for content in ("hi", "Hello.", "again")] == [1, 1, 1]
    # Nothing of the prompt is learned, the assistant's turns in it included.
    assert (of_chosen.split("<")[0], of_rejected.split("<")[0]) == ("yes", "no")


def test_margins_are_counted(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """TRL subtracts them in the loss of a reward model."""
    caplog.set_level("INFO", "megalite")
    record = {"prompt": "hi", "chosen": "yes", "rejected": "no"}
    prepared(tmp_path, {**record, "margin": 0.5}, {**record, "margin": None}, record)
    assert "1 of 6 conversations with a margin, which is not used" in caplog.text


def test_the_pad_of_a_reward_model_ends_no_document(folder: Path) -> None:
    """Not as the end of text, nor as the end of a turn: transformers would read a reward before it."""
    end = load_tokenizer(folder).control_tokens["<|im_end|>"]
    assert _own_pad({"pad_token_id": 300, "eos_token_id": 301}, folder) == 300
    assert _own_pad({"pad_token_id": 301, "eos_token_id": [301, 302]}, folder) is None
    assert _own_pad({"pad_token_id": end, "eos_token_id": 301}, folder) is None


def test_a_prompt_of_text(tmp_path: Path) -> None:
    (chosen, _), _ = prepared(tmp_path, {"prompt": "hi", "chosen": "yes", "rejected": "no"})
    # Control tokens are ids above bytes.
    assert chosen.startswith("user\nhi\nassistant\nyes")


@pytest.mark.parametrize(
    ("record", "rule"),
    [
        ({"prompt": "hi", "chosen": "yes", "rejected": "yes"}, "the same"),
        ({"prompt": "hi", "chosen": "yes"}, "no chosen and rejected"),
        ({"chosen": [YES], "rejected": [NO]}, "no turn in common"),
        ({"chosen": ASKED, "rejected": [*ASKED, NO]}, "no turn after the prompt"),
        ({"prompt": "hi", "chosen": 5, "rejected": "no"}, "must be a text"),
        ({"prompt": "hi", "chosen": [turn("user", "yes")], "rejected": "no"}, "a turn that is no answer"),
        ({"chosen": [SYSTEM, *ASKED, YES], "rejected": [SYSTEM, ASKED[2], NO]}, "a turn that is no answer"),
        ({"prompt": "hi ", "chosen": [*ASKED, YES], "rejected": [*ASKED, NO]}, "neither first nor last"),
    ],
    ids=["same", "one", "no prompt", "no answer", "number", "user", "two prompts", "another prompt"],
)
def test_bad_records(tmp_path: Path, record: Any, rule: str) -> None:
    with pytest.raises(UserError, match=rule):
        prepared(tmp_path, record)
    good = {"prompt": "hi", "chosen": "yes", "rejected": "no"}
    assert len(prepared(tmp_path, record, good, skip_bad=True)) == 2


def test_pairs_are_no_chats(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="--pairs with --chat"):
        prepared(tmp_path, {}, chat=True)
