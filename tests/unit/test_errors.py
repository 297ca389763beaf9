"""How a command-line tool ends, as real processes."""

from __future__ import annotations

import subprocess
import sys

import pytest


def run(body: str, **options: object) -> subprocess.CompletedProcess[str]:
    code = f"from megalite.errors import UserError, run_tool\ndef main():\n    {body}\nrun_tool(main)\n"
    return subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, **options)  # type: ignore[call-overload]


def test_user_error_is_one_line_and_2() -> None:
    done = run("raise UserError('--x 3', 'must be\\neven', 'use 4')")
    assert (done.returncode, done.stderr) == (2, "error: --x 3: must be even; use 4\n")


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
    code = "from megalite.errors import run_tool\nrun_tool(lambda: print('\\n'.join(['line'] * 100000)))"
    done = subprocess.run(
        ["bash", "-c", f'"{sys.executable}" -c "$CODE" | head -1'], env={"CODE": code}, capture_output=True, text=True
    )
    assert done.stdout == "line\n"
    assert done.stderr == ""
