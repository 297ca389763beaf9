"""The Python on the user's pages runs as it stands, from top to bottom, in an empty folder."""

from __future__ import annotations

import dataclasses
import json
import os
import re
import shlex
import subprocess
import sys
from collections.abc import Iterator, MutableMapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from megalite.core.options.choices import ACTIVATIONS, NORMS
from megalite.core.options.lr import LR_DECAYS, learning_rate
from megalite.core.options.model import ModelConfig
from megalite.core.options.parallel import SCHEDULES
from megalite.core.options.update_rule import RULES
from megalite.core.parts.families import FAMILIES
from megalite.extras.command import find_main
from megalite.extras.convert.hf import export_hf
from megalite.extras.prepare.preprocess import preprocess
from megalite.extras.view.metrics import read_metrics
from megalite.runtime.options.cli import parse
from megalite.runtime.options.run import Config
from tests.parity import jobs
from tests.parity.runs import train
from tests.ranks import PYTHONPATH
from tests.workers import WorkerPool

DOCS = Path(__file__).resolve().parents[2] / "docs"


def blocks(page: str) -> list[str]:
    """Python blocks of a page."""
    return re.findall(r"^```python\n(.*?)^```$", (DOCS / page).read_text(), re.M | re.S)


def run_block(text: str, names: dict[str, Any], capsys: pytest.CaptureFixture[str]) -> list[str]:
    """Run a block among the names of those before it; the lines it prints."""
    capsys.readouterr()
    exec(compile(text, "block", "exec"), names)
    return capsys.readouterr().out.splitlines()


def losses(run_dir: str) -> list[float]:
    return [step["loss"] for step in read_metrics(Path(run_dir))[0]]


