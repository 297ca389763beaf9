"""Runs `megalite estimate` several times in one process, without pytest, which may have imported torch too early.

Standard input: a JSON list of its arguments a line. Output: for each line what it printed, or its error; at the end the
memory of the process. Its own arguments: packages that it is to do without.
"""

from __future__ import annotations

import contextlib
import io
import json
import resource
import sys

from megalite.base.errors import UserError
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
    print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024)


if __name__ == "__main__":
    main()
