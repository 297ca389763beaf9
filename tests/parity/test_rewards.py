"""`--stage reward`: loss, figures and gradients are those of the classifier of transformers, the same in any layout."""

from __future__ import annotations

import importlib.util
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch.nn.functional import logsigmoid

from megalite.core.rows import Rows
from megalite.runtime.checkpoint.hf.start import hf_model_config, load_hf
from megalite.runtime.options.run import Config
from tests.parity import jobs
from tests.parity.features import Feature
from tests.parity.harness import (
    assert_same_gradients,
    boxes_of,
    check_evaluated,
    check_fp8,
    evaluate_steps,
    put_together,
    ranks_of,
    train_steps,
)
from tests.parity.models import MIXTRAL
from tests.parity.pairs import LLAMA, ROUNDED, rows_of_pairs
from tests.unit.tensor_parallel.fp8_layers import SMALL
from tests.workers import WorkerPool

REWARD: dict[str, Any] = {"stage": "reward", "reward_center": 0.1}
Pair = tuple[list[int], list[int]]
"""Token ids of the preferred document, and of the other."""


def laid_out(pairs: Sequence[Pair], length: int) -> Rows:
    """One row of pairs, written out: a target at the last token of each document."""
    inputs, starts = np.zeros(length, np.int64), np.zeros(length, np.int64)
    targets, owners, weights = np.full(length, -1), np.full(length, -1), np.zeros(length, np.float32)
    at = 0
    for number, ids in enumerate(document for pair in pairs for document in pair):
        end = at + len(ids)
        inputs[at:end], starts[at:end] = ids, at
        targets[end - 1], owners[end - 1], weights[end - 1] = ids[-1], number, number % 2 == 0
        at = end
    starts[at:] = at
    return Rows(inputs, targets, starts, weights, np.arange(length) >= at, owners)


