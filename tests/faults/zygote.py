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
import math
import os
import select
import signal
import subprocess
import sys
import threading
import time
import traceback
from collections.abc import Callable
from multiprocessing.connection import wait
from pathlib import Path
from typing import Any, NamedTuple

ROOT = Path(__file__).resolve().parents[2]
WITHIN_S = 240.0
"""Far beyond what is waited for takes on a machine with four times more to do than it can: what hangs fails alone."""


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
        self.zygote.until(lambda: self.names[rank] in self.zygote.pids)
        return self.zygote.pids[self.names[rank]]

    def text(self, rank: int) -> str:
        """What the rank has said so far."""
        return self.errors[rank].read_text() if self.errors[rank].exists() else ""

    def wait_for(self, rank: int, words: str) -> None:
        """Until the rank has said this."""
        self.zygote.until(lambda: words in self.text(rank) or self.names[rank] in self.zygote.codes)
        assert words in self.text(rank), self.text(rank)

    def ended(self) -> bool:
        """Whether one of the ranks has ended."""
        self.zygote.listen(0)
        return any(name in self.zygote.codes for name in self.names)

    def end(self, within: float = WITHIN_S) -> list[Left]:
        """Wait for all ranks; those still alive after `within` seconds are killed and the test fails."""
        try:
            self.zygote.until(lambda: all(name in self.zygote.codes for name in self.names), within)
        finally:
            for name in self.names:
                if name in self.zygote.pids and name not in self.zygote.codes:
                    os.kill(self.zygote.pids[name], signal.SIGKILL)
        return [Left(self.zygote.codes[name], self.text(rank)) for rank, name in enumerate(self.names)]


class Zygote:
    """The test's side."""

    def __init__(self) -> None:
        from tests.ranks import PYTHONPATH

        self.process = subprocess.Popen(
            [sys.executable, __file__],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            cwd=ROOT,
            env={**os.environ, "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": "", "PYTHONPATH": PYTHONPATH},
        )
        self.heard = b""
        self.pids: dict[str, int] = {}
        self.codes: dict[str, int] = {}
        self.count = 0

    def start(
        self,
        arguments: list[str],
        world: int,
        folder: Path,
        *faults: dict[str, Any],
        env: dict[str, str] | None = None,
        network: str = "",
    ) -> Job:
        """Start a run; a fault is {"rank", "kind", "place", "at"}, see `FAULTS` and `install`.

        Args:
            env: overrides.
            network: the network namespace of the ranks.
        """
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
                "network": network,
                "faults": [fault for fault in faults if fault["rank"] in (rank, "all")],
            }
            assert self.process.stdin is not None
            self.process.stdin.write(json.dumps(job).encode() + b"\n")
            self.process.stdin.flush()
        return Job(self, names, errors)

    def until(self, condition: Callable[..., object], within: float = WITHIN_S) -> None:
        """Take in what the zygote says until the condition holds."""
        deadline = time.monotonic() + within
        while not condition():
            assert time.monotonic() < deadline, f"not within {within} s"
            self.listen(0.1)

    def listen(self, seconds: float) -> None:
        """Take in what is said within this time."""
        assert self.process.stdout is not None
        # Not select, which takes no descriptor above 1,023.
        if wait([self.process.stdout.fileno()], seconds):
            more = os.read(self.process.stdout.fileno(), 1 << 16)
            assert more, "the zygote has died"
            self.heard += more
            *lines, self.heard = self.heard.split(b"\n")
            for said in map(json.loads, lines):
                table, key = (self.pids, "pid") if "pid" in said else (self.codes, "code")
                table[said["job"]] = said[key]

    def close(self) -> None:
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        self.process.stdin.close()
        self.process.wait(WITHIN_S)
        self.process.stdout.close()


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


def waiting_file(path: str | Path, rank: int | str) -> Path:
    """The file that says that a rank waits for `path`."""
    return Path(f"{path}.rank_{rank}")


