"""What a watchdog reads from stacks, processes and reports."""

from __future__ import annotations

import dataclasses
import faulthandler
import itertools
import json
import os
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

import pytest

from megalite.core.mesh.context import ParallelContext
from megalite.core.pipeline.order import Op
from megalite.runtime.base.child import children, process_state, shared_memory, usage, waits_for_disk
from megalite.runtime.base.untrusted import read_json
from megalite.runtime.watch import watchdog
from megalite.runtime.watch.hang_report import STARVED, STOPPED, WAITING, HangReport, culprit_of
from megalite.runtime.watch.heartbeat import Heartbeat
from megalite.runtime.watch.stacks import is_complete, is_waiting, main_thread
from megalite.runtime.watch.watchdog import IDLE, LAYOUT, STACKS_SIGNAL, Beat, Watchdog, works
from tests.ranks import ROOT


def stacks_of_a_script(body: str) -> str:
    """What faulthandler prints in a script that has another thread."""
    script = (
        "import faulthandler, sys, threading, time\n"
        "threading.Thread(target=time.sleep, args=(600,), daemon=True).start()\n"
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


def test_a_dump_is_whole_when_the_main_thread_is_there_to_its_end() -> None:
    text = stacks_of_a_script("wait()\n")
    assert is_complete(text)
    assert not any(is_complete(text[:end]) for end in range(len(text)))
    assert is_complete(stacks_of_a_script("def deeper(n):\n    deeper(n - 1) if n else wait()\ndeeper(200)\n"))


def test_waiting_is_in_a_collective() -> None:
    text = stacks_of_a_script("wait()\n")
    assert not is_waiting(text)
    assert is_waiting(text.replace('"<string>", line 4', '"/a/megalite/core/mesh/collectives.py", line 50'))
    assert is_waiting(text.replace('"<string>", line 4', '"/x/torch/distributed/distributed_c10d.py", line 50'))
    assert not is_waiting(text.replace('"<string>", line 5', '"/a/megalite/core/mesh/collectives.py", line 50'))


def test_a_gpus_host_waits_wherever_it_launches() -> None:
    """Frames innermost first: in a forward pass, in autograd, in a compiler, in set-up."""
    text = stacks_of_a_script("wait()\n")

    def stacks(*paths: str) -> str:
        inner = "\n".join(f'  File "/a/{path}", line 9 in f' for path in paths)
        return text.replace('  File "<string>", line 4 in wait', inner)

    step = ("megalite/core/pipeline/executor.py", "megalite/core/step.py", "megalite/runtime/loop/loop.py")
    for launching in ("megalite/core/tensor_parallel/linear.py", "torch/autograd/graph.py", "triton/runtime/jit.py"):
        assert is_waiting(stacks(launching, *step), cuda=True)
        assert not is_waiting(stacks(launching, *step))
    assert not is_waiting(stacks("subprocess.py", "triton/compiler/compiler.py", *step), cuda=True)
    assert not is_waiting(stacks("megalite/core/build.py"), cuda=True)


def report(rank: int, state: str, step: int = 5, silent: float = 30.0) -> HangReport:
    return HangReport(rank, "host", 1, step, "training", silent, state, "")


@pytest.mark.parametrize(
    "others",
    [
        [report(0, WAITING, silent=40.0)],
        [report(0, WAITING, step=4), report(2, "at loop.py, line 1 in f", step=4)],
    ],
)
def test_a_stopped_rank_is_the_culprit(others: list[HangReport]) -> None:
    assert min([*others, report(1, "stopped")], key=lambda r: r.suspicion).rank == 1


def test_among_waiting_ranks_the_one_furthest_behind() -> None:
    ranks = [report(0, WAITING), report(1, WAITING, step=4, silent=29.0), report(2, WAITING, silent=35.0)]
    assert min(ranks, key=lambda r: r.suspicion).rank == 1
    ranks[1] = dataclasses.replace(ranks[1], step=5)
    assert min(ranks, key=lambda r: r.suspicion).rank == 2


def test_of_hosts_that_ran_ahead_the_one_that_launched_least() -> None:
    ranks = [dataclasses.replace(report(rank, WAITING), progress=count) for rank, count in enumerate((70, 68, 90))]
    assert min(ranks, key=lambda r: r.suspicion).rank == 1


def test_of_hosts_that_ran_ahead_the_one_whose_gpu_has_not_begun_what_the_others_wait_in() -> None:
    """Its host may have launched more than theirs."""
    ranks = [dataclasses.replace(report(rank, WAITING), progress=count) for rank, count in enumerate((70, 68, 90))]
    ranks[2] = dataclasses.replace(ranks[2], waits_in="all_gather 4 of tp, [[64]], scheduled", gpu_waits=False)
    assert culprit_of({r.rank: r for r in ranks}).rank == 2
    assert "waiting for other ranks (all_gather 4 of tp, [[64]], scheduled), in training" in str(ranks[2])


def test_one_that_had_no_time_to_print_is_no_more_suspect_than_one_that_works() -> None:
    ranks = [report(0, STARVED, silent=40.0), report(1, "at loop.py, line 1 in f"), report(2, WAITING, silent=50.0)]
    assert min(ranks, key=lambda r: r.suspicion).rank == 1
    assert min([ranks[0], ranks[2]], key=lambda r: r.suspicion).rank == 0


SLEEPER = (
    "import faulthandler, sys, time\n"
    f"faulthandler.register({STACKS_SIGNAL.value}, file=int(sys.argv[1]), all_threads=True, chain=False)\n"
    "print(flush=True)\ntime.sleep(600)\n"
)


@pytest.fixture
def watched(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[tuple[Watchdog, int]]:
    """The watchdog of rank 0 of 2, which sleeps, and the rank's pid."""
    monkeypatch.setattr(watchdog, "_STACKS_S", 300.0)
    beats, stacks = shared_memory("beats", LAYOUT.size), shared_memory("stacks", 0)
    alive, theirs = os.pipe()
    flight, other = os.pipe()
    command = [sys.executable, "-c", SLEEPER, str(stacks)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, pass_fds=[stacks]) as rank:
        assert rank.stdout is not None
        rank.stdout.readline()
        yield Watchdog(0, 2, rank.pid, 8.0, str(tmp_path), beats, stacks, alive, flight), rank.pid
        rank.kill()
    for file in (beats, stacks, alive, theirs, flight, other):
        os.close(file)


def test_a_folder_that_cannot_be_is_left_to_the_rank_to_report(watched: tuple[Watchdog, int], tmp_path: Path) -> None:
    dog, _ = watched
    (tmp_path / "run").write_text("a file")
    dog.folder = tmp_path / "run" / "logs"
    dog.alive, goodbye = os.pipe()
    os.write(goodbye, b"x")
    dog.run()
    os.close(dog.alive)
    os.close(goodbye)


def stop(pid: int) -> None:
    """Returns when the process has stopped."""
    os.kill(pid, signal.SIGSTOP)
    os.waitid(os.P_PID, pid, os.WSTOPPED)


def test_a_rank_stopped_for_a_moment_is_looked_at_again(
    watched: tuple[Watchdog, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    dog, pid = watched
    ended: list[dict[int, HangReport]] = []
    monkeypatch.setattr(dog, "end", ended.append)
    beat = Beat.read(dog.memory)
    stop(pid)
    dog.decide(beat, 8.0)
    assert dog.report is not None
    assert dog.report.state == STOPPED
    os.kill(pid, signal.SIGCONT)
    os.waitid(os.P_PID, pid, os.WCONTINUED)
    # Beyond what a stopped rank gets.
    dog.decide(beat, 20.0)
    # Where it says that it is there, or asleep.
    assert dog.report.state in ("at <string>, line 3 in <module>", "at <string>, line 4 in <module>")
    assert is_complete(dog.report.stacks)
    assert [r.state for r in dog.published()] == [dog.report.state]
    assert not ended
    # One that stays stopped is ended.
    dog.report = None
    stop(pid)
    dog.decide(beat, 20.0)
    assert [reports[0].state for reports in ended] == [STOPPED]


def test_a_pause_in_the_middle_of_a_dump_cuts_nothing(
    watched: tuple[Watchdog, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The rank is slow to print: other threads come first, so a cut dump says nothing of the main one."""
    dog, _ = watched
    text = stacks_of_a_script("wait()\n").encode()
    half = text[: text.index(b"\n\n")]
    reads = iter([b"", half, half, half, text])
    monkeypatch.setattr(watchdog.os, "pread", lambda *_: next(reads))
    assert dog.dump() == text.decode()


def test_stacks_that_never_come(watched: tuple[Watchdog, int], monkeypatch: pytest.MonkeyPatch) -> None:
    dog, _ = watched
    monkeypatch.setattr(watchdog, "_STACKS_S", 0.2)
    monkeypatch.setattr(watchdog.os, "pread", lambda *_: b'Thread 0x1 (most recent call first):\n  File "a", li')
    monkeypatch.setattr(watchdog, "process_state", lambda _: "R")
    assert dog.look(Beat.read(dog.memory), 8.0).state == STARVED
    monkeypatch.setattr(watchdog, "process_state", lambda _: "D")
    assert dog.look(Beat.read(dog.memory), 8.0).state == "unable to print its stacks (process state D)"


def test_time_without_the_watchdog_is_no_silence(
    watched: tuple[Watchdog, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A clock that jumps by hours between two looks: as many looks pass as at any pace, before the rank is judged."""
    dog, _ = watched
    dog.timeout, dog.tick = 0.2, 0.01
    looks: list[int] = []
    monkeypatch.setattr(dog, "effort", looks.append)
    monkeypatch.setattr(watchdog, "time", SimpleNamespace(monotonic=itertools.count(0, 10_000).__next__))

    def decide(beat: Beat, silent: float) -> None:
        raise StopIteration

    monkeypatch.setattr(dog, "decide", decide)
    with pytest.raises(StopIteration):
        dog.run()
    # Once before the first look; each adds two ticks at most.
    assert len(looks) - 1 >= dog.timeout / (2 * dog.tick)


@pytest.mark.parametrize(("cuda", "judged_after"), [(False, 10), (True, 2)])
def test_a_busy_wait_for_the_gpu_is_no_work(
    watched: tuple[Watchdog, int], monkeypatch: pytest.MonkeyPatch, cuda: bool, judged_after: int
) -> None:
    """A host in cudaStreamSynchronize uses all of a processor, and set-up counts processor time as life."""
    dog, _ = watched
    dog.timeout, dog.tick, dog.cuda = 1.0, 0.001, cuda
    ticks, clock, dumps = itertools.count(0, 10**6), itertools.count(), []
    monkeypatch.setattr(dog, "effort", lambda _: (next(ticks), 0))
    monkeypatch.setattr(watchdog, "time", SimpleNamespace(monotonic=clock.__next__))
    waiting = stacks_of_a_script("wait()\n").replace(
        '"<string>", line 4', '"/a/megalite/core/mesh/collectives.py", line 50'
    )
    seen: list[float] = []
    polls = dog.polls

    def dump() -> str:
        dumps.append(1)
        return waiting

    def noted(without: float) -> object:
        seen.append(without)
        return polls(without)

    def decide(beat: Beat, silent: float) -> None:
        raise StopIteration

    monkeypatch.setattr(dog, "dump", dump)
    monkeypatch.setattr(dog, "decide", decide)
    monkeypatch.setattr(dog, "polls", noted)
    with pytest.raises(StopIteration):
        dog.run()
    assert seen[-1] == pytest.approx(judged_after * dog.timeout, abs=2 * 2 * dog.tick)
    assert len(dumps) == (1 if cuda else 0)


def test_a_run_in_a_notebook_may_rest_for_hours(watched: tuple[Watchdog, int], monkeypatch: pytest.MonkeyPatch) -> None:
    dog, _ = watched
    dog.timeout, dog.tick = 0.2, 0.001
    looks = iter(range(1000))
    monkeypatch.setattr(dog, "effort", lambda _: next(looks))
    monkeypatch.setattr(dog, "decide", lambda *_: pytest.fail("judged"))
    monkeypatch.setattr(watchdog, "time", SimpleNamespace(monotonic=itertools.count(0, 10_000).__next__))
    monkeypatch.setattr(Beat, "read", lambda _: Beat(7, 3, IDLE, "between steps", ""))
    with pytest.raises(StopIteration):
        dog.run()


def test_reports_are_read_once_all_are_there(
    watched: tuple[Watchdog, int], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """In a hang all watchdogs look every second: reading whatever is there made it the square of the ranks."""
    dog, _ = watched
    dog.world = 30
    reads: list[Path] = []
    ended: list[dict[int, HangReport]] = []

    def counted(path: Path, limit: int) -> object:
        reads.append(path)
        return read_json(path, limit)

    monkeypatch.setattr(watchdog, "read_json", counted)
    monkeypatch.setattr(dog, "end", ended.append)
    beat = Beat.read(dog.memory)
    for rank in range(1, dog.world):
        (tmp_path / f"rank_{rank}.json").write_text(json.dumps(dataclasses.asdict(report(rank, WAITING))))
        assert not ended
        dog.decide(beat, 8.0)
    assert len(reads) <= 2 * dog.world
    assert [sorted(reports) for reports in ended] == [list(range(dog.world))]


@pytest.mark.parametrize(("state", "named"), [(WAITING, "ranks [0, 2], which do not report"), (STOPPED, "rank 1 (")])
def test_a_rank_that_only_waits_names_those_that_do_not_report(
    watched: tuple[Watchdog, int], capfd: pytest.CaptureFixture[str], state: str, named: str
) -> None:
    """Their hosts or watchdogs are gone; it used to name itself."""
    dog, pid = watched
    dog.rank, dog.world = 1, 3
    # The rank's end is closed when it is killed; here the test holds it.
    dog.alive, theirs = os.pipe()
    os.close(theirs)
    with pytest.raises(SystemExit):
        dog.end({1: report(1, state)})
    os.close(dog.alive)
    assert f"[rank 1] watchdog: all ranks are waiting for {named}" in capfd.readouterr().err
    ended = os.waitid(os.P_PID, pid, os.WEXITED | os.WNOWAIT)
    assert ended is not None
    assert ended.si_status == signal.SIGKILL


def test_a_process_that_ends_while_it_is_looked_at_has_no_children(monkeypatch: pytest.MonkeyPatch) -> None:
    def vanished(_: object) -> None:
        raise ProcessLookupError

    monkeypatch.setattr(os, "listdir", vanished)
    monkeypatch.setattr(os, "scandir", vanished)
    assert children(os.getpid()) == []


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
    with subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"]) as child:
        assert child.pid in children(os.getpid())
        assert process_state(child.pid) in ("R", "S", "D")
        child.kill()


# A posix_spawn waits in state D until its child has opened the pipe, which it does when somebody writes to it.
IN_STATE_D = (
    "import os, sys\n"
    "os.posix_spawn('/bin/true', ['true'], {}, file_actions=[(os.POSIX_SPAWN_OPEN, 9, sys.argv[1], os.O_RDONLY, 0)])"
)
FLUSHES = "import time\nfrom megalite.runtime.base.child import *\nwith shown_as(FLUSHING):\n    time.sleep(600)"


@pytest.mark.parametrize("code", [IN_STATE_D, FLUSHES])
def test_a_wait_for_the_disk_is_seen(code: str, tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    command = [sys.executable, "-S", "-c", code, str(tmp_path / "pipe")]
    process = subprocess.Popen(command, cwd=ROOT, start_new_session=True)
    try:
        while not waits_for_disk(process.pid):
            assert process.poll() is None
        # One that is stopped does not wait for the disk.
        if code == FLUSHES:
            stop(process.pid)
            assert not waits_for_disk(process.pid)
        assert not waits_for_disk(os.getpid())
    finally:
        # With its child, which may not have come to the pipe yet.
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()


def test_heartbeats_say_where_the_rank_is(tmp_path: Path) -> None:
    heart = Heartbeat(tmp_path, ParallelContext.single(), 0)
    first = Beat.read(heart._memory)
    assert first.phase == "set-up"
    heart.beat("training", 7)
    places = []
    for op in (Op("F", 0, 1), Op("B", 0, 1)):
        heart.begin(op)
        places.append(Beat.read(heart._memory).place)
        heart.arrived()
        heart.end(op)
    heart.finished()
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
    deadline = time.monotonic() + 120
    while "select" not in maps.read_text():
        assert time.monotonic() < deadline
        time.sleep(0.05)
    assert "torch" not in maps.read_text()
    heart.close()
    assert watchdog not in children(os.getpid())
    heart.close()
    assert threading.current_thread() is threading.main_thread()
    assert not faulthandler.unregister(12)  # type: ignore[func-returns-value]  # a bool, whatever typeshed says
    # Nothing hung: nothing was written.
    assert list(tmp_path.iterdir()) == []