def drawn(step: int) -> list[list[Pair]]:
    """Rows of one to three pairs, so that dp ranks and micro-batches have different numbers of them."""
    rng, rows = np.random.default_rng(step), []
    for number in (1, 3, 2, 1, 1, 1, 2, 3)[: jobs.BATCH]:
        sizes = rng.integers(1, jobs.SEQ // (2 * number) + 1, (number, 2)).tolist()
        rows.append([(rng.integers(0, 90, a).tolist(), rng.integers(0, 90, b).tolist()) for a, b in sizes])
    return rows


def pairs_of(step: int) -> Rows:
    return Rows.stack([laid_out(row, jobs.SEQ) for row in drawn(step)])


# ------------------------------------------------------------------------------------------------------- one process


def rewards_by(model: Any, rows: list[list[Pair]]) -> torch.Tensor:
    return torch.stack([model(torch.tensor([ids])).logits[0, 0] for row in rows for pair in row for ids in pair])


def figures_of(rewards: torch.Tensor) -> dict[str, float]:
    c, r = rewards.view(-1, 2).unbind(1)
    figures = {"accuracy": (c > r).double().mean(), "margin": (c - r).mean(), "mean_reward": rewards.mean()}
    figures |= {"min_reward": rewards.min(), "max_reward": rewards.max()}
    return {name: x.item() for name, x in figures.items()} | {"pairs": len(c)}


def classifier(folder: Path, **special: int) -> Any:
    """One of transformers, also stored as `folder / model`."""
    transformers = pytest.importorskip("transformers")
    sizes = {"vocab_size": 90, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2}
    options = {"num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": jobs.SEQ}
    torch.manual_seed(1)
    more = {"num_labels": 1, "eos_token_id": 5, "initializer_range": 0.2, **special}
    model = transformers.LlamaForSequenceClassification(transformers.LlamaConfig(**{**sizes, **options, **more}))
    model.save_pretrained(folder / "model")
    return model


def with_end_inside(rows: list[list[Pair]]) -> list[list[Pair]]:
    rows[0][0][0][:] = [5, *rows[0][0][0], 5]
    return rows


def engine_of(folder: Path, center: float) -> Any:
    model = replace(hf_model_config(folder / "model"), seq_len=jobs.SEQ + 2)
    cfg = jobs.make_config(model, micro_batch_size=4, stage="reward", reward_center=center)
    (engine,) = jobs.engines([cfg], 1)
    load_hf(folder / "model", cfg.model, engine.optimizer.states(), engine.ctx)
    engine.optimizer.finish_load()
    return engine


def norm_of(model: Any) -> float:
    return torch.stack([x.grad.square().sum() for x in model.parameters()]).sum().sqrt().item()


def batch_of(rows: list[list[Pair]]) -> Rows:
    return Rows.stack([laid_out(row, jobs.SEQ + 2) for row in rows])


def assert_gradients_are_of(theirs: Any, engine: Any, result: Any, folder: Path) -> None:
    cfg, norm = engine.cfg, norm_of(theirs)
    # Gradients take the way of weights into this model: what is fused there is fused here.
    with torch.no_grad():
        for x in theirs.parameters():
            x.copy_(x.grad)
    theirs.float().save_pretrained(folder / "gradients")
    (engine,) = jobs.engines([cfg], 1)
    load_hf(folder / "gradients", cfg.model, engine.optimizer.states(), engine.ctx)
    number = (1 - cfg.optim.beta1) * min(1.0, cfg.optim.clip_grad / (norm + 1e-6))
    whole = {name: x * number for name, x in put_together([boxes_of(engine, "master")]).items()}
    assert_same_gradients([result.gradients], whole, "transformers")


@pytest.mark.parametrize("center", [0.0, 0.1])
def test_one_process_is_the_classifier_of_transformers(center: float, tmp_path: Path) -> None:
    """One document at a time there, all in packed rows here, with the end of text inside of some."""
    theirs = classifier(tmp_path).double()
    rows, fewer = with_end_inside(drawn(1)), [row[:1] for row in drawn(2)]
    rewards = rewards_by(theirs, rows)
    c, r = rewards.view(-1, 2).unbind(1)
    # As TRL's RewardTrainer computes it.
    loss = (-logsigmoid(c - r) + center * (c + r) ** 2).mean()
    loss.backward()
    engine, batches = engine_of(tmp_path, center), [batch_of(rows), batch_of(fewer)]
    evaluated = evaluate_steps(engine, lambda step: batches[step - 1], 2)
    assert evaluated == pytest.approx(figures_of(rewards_by(theirs, rows + fewer)), abs=1e-5)
    result = train_steps(engine, lambda step: batches[0], 1)
    assert result.steps[0] == pytest.approx((loss.item(), norm_of(theirs)), rel=1e-5)
    assert result.reported[0] == pytest.approx(figures_of(rewards), abs=1e-5)
    assert_gradients_are_of(theirs, engine, result, tmp_path)


@pytest.mark.trl
@pytest.mark.skipif(importlib.util.find_spec("trl") is None, reason="needs trl (.ci/peers.sh tests with it)")
@pytest.mark.parametrize("center", [0.0, 0.1])
def test_one_process_is_trls_trainer(center: float, tmp_path: Path) -> None:
    """Loss, figures and gradients of its first step; documents that hold the end of text, and padding beside them."""
    from datasets import Dataset
    from tokenizers import Tokenizer, models
    from transformers import PreTrainedTokenizerFast, TrainerCallback
    from trl import RewardConfig, RewardTrainer

    class Gradients(TrainerCallback):
        def on_pre_optimizer_step(self, *_: Any, model: Any, **__: Any) -> None:
            self.kept = [x.grad.clone() for x in model.parameters()]

    model, rows = classifier(tmp_path, vocab_size=92), with_end_inside(drawn(1))
    words = {f"w{i}": i for i in range(90)} | {"[UNK]": 90, "[PAD]": 91}
    names = {"pad_token": "[PAD]", "unk_token": "[UNK]", "eos_token": "w5"}
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=Tokenizer(models.WordLevel(words, "[UNK]")), **names)
    pairs = [{"chosen_ids": c, "rejected_ids": r} for row in rows for c, r in row]
    options: dict[str, Any] = {"per_device_train_batch_size": len(pairs), "max_steps": 1, "max_grad_norm": 0.0}
    options |= {"logging_steps": 1, "save_strategy": "no", "report_to": "none", "bf16": False, "use_cpu": True}
    options |= {"center_rewards_coefficient": center or None, "max_length": None}
    theirs, gradients = RewardConfig(output_dir=str(tmp_path / "trl"), learning_rate=1e-30, **options), Gradients()
    data = Dataset.from_list(pairs)
    trainer = RewardTrainer(model, theirs, train_dataset=data, processing_class=tokenizer, callbacks=[gradients])
    trainer.train()
    logged = next(line for line in trainer.state.log_history if "loss" in line)
    engine = engine_of(tmp_path, center)
    result = train_steps(engine, lambda step: batch_of(rows), 1)
    for x, grad in zip(model.parameters(), gradients.kept, strict=True):
        x.grad = grad
    assert result.steps[0] == pytest.approx((logged["loss"], norm_of(model)), rel=1e-5)
    assert {name: logged[name] for name in result.reported[0] if name != "pairs"} == pytest.approx(
        {name: x for name, x in result.reported[0].items() if name != "pairs"}, abs=1e-5
    )
    assert_gradients_are_of(model, engine, result, tmp_path)


