"""Make the transcripts of a checkout: write them, or compare them with those that are committed."""

from __future__ import annotations

import argparse
import difflib
import re
import shutil
import sys
import tempfile
from pathlib import Path

from tests.golden.doors import ROOT, enter
from tests.golden.transcript import remake, transcripts
from tests.golden.verbs import VERBS


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.golden", description=__doc__)
    parser.add_argument("names", nargs="*", help="transcripts to make (all)")
    parser.add_argument("--write", action="store_true", help="write them beside this file, instead of comparing")
    parser.add_argument("--out", type=Path, metavar="DIR", help="write them to DIR, instead of comparing")
    parser.add_argument("--checkout", type=Path, default=ROOT, metavar="DIR", help="what to look at (this checkout)")
    args = parser.parse_args()
    out = args.out.resolve() if args.out else None
    paths = {name: path for name, path in transcripts().items() if name in (args.names or transcripts())}
    with tempfile.TemporaryDirectory() as folder:
        work, checkout = Path(folder).resolve() / "work", args.checkout.resolve()
        shutil.copytree(ROOT / "tests" / "golden" / "files", work)
        enter(checkout, work)
        hide = {
            re.escape(str(work)): "WORK",
            re.escape(str(checkout)): "CHECKOUT",
            r"(?m)^ops: .*": "ops: ...",
            r"tfevents\S+": "tfevents...",
            r"\.\d{19}\.pt\.trace": "....pt.trace",
        }
        differs = False
        for name, path in paths.items():
            text = path.read_text()
            made = remake(text, VERBS, hide)
            if args.write or out:
                (path if out is None else out / path.name).write_text(made)
                print(name, flush=True)
            elif made != text:
                differs = True
                words = (text.splitlines(True), made.splitlines(True), f"{name}: committed", f"{name}: now")
                sys.stdout.writelines(difflib.unified_diff(*words, n=2))
    return int(differs)


if __name__ == "__main__":
    sys.exit(main())
