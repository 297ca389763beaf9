"""Files of tasks: what they say, what is refused, and how scores become metrics."""

from __future__ import annotations

import gzip
import json
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import yaml

import megalite
from megalite.core.base.errors import UserError
from megalite.core.mesh.context import ParallelContext
from megalite.core.mesh.grid import Grid
from megalite.core.scoring import Scores
from megalite.extras.tasks.in_loop import open_tasks
from megalite.extras.tasks.read import read_task
from megalite.extras.tasks.requests import Question, documents_of, mean_of, metrics_of, questions
from megalite.extras.tasks.writing import Request, WholeTexts, write_texts
from megalite.runtime.data.tokenizer import load_tokenizer
from megalite.runtime.recover.member import Companion
from megalite.runtime.recover.messages import Go, Turn

DOCS = [
    {"q": "Two", "options": ["a", "bé"], "answer": 0, "label": "bé"},
    {"q": "and two? ", "options": ["c", "d"], "answer": 1, "label": "c"},
    {"q": "Three", "options": ["e", "f"], "answer": 1, "label": "f"},
]
BODY: dict[str, Any] = {
    "task": "mine",
    "output_type": "multiple_choice",
    "dataset_path": "json",
    "test_split": "test",
    "doc_to_text": "Q: {{q}}\nA:",
    "doc_to_choice": "options",
    "doc_to_target": "answer",
}
WRITES: dict[str, Any] = {"output_type": "generate_until", "doc_to_choice": ...}


def written(folder: Path, docs: list[dict[str, Any]] = DOCS, **changes: Any) -> str:
    (folder / "docs.jsonl").write_text("".join(json.dumps(doc) + "\n" for doc in docs))
    files = {"dataset_kwargs": {"data_files": {"test": str(folder / "docs.jsonl")}}}
    body = {key: value for key, value in (BODY | files | changes).items() if value is not ...}
    (folder / "task.yaml").write_text(yaml.safe_dump(body))
    return str(folder / "task.yaml")


@pytest.mark.parametrize(
    ("changes", "error"),
    [
        ({"output_type": "generate_until"}, "doc_to_choice is not supported by --eval-tasks"),
        ({**WRITES, "generation_kwargs": {"do_sample": True}}, "texts of --eval-tasks are greedy"),
        ({**WRITES, "generation_kwargs": {"max_gen_toks": 0}}, "max_gen_toks 0 is no number from 1"),
        ({**WRITES, "filter_list": [{"name": "x", "filter": [{"function": "map"}]}]}, "filters regex and take_first"),
        ({**WRITES, "filter_list": [{"name": "x", "filter": []}] * 2}, "each with its own name"),
        ({"dataset_path": "ai2_arc"}, "dataset_path must be json, with local files in dataset_kwargs.data_files"),
        ({"dataset_kwargs": {"data_files": 3}}, "dataset_kwargs must be data_files alone"),
        ({"dataset_kwargs": {"data_files": {"test": "no.jsonl"}}}, "its data file no.jsonl cannot be read"),
        ({"test_split": "valid"}, "its split valid has no file in data_files; add valid: FILE"),
        ({"test_split": ...}, "has neither test_split nor validation_split"),
        ({"doc_to_target": ...}, "has no doc_to_target"),
        ({"doc_to_choice": ...}, "has no doc_to_choice"),
        ({"filter_list": [{"name": "x"}]}, "filter_list is not supported by --eval-tasks; leave it out, or evaluate"),
        ({"include": "other.yaml"}, "include is not supported by --eval-tasks"),
        ({"process_docs": "x", "repeats": 3}, "process_docs, repeats is not supported by --eval-tasks"),
        ({"metric_list": [{"metric": "f1"}]}, "metric f1 is not among acc, acc_norm, acc_bytes"),
        ({"metric_list": [{"metric": "acc", "aggregation": "median"}]}, "metric acc is made by aggregation: mean"),
        ({"num_fewshot": 3, "fewshot_split": "test"}, "num_fewshot 3 is more than the 3 documents of test"),
        ({"num_fewshot": 1, "fewshot_config": {"samples": []}}, "fewshot_config.samples is not supported"),
        ({"task": ...}, "has no name"),
        ({"output_type": ["loglikelihood"]}, "output_type ['loglikelihood'] is not among multiple_choice"),
        ({"test_split": ["test"]}, "its split ['test'] is no name; name one split"),
        ({"metric_list": [{"metric": ["acc"]}]}, "metric ['acc'] is not among acc"),
        ({"fewshot_config": ["first_n"]}, "fewshot_config ['first_n'] is no mapping of keys to values"),
        ({"target_delimiter": None}, "target_delimiter None is no text; put it in quotes, or leave it out"),
        ({"fewshot_delimiter": 1}, "fewshot_delimiter 1 is no text"),
    ],
    ids=lambda x: str(x)[:40],
)
def test_what_is_not_supported_is_refused_in_a_line(tmp_path: Path, changes: dict[str, Any], error: str) -> None:
    with pytest.raises(UserError) as caught:
        read_task(written(tmp_path, **changes), 0)
    assert str(caught.value).startswith(f"--eval-tasks {tmp_path / 'task.yaml'}: ")
    assert error in str(caught.value)