# ------------------------------------------------------------------------------------------------------------ layouts

DATA = {"data": pairs_of, **REWARD}
TIED = jobs.llama(init_std=0.15, tie_embeddings=True)


class TestRewards(Feature):
    strong = {
        ranks_of(2, tp=2): [(LLAMA, 1, {}, DATA), (TIED, 1, {"sequence_parallel": False}, DATA)],
        ranks_of(2, pp=2): [(TIED, 1, {}, DATA)],
        ranks_of(2, cp=2): [(LLAMA, 1, {}, DATA)],
        ranks_of(2): [(LLAMA, zero, {}, DATA) for zero in range(4)],
    }
    grid = {
        ranks_of(2, ep=2): [(MIXTRAL, 1, {}, DATA)],
        ranks_of(4, tp=2, cp=2): [(LLAMA, 3, {}, DATA), (LLAMA, 3, {"zero_whole_below": 0}, DATA)],
        **rows_of_pairs(DATA),
    }
    rounded = ROUNDED
    rounded_on = DATA
    compiled = ((ranks_of(2, tp=2), (LLAMA, 1, {}, DATA)),)
    planted = {
        "weights as after a differentiated all-reduce": (ranks_of(2, cp=2), (LLAMA, 1, {}, DATA)),
        "rewards of the token before": (ranks_of(2, tp=2), (LLAMA, 1, {}, DATA)),
        "extremes of one rank": (ranks_of(2), (LLAMA, 1, {}, DATA)),
    }

    @staticmethod
    def mistakes(rank: int, cfg: Config) -> dict[str, tuple[Any, str, Any]]:
        from megalite.core.parts.counters.rewards import Rewards
        from megalite.core.parts.heads.score.score import Score

        call, forward, most = Rewards.__call__, Score.forward, Rewards.sums

        def of_own_pairs(self: Any, loss_SB: Any, batch: Any, fwd: Any) -> Any:
            losses, weights = call(self, loss_SB, batch, fwd)
            return losses, weights * self._engine.ctx.axis("cp").size

        def early(self: Any, x: Any, batch: Any, fwd: Any) -> Any:
            return forward(self, x.roll(1, 0), batch, fwd)

        def of_one_rank(self: Any) -> Any:
            sums = most(self)
            sums[-2:] = 0
            return sums

        return {
            "weights as after a differentiated all-reduce": (Rewards, "__call__", of_own_pairs),
            "rewards of the token before": (Score, "forward", early),
            "extremes of one rank": (Rewards, "sums", of_one_rank),
        }


@pytest.mark.parametrize("shape", [ranks_of(2, tp=2), ranks_of(4, pp=2)], ids=str)
def test_evaluations_are_those_of_one_process(pool: WorkerPool, shape: Any) -> None:
    check_evaluated(pool, shape, (LLAMA, 1, {}, DATA))


@pytest.mark.parametrize(
    "shape", [ranks_of(2, tp=2), *(pytest.param(s, marks=pytest.mark.full) for s in (ranks_of(2, cp=2), ranks_of(2)))]
)
def test_products_in_fp8(pool: WorkerPool, shape: Any) -> None:
    model = jobs.llama(2, **{**SMALL, "seq_len": jobs.SEQ, "init_std": 0.15})
    check_fp8(pool, shape, (model, 1, {}, {**DATA, "fp8": "rowwise", "fp8_emulate": True}))
