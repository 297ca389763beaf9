"""Plant the mistakes of mutants.yaml one at a time in a copy of this checkout, and run the tests that find them.

    python -m tests.mutants [--only PATTERN]

A line of JSON for each: its name, whether a test failed, which, and the seconds. Exit code 1 if one survives.
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
from pathlib import Path

from tests.mutants.table import ROOT, Mutant, mutants


def main() -> int:
    parser = argparse.ArgumentParser(
        prog="python -m tests.mutants", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--only", default="", metavar="PATTERN", help="regular expression of names or files")
    args = parser.parse_args()
    chosen = [m for m in mutants() if re.search(args.only, m.name) or re.search(args.only, m.file)]
    with tempfile.TemporaryDirectory() as folder:
        copy = Path(folder) / "checkout"
        copy_checkout(copy)
        survivors = [m.name for m in chosen if not killed(copy, m)]
    print(f"{len(chosen) - len(survivors)} of {len(chosen)} killed", file=sys.stderr)
    return bool(survivors)


def copy_checkout(to: Path) -> None:
    """Copy what git tracks, and the compiled kernels."""
    tracked = subprocess.run(["git", "ls-files"], cwd=ROOT, capture_output=True, text=True, check=True).stdout
    built = [str(path.relative_to(ROOT)) for path in (ROOT / "megalite").rglob("*.so")]
    for name in [*tracked.splitlines(), *built]:
        if (ROOT / name).is_file():
            (to / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(ROOT / name, to / name)


def killed(copy: Path, mutant: Mutant) -> bool:
    """Plant a mutant, run its tests up to the first that fails, and take it out again."""
    path, started = copy / mutant.file, time.monotonic()
    original = path.read_text()
    path.write_text(mutant.planted(original))
    try:
        command = [sys.executable, "-m", "pytest", "-x", "-q", "-p", "no:cacheprovider", *mutant.tests]
        done = subprocess.run(command, cwd=copy, capture_output=True, text=True)
    finally:
        path.write_text(original)
    failed = re.findall(r"^(?:FAILED|ERROR) (\S+)", done.stdout, re.M)
    # 1: tests have failed; other codes are those of a test run that did not come to that.
    is_killed = done.returncode == 1 and bool(failed)
    line = {"name": mutant.name, "killed": is_killed, "by": failed[:1], "seconds": round(time.monotonic() - started)}
    print(json.dumps(line if done.returncode in (0, 1) else {**line, "said": done.stdout[-300:]}), flush=True)
    return is_killed


if __name__ == "__main__":
    sys.exit(main())
