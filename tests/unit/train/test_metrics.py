"""The record of a run: lines, resume, console, bar, and trackers that fail for real."""

from __future__ import annotations

import contextlib
import fcntl
import json
import logging
import math
import os
import pty
import re
import resource
import socket
import struct
import subprocess
import sys
import termios
import textwrap
import threading
import time
import tracemalloc
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from megalite.core.base.errors import UserError
from megalite.core.base.log import logger
from megalite.extras.view.metrics import read_metrics
from megalite.runtime.record.expert_tokens import ExpertTokens
from megalite.runtime.record.metrics import MetricsLogger, duration, json_line
from megalite.runtime.record.trackers import BackgroundTracker, Tracker


def make(run_dir: Path, **options: Any) -> MetricsLogger:
    defaults: dict[str, Any] = {
        "rank": 0,
        "total_steps": 100,
        "log_every": 1,
        "tensorboard": False,
        "wandb_project": None,
        "config": {},
    }
    return MetricsLogger(run_dir, **{**defaults, **options})


def lines(run_dir: Path) -> list[str]:
    return (run_dir / "metrics.jsonl").read_text().splitlines()


@pytest.fixture
def console(caplog: pytest.LogCaptureFixture) -> Iterator[pytest.LogCaptureFixture]:
    """Messages of the project's logger, which does not propagate once it was set up."""
    caplog.set_level(logging.INFO, "megalite")
    logger.addHandler(caplog.handler)
    propagate, logger.propagate = logger.propagate, False
    yield caplog
    logger.removeHandler(caplog.handler)
    logger.propagate = propagate


# --- the file ---------------------------------------------------------------------------------------------------------


def test_every_line_is_on_disk_in_full_precision_when_step_returns(tmp_path: Path) -> None:
    metrics = make(tmp_path)
    loss, before = 0.1 + 0.2, time.time()
    metrics.step({"step": 1, "loss": loss, "lr": 1e-300, "mfu": None})
    record = json.loads(lines(tmp_path)[0])
    # Milliseconds, rounded.
    assert before - 0.001 <= record.pop("time") <= time.time() + 0.001
    assert record == {"step": 1, "loss": 0.30000000000000004, "lr": 1e-300, "mfu": None}
    metrics.event("eval", step=1, loss=2.5)
    assert json.loads(lines(tmp_path)[1]).items() >= {"event": "eval", "step": 1, "loss": 2.5}.items()
    metrics.close()
    metrics.close()


def test_values_that_are_not_finite_stay_valid_json() -> None:
    def refuse(constant: str) -> None:
        raise AssertionError(f"{constant} is no JSON")

    line = json_line({"step": 3, "loss": math.nan, "grad_norm": -math.inf, "lr": 0.5})
    assert json.loads(line, parse_constant=refuse) == {
        "step": 3,
        "loss": None,
        "grad_norm": None,
        "lr": 0.5,
        "nonfinite": {"loss": "nan", "grad_norm": "-inf"},
    }


def test_a_resumed_run_appends_and_its_own_steps_count(tmp_path: Path) -> None:
    first = make(tmp_path)
    for step in (1, 2, 3):
        first.step({"step": step, "loss": float(step)})
    first.close()
    before = (tmp_path / "metrics.jsonl").read_bytes()
    second = make(tmp_path)
    second.event("resume", step=1)
    second.step({"step": 2, "loss": 20.0})
    second.close()
    assert (tmp_path / "metrics.jsonl").read_bytes().startswith(before)
    steps, events = read_metrics(tmp_path)
    assert [(r["step"], r["loss"]) for r in steps] == [(1, 1.0), (2, 20.0)]
    assert [(e["event"], e["step"]) for e in events] == [("resume", 1)]


def test_a_line_cut_off_by_a_crash_swallows_nothing(tmp_path: Path, console: pytest.LogCaptureFixture) -> None:
    (tmp_path / "metrics.jsonl").write_text('{"step": 1, "loss": 1.5}\n{"step": 2, "lo')
    metrics = make(tmp_path)
    metrics.step({"step": 2, "loss": 1.25})
    metrics.close()
    assert "ends in the middle of a line" in console.text
    assert lines(tmp_path)[:2] == ['{"step": 1, "loss": 1.5}', '{"step": 2, "lo']
    assert lines(tmp_path)[2].startswith('{"step": 2, "loss": 1.25, ')
    steps, _ = read_metrics(tmp_path)
    assert [r["loss"] for r in steps] == [1.5, 1.25]
    assert "line 2 is broken and skipped" in console.text