def test_functions_in_a_file_are_not_run(tmp_path: Path) -> None:
    (tmp_path / "task.yaml").write_text("task: x\nprocess_docs: !function utils.process_docs\n")
    with pytest.raises(UserError, match="'!function': Python functions of a task file are not run by --eval-tasks"):
        read_task(str(tmp_path / "task.yaml"), 0)
    # The first is a template without quotes, the last a date that is none.
    for text in ("doc_to_text: {{q}}", "task: !own x", "[1", "[" * 10_000, "metadata: {version: 2024-02-30}"):
        (tmp_path / "task.yaml").write_text(text)
        with pytest.raises(UserError, match=r"is no YAML \(.*a template stands in quotes: '{{question}}'"):
            read_task(str(tmp_path / "task.yaml"), 0)
    (tmp_path / "task.yaml").write_text("- a")
    with pytest.raises(UserError, match="is no mapping"):
        read_task(str(tmp_path / "task.yaml"), 0)
    with pytest.raises(UserError, match="none.yaml: cannot be read"):
        read_task(str(tmp_path / "none.yaml"), 0)


def test_data_may_be_a_list_or_compressed(tmp_path: Path) -> None:
    file = written(tmp_path)
    plain = read_task(file, 0)
    (tmp_path / "docs.json").write_text(json.dumps(DOCS))
    (tmp_path / "docs.jsonl.gz").write_bytes(gzip.compress((tmp_path / "docs.jsonl").read_bytes()))
    for name in ("docs.json", "docs.jsonl.gz"):
        assert read_task(written(tmp_path, dataset_kwargs={"data_files": {"test": str(tmp_path / name)}}), 0) == plain


def test_damaged_data_are_told_in_a_line(tmp_path: Path) -> None:
    packed = bytearray(gzip.compress(b'{"q": "a text"}\n' * 9))
    packed[10] = 255  # a kind of block that there is not
    for name, data in (("nested.json", b"[" * 100_000), ("damaged.jsonl.gz", bytes(packed))):
        (tmp_path / name).write_bytes(data)
        file = written(tmp_path, dataset_kwargs={"data_files": {"test": str(tmp_path / name)}})
        with pytest.raises(UserError, match=f"its data file .*{name} is no JSON"):
            read_task(file, 0)


def pairs(tmp_path: Path, **changes: Any) -> list[Question]:
    return questions(read_task(written(tmp_path, **changes), 0))


