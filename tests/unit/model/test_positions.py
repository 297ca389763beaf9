"""What every kind of positions keeps, whatever it computes; a new entry of the table is held to it by itself.

A model of one block, in one process: `tests/parity/test_positions.py` has layouts.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

from megalite.core.batch import Documents, ForwardPass, MicroBatch, Positions
from megalite.core.model.parameters import param_map
from megalite.core.options.choices import POSITIONS
from tests.parity import jobs
from tests.unit.model.tiny_layers import CPU, layers_of, tiny

EXACT = 2**12
"""Positions whose columns are compared."""


def stage_of(name: str) -> Any:
    engine = jobs.start(0, jobs.make_config(jobs.llama(1, position=name, seq_len=32, init_std=0.15)), 1)
    (stage,) = engine.stages.values()
    return stage


@torch.no_grad()
def logits(stage: Any, tokens_S: torch.Tensor, documents: Documents | None = None) -> torch.Tensor:
    batch = MicroBatch.of_samples(tokens_S[:, None], None, documents)
    out: torch.Tensor = stage(batch.tokens_SB, batch, ForwardPass(0, 0, training=False))
    return out[:, 0]


def words(length: int) -> torch.Tensor:
    return torch.randint(jobs.VOCAB, (length,), generator=torch.Generator().manual_seed(length))


def same(actual: torch.Tensor, expected: torch.Tensor) -> bool:
    return torch.allclose(actual, expected, rtol=0, atol=1e-5 * float(expected.abs().max()))


@pytest.mark.parametrize("name", POSITIONS)
def test_a_model_of_every_kind_knows_the_order(name: str) -> None:
    """Without what it knows, the last token of one block sees a set of tokens."""
    stage, ids = stage_of(name), words(12)
    moved = ids[[1, 0, *range(2, 12)]]
    assert not same(logits(stage, moved)[-1], logits(stage, ids)[-1])


@pytest.mark.parametrize("name", POSITIONS)
def test_samples_of_any_length_and_documents_come_one_after_the_other(name: str) -> None:
    """What is kept from one to the next serves longer ones too, and a document is as it is alone."""
    stage, texts = stage_of(name), [words(length) for length in (5, 17, 10)]
    alone = [logits(stage_of(name), ids) for ids in texts]
    for ids, expected in zip(texts, alone):
        assert same(logits(stage, ids), expected)
    starts_SB = torch.tensor([0] * 5 + [5] * 17 + [22] * 10)[:, None]
    assert same(logits(stage, torch.cat(texts), Documents(starts_SB)), torch.cat(alone))


@pytest.mark.parametrize("name", POSITIONS)
def test_what_a_kind_says_of_itself_is_so(name: str) -> None:
    cfg = tiny(position=name)
    kind, layers = cfg.position_kind, replace(layers_of(cfg), dtype=torch.bfloat16)
    added = kind.embedding(layers)
    assert kind.added == (added is not None)
    if added is not None:
        for weight in added.parameters():
            weight.data.normal_(generator=torch.Generator().manual_seed(2))
        x_SBH = torch.zeros(16, 1, 32, dtype=torch.bfloat16)
        whole = added(x_SBH, Positions.of_samples(16))
        assert whole.dtype is torch.bfloat16, "what blocks pass on has one dtype"
        # A text that is being written comes piece by piece.
        assert torch.equal(added(x_SBH[5:7], Positions(16, (range(5, 7),))), whole[5:7])
    sizes = [[spec.shape for spec in param_map(tiny(position=name, seq_len=n)).values()] for n in (16, 32)]
    assert kind.limited == (sizes[0] != sizes[1]), "a model has only the positions that it has parameters for"


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("name", [name for name in POSITIONS if POSITIONS[name].columns])
def test_columns_say_the_same_in_half_precision(name: str, dtype: torch.dtype) -> None:
    cfg = tiny(position=name, seq_len=EXACT, hidden_size=48, num_heads=6)
    kind, make = cfg.position_kind, layers_of(cfg).positions(0)
    assert make is not None
    (keys,) = make(Positions.of_samples(EXACT), CPU) or ()
    assert torch.equal(keys.to(dtype).float(), keys)
    whole, half = (kind.of_queries(cfg, slice(0, 6), 0.3, each, CPU).double() for each in (torch.float32, dtype))
    whole, half = (queries @ keys[:, 0].double().T for queries in (whole, half))
    torch.testing.assert_close(half, whole, rtol=1e-5, atol=1e-4)
