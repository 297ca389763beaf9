"""Runs `megalite estimate` several times in one process, without pytest, which may have imported torch too early.

Standard input: a JSON list of its arguments a line. Output: a line of JSON for each, what it printed, or its error, and
the memory of the process. Its own arguments: packages that it is to do without.
"""

from __future__ import annotations

import contextlib
import io
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

from megalite.core.base.errors import UserError
from megalite.extras.estimate import command

ROOT = Path(__file__).resolve().parents[4]


class Tool:
    """The tool in a process of its own, which lacks some packages and runs each command line once.

    Attributes:
        peak: memory of the process, bytes.
    """

    def __init__(self, *without: str) -> None:
        command = [sys.executable, "-m", "tests.unit.extras.estimate.fake_runs", *without]
        pipe = subprocess.PIPE
        self.process = subprocess.Popen(command, stdin=pipe, stdout=pipe, text=True, bufsize=1, cwd=ROOT)
        self.peak, self._said = 0, dict[str, str]()

    def says(self, words: str) -> str:
        """What it answers to a command line."""
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        if words not in self._said:
            self.process.stdin.write(json.dumps(words.split()) + "\n")
            self._said[words], self.peak = json.loads(self.process.stdout.readline())
        return self._said[words]

    def figures(self, words: str) -> Any:
        """The same as JSON."""
        return json.loads(self.says(f"--json {words}"))


def main() -> None:
    absent: dict[str, Any] = dict.fromkeys(sys.argv[1:])
    sys.modules.update(absent)
    for line in sys.stdin:
        printed = io.StringIO()
        try:
            with contextlib.redirect_stdout(printed):
                command.main(json.loads(line))
            said = printed.getvalue()
        except UserError as e:
            said = f"error: {e}"
        # After the command, which imports torch in its own way.
        import torch

        from megalite.runtime.record.step_record import peak_memory

        print(json.dumps([said, peak_memory(torch.device("cpu"))]), flush=True)


if __name__ == "__main__":
    main()
