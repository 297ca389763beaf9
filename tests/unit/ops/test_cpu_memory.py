"""Freed memory is reused: page faults, which the kernel counts, vanish from repeated large temporaries."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

from megalite.core.ops.cpu_memory import keep_freed_memory
from tests.limits import GIVES_BACK

_FAULTS = """
import resource, sys, torch
from megalite.core.ops.cpu_memory import keep_freed_memory
torch.set_num_threads(1)
if sys.argv[1] == "keep":
    assert keep_freed_memory()
x = torch.randn(1 << 20)
def step():
    return ((x * 2 + 1).square() * x).sum()
for _ in range(3):
    step()
before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
for _ in range(40):
    step()
print(resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before)
"""


def _faults(mode: str) -> int:
    env = {**os.environ, **GIVES_BACK}
    done = subprocess.run([sys.executable, "-c", _FAULTS, mode], capture_output=True, text=True, check=True, env=env)
    return int(done.stdout)


@pytest.mark.full
@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="glibc only")
def test_no_page_faults_after_warm_up() -> None:
    if not keep_freed_memory():
        pytest.skip("this C library has no mallopt")
    # A 4 MB temporary is 1024 pages: forty steps with four of them fault 160 thousand times.
    left = _faults("leave")
    assert left > 40_000
    # In one run of a hundred a small block that outlives a step lands between them, and three move once.
    assert _faults("keep") < left / 10