@pytest.mark.full
def test_the_python_api(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.chdir(tmp_path)
    names: dict[str, Any] = {"__name__": "__main__"}
    notebook, from_hf, stopped, own_data, answers, several, hooked, by_hand, text = blocks("api.md")
    printed = run_block(notebook, names, capsys)
    # One micro-batch per step; the hook is removed after the first.
    assert printed[0] == "layers.0 returns [128, 8, 128]"
    assert [float(line.split()[1]) for line in printed[1:]] == losses("runs/notebook")
    assert len(printed) == 1 + 10
    export_hf("runs/notebook", "my-model")
    assert run_block(from_hf, names, capsys) == ["llama 1"]
    # Trained before: not at ln 512.
    assert losses("runs/from-hf")[0] < losses("runs/notebook")[0] - 0.02
    (line,) = run_block(stopped, names, capsys)
    learned = [step for step, loss in enumerate(losses("runs/stopped"), start=1) if loss < 6.2][0]
    assert line == f"stopped after step {learned + 1}"
    (line,) = run_block(own_data, names, capsys)
    before, after = [event["loss"] for event in read_metrics(Path("runs/own-data"))[1] if event["event"] == "eval"]
    assert line == f"before training: {before}"
    assert after < before - 0.05
    assert run_block(answers, names, capsys) == []
    assert len(losses("runs/own-answers")) == 2
    (line,) = run_block(several, names, capsys)
    on_two, on_one = np.array(re.findall(r"\d+\.\d+", line), float).reshape(2, 2)
    np.testing.assert_allclose(on_two, on_one, rtol=1e-5)
    # Micro-batches of one sample of 128 tokens, whole on one rank.
    assert run_block(hooked, names, capsys) == ["[128, 1, 128]"]
    assert len(run_block(by_hand, names, capsys)) == 2
    assert len(re.findall(r"\d+", run_block(text, names, capsys)[0])) == 5


# ---------------------------------------------------------------------------------------------------------- README


@pytest.mark.full
def test_from_text_to_an_evaluated_and_preferred_model(tmp_path: Path) -> None:
    """The four commands of the README, from folders of parquet files, in two steps each; no other file is written."""
    arrow, parquet = pytest.importorskip("pyarrow"), pytest.importorskip("pyarrow.parquet")
    transformers = pytest.importorskip("transformers")
    tables = {
        "text": {"text": [f"the sea is deep, said {n}. " * 40 for n in range(40)]},
        "pairs": {"prompt": ["how deep?"] * 40, "chosen": ["the sea is deep"] * 40, "rejected": ["no"] * 40},
    }
    for name, columns in tables.items():
        (tmp_path / name).mkdir()
        parquet.write_table(arrow.table(columns), tmp_path / name / "0.parquet")
    for name in ("examples", "pretrain_gpt.py"):
        (tmp_path / name).symlink_to(DOCS.parent / name)
    readme = (DOCS.parent / "README.md").read_text().replace("\\\n", " ")
    (block,) = [block for block in re.findall(r"^```bash\n(.*?)^```$", readme, re.M | re.S) if "--pairs" in block]
    # Where --cache-dir is by default.
    env = {**os.environ, "HOME": str(tmp_path / "home"), "PYTHONPATH": PYTHONPATH}
    env |= {"OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}
    commands = [["-m", *shlex.split(line.replace("*", "0"))] for line in block.splitlines()]
    assert len(commands) == 4
    for words in commands:
        steps = ["--train-steps", "2"] if "train" in words else []
        done = subprocess.run(
            [sys.executable, *words, *steps], cwd=tmp_path, env=env, capture_output=True, text=True, timeout=400
        )
        assert done.returncode == 0, done.stdout + done.stderr
    base, preferred = (read_metrics(tmp_path / "runs" / name)[1] for name in ("base", "dpo"))
    for events in (base, preferred):
        assert 4 < next(e for e in events if e["event"] == "eval_tasks")["fables/bits_per_byte"] < 9
    assert 0 <= next(e for e in preferred if e["event"] == "eval")["rewards/accuracies"] <= 1
    model = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "preferred-model")
    assert model(torch.arange(8)[None]).logits.isfinite().all()


# ------------------------------------------------------------------------------------------------------- stages.md

TINY = "--num-layers 2 --hidden-size 16 --num-heads 2 --num-kv-heads 2 --ffn-hidden-size 32 --eval-steps 1 --device cpu"
START = r"(?:resumed|weights) from .*"
# Run directory -> steps in place of those of the page.
STEPS = {"base": 2, "continued": 4, "domain": 2, "sft": 2, "dpo": 2, "reward": 2, "stories": 3, "long": 2}


@pytest.mark.full
def test_the_stages_of_training(
    pool: WorkerPool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Every command of the page, with a tiny model; each run starts from where the page says."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "examples").symlink_to(DOCS.parent / "examples")
    (tmp_path / "data").mkdir()
    for name in ("code", "prose"):
        lines = [json.dumps({"text": f"{name} {n} " * 60}) for n in range(20)]
        (tmp_path / f"{name}.jsonl").write_text("\n".join(lines))
        preprocess([f"{name}.jsonl"], "bytes", f"data/{name}")
    talk = [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "hello"}]
    (tmp_path / "chats.jsonl").write_text((json.dumps({"messages": talk}) + "\n") * 20)
    pair = json.dumps({"prompt": "hi", "chosen": "yes", "rejected": "no"})
    (tmp_path / "pairs.jsonl").write_text((pair + "\n") * 20)
    page = (DOCS / "stages.md").read_text()
    code = "".join(re.findall(r"^```bash\n(.*?)^```$", page, re.M | re.S)).replace("\\\n", " ")
    trained, told = {}, ""
    for words in map(shlex.split, code.splitlines()):
        world, script = (int(words[2]), words[3:]) if words[0] == "torchrun" else (1, words[1:])
        if script[0] != "pretrain_gpt.py":
            assert words[0] == "megalite"
            capsys.readouterr()
            find_main(script[0])(script[1:])
            told += capsys.readouterr().out if script[0] == "generate" else ""
            continue
        name = Path(parse(script[1:]).config.run.run_dir).name
        # Ranks have a folder of their own.
        arguments = [*script[1:], *TINY.split(), "--train-steps", str(STEPS[name])]
        # Both answers of a pair are in one sample.
        arguments += [] if "--seq-len" in script else ["--seq-len", "64" if name in ("dpo", "reward") else "32"]
        ranks = pool.run(world, in_folder, str(tmp_path), arguments, world) if world > 1 else [train(0, arguments, 1)]
        assert ranks[0][0][0] == STEPS[name]
        log = (tmp_path / f"runs/{name}/logs/rank_0.log").read_text()
        trained[name] = [without_numbers(line) for line in re.findall(START, log)]
    assert trained.keys() == STEPS.keys()
    shown = [without_numbers(line) for line in re.findall(rf"^    ({START})$", page, re.M)]
    assert sorted(shown) == sorted(line for lines in trained.values() for line in lines)
    assert told.startswith("The Fox and the Crow")
    assert "<|im_start|>" in (tmp_path / "chat-model" / "chat_template.jinja").read_text()


def without_numbers(line: str) -> str:
    return re.sub(r"\d+", "N", line)


def in_folder(rank: int, folder: str, arguments: list[str], world: int) -> Any:
    """Train in a folder."""
    before = os.getcwd()
    os.chdir(folder)
    try:
        return train(rank, arguments, world)
    finally:
        os.chdir(before)


# ---------------------------------------------------------------------------------------------------- extending.md


@contextmanager
def tables_restored() -> Iterator[None]:
    """Recipes add to tables of the process, which other tests read."""
    tables: list[MutableMapping[str, Any]] = [FAMILIES, ACTIVATIONS, NORMS, LR_DECAYS, RULES, SCHEDULES]
    before = [dict(table) for table in tables]
    try:
        yield
    finally:
        for table, content in zip(tables, before):
            table.clear()
            table.update(content)


@pytest.fixture
def recipes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[tuple[list[str], dict[str, Any]]]:
    """The page's blocks, and the names they made: the first six (family, parts, rate, optimizers, schedule) ran."""
    monkeypatch.chdir(tmp_path)
    with tables_restored():
        names: dict[str, Any] = {}
        for text in (texts := blocks("extending.md"))[:6]:
            exec(compile(text, "recipe", "exec"), names)
        yield texts, names


def train_with_recipes(rank: int, texts: list[str], cfg: Config, world: int) -> list[tuple[float, float]]:
    """(loss, gradient norm) of every step on a rank that runs the recipes first."""
    with tables_restored():
        names: dict[str, Any] = {}
        for text in texts:
            exec(compile(text, "recipe", "exec"), names)
        return jobs.train(rank, cfg, world)


@pytest.mark.parametrize("own_parts", [False, True])
def test_recipes_train_in_a_layout_as_in_one_process(pool: WorkerPool, recipes: Any, own_parts: bool) -> None:
    """The family, then the activation and the norm in place of its own, under the page's schedules and optimizers."""
    sizes = {"num_layers": 2, "hidden_size": 32, "num_heads": 4, "num_kv_heads": 2, "vocab_size": jobs.VOCAB}
    parts = {"activation": "relu2", "norm": "layernorm_no_bias"} if own_parts else {}
    model = ModelConfig.from_arch("starcoder2", **sizes, seq_len=jobs.SEQ, **parts)
    assert (model.norm, model.tie_embeddings, model.gated) == (parts.get("norm", "layernorm"), True, False)
    rule = "normalized-rows" if own_parts else "lion"
    optim = dataclasses.replace(jobs.OPTIM, optimizer=rule, lr_decay="wsd-sqrt", wsd_decay_steps=3)
    cfg, one = (
        dataclasses.replace(jobs.make_config(model, layout), optim=optim)
        for layout in ({"tp": 2, "pp": 2, "schedule": "gpipe-groups"}, {})
    )
    expected = jobs.train(0, one, 1)
    assert expected[-1][0] < expected[0][0]
    for figures in pool.run(4, train_with_recipes, recipes[0][:6], cfg, 4):
        np.testing.assert_allclose(figures, expected, rtol=1e-5)


def test_the_family_is_that_of_transformers(recipes: Any, tmp_path: Path) -> None:
    """A folder that transformers wrote, and the one that megalite writes for transformers: the same loss."""
    transformers = pytest.importorskip("transformers")
    import megalite
    from megalite.core.step import eval_step

    torch.manual_seed(0)
    config = transformers.Starcoder2Config(
        vocab_size=90,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=32,
        initializer_range=0.1,
        bos_token_id=1,
        eos_token_id=2,
    )
    theirs = transformers.Starcoder2ForCausalLM(config)
    for name, parameter in theirs.named_parameters():
        if name.endswith("bias") or "norm" in name:
            torch.nn.init.normal_(parameter, 1.0 if name.endswith("norm.weight") else 0.0, 0.2)
    theirs.save_pretrained(tmp_path / "theirs")
    ids = torch.randint(90, (4, 17))
    expected = theirs(input_ids=ids, labels=ids).loss.item()
    cfg = megalite.configure(
        init_from_hf=tmp_path / "theirs", seq_len=16, mock_data=True, global_batch_size=4, run_dir=tmp_path / "run"
    )
    with megalite.start(cfg) as run:
        assert eval_step(run.engine, ids)[0] == pytest.approx(expected, rel=1e-5)
        megalite.save(run)
    export_hf(tmp_path / "run", tmp_path / "ours")
    again = transformers.Starcoder2ForCausalLM.from_pretrained(tmp_path / "ours")
    assert again(input_ids=ids, labels=ids).loss.item() == pytest.approx(expected, rel=1e-6)


def test_the_learning_rate_by_its_name(recipes: Any) -> None:
    from megalite.runtime.options.cli import parse

    words = "--lr-decay wsd-sqrt --lr 1 --warmup-steps 10 --wsd-decay-steps 16 --train-steps 100"
    cfg = parse(words.split()).config
    rates = [learning_rate(step, cfg.optim, 100) for step in (5, 10, 84, 88, 93, 100)]
    assert rates == pytest.approx([0.5, 1.0, 1.0, 0.5, 0.25, 0.0])


def test_all_recipes_in_one_run(
    recipes: tuple[list[str], dict[str, Any]], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    texts, names = recipes
    proof, data, callback, everything = texts[6:]
    # Two groups of 4 on 4 ranks: 2 (p - 1)(F + B) of m (F + B).
    assert run_block(proof, names, capsys) == ["bubble 75.0%, activations [4, 4, 4, 4]"]
    (np.arange(3000) % 50257).astype(np.uint16).tofile("train.bin")
    for text in (data, callback, everything):
        run_block(text, names, capsys)
    steps, events = read_metrics(tmp_path / "runs/extended")
    assert len(steps) == 10
    (weights,) = (event for event in events if event["event"] == "weights")
    assert weights["step"] == 10
    assert weights["embed_tokens"] > 1
