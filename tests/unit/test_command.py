"""`megalite`: its commands, as they are installed from a wheel, without the checkout; their doors in tools/."""

from __future__ import annotations

import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

from megalite.extras.command import COMMANDS
from tests.installed import Installed
from tests.ranks import ROOT

# The help, and a line of what must not have been imported for it.
# Prints the help of each command, and after it what must not be imported for that.
HELPS = """
import runpy, sys
for command in {}:
    sys.argv = ["megalite", command, "--help"]
    try:
        runpy.run_module("megalite", None, "__main__")
    except SystemExit as e:
        print(command, e.code, *{{"torch", "matplotlib"}} & sys.modules.keys(), "\\f")
"""
DOORS = {
    "cluster_check": "check",
    "convert_hf": "convert",
    "convert_megatron": "convert",
    "inspect_checkpoint": "inspect",
    "lm_harness": "lm-eval",
    "preprocess_data": "preprocess",
    "train_tokenizer": "tokenizer",
}
SIZES = "--num-layers 1 --hidden-size 16 --num-heads 2 --seq-len 32 --micro-batch-size 2 --vocab-size 64"
# Of the commands that no newcomer gives, each with something that it prints.
USES = [
    ("schedule --schedule 1f1b --pp 2 -m 4 --json", '{"schedule": "1f1b"'),
    ("train --nproc 1 -m megalite check --device cpu --size-mb 0.1", "all is well"),
    (f"scaling --ranks 1 --mode strong --steps 5 --warmup 0 -- {SIZES} --device cpu --mock-data", "runs/scaling/"),
    ("mup check --widths 16 32 --png widths.png", "without: slopes of log size"),
    (f"estimate --world 2 {SIZES} --json", '{"rank"'),
]


@pytest.mark.full
def test_the_list_of_commands(installed: Installed) -> None:
    done = installed("megalite", "--help")
    assert done.returncode == 0
    lines = [line.split() for line in done.stdout.splitlines() if line.startswith("  ")]
    assert [words[0] for words in lines] == list(COMMANDS)
    assert all(len(words) > 3 for words in lines)
    assert installed("megalite").stdout == done.stdout


def test_help_comes_without_torch(installed: Installed) -> None:
    done = installed("python", "-c", HELPS.format([*COMMANDS]))
    assert (done.returncode, done.stderr) == (0, "")
    for command, said in zip(COMMANDS, done.stdout.split("\f"), strict=False):
        *page, end = said.strip().splitlines()
        assert end.split() == [command, "0"]
        assert any(f"megalite {command}" in line for line in page)


@pytest.mark.parametrize(("word", "remedy"), [("plna", "did you mean megalite plan?"), ("qqq", "see --help")])
def test_an_unknown_command_is_one_line(installed: Installed, word: str, remedy: str) -> None:
    done = installed("megalite", word, "--world", "8")
    assert (done.returncode, done.stderr) == (2, f"error: megalite {word}: unknown command; {remedy}\n")


@pytest.mark.full
def test_the_commands_of_a_wheel_work_without_the_checkout(installed: Installed) -> None:
    for words, said in USES:
        done = installed("megalite", *shlex.split(words))
        assert done.returncode == 0, (words, done.stdout + done.stderr)
        assert said in done.stdout + done.stderr, (words, done.stdout + done.stderr)
    scripts = "".join(path.read_text() for path in (ROOT / "tests" / "newcomers").iterdir())
    used = {words.split()[0] for words, _ in USES} | set(re.findall(r"\bmegalite ([a-z-]+) ", scripts))
    assert used == COMMANDS.keys() - {"lm-eval", "check", "join"}


def test_every_door_in_tools_leads_to_its_command() -> None:
    doors = {path.stem: path.read_text() for path in Path(ROOT, "tools").iterdir() if path.suffix == ".py"}
    named = {door: DOORS.get(door, door) for door in doors}
    assert set(named.values()) == COMMANDS.keys() - {"train", "join"}
    for door, command in named.items():
        assert f'run("{command}")' in doors[door]
    # One of them as it is called; what is wrong is said in the command's name.
    words = [sys.executable, "tools/train_tokenizer.py", "--input", "x"]
    done = subprocess.run(words, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 2
    assert done.stderr.startswith("error: megalite tokenizer: the following arguments are required: --vocab-size")