def wait_for_file(path: str) -> None:
    """Say that this rank waits, by a file beside it, and wait."""
    with contextlib.suppress(FileNotFoundError):
        waiting_file(path, os.environ["RANK"]).touch()
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


class Slow:
    """Sleep four times as long as the rank has worked since: on a busy machine its peers are slow too."""

    woke = math.inf

    def __call__(self) -> None:
        time.sleep(max(0.2, 4 * (time.monotonic() - self.woke)))
        self.woke = time.monotonic()


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
    "slow": Slow(),
}


def before(owner: Any, name: str, action: Callable[..., None]) -> None:
    """Call `action` with the arguments of every call of `owner.name`, first."""
    real = getattr(owner, name)

    def wrapped(*args: Any, **kwargs: Any) -> Any:
        action(*args, **kwargs)
        return real(*args, **kwargs)

    setattr(owner, name, wrapped)


@dataclasses.dataclass
class Fault:
    """What is to happen in a rank, and when.

    Attributes:
        kind: what happens, a name of FAULTS, or what a place makes of it.
        at: step, or sample, of the place; "always": every step.
        once: a file that marks that it has happened, for ranks that are started again.
        act: what happens.
        armed: whether it happens as soon as the rank comes to the point.
    """

    kind: str
    at: Any
    once: str | None
    act: Callable[[], None]
    armed: bool = False

    @classmethod
    def of(cls, given: dict[str, Any]) -> Fault:
        """Read a fault of a job.

        "after": it happens so many seconds later, while the rank goes on. The kind "await" waits until the file "path"
        exists; see `waiting_file`.
        """
        kind, once = given["kind"], given.get("once")
        act = functools.partial(wait_for_file, given["path"]) if kind == "await" else FAULTS.get(kind, lambda: None)
        if once is not None:
            act = functools.partial(only_once, act, once)
        if "after" in given:
            act = threading.Timer(given["after"], act).start
        return cls(kind, given.get("at"), once, act)

    def arm(self, condition: bool) -> None:
        self.armed = condition

    def fire(self, *_: Any, **__: Any) -> None:
        """Let it happen, if it is armed."""
        if self.armed:
            self.armed = False
            self.act()

    def spoil(self, change: Callable[[], Any]) -> None:
        """Change a value, once if it is to happen once."""
        if self.once is None:
            change()
        else:
            only_once(change, self.once)


def arm_in_step(fault: Fault) -> None:
    from megalite.runtime.loop import loop

    before(loop, "train_step", lambda engine, batch, number, **_: fault.arm(fault.at in (number, "always")))


def in_step(fault: Fault) -> None:
    """In the first forward pass of a step."""
    from megalite.core.pipeline import executor

    arm_in_step(fault)
    before(executor._Run, "forward", fault.fire)


def in_every_step(fault: Fault) -> None:
    from megalite.core.pipeline import executor

    before(executor._Run, "forward", lambda *_: fault.act())


def in_gradients(fault: Fault) -> None:
    """NaN in a gradient; of the kind "varies", infinity the first time that a step runs."""
    import torch

    from megalite.core.sharding.parameter import ShardedParameter
    from megalite.runtime.loop import loop

    arm_in_step(fault)
    runs: list[int] = []
    before(loop, "train_step", lambda engine, batch, number, **_: runs.append(number))

    def poison(parameter: ShardedParameter) -> None:
        if fault.armed:
            value = torch.inf if fault.kind == "varies" and runs.count(runs[-1]) == 1 else torch.nan
            fault.spoil(functools.partial(parameter.main_grad.view(-1)[:1].fill_, value))

    before(ShardedParameter, "grad_added", poison)


def in_masters(fault: Fault) -> None:
    """NaN in a master weight before a step."""
    from megalite.runtime.loop import loop

    def spoil(engine: Any, batch: Any, number: int, **_: Any) -> None:
        if number == fault.at:
            flat = next(state.flat for state in engine.optimizer.states() if len(state.flat))
            fault.spoil(functools.partial(flat[:1].fill_, float("nan")))

    before(loop, "train_step", spoil)


