"""Documents scored in any layout, and tasks in a run: the figures are those of transformers on the run's export."""

from __future__ import annotations

import json
import math
import os
import re
import signal
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import megalite
from megalite.core.base.errors import UserError
from megalite.extras.convert.hf import export_hf
from megalite.extras.prepare.preprocess import preprocess
from megalite.runtime.checkpoint.hf.start import hf_model_config, load_hf
from megalite.runtime.data.scored import pack_scored, scored_rows
from tests.parity import jobs
from tests.parity.task_files import COMMON, DOCS
from tests.unit.checkpoint import hf_models
from tests.workers import WorkerError, WorkerPool

pytest.importorskip("transformers")

Documents = list[tuple[list[int], int]]

# ------------------------------------------------------------------------------------------------------- any layout


def documents(model: Any) -> Documents:
    """Of all lengths up to 32 places, some of them continued as the model would."""
    draws = np.random.default_rng(5)
    out: Documents = []
    for length in (2, 33, 5, 19, 11, 30, 3, 8):
        ids = draws.integers(0, 90, length).tolist()
        out.append((ids, int(draws.integers(1, length))))
    for start in ([5, 17, 3], [1]):
        ids = list(start)
        for _ in range(4):
            ids.append(int(model(torch.tensor([ids])).logits[0, -1].argmax()))
        out += [(ids, 4), ([*ids[:-1], (ids[-1] + 1) % 90], 4)]
    return out


@torch.no_grad()
def theirs(model: Any, docs: Documents) -> tuple[list[float], list[bool]]:
    """Sums and whether each id is the likeliest, a document at a time."""
    sums, greedy = [], []
    for ids, n in docs:
        logprobs = model(torch.tensor([ids[:-1]])).logits[0].double().log_softmax(-1)[-n:]
        targets = torch.tensor(ids[-n:])
        sums.append(logprobs.gather(1, targets[:, None]).sum().item())
        greedy.append(bool((logprobs.argmax(1) == targets).all()))
    return sums, greedy


def scored(
    rank: int, folder: str, docs: Documents, world: int, parallel: dict[str, Any], train: dict[str, Any], ended: bool
) -> tuple[list[float], list[bool]] | None:
    from megalite.core.scoring import rows_of_rank, score_rows

    cfg = jobs.make_config(hf_model_config(folder), parallel, micro_batch_size=1, **train)
    (engine,) = jobs.engines([cfg], world)
    load_hf(folder, cfg.model, engine.optimizer.states(), engine.ctx)
    engine.optimizer.finish_load()
    engine.optimizer.wait_weights()
    packs = pack_scored(docs, cfg.model.seq_len)
    rows, owners = scored_rows(docs, rows_of_rank(engine, packs, 1), cfg.model.seq_len)
    calls = iter([True, not ended or rank != world - 1, True, True, True, True])
    scores = score_rows(engine, rows, owners, len(docs), 1, lambda: next(calls))
    return None if scores is None else (scores.logprobs.tolist(), scores.is_greedy.tolist())


LAYOUTS: list[tuple[str, int, dict[str, Any], dict[str, Any]]] = [
    ("llama", 1, {}, {}),
    ("llama", 2, {"tp": 2}, {"loss_chunk": 5}),
    ("llama", 2, {"pp": 2}, {}),
    ("llama", 2, {"cp": 2}, {}),
    ("llama", 2, {"zero": 3, "zero_whole_below": 500, "debug_zero": True}, {}),
    ("mixtral", 2, {"ep": 2}, {}),
]
MORE = [
    ("llama", 3, {}, {"global_batch_size": 9}),
    ("gpt2", 4, {"tp": 2, "pp": 2, "zero": 1}, {}),
    ("llama", 4, {"pp": 2, "cp": 2, "zero": 3, "zero_whole_below": 500}, {}),
    ("gemma2", 2, {"tp": 2}, {}),
    ("gemma2", 2, {"pp": 2, "vp": 2}, {}),
    ("llama", 2, {"zero": 2}, {}),
    ("llama4", 2, {"cp": 2}, {}),
    ("qwen3_next", 2, {"tp": 2}, {}),
    ("bloom", 2, {"pp": 2}, {}),
    ("gpt_oss", 4, {"tp": 2, "ep": 2}, {}),
]


