"""Starts ranks of pretrain_gpt.py by forking a process that has imported it: real processes without the imports' time.

Run as a script it reads jobs from stdin, one JSON object a line, and writes {"job", "pid"} and {"job", "code"} lines.
A job may carry faults, which happen inside the rank at a named place; the program itself has no hooks for them.
"""

from __future__ import annotations

import contextlib
import ctypes
import dataclasses
import functools
import importlib
import json
import os
import select
import signal
import subprocess
import sys
import threading
import time
import traceback
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

ROOT = Path(__file__).resolve().parents[2]


class Left(NamedTuple):
    """How a rank ended: its exit code (minus the signal's number where one killed it), and what it said."""

    code: int
    err: str


class Job:
    """The ranks of one run."""

    def __init__(self, zygote: Zygote, names: list[str], errors: list[Path]) -> None:
        self.zygote, self.names, self.errors = zygote, names, errors

    def pid(self, rank: int) -> int:
        """The rank's process."""
        self.zygote.until(lambda: self.names[rank] in self.zygote.pids, 120)
        return self.zygote.pids[self.names[rank]]

    def text(self, rank: int) -> str:
        """What the rank has said so far."""
        return self.errors[rank].read_text() if self.errors[rank].exists() else ""

    def wait_for(self, rank: int, words: str, within: float = 90.0) -> None:
        """Until the rank has said this."""
        self.zygote.until(lambda: words in self.text(rank) or self.names[rank] in self.zygote.codes, within)
        assert words in self.text(rank), self.text(rank)

    def ended(self) -> bool:
        """Whether one of the ranks has ended."""
        self.zygote.listen(0)
        return any(name in self.zygote.codes for name in self.names)

    def end(self, within: float = 90.0) -> list[Left]:
        """Wait for all ranks; those still alive after `within` seconds are killed and the test fails."""
        try:
            self.zygote.until(lambda: all(name in self.zygote.codes for name in self.names), within)
        finally:
            for name in self.names:
                if name in self.zygote.pids and name not in self.zygote.codes:
                    os.kill(self.zygote.pids[name], signal.SIGKILL)
        return [Left(self.zygote.codes[name], self.text(rank)) for rank, name in enumerate(self.names)]


class Zygote:
    """The test's side.

    Args:
        before: words that the command line of the process begins with ("ip netns exec NAME").
        modules: imported too.
    """

    def __init__(self, before: Sequence[str] = (), modules: Sequence[str] = ()) -> None:
        self.process = subprocess.Popen(
            [*before, sys.executable, __file__, *modules],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            cwd=ROOT,
            env={**os.environ, "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": "", "PYTHONPATH": str(ROOT)},
        )
        self.heard = b""
        self.pids: dict[str, int] = {}
        self.codes: dict[str, int] = {}
        self.count = 0

    def start(
        self, arguments: list[str], world: int, folder: Path, *faults: dict[str, Any], env: dict[str, str] | None = None
    ) -> Job:
        """Start a run; a fault is {"rank", "kind", "place", "at"}, see `FAULTS` and `install`. `env`: overrides."""
        from tests.ranks import reserve_port

        self.count += 1
        port, names, errors = reserve_port(), [], []
        for rank in range(world):
            names.append(f"{self.count}.{rank}")
            errors.append(folder / f"stderr_{self.count}_{rank}.txt")
            launched = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": world, "MASTER_ADDR": "127.0.0.1"}
            job = {
                "job": names[-1],
                "arguments": arguments,
                "err": str(errors[-1]),
                "env": {**launched, "MASTER_PORT": port, **(env or {})},
                "faults": [fault for fault in faults if fault["rank"] in (rank, "all")],
            }
            assert self.process.stdin is not None
            self.process.stdin.write(json.dumps(job).encode() + b"\n")
            self.process.stdin.flush()
        return Job(self, names, errors)

    def until(self, condition: Callable[[], bool], within: float) -> None:
        """Take in what the zygote says until the condition holds."""
        deadline = time.monotonic() + within
        while not condition():
            assert time.monotonic() < deadline, f"not within {within} s"
            self.listen(0.1)

    def listen(self, seconds: float) -> None:
        """Take in what is said within this time."""
        assert self.process.stdout is not None
        if select.select([self.process.stdout], [], [], seconds)[0]:
            more = os.read(self.process.stdout.fileno(), 1 << 16)
            assert more, "the zygote has died"
            self.heard += more
            *lines, self.heard = self.heard.split(b"\n")
            for said in map(json.loads, lines):
                table, key = (self.pids, "pid") if "pid" in said else (self.codes, "code")
                table[said["job"]] = said[key]

    def close(self) -> None:
        assert self.process.stdin is not None
        self.process.stdin.close()
        self.process.wait(30)