def test_questions_of_multiple_choice(tmp_path: Path) -> None:
    first, second, _ = pairs(tmp_path)
    assert first.pairs == [("Q: Two\nA:", " a"), ("Q: Two\nA:", " bé")]
    assert (first.gold, first.sizes) == ((0,), ((1, 2), (1, 3)))
    assert second.pairs[1] == ("Q: and two? \nA:", " d")
    # By its text, by a template, and a list of right ones.
    assert [q.gold for q in pairs(tmp_path, doc_to_target="label")] == [(1,), (0,), (1,)]
    assert [q.gold for q in pairs(tmp_path, doc_to_target="{{1 - answer}}")] == [(1,), (0,), (0,)]
    assert pairs(tmp_path, doc_to_target="{{[0, 1]}}")[0].gold == (0, 1)
    # The choice is in the context.
    (question, *_) = pairs(tmp_path, doc_to_text="answer", doc_to_target="label")
    assert (question.pairs, question.gold) == ([("a", " bé"), ("bé", " bé")], (0,))
    # What a choice gains by the context.
    (question, *_) = pairs(tmp_path, metric_list=[{"metric": "acc_mutual_info"}], target_delimiter="")
    assert question.pairs == [("Q: Two\nA:", "a"), ("Q: Two\nA:", "bé"), ("", "a"), ("", "bé")]
    with pytest.raises(UserError, match="task mine, document 0: .* the answer 7 is not one of the 2 choices"):
        pairs(tmp_path, doc_to_target=7)
    with pytest.raises(UserError, match="task mine, document 0: .* 'nothing' is undefined"):
        pairs(tmp_path, doc_to_text="{{nothing}}")
    with pytest.raises(UserError, match="task mine, document 0: .*SecurityError"):
        pairs(tmp_path, doc_to_text="{{q.__class__.__mro__}}")


ENDLESS = "{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}"


@pytest.mark.parametrize(
    ("changes", "error"),
    [
        ({"doc_to_text": ENDLESS}, "RecursionError"),
        ({"doc_to_text": "{{ q | regex_replace('(', '') }}"}, "unterminated subpattern"),
        ({"doc_to_text": "{{q}}\ud83d"}, "UnicodeEncodeError"),
        ({"doc_to_text": "{{q}}\ud83d", "output_type": "loglikelihood"}, "UnicodeEncodeError"),
    ],
)
def test_texts_that_cannot_be_made_are_told_in_a_line(tmp_path: Path, changes: dict[str, Any], error: str) -> None:
    # YAML has no halves of surrogate pairs, JSON has.
    docs = [{**doc, "half": "\ud83d"} for doc in DOCS]
    changes |= {"doc_to_text": str(changes["doc_to_text"]).replace("\ud83d", "{{half}}")}
    task = read_task(written(tmp_path, docs, **changes, doc_to_target="label"), 0)
    with pytest.raises(UserError, match=f"task mine, document 0: .* fails .*{error}"):
        questions(task)


def test_the_first_document_says_whether_questions_are_numbers_of_choices(tmp_path: Path) -> None:
    text, number = {**DOCS[0], "q": "What is 1?"}, {**DOCS[0], "q": "1"}
    shots = {"num_fewshot": 1, "fewshot_split": "test", "fewshot_config": {"sampler": "first_n"}}
    for first, then, rule in (
        (text, number, "the question 1 is a number, that of document 0 is none"),
        (number, text, "the question 'What is 1.' is no number, that of document 0 is one"),
    ):
        task = {"doc_to_text": "{{q}}", "doc_to_target": "label"}
        with pytest.raises(UserError, match=f"task mine, document 1: .*{rule}"):
            questions(read_task(written(tmp_path, [first, then], **task), 0))
        # An example too is what the first document says.
        with pytest.raises(UserError, match=f"task mine, document 0: .*{rule}"):
            questions(read_task(written(tmp_path, [first, then], **task, **shots), 0))