@contextlib.contextmanager
def room(size: int) -> Iterator[None]:
    """Limit the size that files of this process may have: writes beyond it fail as on a full disk.

    Within a test: pytest may write to a file what has come of it.
    """
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


def test_lines_wait_for_room_on_the_disk(tmp_path: Path, console: pytest.LogCaptureFixture) -> None:
    metrics = make(tmp_path)
    metrics.step({"step": 1, "loss": 4.0})
    # The next line fits in part.
    with room(len(lines(tmp_path)[0]) + 8):
        metrics.step({"step": 2, "loss": 3.0})
        metrics.event("save", step=2)
    assert console.text.count("lines are kept in memory; free some space") == 1
    metrics.step({"step": 3, "loss": 2.0})
    metrics.close()
    records = [json.loads(line) for line in lines(tmp_path)]
    assert [(r.get("event"), r["step"]) for r in records] == [(None, 1), (None, 2), ("save", 2), (None, 3)]


def test_lines_that_never_found_room_are_told(tmp_path: Path, console: pytest.LogCaptureFixture) -> None:
    metrics = make(tmp_path)
    with room(0):
        metrics.step({"step": 1, "loss": 4.0})
        metrics.step({"step": 2, "loss": 3.0})
        metrics.close()
    assert "the last 2 lines could not be written and are lost" in console.text


