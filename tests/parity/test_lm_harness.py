"""lm-eval's numbers on a run in its layout are those of its own HFLM on the run's export; tasks are local files."""

from __future__ import annotations

import importlib.util
import json
from pathlib import Path
from typing import Any

import pytest

import megalite
from megalite.core.base.errors import UserError
from megalite.extras.convert.hf import export_hf
from megalite.extras.inference import command
from megalite.extras.inference.lm_eval import run_tasks
from megalite.extras.prepare.preprocess import preprocess
from tests.parity.task_files import COMMON, DOCS, TEXT
from tests.workers import WorkerPool

MISSING = [name for name in ("lm_eval", "accelerate") if importlib.util.find_spec(name) is None]
pytestmark = pytest.mark.skipif(bool(MISSING), reason=f"needs {', '.join(MISSING)} (pip install 'lm-eval[hf]')")

TASKS = ("choices", "rolling", "text", "shots")
IN_TRAINING = ("choices", "rolling", "text", "shots", "ends", "filtered")
CHOICES = """task: choices
output_type: multiple_choice
doc_to_text: "{{question}}"
doc_to_choice: "{{options}}"
doc_to_target: answer
metric_list: [{metric: acc}, {metric: acc_norm}]
"""
ROLLING = """task: rolling
output_type: loglikelihood_rolling
doc_to_text: ""
doc_to_target: "{{question * 9}}"
metric_list: [{metric: word_perplexity}, {metric: byte_perplexity}, {metric: bits_per_byte}]
"""
SHOTS = """task: shots
output_type: multiple_choice
description: "About the {{question}}: "
doc_to_text: "{{question}}"
doc_to_choice: ["deep", "cheap and", "é"]
doc_to_target: "{{options[answer].strip()}}"
fewshot_split: test
num_fewshot: 2
fewshot_delimiter: "; "
metric_list: [{metric: acc}, {metric: acc_norm}, {metric: acc_bytes}, {metric: acc_mutual_info}, {metric: exact_match}]
"""
ENDS = """task: ends
output_type: loglikelihood
doc_to_text: "{{question}}"
doc_to_target: "{{options[1]}}"
metric_list: [{metric: perplexity}, {metric: acc}]
"""
FILTERED = r"""task: filtered
output_type: generate_until
doc_to_text: "and {{question}}"
doc_to_target: "{{options[0]}}."
generation_kwargs: {until: ["tea", "\n\n"], max_gen_toks: 14}
metric_list: [{metric: exact_match, ignore_case: true, regexes_to_ignore: [",", "\\.$", " "]}]
filter_list:
  - {name: strict, filter: [{function: regex, regex_pattern: "(deep|cheap)"}, {function: take_first}]}
  - name: last
    filter: [{function: regex, regex_pattern: "(dee[a-z]*)|(p[a-z]+)", group_select: -1}, {function: take_first}]
"""


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of a tiny Llama with the byte tokenizer, its export, and three tasks on one file."""
    folder = tmp_path_factory.mktemp("harness")
    text = folder / "a.txt"
    text.write_text("the sea is deep and the tea is cheap. " * 60)
    preprocess([str(text)], "bytes", str(folder / "a"))
    (folder / "docs.jsonl").write_text("".join(json.dumps(doc) + "\n" for doc in DOCS))
    (folder / "tasks").mkdir()
    for name, body in zip((*TASKS, "ends", "filtered"), (CHOICES, ROLLING, TEXT, SHOTS, ENDS, FILTERED)):
        (folder / "tasks" / f"{name}.yaml").write_text(body + COMMON.format(file=folder / "docs.jsonl"))
    sizes = {
        "num_layers": 2,
        "hidden_size": 32,
        "num_heads": 4,
        "num_kv_heads": 2,
        "ffn_hidden_size": 48,
        "seq_len": 48,
    }
    steps = {"train_steps": 12, "lr": 2e-2, "global_batch_size": 8, "micro_batch_size": 8}
    data = {"data": str(folder / "a"), "split": "1,0,0", "tokenizer": "bytes", "run_dir": str(folder / "run")}
    tasks = {"eval_tasks": [str(folder / "tasks" / f"{name}.yaml") for name in IN_TRAINING], "eval_steps": 0}
    with megalite.start(megalite.configure(**sizes, **steps, **data, **tasks, device="cpu")) as run:
        megalite.fit(run)
    export_hf(folder / "run" / "checkpoints" / "step_00000012", folder / "hf", tokenizer="bytes")
    return folder


def ours(rank: int, folder: str, path: str, tp: int, pp: int, *more: str) -> None:
    args = command.lm_eval_parser().parse_args(
        [str(Path(folder, path)), "--tasks", *TASKS, "--include-path", str(Path(folder, "tasks")), "--device", "cpu"]
        + ["--tp", str(tp), "--pp", str(pp), "--batch-size", "2", "--json", str(Path(folder, "ours.json")), *more]
    )
    run_tasks(args)


@pytest.fixture(scope="module")
def theirs(made: Path) -> dict[str, Any]:
    """HFLM on the export, with our start of an empty context."""
    import lm_eval
    from lm_eval.models.huggingface import HFLM
    from lm_eval.tasks import TaskManager

    model = HFLM(pretrained=str(made / "hf"), device="cpu", dtype="float32", batch_size=2, prefix_token_id=256)
    manager = TaskManager(include_path=str(made / "tasks"), include_defaults=False)
    return lm_eval.simple_evaluate(model=model, tasks=[*TASKS, "ends", "filtered"], task_manager=manager)


@pytest.mark.parametrize(("path", "tp", "pp", "world"), [("run", 1, 1, 1), ("hf", 1, 1, 1), ("run", 2, 2, 8)])
def test_results_are_those_of_lm_evals_own_model_and_of_the_run(
    made: Path, theirs: dict[str, Any], pool: WorkerPool, path: str, tp: int, pp: int, world: int
) -> None:
    pool.run(world, ours, str(made), path, tp, pp)
    found, in_training = json.loads((made / "ours.json").read_text())["results"], of_the_run(made)
    for task in TASKS:
        for metric, value in theirs["results"][task].items():
            if isinstance(value, float) and "stderr" not in metric:
                assert found[task][metric] == pytest.approx(value, rel=1e-5), (task, metric)
                same = in_training[f"{task}/{metric.removesuffix(',none')}"]
                assert found[task][metric] == pytest.approx(same, rel=1e-6), (task, metric)


def of_the_run(made: Path) -> dict[str, Any]:
    lines = [json.loads(line) for line in (made / "run" / "metrics.jsonl").read_text().splitlines()]
    (found,) = [line for line in lines if line.get("event") == "eval_tasks"]
    return found


def test_tasks_in_the_run_have_the_figures_of_lm_evals_own_model(made: Path, theirs: dict[str, Any]) -> None:
    found, compared = of_the_run(made), 0
    for task in IN_TRAINING:
        for metric, value in theirs["results"][task].items():
            name = f"{task}/{metric.removesuffix(',none')}"
            # Standard errors that lm-eval draws by bootstrap are not computed.
            if isinstance(value, float) and (name in found or "_stderr" not in name):
                assert found[name] == pytest.approx(value, rel=1e-5, abs=1e-9), name
                compared += 1
    assert compared == len([name for name in found if "/" in name]) == 26


def test_every_single_answer_is_that_of_lm_evals_own_model(made: Path, theirs: dict[str, Any]) -> None:
    from lm_eval.api.instance import Instance

    from megalite.core.mesh.context import ParallelContext
    from megalite.extras.inference.lm_eval_model import HarnessLM
    from megalite.extras.inference.load import find_weights
    from megalite.extras.inference.score import Scorer, scoring_config
    from megalite.runtime.data.tokenizer import load_tokenizer

    weights = find_weights(made / "run")
    scorer = Scorer(scoring_config(weights, 1), ParallelContext.single(), weights)
    lm = HarnessLM(scorer, load_tokenizer("bytes"), 48)
    for task, kind in (("choices", "loglikelihood"), ("rolling", "loglikelihood_rolling"), ("text", "generate_until")):
        asked = [(a, r) for s in theirs["samples"][task] for a, r in zip(s["arguments"], s["resps"])]
        instances = [Instance(kind, {}, tuple(arguments), 0) for arguments, _ in asked]
        for (_, (answer, *_)), mine in zip(asked, getattr(lm, kind)(instances, disable_tqdm=True)):
            if kind == "loglikelihood":
                assert mine == (pytest.approx(answer[0], rel=1e-5), answer[1])
            else:
                assert mine == (answer if kind == "generate_until" else pytest.approx(answer, rel=1e-5))
    # HFLM fails here: what is left of the context has no token.
    (blank, _), (empty, _) = lm.loglikelihood(
        [Instance("loglikelihood", {}, pair, 0) for pair in ((" ", "a"), ("", " a"))], disable_tqdm=True
    )
    assert blank == empty
    # With a beginning of text: 257 and the bytes.
    with_bos = HarnessLM(scorer, load_tokenizer("bytes"), 48, bos=True)
    pairs = [Instance("loglikelihood", {}, pair, 0) for pair in (("the", " sea"), ("", "sea"))]
    rows = [([257, *b"the sea"], 4), ([257, *b"sea"], 3)]
    assert with_bos.loglikelihood(pairs, disable_tqdm=True) == [
        (pytest.approx(total, abs=1e-5), hit) for total, hit in scorer.score(rows)
    ]


def test_mistakes_are_one_line(made: Path) -> None:
    with pytest.raises(UserError, match="--tasks nonsense: lm-eval has no such task"):
        ours(0, str(made), "run", 1, 1, "--tasks", "nonsense")
    with pytest.raises(UserError, match="12 new tokens: leave no room for a context in 12 tokens"):
        ours(0, str(made), "run", 1, 1, "--tasks", "text", "--max-length", "12")
