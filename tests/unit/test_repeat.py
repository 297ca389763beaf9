"""A failure comes with the command that repeats it, alone and in the environment that it failed in."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.ranks import PYTHONPATH

PLANTED = """
import pytest
from hypothesis import given, strategies as st

@pytest.mark.full
@given(st.integers(0, 10**6))
def test_drawn(n):
    assert n < 4242

@pytest.mark.parametrize("words", ["it's 1", "2"])
def test_words(words):
    assert words == "2"
"""


@pytest.mark.full
def test_a_failure_is_repeated_by_what_is_printed(tmp_path: Path) -> None:
    (tmp_path / "pytest.ini").write_text("[pytest]\nmarkers = full\n")
    (tmp_path / "test_planted.py").write_text(PLANTED)
    again = f"{sys.executable} -m pytest -p tests.conftest -p no:cacheprovider"
    env = {**os.environ, "PYTHONPATH": PYTHONPATH, "REPEAT": again}

    def said(command: str) -> list[str]:
        done = subprocess.run(command, shell=True, cwd=tmp_path, env=env, capture_output=True, text=True)
        assert done.returncode == 1, done.stdout + done.stderr
        return done.stdout.splitlines()

    lines = said(f"{again} --full -n 0")
    commands = [line.removeprefix("repeat: ") for line in lines if line.startswith("repeat: ")]
    assert len(commands) == 2
    for command in commands:
        repeated = said(command)
        assert f"repeat: {command}" in repeated
        # What was compared, or drawn.
        told = [line for line in repeated if line.startswith("E  ")]
        assert told
        assert set(told) <= set(lines)
        assert "1 failed" in repeated[-1]
