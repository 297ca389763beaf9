"""What users see is as in the transcripts beside this file; python -m tests.golden --write after an intended change."""

from __future__ import annotations

import shlex
import subprocess
import sys
from collections.abc import Callable, Iterator

import pytest

from megalite.core.mesh.grid import Grid
from megalite.runtime.options import cli
from tests.golden.bits import compare
from tests.golden.doors import Output
from tests.golden.small_runs import BASE, RUNS
from tests.golden.transcript import remake, transcripts
from tests.ranks import ROOT
from tests.rows import always_run

# argparse words and wraps some lines differently from version to version of Python.
PYTHON, OF_ARGPARSE = (3, 11), ("errors_of_tools", "help")
# Many small runs.
SLOW = "runs"


@pytest.fixture(scope="module")
def made(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Callable[[str], str]]:
    """A transcript as it is now; one process makes them one after the other, and who asks waits for his own."""
    out, finished = tmp_path_factory.mktemp("golden"), set[str]()
    names = [name for name in transcripts() if name != SLOW or request.config.getoption("--full")]
    command = [sys.executable, "-m", "tests.golden", *names, "--out", str(out)]
    with subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, text=True) as process:

        def read(name: str) -> str:
            assert process.stdout is not None
            while name not in finished:
                line = process.stdout.readline()
                assert line, f"it ended after {finished}"
                finished.add(line.strip())
            return (out / f"{name}.txt").read_text()

        yield read
        process.kill()


@pytest.mark.parametrize("name", always_run(transcripts(), *transcripts().keys() - {SLOW}))
def test_what_users_see_is_as_committed(made: Callable[[str], str], name: str) -> None:
    if name in OF_ARGPARSE and sys.version_info[:2] != PYTHON:
        pytest.skip(f"written with Python {PYTHON[0]}.{PYTHON[1]}")
    assert made(name) == transcripts()[name].read_text()


def test_a_traceback_is_no_answer() -> None:
    assert [name for name, path in transcripts().items() if "Traceback" in path.read_text()] == []


def test_a_transcript_is_made_anew_by_hand() -> None:
    def greet(*words: str) -> Output:
        return Output(f"hello {' '.join(words)}\n\nfrom /there\n", "bye\n", [len(words)])

    old = "# First.\n$ greet\n| old\n[7]\n\n$ greet 'a b' c\n"
    said = "|\n| from HERE\n| bye"
    assert remake(old, {"greet": greet}, {"/there": "HERE"}) == (
        f"# First.\n$ greet\n| hello \n{said}\n\n$ greet 'a b' c\n| hello a b c\n{said}\n[2]\n"
    )


def test_what_differs_between_two_files_of_bits(capsys: pytest.CaptureFixture[str]) -> None:
    line, states = {"loss": (1.5).hex(), "step": 1}, {"master a": "0", "master b": "1"}
    run = {"kernels": ["all torch"], "lines": [line], "states": states}
    runs = {"same": run, "other": run, "gone": run, "failed": run}
    changed = {"kernels": ["all cpp"], "lines": [{**line, "loss": (2.5).hex()}], "states": {**states, "master b": "2"}}
    assert compare({"torch": "2", "runs": runs}, {"torch": "2", "runs": dict(runs)}) == 0
    assert capsys.readouterr().out == "4 runs are equal to the last bit\n"
    after = {"same": run, "other": changed, "failed": {"error": "exit codes [2]"}}
    assert compare({"torch": "2", "runs": runs}, {"torch": "2", "runs": after}) == 1
    assert capsys.readouterr().out.splitlines() == [
        "other: other kernels",
        "other: line 1: loss 0x1.8000000000000p+0 / 0x1.4000000000000p+1",
        "other: 1 of 2 states, first master b",
        "gone: only in the first",
        "failed: runs / exit codes [2]",
    ]


def test_runs_whose_bits_are_compared_can_start() -> None:
    for name, (ranks, lines) in RUNS.items():
        for line in lines:
            cfg = cli.parse([*BASE, *shlex.split(line)], world=ranks).config
            Grid.from_config(cfg.parallel, ranks)
            assert cfg.train.train_steps in (2, 4), name
