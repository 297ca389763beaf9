"""Scores and next logits of rows of any length in any layout equal those of one whole model."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch

from megalite.checkpoint.hf.convert import import_hf
from megalite.dist.context import ParallelContext
from megalite.dist.grid import Grid
from megalite.errors import UserError
from megalite.train.inference import find_weights, load_model
from megalite.train.scoring import Scorer, scoring_config
from tests.unit.checkpoint import hf_models
from tests.workers import WorkerPool

pytest.importorskip("transformers")
CPU = torch.device("cpu")
# Fewer than fit into a pass, of odd lengths; the last one is as long as the model's positions.
LENGTHS = (5, 2, 19, 11, 33)


def rows() -> list[list[int]]:
    draws = np.random.default_rng(5)
    return [draws.integers(0, 90, n).tolist() for n in LENGTHS]


def scored(rank: int, path: str, tp: int, pp: int, world: int) -> tuple[list[tuple[float, bool]], np.ndarray] | None:
    """Score all but the first id of each row, the last row's last two only; then the logits after the first rows."""
    ctx = ParallelContext.create(Grid.of(world, tp, pp), CPU)
    weights = find_weights(Path(path))
    scorer = Scorer(scoring_config(weights, world, tp, pp, rows=4, max_length=32), ctx, weights)
    if rank > 0:
        scorer.serve()
        return None
    given = [(ids, 2 if i == len(LENGTHS) - 1 else len(ids) - 1) for i, ids in enumerate(rows())]
    found = [
        pair for i in range(0, len(given), scorer.max_rows) for pair in scorer.score(given[i : i + scorer.max_rows])
    ]
    logits = scorer.next_logits(rows()[:3])
    scorer.close()
    return found, logits.numpy()


@pytest.mark.parametrize(
    ("case", "tp", "pp", "world"),
    [("llama", 1, 1, 1), ("llama", 2, 2, 4), ("gpt2", 1, 2, 4), ("gemma2", 2, 1, 2)],
)
def test_scores_in_a_layout(pool: WorkerPool, tmp_path: Path, case: str, tp: int, pp: int, world: int) -> None:
    hf_models.make_model(case, tmp_path / "hf")
    import_hf(tmp_path / "hf", tmp_path / "ckpt")
    found, logits = pool.run(world, scored, str(tmp_path / "ckpt"), tp, pp, world)[0]
    model = load_model(tmp_path / "ckpt", CPU)
    for i, (ids, (total, likeliest)) in enumerate(zip(rows(), found)):
        logprobs = model.logits(torch.tensor([ids[:-1]]))[0].log_softmax(-1)
        n = 2 if i == len(LENGTHS) - 1 else len(ids) - 1
        ends = torch.tensor(ids[-n:])
        assert total == pytest.approx(logprobs[-n:].gather(1, ends[:, None]).sum().item(), abs=2e-4)
        assert likeliest == bool((logprobs[-n:].argmax(1) == ends).all())
    for ids, row in zip(rows(), logits):
        np.testing.assert_allclose(row, model.logits(torch.tensor([ids]))[0, -1], atol=5e-5)


def test_the_likeliest_continuation_is_found_likeliest(pool: WorkerPool, tmp_path: Path) -> None:
    hf_models.make_model("llama", tmp_path / "hf")
    model, ids = load_model(tmp_path / "hf", CPU), [5, 17, 3]
    for _ in range(4):
        ids.append(int(model.logits(torch.tensor([ids]))[0, -1].argmax()))
    path = str(tmp_path / "hf")
    results = pool.run(2, continued, path, [(ids, 4), ([*ids[:-1], (ids[-1] + 1) % 90], 4)])
    assert [hit for _, hit in results[0]] == [True, False]


def continued(rank: int, path: str, given: list[tuple[list[int], int]]) -> list[tuple[float, bool]] | None:
    ctx, weights = ParallelContext.create(Grid.of(2, 2, 1), CPU), find_weights(Path(path))
    scorer = Scorer(scoring_config(weights, 2, tp=2), ctx, weights)
    if rank > 0:
        scorer.serve()
        return None
    found = scorer.score(given)
    scorer.close()
    return found


def test_a_layout_that_does_not_fit(tmp_path: Path) -> None:
    hf_models.make_model("gpt2", tmp_path / "hf")
    weights = find_weights(tmp_path / "hf")
    with pytest.raises(UserError, match="3 ranks with --tp 2 --pp 1: must be a multiple of tp x pp = 2"):
        scoring_config(weights, 3, tp=2)
    with pytest.raises(UserError, match="--max-length 64: must be at most 32"):
        scoring_config(weights, 1, max_length=64)
