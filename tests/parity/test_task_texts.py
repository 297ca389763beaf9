"""Texts that a run writes for its tasks: those of transformers on its export, with a cache and without, in layouts."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import megalite
from megalite.core.base.errors import UserError
from megalite.extras.convert.hf import export_hf
from megalite.extras.inference import command
from megalite.extras.prepare.preprocess import preprocess
from megalite.extras.tasks.in_loop import open_tasks
from tests.parity.task_files import COMMON, DOCS, TEXT
from tests.workers import WorkerPool

pytest.importorskip("transformers")

SEQ = 48
MANY = """task: many
output_type: generate_until
doc_to_text: "{{question}}"
doc_to_target: "{{options[0]}}"
generation_kwargs: {until: ["aoa", "aaaa", "t"], max_gen_toks: 20}
"""
QUESTIONS = [DOCS[i % 5]["question"][: 3 * i] for i in range(20)]  # type: ignore[index]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Data of a run, a task of few texts and one of many, of all lengths."""
    folder = tmp_path_factory.mktemp("texts")
    (folder / "a.txt").write_text("the sea is deep and the tea is cheap. " * 60)
    preprocess([str(folder / "a.txt")], "bytes", str(folder / "a"))
    for name, body, docs in (("text", TEXT, DOCS), ("many", MANY, [{**DOCS[0], "question": q} for q in QUESTIONS])):
        (folder / f"{name}.jsonl").write_text("".join(json.dumps(doc) + "\n" for doc in docs))
        (folder / f"{name}.yaml").write_text(body + COMMON.format(file=folder / f"{name}.jsonl"))
    return folder


def started(folder: str, name: str, tasks: list[str], **more: Any) -> Any:
    options: dict[str, Any] = {"num_layers": 2, "hidden_size": 32, "num_heads": 4, "num_kv_heads": 2}
    options |= {"ffn_hidden_size": 48, "seq_len": SEQ, "data": f"{folder}/a", "split": "1,0,0", "tokenizer": "bytes"}
    options |= {"train_steps": 3, "lr": 2e-2, "global_batch_size": 4, "micro_batch_size": 1, "eval_steps": 0}
    options |= {"eval_tasks": [f"{folder}/{task}.yaml" for task in tasks], "run_dir": f"{folder}/{name}"}
    return megalite.start(megalite.configure(**{**options, "device": "cpu", **more}))


def wrote(rank: int, folder: str, name: str, task: str, options: dict[str, Any]) -> tuple[list[str], list[str], int]:
    """What a model writes on rank 0, with a cache and without, and how many ids a stage of this rank has read."""
    with started(folder, name, [task], **options) as run:
        megalite.fit(run)
        tasks = open_tasks(run.engine.cfg, run.engine.ctx)
        assert tasks is not None
        whole, read = [], []
        for cached in (True, False):
            read.append(0)
            tasks.cached = cached

            def count(_: Any, args: tuple[torch.Tensor, ...]) -> None:
                read[-1] += args[0].shape[0] * args[0].shape[1]

            hooks = [stage.register_forward_pre_hook(count) for stage in run.engine.stages.values()]
            texts = tasks.write(run.engine, run.engine.cfg, lambda: True)
            assert texts is not None
            whole.append(texts)
            for hook in hooks:
                hook.remove()
        return whole[0], whole[1], read[0]


@pytest.mark.parametrize("parallel", [{"tp": 2}, {"pp": 2}, {"zero": 3}, {"cp": 2}], ids=str)
def test_texts_are_those_of_transformers(pool: WorkerPool, folder: Path, parallel: dict[str, Any]) -> None:
    from transformers import AutoModelForCausalLM

    at = folder / f"wrote_{'_'.join(parallel)}"
    found, whole, _ = pool.run(2, wrote, str(folder), at.name, "text", parallel)[0]
    export_hf(at / "checkpoints" / "step_00000003", at / "hf", tokenizer="bytes")
    model = AutoModelForCausalLM.from_pretrained(at / "hf", dtype=torch.float32)
    expected = []
    for doc in DOCS:
        ids = torch.tensor([list(f"and {doc['question']}".encode())[-(SEQ - 12) :]])
        out = model.generate(ids, max_new_tokens=12, do_sample=False, eos_token_id=256)[0, ids.shape[1] :].tolist()
        text = bytes(i for i in out if i < 256).decode(errors="replace")
        expected.append(text.split("e")[0].split("\n\n")[0])
    assert found == whole == expected
    lines = [json.loads(line) for line in (at / "metrics.jsonl").read_text().splitlines()]
    (event,) = [line for line in lines if line.get("event") == "eval_tasks"]
    right = [text == " deep" for text in expected]
    assert event["text/exact_match"] == pytest.approx(np.mean(right))


