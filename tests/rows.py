"""Which rows of a grid always run, and which only with --full."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import pytest


def always_run(table: Iterable[Any], *always: Any) -> list[Any]:
    """Parameters for `pytest.mark.parametrize`, one a row; all but those named run only with --full."""
    table = list(table)
    assert all(row in table for row in always), f"{always} are not all in {table}"
    return [pytest.param(row, marks=() if row in always else pytest.mark.full) for row in table]
