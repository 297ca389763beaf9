"""Fixtures for all tests."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.workers import WorkerPool


@pytest.fixture(scope="session")
def pool() -> Iterator[WorkerPool]:
    """Persistent gloo workers, shared by the whole run."""
    workers = WorkerPool()
    yield workers
    workers.close()
