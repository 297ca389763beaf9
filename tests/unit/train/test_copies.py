"""Copies of a rank's state: on a GPU, what CUDA is asked for, and in which order, recorded without one."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from megalite.core.build import build_engine
from megalite.core.mesh import collectives, device
from megalite.core.mesh.context import ParallelContext
from megalite.core.options.model import ModelConfig
from megalite.core.options.parallel import ParallelConfig
from megalite.core.options.train import TrainConfig
from megalite.core.step import train_step
from megalite.runtime.options.run import Config, RunConfig
from megalite.runtime.recover import copies, interval, rehearse, restore, side_stream
from megalite.runtime.recover.copies import Copies
from megalite.runtime.recover.member import GuardedRank
from megalite.runtime.recover.messages import Commit, Kept, Loaded, Turn, Void

COMPUTE = "compute"


class Calls(TorchDispatchMode):
    """What is asked of CUDA and of the guard, in order; copies and sums also say whether they are on the side."""

    def __init__(self) -> None:
        super().__init__()
        self.log: list[str] = []
        self.refuses = False
        self._on = COMPUTE

    def take(self) -> list[str]:
        log, self.log = self.log, []
        return log

    def say(self, message: Any) -> None:
        self.log.append(type(message).__name__)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if (name := func.overloadpacket.__name__) in ("copy_", "sum"):
            self.log.append(f"{name} on {self._on}")
        return func(*args, **(kwargs or {}))

    @contextmanager
    def queue(self, stream: Any) -> Iterator[None]:
        self._on = "side"
        yield
        self._on = COMPUTE

    def install(self, monkeypatch: pytest.MonkeyPatch) -> None:
        def register(address: int, size: int, flags: int) -> int:
            self.log.append("register")
            return int(self.refuses)

        stream = SimpleNamespace(
            wait_stream=lambda other: self.log.append(f"side waits for {other}"),
            synchronize=lambda: self.log.append("host waits for side"),
        )
        runtime = SimpleNamespace(cudaHostRegister=register, cudaError=SimpleNamespace(success=0))
        monkeypatch.setattr(torch.cuda, "Stream", lambda device: stream)
        monkeypatch.setattr(torch.cuda, "current_stream", lambda device: COMPUTE)
        monkeypatch.setattr(torch.cuda, "stream", self.queue)
        monkeypatch.setattr(torch.cuda, "cudart", lambda: runtime)


def noting(function: Any, note: Any) -> Any:
    """A function that notes its arguments before it runs."""

    def run(*args: Any, **kwargs: Any) -> Any:
        note(*args)
        return function(*args, **kwargs)

    return run


@pytest.fixture
def cuda(monkeypatch: pytest.MonkeyPatch) -> Iterator[Calls]:
    calls = Calls()
    calls.install(monkeypatch)
    with calls:
        yield calls


def open_copies(calls: Calls, flats: list[torch.Tensor], on: str = "cuda", elsewhere: bool = False) -> Copies:
    guard: Any = SimpleNamespace(turn=Turn(), round=0, slots=[], say=calls.say)
    guard.keep = lambda slots: setattr(guard, "slots", slots)
    guard.wait_kept = lambda number: calls.say(Kept(number))
    states: Any = [SimpleNamespace(flat=flat) for flat in flats]
    return Copies(guard, states, elsewhere, device=torch.device(on))


def test_a_copy_beside_the_next_step(cuda: Calls) -> None:
    """It used to be made at once, into memory that was not page-locked: seconds of each step of a large model."""
    kept = open_copies(cuda, [torch.ones(4), torch.ones(8)])
    started = ["register", "side waits for compute", *["copy_ on side", "sum on side"] * 2]
    kept.take(1, {"run_id": "x"})
    assert cuda.take() == started  # nobody is told of it yet
    kept.finish()
    assert cuda.take() == ["host waits for side", "Commit"]
    kept.finish()
    assert cuda.take() == []
    for step in (2, 3):
        kept.take(step, {"run_id": "x"})
        kept.finish()
        assert cuda.take() == [*started, "host waits for side", "Commit"]
    # Memory is locked once; a slot becomes free before it is written to.
    kept.take(4, {"run_id": "x"})
    assert cuda.take() == ["Void", *started[1:]]


def test_a_copy_that_no_step_has_finished_comes_before_the_next_one(cuda: Calls) -> None:
    kept = open_copies(cuda, [torch.ones(4)])
    kept.take(1, {"run_id": "x"})
    cuda.take()
    kept.take(2, {"run_id": "x"})
    assert cuda.take()[:2] == ["host waits for side", "Commit"]


def test_it_counts_once_the_one_before_it_is_elsewhere(cuda: Calls) -> None:
    """Sent while a whole step is trained: waiting before the copy is started would leave no time for that."""
    kept = open_copies(cuda, [torch.ones(4)], elsewhere=True)
    for step in (1, 2):
        kept.take(step, {"run_id": "x"})
        assert "Kept" not in cuda.take()
        kept.finish()
    assert cuda.take() == ["host waits for side", "Kept", "Commit"]


def test_large_tensors_are_copied_in_blocks(cuda: Calls, monkeypatch: pytest.MonkeyPatch) -> None:
    """The one copy engine of that direction also brings the host the figures of a step."""
    monkeypatch.setattr(side_stream, "_BLOCK", 16)
    flat = torch.arange(10.0)
    kept = open_copies(cuda, [flat])
    kept.take(1, {"run_id": "x"})
    assert cuda.take().count("copy_ on side") == 3
    kept.finish()
    flat.zero_()
    assert kept.load(ParallelContext.single()) == []
    assert flat.tolist() == list(range(10))


def test_memory_that_cannot_be_locked(
    cuda: Calls, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    def reports() -> None:
        cuda.log.append("error")
        raise RuntimeError("the error that CUDA has kept")

    monkeypatch.setattr(torch.cuda, "_lazy_init", reports)
    cuda.refuses = True
    kept = open_copies(cuda, [torch.ones(4)])
    with caplog.at_level(logging.WARNING, "megalite"):
        for step in range(1, 6):
            kept.take(step, {"run_id": "x"})
            kept.finish()
    log = cuda.take()
    assert log[:2] == ["register", "error"]
    assert (log.count("register"), log.count("Commit"), len(caplog.records)) == (3, 5, 3)


def test_on_a_cpu_a_copy_is_whole_at_once(cuda: Calls) -> None:
    kept = open_copies(cuda, [torch.ones(4)], "cpu")
    kept.take(1, {"run_id": "x"})
    assert cuda.take() == ["copy_ on compute", "sum on compute", "Commit"]


def test_loaded_first_and_summed_on_the_device(cuda: Calls, monkeypatch: pytest.MonkeyPatch) -> None:
    """The host used to sum what is in its memory with one thread, before the device had any of it."""
    flat = torch.ones(4)
    kept = open_copies(cuda, [flat])
    kept.take(1, {"run_id": "x"})
    kept.finish()
    flat.zero_()
    summed = []
    sums_of_bits = copies.sums_of_bits
    monkeypatch.setattr(copies, "sums_of_bits", noting(sums_of_bits, lambda flats: summed.extend(flats)))
    cuda.take()
    kept.load(ParallelContext.single())
    assert cuda.take() == ["copy_ on compute", "sum on compute", "Loaded"]
    assert [tensor.data_ptr() for tensor in summed] == [flat.data_ptr()]


def test_of_damaged_copies_nothing_is_left(monkeypatch: pytest.MonkeyPatch) -> None:
    """What a fresh start does not write is zero; codecs then complete what is theirs."""
    flat, told = torch.zeros(4), list[Any]()
    guard: Any = object.__new__(GuardedRank)
    vars(guard).update(turn=Turn(), slots=[], say=told.append)
    guard.keep = lambda slots: setattr(guard, "slots", slots)
    first = Copies(guard, [SimpleNamespace(flat=flat)], elsewhere=False)  # type: ignore[list-item]
    for step in (1, 2):
        flat.fill_(step)
        first.take(step, {"run_id": "x"})
    commits = [said for said in told if isinstance(said, Commit)]
    for commit in commits:
        first._maps[commit.slot][3] ^= 1
    guard.turn = Turn(copies=commits)
    optimizer = SimpleNamespace(states=lambda: [SimpleNamespace(flat=flat)], finish_load=lambda: told.append("codecs"))
    run = SimpleNamespace(recover="process", elastic=False)
    engine: Any = SimpleNamespace(cfg=SimpleNamespace(run=run), optimizer=optimizer, ctx=ParallelContext.single())
    opened = restore.open_copies(engine, guard)
    assert opened is not None
    assert opened.restored is None
    assert (flat.tolist(), told[-2:]) == ([0.0] * 4, [Loaded(-1), "codecs"])
    assert not any(isinstance(said, Void) for said in told)


def test_a_step_finishes_it_before_any_state_changes(monkeypatch: pytest.MonkeyPatch) -> None:
    """Once all its work is queued, and before its ranks agree: then all have the copy when the first one updates."""
    model = ModelConfig(num_layers=1, hidden_size=8, num_heads=1, vocab_size=8, seq_len=4)
    train = TrainConfig(micro_batch_size=1, global_batch_size=1, train_steps=1)
    engine = build_engine(Config(model=model, train=train), ParallelContext.single())
    engine.optimizer.init_parameters(seed=0)
    log = list[str]()
    for name in ("finish_grads", "step"):
        method = getattr(engine.optimizer, name)
        monkeypatch.setattr(engine.optimizer, name, noting(method, lambda *_, name=name: log.append(name)))
    monkeypatch.setattr(engine.executor, "run", noting(engine.executor.run, lambda *_: log.append("run")))
    tokens = torch.zeros(1, model.seq_len + 1, dtype=torch.int64)
    train_step(engine, tokens, step=1, before_status=lambda: log.append("copy"))
    assert log == ["run", "copy", "finish_grads", "step"]


@pytest.mark.parametrize(("spare", "steps"), [(None, 1), (100 << 20, 1), (1 << 30, 2)])
def test_a_process_that_waits_rehearses_on_a_gpu_with_room(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], spare: int | None, steps: int
) -> None:
    """CUDA's context and kernels used to come after the death, where each second counts."""
    log = list[Any]()
    monkeypatch.setattr(rehearse, "spare_gpu_memory", lambda: spare)
    monkeypatch.setattr(rehearse, "pick_device", noting(lambda *_: torch.device("cpu"), lambda *args: log.append(args)))
    monkeypatch.setattr(rehearse, "train_step", noting(train_step, lambda *_: log.append("step")))
    train = TrainConfig(precision="bf16", offload="optimizer")
    cfg = Config(train=train, parallel=ParallelConfig(device="cuda", zero=2), run=RunConfig(recover="process"))
    rehearse.rehearse(cfg)
    # CUDA reads its settings once: they are those of the run.
    assert log == ["step", ("cuda", 1, 2, "optimizer", True), "step"][: 2 * steps - 1]
    assert ("100 MiB to spare" in capsys.readouterr().err) == (spare == 100 << 20)


