"""Processes that serve a run beside it."""

from __future__ import annotations

from pathlib import Path

import pytest

from megalite.runtime.base.child import start_child


def test_a_child_imports_without_the_collector_and_works_with_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Over days it would keep what refers to itself."""
    (tmp_path / "served.py").write_text(
        "import gc, pathlib\n"
        "importing = gc.isenabled()\n"
        "def main(out):\n"
        "    pathlib.Path(out).write_text(f'{importing} {gc.isenabled()}')\n"
    )
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    assert start_child("served", {"out": str(tmp_path / "said")}, []).wait(120) == 0
    assert (tmp_path / "said").read_text() == "False True"
