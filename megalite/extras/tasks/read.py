"""Read a task: a YAML file in lm-eval's form whose documents are in local JSON files.

What such a file may say is what needs neither Python functions nor a download: multiple choice, log-likelihood,
rolling log-likelihood and greedy generation, with texts from Jinja templates or fields. Meanings are those of
lm-eval 0.4.13.
"""

from __future__ import annotations

import gzip
import json
import zlib
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml

from megalite.core.base.errors import UserError, describe, require
from megalite.extras.tasks.generation import MATCH_OPTIONS, Generation, read_generation

METRICS = {
    "multiple_choice": {
        "acc": "mean",
        "acc_norm": "mean",
        "acc_bytes": "mean",
        "acc_mutual_info": "mean",
        "exact_match": "mean",
    },
    "loglikelihood": {"perplexity": "perplexity", "acc": "mean"},
    "generate_until": {"exact_match": "mean"},
    "loglikelihood_rolling": {
        "word_perplexity": "weighted_perplexity",
        "byte_perplexity": "weighted_perplexity",
        "bits_per_byte": "bits_per_byte",
    },
}
"""Kind of task -> its metrics and how each is made of the documents'."""

_DEFAULT_METRICS = {**{kind: [*names] for kind, names in METRICS.items()}, "multiple_choice": ["acc", "acc_norm"]}
_KEYS = {"task", "output_type", "metric_list", "dataset_path", "dataset_kwargs"}
_KEYS |= {f"{name}_split" for name in ("test", "validation", "training", "fewshot")}
_KEYS |= {"num_fewshot", "fewshot_config", "fewshot_delimiter", "target_delimiter", "description"}
_KEYS |= {"doc_to_text", "doc_to_choice", "doc_to_target"}
_OF_GENERATION = {"generation_kwargs", "filter_list"}
# Of no effect here, or on figures that are not computed here.
_IGNORED = {"tag", "group", "task_alias", "metadata"}
_IGNORED |= {"should_decontaminate", "doc_to_decontamination_query"}
_REMEDY = "leave it out, or evaluate the checkpoint with megalite lm-eval"

Doc = dict[str, Any]


@dataclass(frozen=True)
class Task:
    """A task and its documents.

    Attributes:
        name: its name.
        kind: "multiple_choice", "loglikelihood", "loglikelihood_rolling" or "generate_until".
        docs: the documents to evaluate.
        examples: those that few-shot examples are drawn from.
        metrics: names of its metrics.
        text, choice, target: `doc_to_text`, `doc_to_choice` and `doc_to_target` of the file.
        description, target_delimiter, fewshot_delimiter, num_fewshot: of the file.
        first_examples: take the first few-shot examples, instead of drawing them.
        excludes_own: a document is not an example of itself.
        generation: how texts are written and judged; of "generate_until" only.
    """

    name: str
    kind: str
    docs: list[Doc]
    examples: list[Doc] = field(default_factory=list)
    metrics: tuple[str, ...] = ()
    text: Any = ""
    choice: Any = None
    target: Any = None
    description: str = ""
    target_delimiter: str = " "
    fewshot_delimiter: str = "\n\n"
    num_fewshot: int = 0
    first_examples: bool = False
    excludes_own: bool = False
    generation: Generation | None = None


def read_task(file: str, limit: int) -> Task:
    """Read a task.

    Args:
        file: path of its YAML file. Paths of data in it are relative to the working directory, as in lm-eval.
        limit: number of documents from the first on that are evaluated; 0: all.

    Raises:
        UserError: a file cannot be read, or says what is not supported.
    """
    given = f"--eval-tasks {file}"
    content = _load(given, file)
    kind = content.get("output_type", "generate_until")
    known = _KEYS | _IGNORED | {"generation_kwargs"} | (_OF_GENERATION if kind == "generate_until" else set())
    known -= {"doc_to_choice"} if kind == "generate_until" else set()
    unknown = [str(key) for key in content if key not in known and content[key] not in (None, False)]
    unknown = [key for key in unknown if key != "repeats" or content[key] != 1]
    require(not unknown, given, f"{', '.join(unknown)} is not supported by --eval-tasks", _REMEDY)
    rule = f"output_type {kind} is not among {', '.join(METRICS)}"
    require(isinstance(kind, str) and kind in METRICS, given, rule, _REMEDY)
    require(isinstance(content.get("task"), str), given, "has no name (task: NAME)", "give it one")
    rule = "dataset_path must be json, with local files in dataset_kwargs.data_files"
    require(content.get("dataset_path") == "json", given, rule, "download the data and name its files")
    for key, needed in (("doc_to_target", True), ("doc_to_choice", kind == "multiple_choice")):
        require(not needed or content.get(key) is not None, given, f"has no {key}", "add it")
    files = _data_files(given, content.get("dataset_kwargs"))
    split = content.get("test_split") or content.get("validation_split")
    require(split is not None, given, "has neither test_split nor validation_split", "name the split to evaluate")
    docs = _split(given, files, split)
    shots, config = content.get("num_fewshot") or 0, content.get("fewshot_config") or {}
    require(isinstance(shots, int) and shots >= 0, given, f"num_fewshot {shots} is no number from 0", "correct it")
    require(isinstance(config, dict), given, f"fewshot_config {config} is no mapping of keys to values", "correct it")
    unknown = [str(key) for key in config if key not in ("sampler", "split")]
    require(not unknown, given, f"fewshot_config.{', '.join(unknown)} is not supported by --eval-tasks", _REMEDY)
    sampler = config.get("sampler", "default")
    require(sampler in ("default", "first_n"), given, f"sampler {sampler} is not default or first_n", "use one of them")
    source = config.get("split", content.get("fewshot_split"))
    excludes = source == content.get("test_split")
    source = source or content.get("training_split") or content.get("validation_split") or content.get("test_split")
    examples = _split(given, files, source) if shots else []
    rule = f"num_fewshot {shots} is more than the {len(examples)} documents of {source} to draw from"
    require(shots + (excludes and shots > 0) <= len(examples) or not shots, given, rule, "lower it")
    between = [content.get("target_delimiter", " "), content.get("fewshot_delimiter", "\n\n")]
    for key, text in zip(("target_delimiter", "fewshot_delimiter"), between):
        require(isinstance(text, str), given, f"{key} {text} is no text", "put it in quotes, or leave it out")
    return Task(
        content["task"],
        kind,
        docs[: limit or None],
        examples,
        _metrics(given, kind, content.get("metric_list")),
        "" if content.get("doc_to_text") is None else content["doc_to_text"],
        content.get("doc_to_choice"),
        content["doc_to_target"],
        content.get("description") or "",
        between[0],
        between[1],
        shots,
        sampler == "first_n",
        excludes,
        read_generation(given, content, between[1]) if kind == "generate_until" else None,
    )


