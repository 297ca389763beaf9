"""Plant the mistakes of mutants.yaml one at a time in a copy of this checkout, and run the tests that find them.

    python -m tests.mutants [--only PATTERN] [--write]

A line of JSON for each: its name, whether a test failed, which, and the seconds. Exit code 1 if one survives. With
--write the rows of docs/design/mutants.md follow.
"""

from __future__ import annotations

import argparse
import json
import re
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from tests.mutants.table import ROOT, Mutant, mutants

PAGE = ROOT / "docs" / "design" / "mutants.md"
SEPARATOR = "|---|---|---|\n"


def main() -> int:
    parser = argparse.ArgumentParser(
        prog="python -m tests.mutants", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--only", default="", metavar="PATTERN", help="regular expression of names or files")
    parser.add_argument("--write", action="store_true", help="update docs/design/mutants.md")
    args = parser.parse_args()
    chosen = [m for m in mutants() if re.search(args.only, m.name) or re.search(args.only, m.file)]
    with tempfile.TemporaryDirectory() as folder:
        copy = Path(folder) / "checkout"
        copy_checkout(copy)
        found = [plant(copy, m) for m in chosen]
    if args.write:
        write_page(found)
    deaths = sum(result["killed"] for result in found)
    print(f"{deaths} of {len(chosen)} killed", file=sys.stderr)
    return deaths < len(chosen)


def copy_checkout(to: Path) -> None:
    """Copy what git tracks, and the compiled kernels."""
    tracked = subprocess.run(["git", "ls-files"], cwd=ROOT, capture_output=True, text=True, check=True).stdout
    built = [str(path.relative_to(ROOT)) for path in (ROOT / "megalite").rglob("*.so")]
    for name in [*tracked.splitlines(), *built]:
        if (ROOT / name).is_file():
            (to / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(ROOT / name, to / name)


def plant(copy: Path, mutant: Mutant) -> dict[str, Any]:
    """Plant a mutant, run its tests up to the first that fails, take it out again, and print what was found."""
    path, started = copy / mutant.file, time.monotonic()
    original = path.read_text()
    path.write_text(mutant.planted(original))
    try:
        command = [sys.executable, "-m", "pytest", "-x", "-q", "-p", "no:cacheprovider", *mutant.tests]
        done = subprocess.run(command, cwd=copy, capture_output=True, text=True)
    finally:
        path.write_text(original)
    failed = re.findall(r"^(?:FAILED|ERROR) (.+?)(?: - .*)?$", done.stdout, re.M)
    # 1: tests have failed; other codes are those of a test run that did not come to that.
    is_killed = done.returncode == 1 and bool(failed)
    line: dict[str, Any] = {
        "name": mutant.name,
        "killed": is_killed,
        "by": failed[:1],
        "seconds": round(time.monotonic() - started),
    }
    print(json.dumps(line if done.returncode in (0, 1) else {**line, "said": done.stdout[-300:]}), flush=True)
    return line


def write_page(found: Iterable[Mapping[str, Any]]) -> None:
    """Write what was found of some mutants into the page's table, which has the order of the list."""
    head, *rows = PAGE.read_text().split(SEPARATOR)
    known = {row.split(" | ")[0].removeprefix("| "): row for row in "".join(rows).splitlines()}
    for result in found:
        test = f"`{result['by'][0]}`" if result["killed"] else "**none**"
        known[result["name"]] = f"| {result['name']} | {test.replace('|', '&#124;')} | {result['seconds']} |"
    table = "".join(f"{known[m.name]}\n" for m in mutants() if m.name in known)
    PAGE.write_text(f"{head}{SEPARATOR}{table}")


if __name__ == "__main__":
    sys.exit(main())
