"""What a watchdog reads from stacks, processes and reports."""

from __future__ import annotations

import dataclasses
import faulthandler
import os
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path

import pytest

from megalite.dist.context import ParallelContext
from megalite.pipeline.orders import Op
from megalite.train.heartbeat import Heartbeat
from megalite.train.watchdog import (
    LAYOUT,
    WAITING,
    Beat,
    Report,
    children,
    is_waiting,
    main_thread,
    process_state,
    usage,
    works,
)


def stacks_of_a_script(body: str) -> str:
    """What faulthandler prints in a script that has another thread."""
    script = (
        "import faulthandler, sys, threading, time\n"
        "threading.Thread(target=time.sleep, args=(9,), daemon=True).start()\n"
        "def wait():\n    faulthandler.dump_traceback(sys.stderr, all_threads=True)\n" + body
    )
    return subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True).stderr


def test_the_main_thread_whoever_prints() -> None:
    text = stacks_of_a_script("wait()\n")
    assert main_thread(text) == ["<string>, line 4 in wait", "<string>, line 5 in <module>"]
    # Printed by another thread, the main one is no longer "current".
    text = stacks_of_a_script("t = threading.Thread(target=wait); t.start(); t.join()\n")
    assert main_thread(text)[-1].endswith("in <module>")
    assert "line 4 in wait" not in "".join(main_thread(text))
    assert main_thread("") == []


def test_waiting_is_in_a_collective() -> None:
    text = stacks_of_a_script("wait()\n")
    assert not is_waiting(text)
    for room in ("collectives", "direct"):
        assert is_waiting(text.replace('"<string>", line 4', f'"/a/megalite/dist/{room}.py", line 50'))
    assert is_waiting(text.replace('"<string>", line 4', '"/x/torch/distributed/distributed_c10d.py", line 50'))
    assert not is_waiting(text.replace('"<string>", line 5', '"/a/megalite/dist/collectives.py", line 50'))


def report(rank: int, state: str, step: int = 5, silent: float = 30.0) -> Report:
    return Report(rank, "host", 1, step, "training", silent, state, "")


@pytest.mark.parametrize(
    "others",
    [
        [report(0, WAITING, silent=40.0)],
        [report(0, WAITING, step=4), report(2, "at loop.py, line 1 in f", step=4)],
    ],
)
def test_a_stopped_rank_is_the_culprit(others: list[Report]) -> None:
    assert min([*others, report(1, "stopped")], key=lambda r: r.suspicion).rank == 1


def test_among_waiting_ranks_the_one_furthest_behind() -> None:
    ranks = [report(0, WAITING), report(1, WAITING, step=4, silent=29.0), report(2, WAITING, silent=35.0)]
    assert min(ranks, key=lambda r: r.suspicion).rank == 1
    ranks[1] = dataclasses.replace(ranks[1], step=5)
    assert min(ranks, key=lambda r: r.suspicion).rank == 2


def test_work_is_seen_and_sleep_is_not() -> None:
    me = [os.getpid()]
    before, started = usage(me), time.process_time()
    while time.process_time() - started < 0.2:
        pass
    busy = usage(me)
    assert works(before, busy, 1.0)
    with tempfile.TemporaryFile() as file:
        file.write(bytes(1 << 17))
        file.flush()
        assert works((busy[0], busy[1]), (busy[0], usage(me)[1]), 1.0)
    assert not works(busy, busy, 1.0)
    assert not works(None, busy, 1.0)
    with subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"]) as child:
        assert child.pid in children(os.getpid())
        assert process_state(child.pid) in ("R", "S", "D")
        child.kill()


def test_heartbeats_say_where_the_rank_is(tmp_path: Path) -> None:
    heart = Heartbeat(tmp_path, ParallelContext.single(), 0)
    first = Beat.read(heart._memory)
    assert first.phase == "set-up"
    heart.beat("training", 7)
    program = heart.told((Op("F", 0, 1), Op("B", 0, 1)))
    assert program == (Op("F", 0, 1), Op("B", 0, 1))
    places = [Beat.read(heart._memory).place for _ in program]
    places.append(Beat.read(heart._memory).place)
    assert places == [
        "training (step 7, last operation: F of micro-batch 0 on stage 1)",
        "training (step 7, last operation: B of micro-batch 0 on stage 1)",
        "training (step 7, last operation: all of the schedule)",
    ]
    assert Beat.read(heart._memory).count == first.count + 4
    heart.beat("a phase whose name is too long for the place that there is for it, by far", 2**62)
    assert len(Beat.read(heart._memory).phase) == 63
    assert LAYOUT.size < 200
    heart.close()


def test_the_watchdog_starts_without_torch_and_ends_with_close(tmp_path: Path) -> None:
    heart = Heartbeat(tmp_path, ParallelContext.single(), 600)
    assert heart._process is not None
    watchdog = heart._process.pid
    assert watchdog in children(os.getpid())
    maps = Path(f"/proc/{watchdog}/maps")
    deadline = time.monotonic() + 20
    while "select" not in maps.read_text():
        assert time.monotonic() < deadline
        time.sleep(0.05)
    assert "torch" not in maps.read_text()
    heart.close()
    assert watchdog not in children(os.getpid())
    heart.close()
    assert threading.current_thread() is threading.main_thread()
    assert not faulthandler.unregister(12)
    # Nothing hung: nothing was written.
    assert list(tmp_path.iterdir()) == []
