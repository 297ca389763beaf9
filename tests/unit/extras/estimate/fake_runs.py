"""Runs `megalite estimate` several times in one process, without pytest, which may have imported torch too early.

Standard input: a JSON list of its arguments a line. Output: for each line what it printed, or its error; at the end the
memory of the process. Its own arguments: packages that it is to do without.
"""

from __future__ import annotations

import contextlib
import io
import json
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from megalite.core.base.errors import UserError
from megalite.extras.estimate import command

ROOT = Path(__file__).resolve().parents[4]


def answers(asked: Sequence[str], without: Sequence[str] = ()) -> list[Any]:
    """What the tool answers to several command lines, and the memory of its process, which lacks some packages."""
    lines = "".join(json.dumps(words.split()) + "\n" for words in asked)
    program = [sys.executable, "-m", "tests.unit.extras.estimate.fake_runs", *without]
    done = subprocess.run(program, input=lines, capture_output=True, text=True, cwd=ROOT)
    assert done.returncode == 0, done.stderr
    return [json.loads(line) for line in done.stdout.splitlines()]


def main() -> None:
    absent: dict[str, Any] = dict.fromkeys(sys.argv[1:])
    sys.modules.update(absent)
    for line in sys.stdin:
        printed = io.StringIO()
        try:
            with contextlib.redirect_stdout(printed):
                command.main(json.loads(line))
            print(json.dumps(printed.getvalue()))
        except UserError as e:
            print(json.dumps(f"error: {e}"))
    import torch

    from megalite.runtime.record.step_record import peak_memory

    print(peak_memory(torch.device("cpu")))


if __name__ == "__main__":
    main()