EXPERTS = {"num_experts": 4, "moe_topk": 2}
ROWS: list[tuple[int, dict[str, Any]]] = [(1, {}), (4, {"tp": 2, "pp": 2})]
MORE_ROWS: list[tuple[int, dict[str, Any]]] = [
    (4, {"ep": 2, **EXPERTS}),
    (2, {"pp": 2, "vp": 2, "num_layers": 4}),
    (2, {"tp": 2, "sequence_parallel": False, "arch": "gpt2"}),
    (4, {"tp": 2, "ep": 2, "zero": 2, **EXPERTS}),
    (4, {"pp": 2, "cp": 2, "zero": 3}),
    (3, {"global_batch_size": 6, "position": "alibi"}),
]


@pytest.mark.parametrize(
    ("world", "options"), [*ROWS, *(pytest.param(*row, marks=pytest.mark.full) for row in MORE_ROWS)], ids=str
)
def test_a_cache_changes_no_text(pool: WorkerPool, folder: Path, world: int, options: dict[str, Any]) -> None:
    """More texts than are kept at once, some of which end early: the rest move together."""
    name = f"many_{world}_{'_'.join(options)}"
    found, whole, _ = pool.run(world, wrote, str(folder), name, "many", {**options, "init_std": 0.2})[0]
    assert found == whole
    assert len({*found}) > 3
    assert options or len({len(text) for text in found}) > 2


def test_each_token_is_read_once(folder: Path) -> None:
    """Contexts of 4 texts at a time are filled up to the longest, and rows whose text has ended go on by halves."""
    texts, _, read = wrote(0, str(folder), "once", "text", {})
    lengths = [len(f"and {doc['question']}".encode()[-(SEQ - 12) :]) for doc in DOCS]
    assert sum(lengths) + sum(map(len, texts)) < read < 4 * max(lengths) + max(0, *lengths) + 5 * 12


def stopped(rank: int, folder: str) -> bool:
    """Whether writing ends on this rank where rank 1 is asked to stop before its 20th pass."""
    with started(folder, "stopped", ["many"], pp=2) as run:
        tasks, calls = open_tasks(run.engine.cfg, run.engine.ctx), iter(range(1000))
        assert tasks is not None
        return tasks.write(run.engine, run.engine.cfg, lambda: rank == 0 or next(calls) < 20) is None


def test_all_ranks_end_in_the_middle_of_a_text(pool: WorkerPool, folder: Path) -> None:
    assert pool.run(2, stopped, str(folder)) == [True, True]


def trained(rank: int, folder: str, name: str, tasks: list[str], options: dict[str, Any]) -> None:
    with started(folder, name, tasks, eval_every=1, **options) as run:
        megalite.fit(run)


BITS: list[dict[str, Any]] = [{"zero": 3}, {"tp": 2, "hidden_dropout": 0.1}]


@pytest.mark.parametrize("options", [BITS[0], pytest.param(BITS[1], marks=pytest.mark.full)], ids=str)
def test_texts_move_no_bit_of_training(pool: WorkerPool, folder: Path, options: dict[str, Any]) -> None:
    bits = []
    for tasks in (["many"], []):
        name = f"bits_{'_'.join(options)}_{len(tasks)}"
        pool.run(2, trained, str(folder), name, tasks, options)
        lines = [json.loads(line) for line in (folder / name / "metrics.jsonl").read_text().splitlines()]
        assert len([line for line in lines if line.get("event") == "eval_tasks"]) == 3 * len(tasks)
        files = sorted((folder / name / "checkpoints" / "step_00000003").rglob("*.safetensors"))
        assert files
        losses = [(line["loss"], line["grad_norm"]) for line in lines if "event" not in line]
        bits.append((losses, [file.read_bytes() for file in files]))
    assert bits[0] == bits[1]


CHOICES = """task: choices
output_type: multiple_choice
doc_to_text: "{{question}}"
doc_to_choice: "{{options}}"
doc_to_target: answer
"""


def test_a_checkpoint_has_the_figures_of_its_run(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    tasks = ["text", "many", "choices"]
    (folder / "choices.yaml").write_text(CHOICES + COMMON.format(file=folder / "text.jsonl"))
    with started(str(folder), "of_checkpoint", tasks) as run:
        megalite.fit(run)
    lines = [json.loads(line) for line in (folder / "of_checkpoint" / "metrics.jsonl").read_text().splitlines()]
    (event,) = [line for line in lines if line.get("event") == "eval_tasks"]
    files = [str(folder / f"{task}.yaml") for task in tasks]
    capsys.readouterr()
    command.evaluate([str(folder / "of_checkpoint"), "--device", "cpu", "--eval-tasks", *files])
    found = json.loads(capsys.readouterr().out)
    assert (found.pop("source"), found.pop("step")) == ("eval_tasks", 3)
    assert found == {name: pytest.approx(value, rel=1e-5) for name, value in event.items() if "/" in name}
    assert len(found) == 8
    command.evaluate([str(folder / "of_checkpoint"), "--eval-tasks", files[0], "--eval-limit", "1"])
    assert "text/exact_match_stderr" not in json.loads(capsys.readouterr().out)
    with pytest.raises(UserError, match="--eval-limit 1: bounds tasks, and there are none"):
        command.evaluate([str(folder / "of_checkpoint"), "--text", "a.txt", "--eval-limit", "1"])
