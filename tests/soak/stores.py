"""Kill runs whose data and checkpoints are in a store, at random requests: `python -m tests.soak.stores --minutes 60`.

Two hosts share no disk and have networks of their own (requires root). One or both are turned off in the middle of a
request, their disks are lost now and then, and requests and answers are refused, cut, late or damaged. After each kill
what counts as committed has to be whole, and the end has to be that of an undisturbed run, to the bit.
"""

from __future__ import annotations

import argparse
import os
import random
import shutil
import tempfile
import time
from collections import Counter
from pathlib import Path

from tests.faults.store_hosts import kill_to_the_end
from tests.faults.zygote import Zygote
from tests.stores import environment, start_s3

BROKEN = ("503", "cut", "cut-request", "short", "corrupt", "corrupt-request", "slow")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--minutes", type=float, default=5, help="no run begins later")
    parser.add_argument("--seed", type=int, default=int(time.time()))
    parser.add_argument("--kills", type=int, default=8, help="of each run")
    args = parser.parse_args()
    print(f"seed {args.seed}, {', '.join(BROKEN)}", flush=True)
    zygote, total, until = Zygote(), Counter[str](), time.monotonic() + 60 * args.minutes
    with tempfile.TemporaryDirectory() as place:
        s3 = start_s3(Path(place) / "moto.log")
        os.environ |= environment(s3.port)
        while time.monotonic() < until:
            folder = Path(place) / f"run{total['runs']}"
            folder.mkdir()
            hits = kill_to_the_end(s3, zygote, folder, random.Random(args.seed + total["runs"]), args.kills, BROKEN)
            total += Counter({"runs": 1, **Counter(hit.split()[0] for hit in hits)})
            shutil.rmtree(folder)
            print(", ".join(f"{n} {what}" for what, n in total.items()), flush=True)
        s3.close()
    zygote.close()


if __name__ == "__main__":
    main()