def test_a_run_directory_that_cannot_be_written(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(UserError, match=r"file.*metrics\.jsonl cannot be written.*another --run-dir"):
        make(tmp_path / "file")


def test_other_ranks_do_nothing(tmp_path: Path, console: pytest.LogCaptureFixture) -> None:
    metrics = make(tmp_path / "run", rank=1, tensorboard=True, wandb_project="p")
    metrics.step({"step": 1, "loss": 1.0})
    metrics.event("eval", step=1, loss=1.0)
    metrics.close()
    assert list(tmp_path.iterdir()) == []
    assert console.text == ""


# --- the console ------------------------------------------------------------------------------------------------------


def test_console_lines_come_at_log_every_and_at_the_end(tmp_path: Path, console: pytest.LogCaptureFixture) -> None:
    now = 0.0
    metrics = make(tmp_path, total_steps=5, log_every=2, clock=lambda: now)
    for step in range(1, 6):
        now += 10.0
        record = {"loss": 4.25, "grad_norm": 1.5, "lr": 3e-4, "tokens_per_s": 12345.6, "step_time_s": 7.5}
        metrics.step({"step": step, **record})
    metrics.close()
    tail = "loss 4.2500 | grad norm 1.500 | lr 3.00e-04 | 12,346 tokens/s | 7.500 s/step"
    # 10 s from step to step, evaluation and saves included, not the 7.5 s of a step alone.
    assert console.messages == [
        f"step 2/5 | {tail} | ETA 0:00:30",
        f"step 4/5 | {tail} | ETA 0:00:10",
        f"step 5/5 | {tail} | ETA 0:00:00",
    ]
    assert len(lines(tmp_path)) == 5


def test_the_first_eta_goes_by_the_step_itself(tmp_path: Path, console: pytest.LogCaptureFixture) -> None:
    metrics = make(tmp_path, total_steps=1000)
    metrics.step({"step": 100, "loss": math.nan, "grad_norm": math.inf, "step_time_s": 100.0})
    metrics.close()
    assert console.messages == ["step 100/1000 | loss nan | grad norm inf | 100.000 s/step | ETA 1d 1:00:00"]


def test_durations() -> None:
    assert [duration(s) for s in (0.4, 59.6, 3599, 86399.6, 90061)] == [
        "0:00:00",
        "0:01:00",
        "0:59:59",
        "1d 0:00:00",
        "1d 1:01:01",
    ]


def test_a_terminal_gets_a_bar_that_lines_do_not_tear(tmp_path: Path) -> None:
    code = """
    import sys
    from pathlib import Path
    from megalite.core.base.log import logger, setup_logging
    from megalite.runtime.record.metrics import MetricsLogger
    setup_logging(0)
    metrics = MetricsLogger(Path(sys.argv[1]), 0, 8, 2, False, None, {})
    for step in range(5, 9):
        metrics.step({"step": step, "loss": step / 2})
        logger.warning("said between steps")
    metrics.close()
    logger.info("after the bar")
    """
    terminal, other_end = pty.openpty()
    fcntl.ioctl(other_end, termios.TIOCSWINSZ, struct.pack("HHHH", 24, 80, 0, 0))
    command = [sys.executable, "-c", textwrap.dedent(code), str(tmp_path)]
    child = subprocess.Popen(command, stderr=other_end)
    os.close(other_end)
    shown = b""
    try:
        while chunk := os.read(terminal, 4096):
            shown += chunk
    except OSError:
        pass  # Linux ends a terminal whose other end is closed with EIO
    os.close(terminal)
    assert child.wait() == 0
    text = shown.decode()
    assert re.search(r"50%\|.*4/8", text), "a bar that starts where the run resumed"
    # What stands in a line at last is what follows the last carriage return.
    rows = [row.rstrip("\r").rsplit("\r", 1)[-1].replace("\x1b[A", "").strip() for row in text.split("\n")]
    said = [row for row in rows if row and "%|" not in row]
    assert [row.split(" | ETA")[0] for row in said] == [
        "said between steps",
        "step 6/8 | loss 3.0000",
        "said between steps",
        "said between steps",
        "step 8/8 | loss 4.0000",
        "said between steps",
        "after the bar",
    ]


# --- trackers ---------------------------------------------------------------------------------------------------------


@pytest.fixture
def patient(monkeypatch: pytest.MonkeyPatch) -> None:
    """Importing a tracker's library alone may take longer than a run waits for it at its end."""
    monkeypatch.setattr("megalite.runtime.record.trackers.FINISH_S", 300.0)


@pytest.mark.usefixtures("patient")
def test_tensorboard_holds_what_was_logged(tmp_path: Path) -> None:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    metrics = make(tmp_path, tensorboard=True)
    for step in (1, 2, 3):
        metrics.step({"step": step, "loss": 4.0 / step, "mfu": None})
    metrics.event("eval", step=3, loss=1.25)
    metrics.event("save", path="x")
    metrics.close()
    events = EventAccumulator(str(tmp_path / "tensorboard"))
    events.Reload()
    assert sorted(events.Tags()["scalars"]) == ["eval/loss", "train/loss"]
    assert [(e.step, e.value) for e in events.Scalars("train/loss")] == [(1, 4.0), (2, 2.0), (3, pytest.approx(4 / 3))]
    assert [(e.step, e.value) for e in events.Scalars("eval/loss")] == [(3, 1.25)]


@pytest.mark.usefixtures("patient")
def test_tensorboard_that_cannot_write_stops_itself_only(tmp_path: Path, console: pytest.LogCaptureFixture) -> None:
    (tmp_path / "tensorboard").write_text("a file where the folder should be")
    metrics = make(tmp_path, tensorboard=True)
    metrics.step({"step": 1, "loss": 1.0})
    metrics.close()
    assert "TensorBoard stopped (FileExistsError" in console.text
    assert len(lines(tmp_path)) == 1


def _stuck() -> Tracker:
    """A tracker whose first log call never returns, like a client whose server process hangs."""

    def log(values: dict[str, float], step: int) -> None:
        time.sleep(3600)

    def close() -> None:
        raise AssertionError("is never reached")

    return Tracker(log, close)


def test_a_tracker_that_hangs_delays_the_end_by_its_limit_only(
    monkeypatch: pytest.MonkeyPatch, console: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr("megalite.runtime.record.trackers.FINISH_S", 0.05)
    monkeypatch.setattr("megalite.runtime.record.trackers._QUEUE_LENGTH", 3)
    tracker = BackgroundTracker("stuck", _stuck)
    for step in range(10):
        tracker.log({"loss": 1.0}, step)
    assert "stuck stopped (the last 3 lines are still waiting)" in console.text
    tracker.close()
    tracker = BackgroundTracker("stuck", _stuck)
    tracker.log({"loss": 1.0}, 1)
    tracker.close()
    assert "stuck stopped (not finished after 0.05 s)" in console.text
    assert len(console.messages) == 2


class _SlowToSpeak(logging.Handler):
    """A console that takes its time, as one does on a busy machine."""

    def __init__(self) -> None:
        super().__init__()
        self.reached, self.go_on = threading.Event(), threading.Event()
        self.said: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.reached.set()
        assert self.go_on.wait(120)
        self.said.append(record.getMessage())


def test_the_end_of_a_run_waits_for_what_a_failing_tracker_has_to_say(console: pytest.LogCaptureFixture) -> None:
    def fails() -> Tracker:
        raise OSError("no such server")

    slow = _SlowToSpeak()
    logger.addHandler(slow)
    tracker = BackgroundTracker("broken", fails)
    assert slow.reached.wait(120)
    closing = threading.Thread(target=tracker.close)
    closing.start()
    closing.join(0.2)
    still_closing = closing.is_alive()
    slow.go_on.set()
    closing.join(120)
    logger.removeHandler(slow)
    assert still_closing, "close came back before the warning was out: a process that ends now would never show it"
    assert slow.said == ["broken stopped (OSError: no such server); the run and its metrics.jsonl continue"]


_WANDB_RUN = """
import sys
from pathlib import Path
from megalite.core.base.log import setup_logging
from megalite.runtime.record import trackers
from megalite.extras.view.metrics import read_metrics
from megalite.runtime.record.metrics import MetricsLogger
setup_logging(0)
trackers.WANDB_INIT_S, trackers.FINISH_S = 1.0, 300.0
metrics = MetricsLogger(Path(sys.argv[1]), 0, 2, 1, False, "megalite-test", {"lr": 1.0})
for step in (1, 2):
    metrics.step({"step": step, "loss": 1.0})
metrics.event("eval", step=2, loss=1.5)
metrics.best(Path(sys.argv[1]) / "checkpoints/step_00000002", 1.5)
metrics.close()
"""


_BEST = "checkpoints/step_00000002"


def _wandb_run(run_dir: Path, **env: str) -> subprocess.CompletedProcess[str]:
    """A run in a process of its own, without this machine's keys and settings."""
    clean = {k: v for k, v in os.environ.items() if not k.startswith("WANDB")}
    (run_dir / _BEST).mkdir(parents=True)
    (run_dir / _BEST / "COMMIT").write_text("x")
    clean |= {"HOME": str(run_dir), "NETRC": str(run_dir / "netrc"), "WANDB__SERVICE_WAIT": "300", **env}
    command = [sys.executable, "-c", _WANDB_RUN, str(run_dir)]
    return subprocess.run(command, env=clean, stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=600)


def _offline_values(run_dir: Path) -> bytes:
    (record,) = run_dir.glob("wandb/offline-run-*/run-*.wandb")
    return record.read_bytes()


def test_wandb_without_a_key_records_offline(tmp_path: Path) -> None:
    done = _wandb_run(tmp_path)
    assert done.returncode == 0, done.stderr
    assert done.stderr.count("wandb: no API key; recording offline in ") == 1
    record = _offline_values(tmp_path)
    assert b"train/loss" in record
    assert b"eval/loss" in record
    # The best checkpoint, by reference: its files, their place and its alias.
    for word in ("checkpoint-", "\x04best", f"{(tmp_path / _BEST).as_uri()}/COMMIT", '{"checkpoint":"step_00000002"'):
        assert word.encode() in record, word
    assert len(lines(tmp_path)) == 3


def test_wandb_with_a_server_that_cannot_be_reached_records_offline(tmp_path: Path) -> None:
    with socket.socket() as closed:
        closed.bind(("127.0.0.1", 0))  # bound, never listening: connections are refused
        url = f"http://127.0.0.1:{closed.getsockname()[1]}"
        done = _wandb_run(tmp_path, WANDB_BASE_URL=url, WANDB_API_KEY="a" * 40)
    assert done.returncode == 0, done.stderr
    assert re.search(r"wandb: .*(refused|[Tt]imed out).*; recording offline in ", done.stderr)
    assert b"train/loss" in _offline_values(tmp_path)
    assert len(lines(tmp_path)) == 3


def test_wandb_that_was_turned_off_stays_off(tmp_path: Path) -> None:
    done = _wandb_run(tmp_path, WANDB_MODE="disabled")
    assert done.returncode == 0, done.stderr
    assert "recording offline" not in done.stderr
    assert not list(tmp_path.glob("wandb/*run-*"))
    assert len(lines(tmp_path)) == 3


def test_a_file_that_is_not_a_record_of_steps(tmp_path: Path, console: pytest.LogCaptureFixture) -> None:
    path = tmp_path / "metrics.jsonl"
    good = b'{"step": 1, "loss": 1.5}\n'
    path.write_bytes(b'{"step": 2, "x": "' + b"x" * (5 << 20) + b'"}\n' + good + b"[" * 1000 + b"\n" + b"\xff\n" * 5000)
    with path.open("ab") as f:
        f.truncate(64 << 20)  # zeros that take no place on the disk
    tracemalloc.start()
    steps, _ = read_metrics(tmp_path)
    assert tracemalloc.get_traced_memory()[1] < 20 << 20
    tracemalloc.stop()
    assert [s["loss"] for s in steps] == [1.5]
    assert "line 1 is broken" in console.text
    assert "line 3 is broken" in console.text
    assert "5003 broken lines are skipped" in console.text
    assert len(console.records) == 11
    path.unlink()
    os.mkfifo(path)
    with pytest.raises(UserError, match=r"metrics.jsonl in it cannot be read \(is not a regular file\)"):
        read_metrics(tmp_path)


def test_an_abandoned_attempt_is_not_mixed_in(tmp_path: Path) -> None:
    lines = [
        *({"step": s, "loss": 1.0} for s in range(1, 6)),
        {"event": "eval", "step": 4, "loss": 1.0},
        {"event": "eval_tasks", "step": 4, "piqa/acc": 1.0},
        {"event": "resume", "step": 2},
        {"step": 3, "loss": 2.0},
    ]
    (tmp_path / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    steps, events = read_metrics(tmp_path)
    assert [(s["step"], s["loss"]) for s in steps] == [(1, 1.0), (2, 1.0), (3, 2.0)]
    assert [e["event"] for e in events] == ["resume"]


@pytest.mark.full
def test_memory_of_a_rank_is_its_own() -> None:
    # Linux lets ru_maxrss of a new process begin at that of the process that started it.
    code = (
        "import torch; from megalite.runtime.record.step_record import peak_memory; "
        "print(peak_memory(torch.device('cpu')))"
    )
    large = (
        "import subprocess, sys; ballast = bytearray(1 << 30); "
        f"print(subprocess.check_output([sys.executable, '-c', {code!r}], text=True))"
    )
    peak = int(subprocess.run([sys.executable, "-c", large], capture_output=True, text=True, check=True).stdout)
    assert 50 << 20 < peak < 1 << 30


def test_a_torn_line_of_experts_spoils_no_other(tmp_path: Path) -> None:
    run = SimpleNamespace(folder=tmp_path, log_every=1)
    cfg, ctx = SimpleNamespace(run=run, train=SimpleNamespace(train_steps=4)), SimpleNamespace(rank=0)
    engine: Any = SimpleNamespace(cfg=cfg, ctx=ctx)
    figures: Any = SimpleNamespace(layers=[1], tokens=torch.tensor([[3.0, 5.0]]))
    ExpertTokens(engine).write(1, figures)
    path = tmp_path / "experts.jsonl"
    path.write_text(path.read_text() + '{"step": 2, "lay')
    for step in (2, 3):
        ExpertTokens(engine).write(step, figures)
    first, _, *rest = path.read_text().splitlines()
    assert [json.loads(line) for line in (first, *rest)] == [
        {"step": step, "layers": [1], "tokens": [[3, 5]]} for step in (1, 2, 3)
    ]
