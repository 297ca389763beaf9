"""Where there is no /proc (macOS, a hardened container): a run starts, trains, saves and resumes."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.ranks import ROOT, finish, start_ranks

INJECT = str(Path(__file__).with_name("inject"))
HIDDEN = {"PYTHONPATH": os.pathsep.join([INJECT, str(ROOT)]), "HIDE_LINUX": "1"}
RUN = [
    *("--num-layers", "1", "--hidden-size", "16", "--num-heads", "2", "--vocab-size", "64", "--seq-len", "16"),
    *("--global-batch-size", "2", "--mock-data", "--device", "cpu"),
]


@pytest.mark.full
def test_a_run_trains_saves_and_resumes(tmp_path: Path) -> None:
    for steps, world in ((2, 2), (4, 1)):
        flags = [*RUN, "--train-steps", str(steps), "--run-dir", str(tmp_path)]
        left = finish(start_ranks(flags, world, env=HIDDEN))
        assert [rank.code for rank in left] == [0] * world, "".join(rank.err for rank in left)
        assert (tmp_path / "checkpoints" / f"step_{steps:08d}" / "COMMIT").exists()
    lines = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    assert [line["step"] for line in lines if "event" not in line] == [1, 2, 3, 4]
    assert [line["step"] for line in lines if line.get("event") == "resume"] == [2]
    assert not (tmp_path / "logs" / "out_of_memory_rank_0.txt").exists()


def test_memory_is_still_limited_by_the_machine() -> None:
    """What the process uses is unknown there: counted as nothing, never as a failure."""
    code = (
        "import os, torch\nfrom megalite.extras.diagnose.memory import usable_bytes\n"
        "assert not hasattr(os, 'memfd_create')\n"
        "try:\n    open('/proc/self/status')\nexcept FileNotFoundError:\n"
        "    print(usable_bytes(torch.device('cpu')))\n"
    )
    command = [sys.executable, "-c", code]
    run = subprocess.run(command, env={**os.environ, **HIDDEN}, capture_output=True, text=True, check=True)
    assert 0 < int(run.stdout) <= os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")


LOCKED = """
import sys, time
from pathlib import Path
from megalite.runtime.places.lock import RunLock
RunLock(Path(sys.argv[1]), sys.argv[2]).acquire()
print("held", flush=True)
time.sleep(600 if sys.argv[2] == "owner" else 0)
"""


def test_a_lock_is_taken_over_when_its_owner_is_gone_and_only_then(tmp_path: Path) -> None:
    def start(run: str) -> subprocess.Popen[str]:
        command = [sys.executable, "-c", LOCKED, str(tmp_path), run]
        env = {**os.environ, **HIDDEN}
        return subprocess.Popen(command, env=env, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)

    with start("owner") as owner:
        assert owner.stdout is not None
        assert owner.stdout.readline() == "held\n"
        with start("other") as other:
            assert "is in use by run owner" in other.communicate()[1]
        owner.kill()
    with start("heir") as heir:
        out, err = heir.communicate()
        assert out == "held\n", err
