"""pretrain_gpt.py, whose ranks wait after steps, or fail there: `WAIT=STEP:FILE;...` waits until the file exists."""

from __future__ import annotations

import os
import sys
from typing import Any

from megalite.runtime.recover.member import become_guard_if_asked

if __name__ == "__main__":
    become_guard_if_asked(sys.argv[1:])

import pretrain_gpt
from megalite.runtime.loop.run import Run
from tests.faults.zygote import wait_for_file


def wait(run: Run, _: dict[str, Any]) -> None:
    for word in os.environ["WAIT"].split(";"):
        step, path = word.split(":", 1)
        if run.step == int(step):
            wait_for_file(path)


if __name__ == "__main__":
    with pretrain_gpt.leaving_together():
        pretrain_gpt.main(callbacks=[wait])
