"""Which rows of a grid always run, and which only with --full."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any

import pytest

from tests.workers import WorkerPool


def always_run(table: Iterable[Any], *always: Any) -> list[Any]:
    """Parameters for `pytest.mark.parametrize`, one a row; all but those named run only with --full."""
    table = list(table)
    assert all(row in table for row in always), f"{always} are not all in {table}"
    return [pytest.param(row, marks=() if row in always else pytest.mark.full) for row in table]


def layout_tests(check: Callable[..., None], strong: Mapping[Any, Any], grid: Mapping[Any, Any]) -> tuple[Any, Any]:
    """Two tests that call `check(pool, shape, rows)` for each shape of ranks: a strong one, and one for --full."""

    @pytest.mark.parametrize("shape", strong, ids=str)
    def always(pool: WorkerPool, shape: Any) -> None:
        check(pool, shape, strong[shape])

    @pytest.mark.full
    @pytest.mark.parametrize("shape", grid, ids=str)
    def full(pool: WorkerPool, shape: Any) -> None:
        check(pool, shape, grid[shape])

    return always, full