class Driver:
    """The driver's management library with two GPUs: (compute mode; bytes in all, free and in use) of each."""

    def __init__(self, *gpus: tuple[int, tuple[int, int, int]]) -> None:
        self.gpus, self.closed = gpus, False

    def __getattr__(self, name: str) -> Any:
        return lambda *_: 0

    def nvmlDeviceGetCount_v2(self, count: Any) -> int:  # noqa: N802
        count._obj.value = len(self.gpus)
        return 0

    def nvmlDeviceGetHandleByIndex_v2(self, i: int, device: Any) -> int:  # noqa: N802
        device._obj.value = i + 1
        return 0

    def nvmlDeviceGetComputeMode(self, device: Any, mode: Any) -> int:  # noqa: N802
        mode._obj.value = self.gpus[device.value - 1][0]
        return 0

    def nvmlDeviceGetMemoryInfo(self, device: Any, sizes: Any) -> int:  # noqa: N802
        sizes._obj[:] = self.gpus[device.value - 1][1]
        return 0

    def nvmlShutdown(self) -> int:  # noqa: N802
        self.closed = True
        return 0


@pytest.mark.parametrize(
    ("gpus", "spare"),
    [
        ([], None),
        ([(0, (100, 30, 70)), (0, (100, 20, 80))], 15),
        ([(0, (100, 3, 97))], 0),
        ([(0, (100, 30, 70)), (3, (100, 30, 70))], 0),  # for one process alone
    ],
)
def test_memory_that_gpus_have_to_spare(monkeypatch: pytest.MonkeyPatch, gpus: list[Any], spare: int | None) -> None:
    driver = Driver(*gpus)
    monkeypatch.setattr(device.ctypes, "CDLL", lambda name: driver)
    assert device.spare_gpu_memory() == spare
    assert driver.closed


@pytest.mark.parametrize(("added", "steps"), [(-0.3, 1), (0.0, 1), (0.02, 1), (0.021, 2), (0.5, 25)])
def test_copies_are_as_rare_as_they_take(monkeypatch: pytest.MonkeyPatch, added: float, steps: int) -> None:
    """By the time from a step to the next with and without a copy; another rank may have less to copy."""
    monkeypatch.setattr(collectives, "gather_texts", lambda text, *_: [text, "-1.0"])
    chosen, now, due = interval.Interval(0), 0.0, list[bool]()
    for step in range(1, 40):
        due.append(chosen.is_due(step, now, ParallelContext.single()))
        now += (10.0 if step == 9 else 1.0) + added * due[-1] + 5.0 * (step < 4)  # an odd step, and the first ones
    assert due[:8] == [True] * 5 + [False, True, False]
    assert chosen.steps == steps
    assert due[17:] == [step % steps == 0 for step in range(18, 40)]


def test_copies_as_often_as_asked_for() -> None:
    every = interval.Interval(3)
    assert [every.is_due(step, 0.0, ParallelContext.single()) for step in range(1, 7)] == [False, False, True] * 2