def processes_of(folder: Path) -> list[str]:
    """Command lines of processes that name the folder: ranks' watchdogs."""
    found = []
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            line = path.read_bytes().replace(b"\0", b" ").decode(errors="replace")
        except OSError:
            continue
        if str(folder) in line and int(path.parent.name) != os.getpid():
            found.append(line)
    return found


def members_of(folder: Path) -> list[int]:
    """Ranks whose stderr is a file in the folder, their guards, and all that they have started."""
    found = []
    for path in Path("/proc").glob("[0-9]*/fd/2"):
        with contextlib.suppress(OSError):
            if str(folder) in os.readlink(path):
                found.append(int(path.parts[2]))
    return found


def hold_interpreter() -> None:
    """Sleep without giving the interpreter lock back."""
    while True:
        # A signal ends a sleep.
        ctypes.PyDLL(None).sleep(1000)


def loop_forever() -> None:
    # Others, a writer of checkpoints with little priority too, are to have the processor: a loop is one at any pace.
    os.nice(19)
    while True:
        pass


def wait_outside_python() -> None:
    """As in a CUDA call: other threads run, but no signal's handler does."""
    while True:
        ctypes.CDLL(None).sleep(1000)


def wait_for_file(path: str) -> None:
    while not os.path.exists(path):
        time.sleep(0.01)


def lose_a_peer() -> None:
    """What gloo says where a network breaks and all ranks live."""
    raise RuntimeError("injected: Connection reset by peer")


def only_once(act: Callable[[], None], mark: str) -> None:
    with contextlib.suppress(FileExistsError):
        os.close(os.open(mark, os.O_CREAT | os.O_EXCL))
        act()


def fork() -> None:
    """A process, such as a worker that loads data, that inherits every descriptor and outlives its parent a little."""
    if os.fork() == 0:
        time.sleep(40)
        os._exit(0)


def fail() -> None:
    raise ValueError("injected")


FAULTS: dict[str, Callable[[], None]] = {
    "kill": lambda: os.kill(os.getpid(), signal.SIGKILL),
    "stop": lambda: os.kill(os.getpid(), signal.SIGSTOP),
    "sigterm": lambda: os.kill(os.getpid(), signal.SIGTERM),
    "loop": loop_forever,
    "gil": hold_interpreter,
    "call": wait_outside_python,
    "hang": lambda: time.sleep(1000),
    "fail": fail,
    "lose": lose_a_peer,
    "fork": fork,
    "slow": lambda: time.sleep(0.2),
}


def before(owner: Any, name: str, action: Callable[..., None]) -> None:
    """Call `action` with the arguments of every call of `owner.name`, first."""
    real = getattr(owner, name)

    def wrapped(*args: Any, **kwargs: Any) -> Any:
        action(*args, **kwargs)
        return real(*args, **kwargs)

    setattr(owner, name, wrapped)


