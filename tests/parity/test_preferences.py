"""`--stage dpo`: loss, figures and every gradient are those of DPO in transformers, and the same in every layout."""

from __future__ import annotations

import json
import random
from collections.abc import Sequence
from dataclasses import replace
from functools import cache, partial
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
    assert_same,
    assert_same_gradients,
    boxes_of,
    check_evaluated,
    check_fp8,
    config_of,
    evaluate_steps,
    in_one_process,
    put_together,
    ranks_of,
    train_steps,
    trained,
)
from tests.parity.models import MIXTRAL
from tests.parity.pairs import LLAMA, ROUNDED, rows_of_pairs
from tests.unit.tensor_parallel.fp8_layers import SMALL
from tests.workers import WorkerPool

DPO: dict[str, Any] = {"stage": "dpo", "dpo_beta": 0.5}

# ------------------------------------------------------------------------------------------------------------- rows

Answers = tuple[list[int], int, float]
"""Token ids, how many of the last of them are the answer, the answer's log-probability under the reference."""


def laid_out(pairs: Sequence[Sequence[Answers]], length: int) -> Rows:
    """One row of pairs, written out token by token."""
    inputs: list[int] = []
    targets: list[int] = []
    starts: list[int] = []
    owners: list[int] = []
    weights: list[float] = []
    references: list[float] = []
    for number, (ids, answer, reference) in enumerate(document for pair in pairs for document in pair):
        first, n = len(inputs), len(ids) - 1
        for place in range(n):
            learned, is_first = place >= n - answer, place == n - answer
            inputs.append(ids[place])
            starts.append(first)
            targets.append(ids[place + 1] if learned else -1)
            owners.append(number if learned else -1)
            weights.append(1.0 if is_first and number % 2 == 0 else 0.0)
            references.append(reference if is_first else 0.0)
    end, rest = len(inputs), length - len(inputs)
    fill: list[tuple[list[Any], float]] = [(inputs, 0), (targets, -1), (starts, end), (weights, 0), (owners, -1)]
    for values, filler in [*fill, (references, 0)]:
        values += [filler] * rest
    return Rows(
        np.array(inputs),
        np.array(targets),
        np.array(starts),
        np.array(weights, np.float32),
        np.arange(length) >= end,
        np.array(owners),
        np.array(references),
    )


def pairs_of(step: int) -> Rows:
    """Rows of one to three pairs, so that dp ranks and micro-batches have different numbers of them."""
    rng, rows = np.random.default_rng(step), []
    for row in range(jobs.BATCH):
        pairs, number = [], (1, 3, 2, 1, 1, 1, 2, 3)[row]
        for _ in range(number):
            prompt = rng.integers(0, jobs.VOCAB, 4 - number).tolist()
            answers = [rng.integers(0, jobs.VOCAB, n).tolist() for n in rng.integers(1, 6 - number, 2)]
            pairs.append(tuple((prompt + ids, len(ids), -4.5 * len(ids) + rng.normal()) for ids in answers))
        rows.append(laid_out(pairs, jobs.SEQ))
    return Rows.stack(rows)


# -------------------------------------------------------------------------------------------------------- one process

CASES = json.loads((Path(__file__).parents[1] / "data/preferences.json").read_text())["model_cases"]
SIMPO = {"name": "simpo", "kind": "simpo", "beta": 2.0, "eps": 0.1, "gamma": 0.3}


def models_of(case: dict[str, Any]) -> tuple[Any, Any]:
    """(policy, reference), by the recipe of the file."""
    transformers = pytest.importorskip("transformers")
    options = {"vocab_size": 64, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2}
    options |= {"num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": case["places"]}
    draws = torch.Generator().manual_seed(case["model_seed"])
    policy, reference = (
        transformers.LlamaForCausalLM(transformers.LlamaConfig(**options, tie_word_embeddings=False)) for _ in range(2)
    )
    with torch.no_grad():
        ours, theirs = dict(policy.named_parameters()), dict(reference.named_parameters())
        for name in sorted(ours):
            x = torch.ones(ours[name].shape) if "norm" in name else 0.2 * torch.randn(ours[name].shape, generator=draws)
            ours[name].copy_(x)
            theirs[name].copy_(x)
        for name in sorted(ours):
            ours[name] += case["noise"] * torch.randn(ours[name].shape, generator=draws)
    return policy, reference