@pytest.mark.parametrize(
    ("case", "world", "parallel", "train"),
    [*LAYOUTS, *(pytest.param(*row, marks=pytest.mark.full) for row in MORE)],
    ids=lambda x: str(x).replace(" ", ""),
)
def test_scores_are_those_of_transformers(
    pool: WorkerPool, tmp_path: Path, case: str, world: int, parallel: dict[str, Any], train: dict[str, Any]
) -> None:
    model = hf_models.make_model(case, tmp_path / "hf")
    docs = documents(model)
    sums, greedy = theirs(model, docs)
    assert any(greedy)
    assert not all(greedy)
    for found in pool.run(world, scored, str(tmp_path / "hf"), docs, world, parallel, train, False):
        np.testing.assert_allclose(found[0], sums, rtol=1e-5, atol=1e-5)
        assert found[1] == greedy


@pytest.mark.full
def test_one_request_passes_a_pipeline_of_four(pool: WorkerPool, tmp_path: Path) -> None:
    """Most of its micro-batches are padding."""
    model = hf_models.make_model("gemma2", tmp_path / "hf")
    docs = documents(model)[:1]
    sums, greedy = theirs(model, docs)
    for found in pool.run(4, scored, str(tmp_path / "hf"), docs, 4, {"pp": 4}, {}, False):
        np.testing.assert_allclose(found[0], sums, rtol=1e-5, atol=1e-5)
        assert found[1] == greedy


def test_all_ranks_end_when_one_is_asked_to(pool: WorkerPool, tmp_path: Path) -> None:
    model = hf_models.make_model("llama", tmp_path / "hf")
    docs = documents(model) * 3
    found = pool.run(2, scored, str(tmp_path / "hf"), docs, 2, {"pp": 2}, {"global_batch_size": 2}, True)
    assert found == [None, None]


# ------------------------------------------------------------------------------------------------------------ a run

