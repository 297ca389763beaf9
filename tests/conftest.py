"""Fixtures for all tests."""

from __future__ import annotations

import os
import signal
from collections.abc import Generator, Iterator
from typing import Any

import pytest

from megalite.base.log import logger
from tests.workers import WorkerPool

# Before torch is imported. Several tests run at a time: on tiny tensors OpenMP threads spin for each other and cost ten
# times the processor time of one thread.
os.environ.setdefault("OMP_NUM_THREADS", "1")

HUNG_S = 600
"""Far beyond the slowest test (80 s on two busy cores). One that hangs fails alone, and does not hold up the others."""


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--full", action="store_true", help="also run the tests marked full: the rest of every grid")


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Leave out what is marked full, unless it is asked for or named."""
    if config.getoption("--full") or config.getoption("-m") or any("::" in a for a in config.args):
        return
    left_out = [item for item in items if item.get_closest_marker("full")]
    config.hook.pytest_deselected(items=left_out)
    items[:] = [item for item in items if item not in set(left_out)]


@pytest.hookimpl(wrapper=True)
def pytest_runtest_protocol() -> Generator[None, Any, Any]:
    def fail(*_: object) -> None:
        pytest.fail(f"hung: not done after {HUNG_S} s")

    before = signal.signal(signal.SIGALRM, fail)
    signal.setitimer(signal.ITIMER_REAL, HUNG_S)
    try:
        return (yield)
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)


@pytest.fixture(autouse=True)
def _own_logging() -> Iterator[None]:
    """A command called in the test's process sets the logger up; its handler writes to a stream that pytest closes."""
    handlers, level = list(logger.handlers), logger.level
    # pytest attaches its handlers also to loggers that do not propagate; kept here, they would see each record twice.
    logger.propagate = True
    yield
    logger.handlers[:] = handlers
    logger.setLevel(level)
    logger.propagate = True


@pytest.fixture(scope="session")
def pool() -> Iterator[WorkerPool]:
    """Persistent gloo workers, shared by the whole run."""
    workers = WorkerPool()
    yield workers
    workers.close()