def test_a_recovered_run_goes_on_without_tasks_that_are_gone(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    options = {"num_layers": 1, "hidden_size": 16, "num_heads": 2, "seq_len": 64, "device": "cpu"}
    file = written(tmp_path)
    cfg = megalite.configure(**options, mock_data=True, tokenizer="bytes", eval_tasks=[file])
    ctx, companion = ParallelContext.create(Grid.of(1), torch.device("cpu")), Companion()
    companion.turn = Turn(Go(round=1))
    assert open_tasks(cfg, ctx, companion) is not None
    (tmp_path / "docs.jsonl").unlink()
    with pytest.raises(UserError, match="docs.jsonl cannot be read"):
        open_tasks(cfg, ctx)
    with caplog.at_level("WARNING", "megalite"):
        assert open_tasks(cfg, ctx, companion) is None
    (record,) = caplog.records
    assert "the tasks cannot be read any more (--eval-tasks" in record.message
    caplog.clear()
    # What only saves needs none.
    companion.turn = Turn(Go(round=1, gave_up="no spare rank is left"))
    assert open_tasks(cfg, ctx, companion) is None
    assert not caplog.records


def test_examples_come_before_the_question(tmp_path: Path) -> None:
    shots = {"num_fewshot": 1, "description": "Say it.\n", "doc_to_text": "{{q}}", "fewshot_split": "test"}
    first, second, _ = pairs(tmp_path, **shots, fewshot_config={"sampler": "first_n"})
    assert first.pairs[0][0] == "Say it.\nand two?  d\n\nTwo"
    assert second.pairs[0][0] == "Say it.\nTwo a\n\nand two? "
    drawn = [q.pairs[0][0] for q in pairs(tmp_path, **shots)]
    # random.Random(1234).sample of three documents, two for each question.
    assert drawn == [q.pairs[0][0] for q in pairs(tmp_path, **shots)]
    assert all(not str(text).split("\n")[1].startswith(str(doc["q"])) for text, doc in zip(drawn, DOCS))


def test_pairs_become_tokens(tmp_path: Path) -> None:
    """Spaces at the end of a context are the continuation's; an empty context is the end of a text; the left is cut."""
    tokenizer = load_tokenizer("bytes")

    def encoded(context: str | None, text: str, longest: int = 8) -> list[tuple[list[int], int]]:
        (parts,) = documents_of(Question([(context, text)]), tokenizer, longest, "mine")
        return parts

    assert encoded("ab", " c") == [([*b"ab c"], 2)]
    assert encoded("ab  ", "c") == [([*b"ab  c"], 3)]
    assert encoded("", "ab") == [([256, *b"ab"], 2)]
    assert encoded("  ", "c") == [([256, *b"  c"], 3)]
    assert encoded("abcdefghij", "kl") == [([*b"defghijkl"], 2)]
    with pytest.raises(UserError, match="task mine: a continuation of 9 tokens must have 1 to 8 "):
        encoded("a", "bcdefghij")
    # Windows do not overlap, and the last has as much context as fits.
    whole = [256, *b"abcdefghijk"]
    assert encoded(None, "abcdefghijk", 4) == [(whole[:5], 4), (whole[4:9], 4), (whole[7:], 3)]
    assert encoded(None, "abcd", 4) == [(whole[:5], 4)]
    assert encoded(None, "") == []


def test_metrics(tmp_path: Path) -> None:
    names = ("acc", "acc_norm", "acc_bytes", "exact_match")
    docs = [DOCS[0], DOCS[0], DOCS[2]]
    task = read_task(written(tmp_path, docs, metric_list=[{"metric": name} for name in names]), 0)
    asked = questions(task)
    # By its bytes the first chooses otherwise, by its characters the second; of equals the first is chosen.
    answers = [[(-1.0, False), (-2.4, True)], [(-1.0, True), (-1.8, False)], [(-1.0, True), (-1.0, True)]]
    found = metrics_of(task, asked, answers)
    assert {name: found[name] for name in names} == {
        "acc": pytest.approx(2 / 3),
        "acc_norm": pytest.approx(1 / 3),
        "acc_bytes": 0.0,
        "exact_match": pytest.approx(2 / 3),
    }
    assert found["acc_stderr"] == pytest.approx(1 / 3)
    mutual = read_task(written(tmp_path, metric_list=[{"metric": "acc_mutual_info"}]), 1)
    asked = questions(mutual)
    assert metrics_of(mutual, asked, [[(-2.0, False), (-1.0, False), (-5.0, False), (-1.0, False)]]) == {
        "acc_mutual_info": 1.0
    }
    texts: dict[str, Any] = {"doc_to_choice": ..., "metric_list": ...}
    rolling = read_task(written(tmp_path, **texts, output_type="loglikelihood_rolling", doc_to_target="{{q}} é"), 2)
    found = metrics_of(rolling, questions(rolling), [[(-4.0, False)], [(-6.0, False)]])
    # "Two é", "and two?  é"
    assert found == {
        "word_perplexity": pytest.approx(math.exp(10 / 5)),
        "byte_perplexity": pytest.approx(math.exp(10 / 18)),
        "bits_per_byte": pytest.approx(10 / 18 / math.log(2)),
    }
    ends = read_task(written(tmp_path, **texts, output_type="loglikelihood", doc_to_target="label"), 2)
    found = metrics_of(ends, questions(ends), [[(-4.0, True)], [(-6.0, False)]])
    assert found == {"perplexity": pytest.approx(math.exp(5)), "acc": 0.5, "acc_stderr": pytest.approx(0.5)}


def test_texts_are_filtered_and_judged(tmp_path: Path) -> None:
    """lm-eval's regex filter takes the first group that is not empty, and exact_match drops before it compares."""
    regex = {"function": "regex", "regex_pattern": r"(-?[0-9]+)|(none)", "group_select": -1}
    metric = {"metric": "exact_match", "ignore_case": True, "ignore_punctuation": True, "regexes_to_ignore": [","]}
    filters = [{"name": "last", "filter": [regex, {"function": "take_first"}]}]
    judge = read_task(written(tmp_path, **WRITES, filter_list=filters, metric_list=[metric]), 0).generation
    plain = read_task(written(tmp_path, **WRITES, metric_list=[metric]), 0).generation
    assert judge is not None
    assert plain is not None
    assert (plain.until, plain.most) == (("\n\n",), 256)
    for text, target in (("12 and then 7.", "7"), ("it is none", "None"), ("nothing", "[invalid]")):
        assert judge.judged(text, target) == {"exact_match,last": 1.0}
    assert judge.judged("7 and then 12", "7") == {"exact_match,last": 0.0}
    assert plain.judged("The Sea.", "the sea") == {"exact_match": 1.0}
    assert plain.judged(" the sea", "the sea") == {"exact_match": 0.0}


GSM8K = r"""
generation_kwargs: {until: ["Question:", "</s>", "<|im_end|>"], do_sample: false, temperature: 0.0}
metric_list:
  - metric: exact_match
    aggregation: mean
    higher_is_better: true
    ignore_case: true
    ignore_punctuation: false
    regexes_to_ignore: [",", "\\$", "(?s).*#### ", "\\.$"]
filter_list:
  - name: "strict-match"
    filter:
      - function: "regex"
        regex_pattern: "#### (\\-?[0-9\\.\\,]+)"
      - function: "take_first"
  - name: "flexible-extract"
    filter:
      - function: "regex"
        group_select: -1
        regex_pattern: "(-?[$0-9.,]{2,})|(-?[0-9]+)"
      - function: "take_first"
"""


def test_a_task_has_a_metric_for_each_pipeline_of_filters(tmp_path: Path) -> None:
    """As lm-eval's gsm8k has."""
    how = read_task(written(tmp_path, **WRITES, **yaml.safe_load(GSM8K)), 0).generation
    assert how is not None
    names = strict, flexible = "exact_match,strict-match", "exact_match,flexible-extract"
    texts = ["so 2 and\n#### 1,234.", "it is $1,234.", "1234 is not 5", "#### 1234 or 5"]
    rows = [how.judged(text, "They had 3.\n#### 1,234") for text in texts]
    assert [(row[strict], row[flexible]) for row in rows] == [(1, 1), (0, 1), (0, 0), (1, 0)]
    assert mean_of(how.metrics, rows) == {
        **dict.fromkeys(names, 0.5),
        **dict.fromkeys((name.replace(",", "_stderr,") for name in names), pytest.approx(math.sqrt(1 / 12))),
    }


def test_where_texts_end(monkeypatch: pytest.MonkeyPatch) -> None:
    """Before the first stop, before the end of text, which many tokenizers name, or after the last token allowed."""
    tokenizer, pieces = load_tokenizer("bytes"), {0: "a", 1: "b", 2: ". and ."}
    monkeypatch.setattr(tokenizer, "decode", lambda ids: "".join(pieces.get(i, "<end>") for i in ids))
    # By the only id of its context, what a model would write; 300 is an id that the tokenizer lacks.
    continued = {10: [0, 1, 256, 0], 11: [0, 2, 1], 12: [1] * 9, 13: [0, 300, 256]}
    requests = [Request([start], 3 if start == 12 else 9, ("x", ".")) for start in continued]

    def score(documents: list[tuple[list[int], int]]) -> Scores:
        likeliest = np.array([continued[ids[0]][len(ids) - 2] for ids, _ in documents])
        return Scores(np.zeros(len(documents)), np.ones(len(documents), bool), likeliest)

    assert write_texts(requests, tokenizer, ParallelContext.single(), WholeTexts(score)) == ["ab", "a", "bbb", "a"]
