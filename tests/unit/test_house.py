"""The house rules that tools can check: floors, style, types."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
SOURCES = ["megalite", "tools", "tests", "benchmarks", "examples", "pretrain_gpt.py", "setup.py"]


def run(*command: str) -> None:
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr


def test_floors() -> None:
    run(str(Path(sys.executable).with_name("lint-imports")), "--no-cache")


def test_ruff() -> None:
    run(sys.executable, "-m", "ruff", "check", "--no-cache", *SOURCES)
    run(sys.executable, "-m", "ruff", "format", "--no-cache", "--check", *SOURCES)


def test_types() -> None:
    run(sys.executable, "-m", "mypy", "--cache-dir", "/dev/null")


def test_no_pickle_in_the_library() -> None:
    pattern = re.compile(r"torch\.load|torch\.save|import pickle|gather_object|broadcast_object")
    found = [
        f"{path.relative_to(ROOT)}: {line}"
        for path in sorted((ROOT / "megalite").rglob("*.py"))
        for line in path.read_text().splitlines()
        # Checkpoints of Megatron-LM are pickles; test_checkpoint_damage.py names the one file that reads them. What a
        # notebook sends to its own processes is one.
        if pattern.search(line) and path.parent.name != "megatron" and path.name != "notebook.py"
    ]
    assert not found


def test_the_process_grid_is_not_global() -> None:
    """No literal device in the library, and the environment is read where processes are started only."""
    allowed = {"dist", "log.py", "host.py", "launch"}
    for path in sorted((ROOT / "megalite").rglob("*.py")):
        inside = path.relative_to(ROOT / "megalite")
        if inside.parts[0] not in allowed and "os.environ" in path.read_text():
            pytest.fail(f"{inside} reads os.environ")
