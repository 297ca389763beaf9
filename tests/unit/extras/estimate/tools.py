"""`megalite estimate` in a process of its own, for tests that ask it several times."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from tests.unit.extras.estimate.fake_runs import Tool


@contextmanager
def started(*without: str) -> Iterator[Tool]:
    """Start it without some packages; the test is skipped where fake GPUs cannot be had."""
    if shutil.which("g++") is None:
        pytest.skip("no C++ compiler, which a CPU build of torch requires to imitate a GPU")
    tool = Tool(*without)
    with tool.process:
        yield tool
