"""pretrain_gpt.py, whose ranks wait after steps, or fail there: `WAIT=STEP:FILE;...` waits until the file exists.

Steps of so small a model would take all processors where a run goes on until a test ends it: each one has a pause, and
a longer one where the run has no end.
"""

from __future__ import annotations

import os
import sys
import time
from typing import Any

from megalite.runtime.recover.member import become_guard_if_asked

if __name__ == "__main__":
    become_guard_if_asked(sys.argv[1:])

import pretrain_gpt
from megalite.runtime.loop.run import Run
from tests.faults.zygote import wait_for_file


def wait(run: Run, _: dict[str, Any]) -> None:
    time.sleep(0.1 if run.engine.cfg.train.train_steps < 100 else 0.5)
    for word in os.environ["WAIT"].split(";"):
        step, path = word.split(":", 1)
        if run.step == int(step):
            wait_for_file(path)


if __name__ == "__main__":
    with pretrain_gpt.leaving_together():
        pretrain_gpt.main(callbacks=[wait])
