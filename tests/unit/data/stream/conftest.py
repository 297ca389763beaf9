"""Fixtures of streams."""

from __future__ import annotations

import pytest

from megalite.runtime.data.stream import catalogue


@pytest.fixture
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    """Pieces of 2 KiB: a small folder has many."""
    monkeypatch.setattr(catalogue, "_LEAST", 2048)
    monkeypatch.setattr(catalogue, "_PIECES", 1)
    monkeypatch.setattr(catalogue, "_MOST", 2048)