CHOICES = """task: choices
output_type: multiple_choice
doc_to_text: "{{question}}"
doc_to_choice: "{{options}}"
doc_to_target: answer
num_fewshot: 1
fewshot_split: test
fewshot_delimiter: "; "
metric_list: [{metric: acc}, {metric: acc_norm}, {metric: acc_bytes}]
"""
ENDS = """task: ends
output_type: loglikelihood
doc_to_text: "{{question}}"
doc_to_target: "{{options[0]}}"
"""
ROLLING = """task: rolling
output_type: loglikelihood_rolling
doc_to_text: ""
doc_to_target: "{{question * 9}}"
"""
SEQ = 48


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Data of a run, and three tasks on one file."""
    folder = tmp_path_factory.mktemp("tasks")
    (folder / "a.txt").write_text("the sea is deep and the tea is cheap. " * 60)
    preprocess([str(folder / "a.txt")], "bytes", str(folder / "a"))
    (folder / "docs.jsonl").write_text("".join(json.dumps(doc) + "\n" for doc in DOCS))
    for name, body in (("choices", CHOICES), ("ends", ENDS), ("rolling", ROLLING)):
        (folder / f"{name}.yaml").write_text(body + COMMON.format(file=folder / "docs.jsonl"))
    return folder


def trained(rank: int, folder: str, name: str, tasks: bool, stop: bool = False, **options: Any) -> list[dict[str, Any]]:
    """Train three steps, and return the lines of metrics.jsonl; on ranks other than 0 none.

    `stop`: ask this rank to stop after the first.
    """
    sizes = {"num_layers": 2, "hidden_size": 32, "num_heads": 4, "num_kv_heads": 2, "ffn_hidden_size": 48}
    steps = {"train_steps": 3, "lr": 2e-2, "lr_decay": "constant", "global_batch_size": 4, "micro_batch_size": 1}
    steps["seq_len"] = SEQ
    data = {"data": f"{folder}/a", "split": "1,0,0", "tokenizer": "bytes", "run_dir": f"{folder}/{name}"}
    if tasks:
        options |= {"eval_tasks": [f"{folder}/{task}.yaml" for task in ("choices", "ends", "rolling")]}
    evaluated = {"eval_every": 1, "eval_steps": 0, "device": "cpu"}
    cfg = megalite.configure(**{**sizes, **steps, **data, **evaluated, **options})
    with megalite.start(cfg) as run:
        megalite.fit(run, [lambda run, _: setattr(run, "stop_asked", stop)])
    lines = Path(folder, name, "metrics.jsonl").read_text().splitlines() if rank == 0 else []
    return [json.loads(line) for line in lines]


def figures(lines: list[dict[str, Any]]) -> list[dict[str, float]]:
    events = [line for line in lines if line.get("event") == "eval_tasks"]
    assert [event["step"] for event in events] == [1, 2, 3]
    assert all(event["seconds"] > 0 for event in events)
    return [{name: value for name, value in event.items() if "/" in name} for event in events]


@torch.no_grad()
def by_hand(hf: Path) -> dict[str, float]:
    """The figures of the tasks by transformers, a text at a time, and Python's own seed of the examples."""
    from random import Random

    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(hf, dtype=torch.float32)

    def score(context: str, text: str) -> tuple[float, bool]:
        whole = list((context + text).encode())
        n = len(whole) - len(context.rstrip().encode())
        ids = ([256] + whole)[-SEQ - 1 :] if n == len(whole) else whole[-SEQ - 1 :]
        sums, greedy = theirs(model, [(ids, n)])
        return sums[0], greedy[0]

    drawn, hits = Random(1234), {"acc": [], "acc_norm": [], "acc_bytes": []}  # type: ignore[var-annotated]
    for doc in DOCS:
        pair = drawn.sample(DOCS, 2)
        shot = next(d for d in pair if d != doc)
        before = f"{shot['question']} {shot['options'][shot['answer']]}; "  # type: ignore[index]
        sums = np.array([score(before + str(doc["question"]), " " + o)[0] for o in doc["options"]])  # type: ignore[attr-defined]
        for name, sizes in (("acc", [1, 1, 1]), ("acc_norm", [5, 10, 2]), ("acc_bytes", [5, 10, 3])):
            hits[name].append(float(np.argmax(sums / sizes) == doc["answer"]))
    out: dict[str, Any] = {}
    for name, values in hits.items():
        out |= {f"choices/{name}": np.mean(values), f"choices/{name}_stderr": np.std(values, ddof=1) / math.sqrt(5)}
    ends = [score(str(doc["question"]), " deep") for doc in DOCS]
    greedy = [float(hit) for _, hit in ends]
    out |= {"ends/perplexity": math.exp(-np.mean([s for s, _ in ends])), "ends/acc": np.mean(greedy)}
    out["ends/acc_stderr"] = np.std(greedy, ddof=1) / math.sqrt(5)
    total, words, size = 0.0, 0, 0
    for doc in DOCS:
        text = str(doc["question"]) * 9
        ids = [256, *text.encode()]
        words, size = words + len(text.split(" ")), size + len(text)
        for end in range(SEQ, len(ids) - 1 + SEQ, SEQ):
            last = min(end, len(ids) - 1)
            total += theirs(model, [(ids[max(last - SEQ, 0) : last + 1], last - end + SEQ)])[0][0]
    out |= {"rolling/word_perplexity": math.exp(-total / words), "rolling/byte_perplexity": math.exp(-total / size)}
    return out | {"rolling/bits_per_byte": -total / size / math.log(2)}