def install(fault: dict[str, Any]) -> None:
    """Make a fault happen: in step `at` ("step", "nan", "every_step"; "master": before it), in the evaluation or the
    save after it ("eval", "save", "writer", "flip", "moment"), before a copy of step `at` counts ("commit"; "copy"
    flips a bit of it), reading the batch that ends at sample `at` ("data"), or in its step ("spike", "overflow");
    "sample" makes the weight of the sample at position `at` infinite, whoever reads it; "end": where all is done.

    "after": so many seconds later, while the rank goes on. The kind "await" waits there until the file "path" exists.
    "once": a file that marks that it has happened, for ranks that are started again.
    """
    import numpy as np
    import torch

    from megalite.core.pipeline import executor
    from megalite.core.rows import Rows
    from megalite.core.sharding.parameter import ShardedParameter
    from megalite.core.sums import StepSums
    from megalite.runtime.checkpoint.snapshot import Snapshot
    from megalite.runtime.data import BatchLoader
    from megalite.runtime.loop import loop
    from megalite.runtime.recover.member import GuardedRank
    from megalite.runtime.watch.heartbeat import Heartbeat

    place, at, armed = fault["place"], fault.get("at"), []
    act = FAULTS.get(fault["kind"], lambda: None)
    if fault["kind"] == "await":
        act = functools.partial(wait_for_file, fault["path"])
    if "once" in fault:
        act = functools.partial(only_once, act, fault["once"])
    if "after" in fault:
        act = threading.Timer(fault["after"], act).start

    def when_armed(*args: Any, **kwargs: Any) -> None:
        if armed:
            armed.clear()
            act()

    def arm(condition: bool) -> None:
        armed.clear()
        if condition:
            armed.append(True)

    if place in ("step", "nan"):
        before(loop, "train_step", lambda engine, batch, number, **_: arm(at in (number, "always")))
    if place == "step":
        before(executor._Run, "forward", when_armed)
    elif place == "nan":
        runs: list[int] = []
        before(loop, "train_step", lambda engine, batch, number, **_: runs.append(number))

        def poison(parameter: ShardedParameter) -> None:
            if armed:
                value = torch.inf if fault["kind"] == "varies" and runs.count(runs[-1]) == 1 else torch.nan
                spoil = functools.partial(parameter.main_grad.view(-1)[:1].fill_, value)
                only_once(spoil, fault["once"]) if "once" in fault else spoil()

        before(ShardedParameter, "grad_added", poison)
    elif place == "master":

        def spoil_master(engine: Any, batch: Any, number: int, **_: Any) -> None:
            if number == at:
                flat = next(state.flat for state in engine.optimizer.states() if len(state.flat))
                only_once(functools.partial(flat[:1].fill_, torch.nan), fault["once"])

        before(loop, "train_step", spoil_master)
    elif place == "every_step":
        before(executor._Run, "forward", lambda *_: act())
    elif place == "eval":
        before(loop, "evaluate", lambda run: arm(run.step == at))
        before(executor._Run, "forward", when_armed)
    elif place == "save":
        before(loop, "save", lambda run, **_: arm(run.step == at))
        before(Snapshot, "take", when_armed)
    elif place == "writer":

        def kill_writer(run: Any, **_: Any) -> None:
            if run.step == at:
                # The save before this one is not to be hit.
                if run.checkpointer._current is not None:
                    run.checkpointer._writer.wait(None)
                os.kill(run.checkpointer._writer.process.pid, signal.SIGKILL)

        before(loop, "save", kill_writer)
    elif place == "flip":

        def flip(run: Any, **_: Any) -> None:
            if run.step == at:
                run.engine.optimizer.wait_weights()
                weight = next(iter(run.engine.stages.values())).norm.weight
                weight.data.view(torch.int32)[1] ^= 1 << 12

        before(loop, "save", flip)
    elif place == "moment":

        def spoil(run: Any, **_: Any) -> None:
            if run.step == at:
                moments = [s.flat for s in run.engine.optimizer.states() if s.role == "exp_avg_sq" and len(s.flat)]
                moments[0][0] = torch.nan

        before(loop, "save", spoil)
    elif place == "end":
        before(Heartbeat, "_close_pipe", lambda _: act())
    elif place == "commit":
        before(GuardedRank, "commit", lambda _, copy: act() if copy["step"] == at else None)
    elif place == "copy":

        def damage(rank_guard: Any, copy: dict[str, Any]) -> None:
            if copy["step"] == at:
                memory, where = rank_guard.slots[copy["slot"]], 40
                os.pwrite(memory, bytes([os.pread(memory, 1, where)[0] ^ 8]), where)

        before(GuardedRank, "commit", damage)
    elif place == "data":
        before(BatchLoader, "_read", lambda self, start, size: act() if start + size == at else None)
    elif place == "sample":
        real_sample = BatchLoader._sample

        def sample(self: Any, position: int) -> Rows:
            rows = real_sample(self, position)
            weight = np.inf if position == at else 1.0
            return dataclasses.replace(rows, weights=np.full(rows.inputs.shape, weight, np.float32))

        BatchLoader._sample = sample
        Rows.check_inputs = lambda self, what: self  # as if what computes with it were at fault
    elif place in ("spike", "overflow"):
        real_sum = StepSums.over_world
        what, factor = ("loss", 10.0) if place == "spike" else ("squared norm", float("nan"))

        def larger(self: StepSums) -> Any:
            if armed and "squared norm" in self._values:
                self._values[what] *= factor
            return real_sum(self)

        real_next = BatchLoader.next_batch

        def next_batch(self: Any) -> Any:
            batch = real_next(self)
            arm(self.consumed_samples == at)
            return batch

        BatchLoader.next_batch, StepSums.over_world = next_batch, larger  # type: ignore[method-assign]


