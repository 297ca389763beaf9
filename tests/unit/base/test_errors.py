"""How a command-line tool ends, as real processes."""

from __future__ import annotations

import argparse
import contextlib
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from megalite.core.base.errors import UserError
from megalite.core.base.log import logger, setup_logging
from megalite.extras.command import find_main
from megalite.extras.tool import ToolParser
from tests.ranks import ROOT


def run(body: str, **options: Any) -> subprocess.CompletedProcess[str]:
    imports = "from megalite.core.base.errors import UserError; from megalite.extras.tool import run_tool"
    code = f"{imports}\ndef main():\n    {body}\nrun_tool(main)\n"
    return subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, **options)


def test_user_error_is_one_line_and_2() -> None:
    done = run("raise UserError('--x 3', 'must be\\neven', 'use 4')")
    assert (done.returncode, done.stderr) == (2, "error: --x 3: must be even; use 4\n")


def test_a_file_that_may_not_be_read_is_one_line_and_2() -> None:
    done = run("raise PermissionError(13, 'Permission denied', 'runs/theirs/manifest.json')")
    assert (done.returncode, done.stderr.count("\n")) == (2, 1)
    assert done.stderr.startswith("error: runs/theirs/manifest.json: Permission denied")


def test_a_rank_whose_errors_are_captured_begins_and_ends() -> None:
    """In a notebook or a test, sys.stderr is no file; stacks and errors go to the process's own."""
    body = "import io, sys; sys.stderr = io.StringIO()\n"
    body += "from megalite.runtime.start.exit import leaving_together\n"
    body += "import os, signal\nwith leaving_together():\n    os.kill(os.getpid(), signal.SIGUSR1)\n    print('done')\n"
    done = subprocess.run([sys.executable, "-c", body], capture_output=True, text=True)
    assert (done.returncode, done.stdout) == (0, "done\n")
    assert "Current thread" in done.stderr


def test_a_rank_that_took_over_another_reports_under_its_number() -> None:
    """It used to be told as the rank in reserve that it had been."""
    body = "from megalite.core.base.log import take_rank\nfrom megalite.runtime.start.exit import leaving_together\n"
    body += "with leaving_together():\n    take_rank(1)\n    raise ValueError('odd')\n"
    env = os.environ | {"RANK": "4"}
    done = subprocess.run([sys.executable, "-c", body], capture_output=True, text=True, env=env)
    assert done.returncode == 1
    assert done.stderr.splitlines()[-1] == "[rank 1] ValueError: odd"


HOSTILE = "a\x1b[2J\x07\x7f\x9b31m\nb\u202ec\ud800é\U0001f642"
SAFE = r"a\x1b[2J\x07\x7f\x9b31m\nb\u202ec\ud800é🙂"


def test_foreign_text_cannot_act_on_a_terminal_or_forge_a_log_line(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    error = UserError(HOSTILE, "rule", "remedy")
    assert str(error) == SAFE.replace(r"\n", " ") + ": rule; remedy"
    assert str(UserError.from_message(HOSTILE)) == SAFE.replace(r"\n", "\n")
    before = logger.handlers[:]
    try:
        setup_logging(rank=0, log_file=tmp_path / "log")
        logger.warning(f"file {HOSTILE}")
        assert capsys.readouterr().err == f"file {SAFE}\n"
        assert (tmp_path / "log").read_text().endswith(f" [rank 0] WARNING file {SAFE}\n")
    finally:
        for handler in logger.handlers:
            handler.close()
        logger.handlers[:] = before


def test_a_value_of_any_length_is_quoted_in_part() -> None:
    """A hostfile or tokenizer of a stranger may have a word of a hundred megabytes."""
    text = str(UserError("--x " + "a" * 10**6, "b" * 10**6, "use 4"))
    assert len(text) < 3000
    assert text.startswith("--x aaa")
    assert text.endswith("bbb; use 4")
    assert " ... " in text


@pytest.mark.parametrize(("body", "code"), [("return 3", 3), ("pass", 0)])
def test_codes(body: str, code: int) -> None:
    assert run(body).returncode == code


def test_full_disk_is_one_line_and_1() -> None:
    done = run("open('/dev/full', 'w').write('x' * 100000)")
    assert done.returncode == 1
    assert done.stderr.startswith("error: ")
    assert "No space left on device" in done.stderr
    assert done.stderr.count("\n") == 1


def test_a_defect_keeps_its_traceback() -> None:
    done = run("raise KeyError('x')")
    assert done.returncode == 1
    assert "Traceback" in done.stderr


def test_a_reader_that_goes_away() -> None:
    code = "from megalite.extras.tool import run_tool\nrun_tool(lambda: print('\\n'.join(['line'] * 100000)))"
    done = subprocess.run(
        ["bash", "-c", f'"{sys.executable}" -c "$CODE" | head -1'], env={"CODE": code}, capture_output=True, text=True
    )
    assert done.stdout == "line\n"
    assert done.stderr == ""


@pytest.mark.parametrize(
    ("program", "argument"),
    [
        (["-c", "import sys; from megalite.extras.compat.help import *; show_help_if_asked(sys.argv)"], "--help"),
        (["pretrain_gpt.py"], "--print-config"),
        (["tools/preprocess_data.py"], "--help"),
        (["-m", "megalite"], "--help"),
    ],
)
def test_what_is_printed_may_be_cut_short(program: list[str], argument: str) -> None:
    """`| head`, at its worst: nobody reads."""
    ours, theirs = os.pipe()
    os.close(ours)
    # Unbuffered output hides the complaint that Python makes when it flushes at exit.
    env = {**os.environ, "PYTHONUNBUFFERED": ""}
    done = subprocess.run(
        [sys.executable, *program, argument], cwd=ROOT, env=env, stdout=theirs, stderr=subprocess.PIPE
    )
    os.close(theirs)
    assert (done.returncode, done.stderr) == (1, b"")


TOOLS = {
    "generate": ["run"],
    "evaluate": ["run", "--data", "x"],
    "tokenizer": ["--input", "x", "--vocab-size", "300", "--out", "x"],
    "launch": ["--hostfile", "missing", "--", "pretrain_gpt.py"],
    "train": ["--dry-run"],
}


@pytest.mark.parametrize("command", TOOLS)
def test_every_number_of_a_tool_has_a_range(command: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """What cannot be meant is refused, by its flag, before a file is read or anything is started."""
    monkeypatch.chdir(tmp_path)
    main, words = find_main(command), TOOLS[command]
    seen: list[argparse.Action] = []
    parse = ToolParser.parse_known_args

    def note(self: ToolParser, *args: Any, **options: Any) -> Any:
        seen.extend(a for a in self._actions if a.type in (int, float))
        return parse(self, *args, **options)

    monkeypatch.setattr(ToolParser, "parse_known_args", note)
    with contextlib.suppress(UserError):
        main([*words, "--no-such-flag"] if command != "train" else ["--tp", "0"])
    monkeypatch.undo()
    monkeypatch.chdir(tmp_path)
    assert seen
    end = words.index("--") if "--" in words else len(words)
    for action in {a.dest: a for a in seen}.values():
        flag = action.option_strings[0]
        for value in (-1, -(10**40), 10**40, *(("nan", "inf", "1e300") if action.type is float else ())):
            with pytest.raises(UserError) as caught:
                main([*words[:end], f"{flag}={value}", *words[end:]])
            assert str(caught.value).startswith(flag), (flag, value, str(caught.value))
