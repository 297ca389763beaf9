"""Runs `megalite estimate` several times in one process, without pytest, which may have imported torch too early.

Standard input: a JSON list of its arguments a line. Output: for each line what it printed, or its error; at the end the
memory of the process. Its own arguments: packages that it is to do without.
"""

from __future__ import annotations

import contextlib
import io
import json
import sys

from megalite.core.base.errors import UserError
from megalite.extras.estimate import command


def main() -> None:
    sys.modules.update(dict.fromkeys(sys.argv[1:]))
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
