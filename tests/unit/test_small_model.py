"""examples/small_model.sh, and moe_twin.sh: bash runs them and notes its commands, which then run in this process."""

from __future__ import annotations

import importlib
import json
import math
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from megalite.core.model.parameters import active_parameters
from megalite.extras.command import find_main
from megalite.runtime.options.cli import parse
from tests.ranks import ROOT

RECIPE = """model: {num_layers: 1, hidden_size: 16, num_heads: 2, ffn_hidden_size: 32, seq_len: 32}
train: {micro_batch_size: 2, global_batch_size: 4, train_steps: 6}
optim: {lr: 1.0e-2}
run: {eval_every: 3, eval_steps: 1}
"""
# Notes its arguments; what the script asks it about itself it answers.
PYTHON = """#!/bin/bash
if [ "$1" = -c ]; then echo {prefix}; exit; fi
[ "$2" = pip ] || {{ printf '%s\\n' "$@" ''; }} >>{log}
"""


def commands(folder: Path, *arguments: str, name: str = "small_model.sh") -> list[list[str]]:
    """The commands of the script, without Python's own name."""
    log, python = folder / "commands.txt", folder / "venv" / "bin" / "python"
    python.parent.mkdir(parents=True, exist_ok=True)
    python.write_text(PYTHON.format(prefix=folder / "venv", log=log))
    python.chmod(0o755)
    log.write_text("")
    script = ["bash", str(ROOT / "examples" / name), *arguments]
    environment = {**os.environ, "VIRTUAL_ENV": str(folder / "venv")}
    done = subprocess.run(script, cwd=folder, env=environment, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    return [command.split("\n") for command in log.read_text().split("\n\n") if command]


def test_the_script_from_text_to_an_evaluated_export(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "a.txt").write_text("def f(x):\n    return x + 1\n" * 200)
    (tmp_path / "b.txt").write_text("def g(y):\n    return y + 2\n" * 20)
    (tmp_path / "tiny.yaml").write_text(RECIPE)
    given = "--out o --recipe tiny.yaml --vocab-size 280 --input a.txt --held-out b.txt -- --device cpu --lr 2e-2"
    for command in commands(tmp_path, *given.split()):
        monkeypatch.chdir(ROOT)
        capsys.readouterr()
        if command[:5] == ["-m", "megalite", "train", "--nproc", "1"]:
            # It starts one rank of this script.
            monkeypatch.setattr(sys, "argv", ["pretrain_gpt.py", *command[5:]])
            importlib.import_module("pretrain_gpt").main()
        elif command[:2] == ["-m", "megalite"]:
            find_main(command[2])(command[3:])
        else:
            monkeypatch.setattr(sys, "argv", command)
            importlib.import_module(command[0].removesuffix(".py").replace("/", ".")).main()
        if command[2] == "evaluate":
            held_out = json.loads(capsys.readouterr().out)
    out = tmp_path / "o"
    assert held_out["source"] == str(tmp_path / "b.txt")
    assert 0 < held_out["loss"] < math.log(280)
    lines = [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]
    assert [line["step"] for line in lines if line.get("event") == "eval"] == [3, 6]
    assert max(line["lr"] for line in lines if "lr" in line) == pytest.approx(2e-2, rel=0.1)
    assert (out / "loss.png").stat().st_size > 1000
    # Started again, it makes neither tokenizer nor tokens.
    assert commands(tmp_path, *given.split())[0][:3] == ["-m", "megalite", "train"]


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ("--nproc two", "--nproc two: must be a whole number above 0"),
        ("--vocab-size 0", "--vocab-size 0: must be a whole number above 0"),
        ("--recipe none.yaml", "--recipe none.yaml: no such file"),
        ("--input *.txt --held-out none/b.txt", "--held-out none/b.txt: no such file"),
        ("--input *.txt --held-out a.txt", "/venv: bin/python is missing there"),
    ],
)
def test_mistakes_are_found_before_anything_is_made(tmp_path: Path, given: str, message: str) -> None:
    (tmp_path / "a.txt").write_text("text")
    script = ["bash", str(ROOT / "examples" / "small_model.sh"), "--out", "o", *given.split()]
    environment = {**os.environ, "VIRTUAL_ENV": str(tmp_path / "venv")}
    done = subprocess.run(script, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=120)
    assert (done.returncode, done.stderr.count("\n")) == (2, 1), done.stderr
    assert message in done.stderr
    assert not (tmp_path / "o").exists()


def test_without_input_the_text_is_this_environments_code(tmp_path: Path) -> None:
    corpus, tokenizer, text, held_out, train, *_ = commands(tmp_path, "--out", "o", "--nproc", "2")
    out = tmp_path / "o"
    assert corpus[1:] == ["--packages", "--out", f"{out}/text.jsonl", "--held-out", f"{out}/held_out.jsonl"]
    assert (tokenizer[4], text[4], held_out[4]) == (f"{out}/text.jsonl", f"{out}/text.jsonl", f"{out}/held_out.jsonl")
    assert train[3:6] == ["--nproc", "2", "--config"]


def test_twins_differ_in_their_experts_alone(tmp_path: Path) -> None:
    """They have as many active parameters, but for the routers: 16 scores of each of 64 features in 4 layers."""
    words = ["--out", str(tmp_path), "--steps", "8", "--seeds", "5 6"]
    *_, first, _, dense, moe, plot = commands(tmp_path, *words, name="moe_twin.sh")
    cfgs = [parse([*command[5:], "--vocab-size", "1024"]).config for command in (dense, moe)]
    active = [active_parameters(cfg.model) for cfg in cfgs]
    assert active[1] - active[0] == 4 * 16 * 64
    alike = [(cfg.data, cfg.train, cfg.optim, replace(cfg.run, run_dir="o")) for cfg in cfgs]
    assert alike[0] == alike[1]
    assert (cfgs[0].train.seed, parse([*first[5:], "--vocab-size", "1024"]).config.train.seed) == (6, 5)
    assert plot[3:7] == [f"{tmp_path}/{name}_{seed}" for seed in (5, 6) for name in ("dense", "moe")]