def test_figures_are_those_of_transformers_on_the_export(folder: Path) -> None:
    found = figures(trained(0, str(folder), "alone", tasks=True))
    export_hf(folder / "alone" / "checkpoints" / "step_00000003", folder / "hf", tokenizer="bytes")
    expected = by_hand(folder / "hf")
    assert found[-1] == {name: pytest.approx(value, rel=1e-5, abs=1e-9) for name, value in expected.items()}
    assert found[0] != found[1] != found[2]


ROWS: list[tuple[int, dict[str, Any]]] = [(2, {"tp": 2}), (2, {"zero": 3})]
MORE_ROWS: list[tuple[int, dict[str, Any]]] = [
    (2, {"cp": 2, "zero": 2}),
    (2, {"zero": 1}),
    (3, {"global_batch_size": 6}),
    (4, {"tp": 2, "pp": 2}),
    (2, {"pp": 2, "vp": 2, "num_layers": 4}),
    (2, {"ep": 2, "num_experts": 4, "moe_topk": 2, "hidden_dropout": 0.1}),
    (1, {"hidden_dropout": 0.1, "precision": "bf16"}),
]


@pytest.mark.parametrize(
    ("world", "options"), [*ROWS, *(pytest.param(*row, marks=pytest.mark.full) for row in MORE_ROWS)]
)
def test_tasks_move_no_bit_of_training(pool: WorkerPool, folder: Path, world: int, options: dict[str, Any]) -> None:
    name = "_".join(map(str, options))
    runs = []
    for tasks in (True, False):
        lines = pool.run(world, trained_in, str(folder), f"{name}_{tasks}", tasks, options)[0]
        steps = [line for line in lines if "event" not in line]
        assert len(steps) == 3
        bits = [(line["loss"], line["grad_norm"], line["consumed_samples"]) for line in steps]
        runs.append((bits, shards(folder / f"{name}_{tasks}")))
        if tasks:
            assert len(figures(lines)[-1]) == 12
    assert runs[0] == runs[1]


def trained_in(rank: int, folder: str, name: str, tasks: bool, options: dict[str, Any]) -> list[dict[str, Any]]:
    return trained(rank, folder, name, tasks, **options)


def shards(run: Path) -> list[bytes]:
    """What a checkpoint holds of weights and moments."""
    files = sorted((run / "checkpoints" / "step_00000003").rglob("*.safetensors"))
    assert files
    return [file.read_bytes() for file in files]


SAME: list[tuple[int, dict[str, Any], dict[str, Any]]] = [
    (2, {"pp": 2}, {}),
    (2, {"tp": 2}, {}),
    (4, {"tp": 2, "pp": 2}, {}),
    (2, {"cp": 2}, {}),
    (2, {"pp": 2, "vp": 2}, {"num_layers": 4}),
    (2, {"ep": 2}, {"num_experts": 4, "moe_topk": 2}),
    (3, {}, {"global_batch_size": 6}),
    *((2, {"zero": zero}, {}) for zero in (1, 2, 3)),
]


@pytest.mark.parametrize(
    ("world", "layout", "model"),
    [SAME[0], *(pytest.param(*row, marks=pytest.mark.full) for row in SAME[1:])],
    ids=lambda x: str(x).replace(" ", ""),
)
def test_the_figures_are_the_same_in_a_layout(
    pool: WorkerPool, folder: Path, world: int, layout: dict[str, Any], model: dict[str, Any]
) -> None:
    """Of the same weights: what is learned in another layout differs by the rounding of its steps."""
    options, name = {**model, "lr": 1e-30, "init_std": 0.2}, "_".join(map(str, (world, *layout.items())))
    alone = figures(trained(0, str(folder), f"one_{name}", tasks=True, **options))
    apart = figures(pool.run(world, trained_in, str(folder), f"apart_{name}", True, {**options, **layout})[0])
    for one, two in zip(alone, apart, strict=True):
        assert one == {name: pytest.approx(value, rel=1e-6) for name, value in two.items()}