def in_evaluation(fault: Fault) -> None:
    from megalite.core.pipeline import executor
    from megalite.runtime.loop import loop

    before(loop, "evaluate", lambda run: fault.arm(run.step == fault.at))
    before(executor._Run, "forward", fault.fire)


def in_save(fault: Fault) -> None:
    from megalite.runtime.checkpoint.snapshot import Snapshot
    from megalite.runtime.loop import loop

    before(loop, "save", lambda run, **_: fault.arm(run.step == fault.at))
    before(Snapshot, "take", fault.fire)


def before_save(fault: Fault, change: Callable[[Any], None]) -> None:
    """Change a run before the save of a step."""
    from megalite.runtime.loop import loop

    before(loop, "save", lambda run, **_: change(run) if run.step == fault.at else None)


def kill_writer(run: Any) -> None:
    # The save before this one is not to be hit.
    if run.checkpointer._current is not None:
        run.checkpointer._writer.wait(None)
    os.kill(run.checkpointer._writer.process.pid, signal.SIGKILL)


def flip_a_bit(run: Any) -> None:
    import torch

    run.engine.optimizer.wait_weights()
    weight = next(iter(run.engine.stages.values())).norm.weight
    weight.data.view(torch.int32)[1] ^= 1 << 12


def spoil_a_moment(run: Any) -> None:
    moments = [s.flat for s in run.engine.optimizer.states() if s.role == "exp_avg_sq" and len(s.flat)]
    moments[0][0] = float("nan")


def before_uploads(fault: Fault) -> None:
    """No save begins before the last one is uploaded: then none replaces another during a slow upload."""
    from megalite.runtime.checkpoint.save import Checkpointer

    for name in ("save", "save_model"):
        before(Checkpointer, name, lambda checkpointer, *_, **__: checkpointer.settle())


def at_end(fault: Fault) -> None:
    """Where all is done, and not where a rank leaves because another one died."""
    from megalite.runtime.watch.heartbeat import Heartbeat

    closed: list[Heartbeat] = []
    before(Heartbeat, "close", lambda heartbeat: closed.append(heartbeat) if sys.exc_info()[0] is None else None)
    # Nor where another watchdog is started in place of one that is gone.
    before(Heartbeat, "_close_pipe", lambda heartbeat: fault.act() if heartbeat in closed else None)


def before_commit(fault: Fault) -> None:
    """Before a copy of a step counts."""
    from megalite.runtime.recover.member import GuardedRank

    before(GuardedRank, "say", lambda _, said: fault.act() if is_copy_of(fault.at, said) else None)


def in_copy(fault: Fault) -> None:
    """One bit of a copy of a step is flipped before it counts."""
    from megalite.runtime.recover.member import GuardedRank

    def damage(rank_guard: Any, said: Any) -> None:
        if is_copy_of(fault.at, said):
            memory, where = rank_guard.slots[said.slot], 40
            os.pwrite(memory, bytes([os.pread(memory, 1, where)[0] ^ 8]), where)

    before(GuardedRank, "say", damage)


def is_copy_of(step: int, said: Any) -> bool:
    from megalite.runtime.recover.messages import Commit

    return isinstance(said, Commit) and said.step == step


def in_reading(fault: Fault) -> None:
    """Reading the batch that ends at a sample."""
    from megalite.runtime.data import BatchLoader

    before(BatchLoader, "_read", lambda self, start, size: fault.act() if start + size == fault.at else None)