def pairs_by_seed(case: dict[str, Any]) -> list[list[tuple[list[int], int]]]:
    draws = random.Random(case["seed"])

    def ids() -> list[int]:
        return [draws.randrange(63) for _ in range(draws.randint(1, 12))]

    out = []
    for _ in range(case["pairs"]):
        prompt, chosen, rejected = ids(), [*ids(), 63], [*ids(), 63]
        out.append([(prompt + answer, len(answer)) for answer in (chosen, rejected)])
    return out


def logprob(model: Any, ids: list[int], answer: int) -> torch.Tensor:
    logprobs = model(torch.tensor([ids[:-1]])).logits[0].log_softmax(-1)[-answer:]
    return logprobs.gather(1, torch.tensor(ids[-answer:])[:, None]).sum()


def by_hand(case: dict[str, Any], policy: Any, reference: Any) -> torch.Tensor:
    """The mean loss of all pairs, one document at a time."""
    kind, beta, eps, losses = case["kind"], case["beta"], case.get("eps", 0.0), []
    for pair in pairs_by_seed(case):
        if kind == "simpo":
            # As TRL's CPOTrainer computes it, whose margin is gamma / beta inside beta.
            c, r = (logprob(policy, *document) / document[1] for document in pair)
            h = beta * (c - r - case["gamma"] / beta)
            losses.append(-(1 - eps) * logsigmoid(h) - eps * logsigmoid(-h))
            continue
        c, r = (logprob(policy, *document) - logprob(reference, *document).detach() for document in pair)
        if kind == "ipo":
            losses.append((c / pair[0][1] - r / pair[1][1] - 1 / (2 * beta)) ** 2)
            continue
        h = beta * (c - r)
        sign = -1 if kind == "robust" else 1
        loss = -(1 - eps) * logsigmoid(h) - sign * eps * logsigmoid(-h)
        losses.append(loss / (1 - 2 * eps) if kind == "robust" else loss)
    return torch.stack(losses).mean()


def expected_of_simpo(case: dict[str, Any], policy: Any, loss: float, norm: float) -> dict[str, Any]:
    documents = [document for pair in pairs_by_seed(case) for document in pair]
    logps = [logprob(policy, *document).item() for document in documents]
    rewards = case["beta"] * np.array([x / n for x, (_, n) in zip(logps, documents)]).reshape(-1, 2)
    margins = rewards[:, 0] - rewards[:, 1]
    figures = {"chosen": rewards[:, 0], "rejected": rewards[:, 1], "margins": margins, "accuracies": margins > 0}
    named = {f"rewards/{name}": x.mean() for name, x in figures.items()}
    return {"loss": loss, "grad_norm": norm, "logps": logps, "ref_logps": [0.0] * len(logps), **named}


@pytest.mark.parametrize("chunk", [0, 7])
@pytest.mark.parametrize("case", [*CASES, {"case": CASES[0]["case"] | SIMPO}], ids=lambda case: case["case"]["name"])
def test_one_process_is_dpo_in_transformers(case: dict[str, Any], chunk: int, tmp_path: Path) -> None:
    given = case["case"]
    policy, reference = (model.double() for model in models_of(given))
    loss = by_hand(given, policy, reference)
    loss.backward()
    norm = torch.stack([x.grad.square().sum() for x in policy.parameters()]).sum().sqrt().item()
    expected = case.get("expected", {})
    if given["kind"] == "simpo":
        expected = expected_of_simpo(given, policy, loss.item(), norm) | expected
    # The oracle is that of the file, and TRL's.
    assert [loss.item(), norm] == pytest.approx([expected["loss"], expected["grad_norm"]], rel=1e-6)
    if trl := case.get("trl"):
        assert [loss.item(), norm] == pytest.approx([trl["loss"], trl["grad_norm"]], rel=1e-6)
    scores = iter(expected["ref_logps"])
    documents = [[(ids, n, next(scores)) for ids, n in pair] for pair in pairs_by_seed(given)]
    rows: list[list[Any]] = [[]]
    for pair in documents:
        if sum(len(ids) - 1 for p in [*rows[-1], pair] for ids, *_ in p) > given["places"]:
            rows.append([])
        rows[-1].append(pair)
    data = Rows.stack([laid_out(row, given["places"]) for row in rows])
    policy.float().save_pretrained(tmp_path / "policy")
    cfg = jobs.make_config(
        hf_model_config(str(tmp_path / "policy")),
        micro_batch_size=1,
        global_batch_size=len(rows),
        loss_chunk=chunk,
        stage="dpo",
        dpo_loss="sigmoid" if given["kind"] == "smoothed" else given["kind"],
        dpo_beta=given["beta"],
        dpo_smoothing=given.get("eps", 0.0),
        simpo_gamma=given.get("gamma", 0.5),
    )
    result, gradients = from_folder(cfg, tmp_path / "policy", data)
    assert result.steps[0] == pytest.approx((expected["loss"], expected["grad_norm"]), rel=1e-5)
    names = ("rewards/chosen", "rewards/rejected", "rewards/margins", "rewards/accuracies")
    assert [result.reported[0][name] for name in names] == pytest.approx([expected[name] for name in names], abs=1e-5)
    assert result.reported[0]["pairs"] == given["pairs"]
    chosen = np.mean(expected["logps"][::2])
    assert result.reported[0]["logps/chosen"] == pytest.approx(chosen, rel=1e-5)
    # Gradients take the way of weights into this model: what is fused there is fused here.
    with torch.no_grad():
        for x in policy.parameters():
            x.copy_(x.grad)
    policy.save_pretrained(tmp_path / "gradients")
    (engine,) = jobs.engines([cfg], 1)
    load_hf(str(tmp_path / "gradients"), cfg.model, engine.optimizer.states(), engine.ctx)
    number = (1 - cfg.optim.beta1) * min(1.0, cfg.optim.clip_grad / (norm + 1e-6))
    whole = {name: x * number for name, x in put_together([boxes_of(engine, "master")]).items()}
    assert_same_gradients([gradients], whole, "transformers")


