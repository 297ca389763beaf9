"""Check a change in a minute: style, types, imports, and the tests of what changed since origin/main (or else HEAD).

    bash tests/run.sh --quick

A test file belongs to a change if it changed itself, or if it is in tests/unit and imports a module that changed. Those
that import the fewest other modules run first; after 40 seconds no further test begins, and what was left out is said.
"""

from __future__ import annotations

import functools
import subprocess
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from tests.unit.house import House

ROOT = Path(__file__).resolve().parents[1]
BUDGET_S = 40.0
BEGAN = time.monotonic()
STYLE = (
    (sys.executable, "-m", "ruff", "check", "."),
    (sys.executable, "-m", "ruff", "format", "--check", "."),
    (str(Path(sys.executable).with_name("lint-imports")),),
    (sys.executable, "-m", "mypy"),
)


def pytest_runtest_setup() -> None:
    """This module is pytest's plugin too: begin no further test when the time is over."""
    if time.monotonic() - BEGAN > BUDGET_S:
        pytest.skip(f"{BUDGET_S:.0f} s are over")


def main() -> int:
    """Return the exit code: 0 if nothing was found."""
    checks = [subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, text=True) for command in STYLE]
    said = [(check.communicate()[0], check.returncode) for check in checks]
    failed = [text for text, code in said if code]
    print("".join(failed) or "style, types and imports: nothing found", flush=True)
    tests = files_for(changed_files())
    if not tests:
        print("no test file belongs to what changed")
        return bool(failed)
    command = [sys.executable, "-m", "pytest", "-n", "2", "--dist", "load", "-p", "tests.quick", *tests]
    return subprocess.run(command, cwd=ROOT).returncode or bool(failed)


def changed_files() -> list[str]:
    """List the files that differ from where this branch left origin/main (or from HEAD), and new ones."""
    base = _git("merge-base", "HEAD", "origin/main") or ["HEAD"]
    return sorted({*_git("diff", "--name-only", base[0]), *_git("ls-files", "--others", "--exclude-standard")})


def files_for(files: list[str]) -> list[str]:
    """List the test files that belong to changed files, those that changed first."""
    house, tests = _houses()
    changed = {_dotted(file) for file in files if file.startswith("megalite/")} & house.texts.keys()
    helpers = {_dotted(file) for file in files if file.startswith("tests/")} & tests.texts.keys()
    files_of_tests = [name for name in tests.texts if name.split(".")[-1].startswith("test_")]
    reach = {name: house.imported_by(tests.trees[name]) for name in files_of_tests}
    near = [name for name in reach if name.startswith("unit.") and reach[name] & changed]
    own = [name for name in reach if name in helpers or tests.imports[name] & helpers]
    chosen = dict.fromkeys([*own, *sorted(near, key=lambda name: len(reach[name]))])
    return [f"tests/{name.replace('.', '/')}.py" for name in chosen]


@functools.cache
def _houses() -> tuple[House, House]:
    # Not before pytest: it rewrites the assertions of what is in tests/unit.
    from tests.unit.house import House

    return House(ROOT / "megalite"), House(ROOT / "tests")


def _dotted(file: str) -> str:
    return ".".join(Path(file).with_suffix("").parts[1:]).removesuffix(".__init__")


def _git(*arguments: str) -> list[str]:
    done = subprocess.run(("git", *arguments), cwd=ROOT, capture_output=True, text=True)
    return done.stdout.splitlines() if done.returncode == 0 else []


if __name__ == "__main__":
    sys.exit(main())