def in_sample(fault: Fault) -> None:
    """The weight of a sample is infinite, whoever reads it."""
    import numpy as np

    from megalite.core.rows import Rows
    from megalite.runtime.data import BatchLoader

    real_sample = BatchLoader._sample

    def sample(self: Any, position: int) -> Rows:
        rows = real_sample(self, position)
        weight = np.inf if position == fault.at else 1.0
        return dataclasses.replace(rows, weights=np.full(rows.inputs.shape, weight, np.float32))

    BatchLoader._sample = sample  # type: ignore[method-assign]
    # As if what computes with it were at fault.
    Rows.check_inputs = lambda self, what: self  # type: ignore[method-assign]


def in_sums(fault: Fault, name: str, factor: float) -> None:
    """A sum of the step whose batch ends at a sample is multiplied."""
    from megalite.core.sums import StepSums
    from megalite.runtime.data import BatchLoader

    real_next, real_sum = BatchLoader.next_batch, StepSums.over_world

    def next_batch(self: Any) -> Any:
        batch = real_next(self)
        fault.arm(self.consumed_samples == fault.at)
        return batch

    def larger(self: StepSums) -> Any:
        # An evaluation has no norm.
        if fault.armed and "squared norm" in self._values:
            self._values[name] *= factor
        return real_sum(self)

    BatchLoader.next_batch, StepSums.over_world = next_batch, larger  # type: ignore[method-assign]


PLACES: dict[str, Callable[[Fault], None]] = {
    "step": in_step,
    "every_step": in_every_step,
    "nan": in_gradients,
    "master": in_masters,
    "spike": functools.partial(in_sums, name="loss", factor=10.0),
    "overflow": functools.partial(in_sums, name="squared norm", factor=float("nan")),
    "data": in_reading,
    "sample": in_sample,
    "eval": in_evaluation,
    "save": in_save,
    "writer": functools.partial(before_save, change=kill_writer),
    "flip": functools.partial(before_save, change=flip_a_bit),
    "moment": functools.partial(before_save, change=spoil_a_moment),
    "commit": before_commit,
    "copy": in_copy,
    "end": at_end,
    "settle": before_uploads,
}


def install(given: dict[str, Any]) -> None:
    """Plant a fault at its "place"; see `Fault`."""
    PLACES[given["place"]](Fault.of(given))


def be_rank(job: dict[str, Any]) -> None:
    """The forked process: pretrain_gpt.py with the job's arguments, as a script would run it."""
    os.setsid()
    if job["network"]:
        enter(job["network"])
    null, err = os.open(os.devnull, os.O_RDWR), os.open(job["err"], os.O_WRONLY | os.O_CREAT)
    os.dup2(null, 0)
    os.dup2(null, 1)
    os.dup2(err, 2)
    os.environ.update({key: str(value) for key, value in job["env"].items()})
    sys.argv = ["pretrain_gpt.py", *job["arguments"]]
    if "--recover" in job["arguments"]:
        be_guard(job)
    train(job)


def enter(network: str) -> None:
    """Join a network namespace, as `ip netns exec` does."""
    libc, new_network = ctypes.CDLL(None, use_errno=True), 0x40000000
    with open(f"/var/run/netns/{network}") as namespace:
        if libc.setns(namespace.fileno(), new_network):
            raise OSError(ctypes.get_errno(), "setns", network)


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
        stdin: Any = sys.stdin.buffer
        line = stdin.raw.readline()
        if not line:
            # The tests are over, or were killed: no rank trains on.
            for rank in names:
                with contextlib.suppress(ProcessLookupError):
                    os.killpg(rank, signal.SIGKILL)
            return
        job = json.loads(line)
        if b"s3://" in line:
            importlib.import_module("s3fs")
        pid = os.fork()
        if pid == 0:
            be_rank(job)
        names[pid] = job["job"]
        tell(job=job["job"], pid=pid)


if __name__ == "__main__":
    # For all ranks that are forked: with what a first step imports, and no garbage collection walks through it.
    import numpy.random  # noqa: F401

    import pretrain_gpt  # noqa: F401
    from megalite.runtime.recover.rehearse import rehearse

    rehearse()
    serve()