def from_folder(cfg: Config, folder: Path, data: Rows) -> tuple[Any, Any]:
    (engine,) = jobs.engines([cfg], 1)
    load_hf(str(folder), cfg.model, engine.optimizer.states(), engine.ctx)
    engine.optimizer.finish_load()
    result = train_steps(engine, lambda step: data, 1)
    return result, result.gradients


def test_an_evaluation_is_the_mean_of_all_its_pairs(tmp_path: Path) -> None:
    """And not of its batches: one has a pair, and the other the rest."""
    given, beta = CASES[0]["case"], 0.3
    policy, reference = (model.double() for model in models_of(given))
    pairs, room = pairs_by_seed(given), 5 * given["places"]
    logps, scores = (
        torch.tensor([[logprob(model, *answer).item() for answer in pair] for pair in pairs])
        for model in (policy, reference)
    )
    documents = [[(*answer, s) for answer, s in zip(pair, by_ref)] for pair, by_ref in zip(pairs, scores.tolist())]
    policy.float().save_pretrained(tmp_path / "policy")
    model = replace(hf_model_config(str(tmp_path / "policy")), seq_len=room)
    cfg = jobs.make_config(model, micro_batch_size=1, global_batch_size=1, stage="dpo", dpo_beta=beta)
    (engine,) = jobs.engines([cfg], 1)
    load_hf(str(tmp_path / "policy"), cfg.model, engine.optimizer.states(), engine.ctx)
    engine.optimizer.finish_load()
    batches = [Rows.stack([laid_out(part, room)]) for part in (documents[:1], documents[1:])]
    found = evaluate_steps(engine, lambda step: batches[step - 1], 2)
    (chosen, rejected), by_answer = (beta * (logps - scores)).unbind(1), logps.mean(0).tolist()
    rewards = {"chosen": chosen, "rejected": rejected, "margins": chosen - rejected, "accuracies": chosen > rejected}
    expected = {f"rewards/{name}": x.double().mean().item() for name, x in rewards.items()}
    expected |= {"logps/chosen": by_answer[0], "logps/rejected": by_answer[1], "pairs": len(pairs)}
    assert found == pytest.approx(expected, rel=1e-4, abs=1e-5)


def test_six_pairs_in_rows_are_six_in_one() -> None:
    draws = np.random.default_rng(1)
    pairs = [tuple((draws.integers(0, 90, 4).tolist(), n, -5.0 * n) for n in draws.integers(1, 4, 2)) for _ in range(6)]
    model = jobs.llama(seq_len=36, init_std=0.15)
    results = []
    for cuts in ([1, 3, 2], [6]):
        at = np.cumsum([0, *cuts])
        rows = [laid_out(pairs[a:b], 36) for a, b in zip(at, at[1:])]
        cfg = jobs.make_config(model, micro_batch_size=1, global_batch_size=len(rows), **DPO)
        (engine,) = jobs.engines([cfg], 1)
        results.append(train_steps(engine, partial(lambda step, data: data, data=Rows.stack(rows)), 1))
    apart, together = results
    assert apart.steps[0] == pytest.approx(together.steps[0], rel=1e-5)
    assert_same_gradients([apart.gradients], put_together([together.gradients]), "rows")


