"""With a cache a model reads piece by piece, and finds the logits of the whole text."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import pytest
import torch

from megalite.core.batch import ForwardPass
from megalite.extras.inference.cache import Cache, KeptTexts
from megalite.extras.inference.generate import Sampling, new_tokens
from megalite.extras.inference.load import Model, load_model
from tests.unit.checkpoint import hf_models

pytest.importorskip("transformers")

# Ordinary, learned positions, windows with sinks, windows with caps, latents, ALiBi, chunks with temperatures.
CASES = ["llama", "gpt2", "gpt_oss", "gemma2", "deepseek_v2_lite", "bloom", "llama4"]
PIECES = (5, 1, 1, 9, 1, 1, 2, 12)


def made(case: str, folder: Path) -> Model:
    hf_models.make_model(case, folder)
    return load_model(folder, torch.device("cpu"))


def full_on(names: list[str], quick: int) -> list[Any]:
    return [*names[:quick], *(pytest.param(name, marks=pytest.mark.full) for name in names[quick:])]


@pytest.mark.parametrize("case", full_on(CASES, 5))
def test_logits_by_pieces_are_those_of_the_whole(tmp_path: Path, case: str) -> None:
    model, at = made(case, tmp_path), 0
    ids = hf_models.tokens().flatten().tolist()
    assert len(ids) == sum(PIECES)
    whole = model.logits(torch.tensor([ids]))[0]
    cache = Cache.of(model, len(ids))
    assert cache is not None
    for size in PIECES:
        found = cache.logits(ids[at : at + size])
        at += size
        assert cache.length == at
        torch.testing.assert_close(found, whole[at - 1], rtol=0, atol=1e-5 * float(whole.abs().max()))
    # The model itself is as it was.
    assert torch.equal(model.logits(torch.tensor([ids]))[0], whole)


@pytest.mark.parametrize("case", full_on(CASES, 2))
def test_texts_of_several_lengths_are_read_together(tmp_path: Path, case: str) -> None:
    """The shorter one reads what is not its own, which nothing sees once its next tokens have come."""
    model, ids = made(case, tmp_path), hf_models.tokens().flatten().tolist()
    texts, lengths = [ids[:20], ids[8:28]], [14, 3]
    kept = KeptTexts([model.stage], 20, 20)
    pieces = [([text[:14] for text in texts], [0, 0])]
    pieces += [([[text[n + i]] for text, n in zip(texts, lengths)], [n + i for n in lengths]) for i in range(6)]
    for new, starts in pieces:
        batch = kept.next_piece(new, starts, torch.device("cpu"))
        with torch.no_grad(), kept.attending():
            out = model.stage(batch.tokens_SB, batch, ForwardPass(0, 0, training=False))
        for row, (text, start) in enumerate(zip(texts, starts)):
            end = start + len(new[row])
            found = out.unflatten(0, (2, -1))[row, -1, 0, : model.cfg.vocab]
            whole = model.logits(torch.tensor([text[:end]]))[0, -1]
            torch.testing.assert_close(found, whole, rtol=0, atol=1e-5 * float(whole.abs().max()))


@pytest.mark.parametrize("case", full_on(CASES, 2))
def test_greedy_texts_are_those_without_a_cache(tmp_path: Path, case: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Past the model's positions, 32 but for BLOOM, the window slides, and there is no cache with either."""
    model = made(case, tmp_path)
    sampling = Sampling(37, 0.0, 0, 1.0)

    def texts() -> list[list[int]]:
        return [list(new_tokens(model, prompt, sampling, 0, ())) for prompt in ([7], [3, 1, 4, 1, 5, 9], [8] * 33)]

    with_cache = texts()
    monkeypatch.setattr(Cache, "of", lambda model, capacity: None)
    assert texts() == with_cache


def test_two_texts_at_a_time_do_not_mix(tmp_path: Path) -> None:
    model = made("llama", tmp_path)
    sampling = Sampling(8, 0.0, 0, 1.0)
    alone = [list(new_tokens(model, [first], sampling, 0, ())) for first in (7, 11)]
    writers = [new_tokens(model, [first], sampling, 0, ()) for first in (7, 11)]
    together = list(zip(*writers))
    assert [list(text) for text in zip(*together)] == alone


def test_each_new_token_is_computed_once(tmp_path: Path) -> None:
    model, read = made("llama", tmp_path), []
    model.stage.register_forward_pre_hook(lambda _, args: read.append(len(args[0])))
    list(new_tokens(model, [1, 2, 3], Sampling(6, 0.0, 0, 1.0), 0, ()))
    assert read == [3, 1, 1, 1, 1, 1]


def test_layers_with_a_state_of_their_own_have_no_cache(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    model = made("qwen3_next", tmp_path)
    with caplog.at_level(logging.INFO, logger="megalite"):
        assert Cache.of(model, 8) is None
    assert "no cache: DeltaNetLayer has none, so each token is computed from the whole text" in caplog.text