def _load(given: str, file: str) -> dict[str, Any]:
    try:
        content = yaml.safe_load(Path(file).read_text())
    except OSError as e:
        raise UserError(given, f"cannot be read ({e.strerror})", "give a YAML file of a task") from None
    except (yaml.YAMLError, ValueError, LookupError, AttributeError, RecursionError) as e:
        # Values that fit no type, as a date that is none, fail in Python's own functions.
        if "'!function'" in str(getattr(e, "problem", "")):
            rule = f"{getattr(e, 'problem', '')}: Python functions of a task file are not run by --eval-tasks"
            raise UserError(given, rule, _REMEDY) from None
        remedy = "correct it; a template stands in quotes: '{{question}}'"
        raise UserError(given, f"is no YAML ({describe(e)})", remedy) from None
    require(isinstance(content, dict), given, "is no mapping of keys to values", "give a YAML file of a task")
    return content


def _data_files(given: str, options: Any) -> dict[str, list[str]]:
    rule = "dataset_kwargs must be data_files alone: {SPLIT: FILE or [FILE, ...]}"
    require(isinstance(options, dict) and [*options] == ["data_files"], given, rule, "correct it")
    files = options["data_files"]
    # As the json builder of datasets names it.
    files = files if isinstance(files, dict) else {"train": files}
    out = {split: [names] if isinstance(names, str) else names for split, names in files.items()}
    fine = all(isinstance(names, list) and all(isinstance(n, str) for n in names) for names in out.values())
    require(fine, given, rule, "correct it")
    return out


def _split(given: str, files: dict[str, list[str]], split: Any) -> list[Doc]:
    """Read the documents of a split; all have the keys of any of them."""
    require(isinstance(split, str), given, f"its split {split} is no name", "name one split")
    require(split in files, given, f"its split {split} has no file in data_files", f"add {split}: FILE")
    docs = [doc for name in files[split] for doc in _documents(given, name)]
    require(bool(docs), given, f"its split {split} has no document", "use files with documents")
    keys = dict.fromkeys(key for doc in docs for key in doc)
    return [{key: doc.get(key) for key in keys} for doc in docs]


def _documents(given: str, name: str) -> list[Doc]:
    remedy = "give a local file of JSON lines, or of one list, .gz or not"
    try:
        data = Path(name).read_bytes()
        text = (gzip.decompress(data) if name.endswith(".gz") else data).decode()
        docs = json.loads(text) if text.lstrip()[:1] == "[" else [json.loads(s) for s in text.split("\n") if s.strip()]
    except OSError as e:
        raise UserError(given, f"its data file {name} cannot be read ({e.strerror or e})", remedy) from None
    except (ValueError, EOFError, zlib.error, RecursionError) as e:
        raise UserError(given, f"its data file {name} is no JSON ({describe(e)})", remedy) from None
    require(all(isinstance(doc, dict) for doc in docs), given, f"{name} holds what is no JSON object", remedy)
    return docs


def _metrics(given: str, kind: str, entries: Any) -> tuple[str, ...]:
    if entries is None:
        return tuple(_DEFAULT_METRICS[kind])
    fine = isinstance(entries, list) and bool(entries) and all(isinstance(entry, dict) for entry in entries)
    require(fine, given, "metric_list is no list of {metric: NAME}", "correct it")
    for entry in entries:
        name, known = entry.get("metric"), METRICS[kind]
        rule = f"metric {name} is not among {', '.join(known)}, those of {kind}"
        require(isinstance(name, str) and name in known, given, rule, _REMEDY)
        options = MATCH_OPTIONS if kind == "generate_until" else ()
        other = [k for k in entry if k not in ("metric", "aggregation", "higher_is_better", *options)]
        wrong = other or entry.get("aggregation", known[name]) != known[name]
        rule = f"metric {name} is made by aggregation: {known[name]} without further keys"
        require(not wrong, given, rule, _REMEDY)
    return tuple(entry["metric"] for entry in entries)