# ------------------------------------------------------------------------------------------------------------ layouts


@pytest.mark.full
@pytest.mark.parametrize(
    "shape",
    [ranks_of(4, tp=2, pp=2), ranks_of(4, cp=2), ranks_of(2, pp=2, vp=2)],
    ids=str,
)
@pytest.mark.parametrize("zero", [1, 2, 3])
def test_five_steps(pool: WorkerPool, shape: Any, zero: int) -> None:
    """Of each, loss, gradient norm and figures; of the first, all gradients."""
    cfg = config_of(shape, (LLAMA, zero, {}, DATA))
    expected = five_steps_alone(in_one_process(cfg))
    ranks = pool.run(shape[0], trained, [cfg], shape[0], [pairs_of], 5)
    assert_same([rank[0] for rank in ranks], expected, f"{shape}, ZeRO-{zero}")


@cache
def five_steps_alone(cfg: Config) -> Any:
    return trained(0, [cfg], 1, [pairs_of], 5)[0]


DATA = {"data": pairs_of, **DPO}


class TestPreferences(Feature):
    strong = {
        ranks_of(2, tp=2): [(LLAMA, 1, {}, DATA), (LLAMA, 1, {}, {**DATA, "loss_chunk": 5, "dpo_loss": "ipo"})],
        ranks_of(2, pp=2): [(LLAMA, 1, {}, DATA), (LLAMA, 1, {}, {**DATA, "dpo_loss": "simpo", "dpo_beta": 2.0})],
        ranks_of(2, cp=2): [(LLAMA, 1, {}, DATA), (LLAMA, 1, {}, {**DATA, "loss_chunk": 5})],
        ranks_of(2): [(LLAMA, 1, {}, DATA), (LLAMA, 3, {}, {**DATA, "dpo_loss": "robust", "dpo_smoothing": 0.1})],
        ranks_of(2, ep=2): [(MIXTRAL, 1, {}, DATA)],
    }
    grid = {
        ranks_of(4, tp=2, cp=2): [(LLAMA, 1, {}, DATA)],
        **rows_of_pairs(DATA),
    }
    rounded = ROUNDED
    rounded_on = DATA
    compiled = ((ranks_of(2, tp=2), (LLAMA, 1, {}, DATA)),)
    planted = {
        "reference of the other sign": (ranks_of(2, cp=2), (LLAMA, 1, {}, DATA)),
        "a pair split": (ranks_of(2, tp=2), (LLAMA, 1, {}, DATA)),
        "sums per token": (ranks_of(2, tp=2), (LLAMA, 1, {}, DATA)),
        "weights as after a differentiated all-reduce": (ranks_of(2, cp=2), (LLAMA, 1, {}, DATA)),
    }

    @staticmethod
    def mistakes(rank: int, cfg: Config) -> dict[str, tuple[Any, str, Any]]:
        from megalite.core import microbatches, step
        from megalite.core.parts.counters.preferences import Preferences

        call = Preferences.__call__

        def wrong_sign(self: Any, loss_SB: Any, batch: Any, fwd: Any) -> Any:
            return call(self, loss_SB, replace(batch, references_SB=-batch.references_SB), fwd)

        def per_token(self: Any, loss_SB: Any, batch: Any, fwd: Any) -> Any:
            losses, weights = call(self, loss_SB, batch, fwd)
            return losses, weights / (weights != 0).sum().clamp(min=1) * 8

        def of_own_pairs(self: Any, loss_SB: Any, batch: Any, fwd: Any) -> Any:
            losses, weights = call(self, loss_SB, batch, fwd)
            return losses, weights * self._engine.ctx.axis("cp").size

        def to_microbatches(rows: Any, *args: Any) -> Any:
            # A pair lies in two micro-batches: its second document is that of the next row.
            owners = np.where(rows.owners % 2 == 1, np.roll(rows.owners, 1, 0), rows.owners)
            return original(replace(rows, owners=owners), *args)

        original = microbatches.to_microbatches
        return {
            "reference of the other sign": (Preferences, "__call__", wrong_sign),
            "sums per token": (Preferences, "__call__", per_token),
            "weights as after a differentiated all-reduce": (Preferences, "__call__", of_own_pairs),
            "a pair split": (step, "to_microbatches", to_microbatches),
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
