"""New tokens end at the token, and with the text, at which their whole text first has a stop."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from megalite.extras.tasks.new_text import NewText
from megalite.runtime.data.tokenizer import Tokenizer, load_tokenizer

WORDS = "the sea is dép €, and the 海 is\n\ndeep 🌊 A: 4. ee"
STOPS = ("\n\n", "A:", "é", "海 is", " deep 🌊", "the")


def whole(tokenizer: Tokenizer, ids: list[int], until: tuple[str, ...]) -> tuple[int, str]:
    """The number of tokens and the text, by a look at all of it after each token."""
    for n in range(1, len(ids) + 1):
        text = everything = tokenizer.decode(ids[:n])
        for stop in until:
            text = text.split(stop)[0]
        if text != everything:
            return n, text
    return len(ids), everything


@pytest.mark.parametrize("kind", ["bytes", "sentencepiece"])
def test_stops_are_those_of_the_whole_text(tokenizer_dir: Path, kind: str) -> None:
    tokenizer, draws = load_tokenizer(kind if kind == "bytes" else tokenizer_dir), np.random.default_rng(1)
    stopped = 0
    for _ in range(200):
        ids = tokenizer.encode(WORDS[draws.integers(len(WORDS)) :] + WORDS)
        # Halves of characters, as a model that has learned little writes them.
        ids = [i for i in ids[: draws.integers(2, 90)] if draws.random() > 0.1]
        until = tuple(str(stop) for stop in draws.choice(STOPS, draws.integers(0, 3), replace=False))
        new = NewText(tokenizer, until)
        at = next((n for n, token in enumerate(ids, 1) if new.add(token)), None)
        stopped += at is not None
        assert (at or len(ids), new.text()) == whole(tokenizer, ids, until)
    assert 50 < stopped < 190


def test_the_end_of_text_is_not_part_of_it() -> None:
    tokenizer = load_tokenizer("bytes")
    new = NewText(tokenizer, ())
    assert [new.add(token) for token in (97, 400, 98, int(tokenizer.eos_id or 0))] == [False, False, False, True]
    assert new.text() == "ab"


def test_a_token_costs_the_same_at_any_length(monkeypatch: pytest.MonkeyPatch) -> None:
    tokenizer = load_tokenizer("bytes")
    new, decode, read = NewText(tokenizer, ("nothing",)), tokenizer.decode, []

    def noted(ids: list[int]) -> str:
        read.append(len(ids))
        return decode(ids)

    monkeypatch.setattr(tokenizer, "decode", noted)
    for token in [*b"the sea ", *[0xE6] * 50, *b"is deep"] * 3:
        new.add(token)
    assert max(read) <= 8
