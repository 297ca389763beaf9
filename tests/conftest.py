"""Fixtures for all tests."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from megalite.log import logger
from tests.workers import WorkerPool


@pytest.fixture(autouse=True)
def _own_logging() -> Iterator[None]:
    """A command called in the test's process sets the logger up; its handler writes to a stream that pytest closes."""
    handlers, level, propagate = list(logger.handlers), logger.level, logger.propagate
    yield
    logger.handlers[:] = handlers
    logger.setLevel(level)
    logger.propagate = propagate


@pytest.fixture(scope="session")
def pool() -> Iterator[WorkerPool]:
    """Persistent gloo workers, shared by the whole run."""
    workers = WorkerPool()
    yield workers
    workers.close()