@pytest.mark.full
def test_a_kill_within_an_evaluation_changes_no_figure(pool: WorkerPool, folder: Path) -> None:
    options = {"tp": 2, "save_every": 1}
    left_alone = figures(pool.run(2, trained_in, str(folder), "left_alone", True, options)[0])
    with pytest.raises(WorkerError, match="died"):
        pool.run(2, killed_in_the_second_evaluation, str(folder), "killed", options)
    assert [path.name for path in (folder / "killed" / "checkpoints").glob("step_*")] == ["step_00000001"]
    assert figures(pool.run(2, trained_in, str(folder), "killed", True, options)[0]) == left_alone


def killed_in_the_second_evaluation(rank: int, folder: str, name: str, options: dict[str, Any]) -> None:
    """Rank 0 dies when all is scored and nothing is written down."""
    from megalite.extras.tasks import in_loop

    def scored(*args: Any) -> Any:
        calls.append(real(*args))
        if rank == 0 and len(calls) == 2:
            os.kill(os.getpid(), signal.SIGKILL)
        return calls[-1]

    calls, real = list[Any](), in_loop.score_rows
    in_loop.score_rows = scored  # type: ignore[assignment]
    trained(rank, folder, name, True, **options)


def test_a_run_that_is_asked_to_stop_evaluates_no_further(folder: Path) -> None:
    lines = trained(0, str(folder), "stopped", tasks=True, stop=True)
    assert [line["step"] for line in lines if line.get("event") in ("eval_tasks", "save")] == [1, 2]


def refusal(rank: int, folder: str) -> str:
    """What a rank says where rank 0 alone is given tasks."""
    try:
        trained(rank, folder, "some", tasks=rank == 0)
    except UserError as e:
        return str(e)
    return ""


def test_tasks_are_given_on_all_ranks_or_none(pool: WorkerPool, folder: Path) -> None:
    first, second = pool.run(2, refusal, str(folder))
    assert first == second
    assert re.match(r"--eval-tasks of rank 1 \(none\): must equal rank 0's \(.*choices.yaml .*\); start every", first)


def test_tasks_alone_are_enough_to_evaluate(folder: Path) -> None:
    """The step between evaluations too: the last is evaluated at the end, once; a best checkpoint needs a loss."""
    lines = trained(0, str(folder), "no_loss", tasks=True, eval_steps=1, eval_every=2)
    assert [line["step"] for line in lines if line.get("event") == "eval_tasks"] == [2, 3]
    assert not [line for line in lines if line.get("event") == "eval"]
    refused: list[tuple[bool, dict[str, Any]]] = [(False, {}), (True, {"keep_best": 1, "save_every": 1})]
    for tasks, options in refused:
        with pytest.raises(UserError, match="--eval-every 1 with --split 1,0,0: leaves no documents to evaluate on"):
            trained(0, str(folder), "refused", tasks=tasks, eval_steps=1, **options)


def test_a_limit_takes_the_first_documents(folder: Path) -> None:
    from megalite.extras.tasks.read import read_task

    assert read_task(str(folder / "ends.yaml"), 2).docs == DOCS[:2]
    assert len(read_task(str(folder / "ends.yaml"), 0).docs) == 5


def test_tasks_need_a_tokenizer(folder: Path) -> None:
    options = {"num_layers": 1, "hidden_size": 16, "num_heads": 2, "seq_len": 8, "mock_data": True, "device": "cpu"}
    cfg = megalite.configure(**options, eval_tasks=[str(folder / "ends.yaml")], run_dir=str(folder / "none"))
    rule = "texts of tasks become tokens by the run's tokenizer, and there is none; give --tokenizer"
    with pytest.raises(UserError, match=rf"--eval-tasks .*ends.yaml: {rule}"):
        megalite.start(cfg)
    assert not (folder / "none").exists()