def be_rank(job: dict[str, Any]) -> None:
    """The forked process: pretrain_gpt.py with the job's arguments, as a script would run it."""
    os.setsid()
    null, err = os.open(os.devnull, os.O_RDWR), os.open(job["err"], os.O_WRONLY | os.O_CREAT)
    os.dup2(null, 0)
    os.dup2(null, 1)
    os.dup2(err, 2)
    os.environ.update({key: str(value) for key, value in job["env"].items()})
    sys.argv = ["pretrain_gpt.py", *job["arguments"]]
    if "--recover" in job["arguments"]:
        be_guard(job)
    train(job)


def be_guard(job: dict[str, Any]) -> None:
    """Guard a rank whose processes are forked, so that they need not import anything."""
    from megalite.runtime.recover.guard import Guard
    from megalite.runtime.recover.main import reserve

    words = job["arguments"]
    spares = int(words[words.index("--spare-ranks") + 1]) if "--spare-ranks" in words else 0
    inherited = set(os.listdir("/proc/self/fd"))

    def start(descriptor: int) -> int:
        pid = os.fork()
        if pid == 0:
            os.setsid()
            for number in (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1):
                signal.signal(number, signal.SIG_DFL)
            for open_one in set(os.listdir("/proc/self/fd")) - inherited - {str(descriptor)}:
                with contextlib.suppress(OSError):
                    os.close(int(open_one))
            os.environ["MEGALITE_GUARD"] = str(descriptor)
            train(job)
        return pid

    Guard(start, 0, reserve(spares), spares).serve()


def train(job: dict[str, Any]) -> None:
    """Run the program to its end."""
    import pretrain_gpt

    code = 0
    try:
        for fault in job["faults"]:
            install(fault)
        with pretrain_gpt.leaving_together():
            pretrain_gpt.main()
    except SystemExit as e:
        code = e.code if isinstance(e.code, int) else 1
    except Exception:
        # A fault that cannot be installed; the run itself never gets here.
        traceback.print_exc()
        code = 3
    finally:
        sys.stderr.flush()
        os._exit(code)


def serve() -> None:
    """Fork a rank for every line; tell how ranks end."""
    names: dict[int, str] = {}

    def tell(**said: Any) -> None:
        os.write(1, (json.dumps(said) + "\n").encode())

    while True:
        while names:
            pid, status = os.waitpid(-1, os.WNOHANG)
            if pid == 0:
                break
            if pid in names:
                tell(job=names.pop(pid), code=os.waitstatus_to_exitcode(status))
        if not select.select([0], [], [], 0.05)[0]:
            continue
        line = sys.stdin.buffer.raw.readline()  # type: ignore[attr-defined]
        if not line:
            return
        job = json.loads(line)
        pid = os.fork()
        if pid == 0:
            be_rank(job)
        names[pid] = job["job"]
        tell(job=job["job"], pid=pid)


if __name__ == "__main__":
    # For all ranks that are forked. torch imports the last, and sympy with it, in the first backward pass.
    import numpy.random  # noqa: F401
    import torch.fx.experimental.symbolic_shapes  # noqa: F401

    import pretrain_gpt  # noqa: F401

    for module in sys.argv[1:]:
        importlib.import_module(module)
    serve()
