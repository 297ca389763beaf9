"""TensorBoard and Weights & Biases beside a run: they may fail or hang, and the run goes on.

`metrics.jsonl` is the record; a tracker is a copy for looking at. Each lives in a thread of its own that takes values
from a queue, so that neither its errors nor its delays (an unreachable server, a full disk) reach the training loop.
"""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any, Protocol

from megalite.log import logger

WANDB_INIT_S = 15.0
"""Longest wait for the wandb server before the run is recorded offline, seconds."""
FINISH_S = 20.0
"""Longest wait for a tracker at the end of a run, seconds."""
_QUEUE_LENGTH = 100_000


class Tracker(Protocol):
    """Where values go."""

    def log(self, values: dict[str, float], step: int) -> None: ...
    def close(self) -> None: ...


class BackgroundTracker:
    """A tracker in a daemon thread. No method raises or waits, but `close`, which waits for `FINISH_S` at most.

    Args:
        name: for messages.
        start: makes the tracker; runs in the thread.
    """

    def __init__(self, name: str, start: Callable[[], Tracker]) -> None:
        self.name, self._start = name, start
        self._items: queue.Queue[tuple[dict[str, float], int] | None] = queue.Queue(_QUEUE_LENGTH)
        self._stopped = threading.Event()
        self._giving_up = threading.Lock()
        self._thread = threading.Thread(target=self._work, name=f"megalite-{name}", daemon=True)
        self._thread.start()

    def _work(self) -> None:
        try:
            tracker = self._start()
            while (item := self._items.get()) is not None:
                tracker.log(*item)
            tracker.close()
        except Exception as e:  # whatever a tracker does, the run goes on
            self._give_up(f"{type(e).__name__}: {' '.join(str(e).split())}")

    def _give_up(self, why: str) -> None:
        with self._giving_up:
            if not self._stopped.is_set():
                logger.warning("%s stopped (%s); the run and its metrics.jsonl go on", self.name, why)
                # Only now: `close` of a stopped tracker does not wait, and what ends the process ends this thread.
                self._stopped.set()

    def log(self, values: dict[str, float], step: int) -> None:
        """Hand values over."""
        if self._stopped.is_set():
            return
        try:
            self._items.put_nowait((values, step))
        except queue.Full:
            self._give_up(f"it has not taken the last {_QUEUE_LENGTH} lines")

    def close(self) -> None:
        """Let the tracker finish."""
        if self._stopped.is_set():
            return
        try:
            self._items.put_nowait(None)
            self._thread.join(FINISH_S)
        except queue.Full:
            pass
        if self._thread.is_alive():
            self._give_up(f"not finished after {FINISH_S:g} s")
        self._stopped.set()


class TensorBoardTracker:
    """Events in RUN_DIR/tensorboard."""

    def __init__(self, run_dir: Path) -> None:
        try:
            from torch.utils.tensorboard import SummaryWriter
        except ImportError:
            raise RuntimeError("--tensorboard needs the package: pip install 'megalite[log]'") from None
        self._writer = SummaryWriter(str(run_dir / "tensorboard"))

    def log(self, values: dict[str, float], step: int) -> None:
        for name, value in values.items():
            self._writer.add_scalar(name, value, step)

    def close(self) -> None:
        self._writer.close()


class WandbTracker:
    """A Weights & Biases run: online where a key is found and the server answers, else offline in RUN_DIR/wandb."""

    def __init__(self, run_dir: Path, project: str, config: dict[str, Any]) -> None:
        try:
            import wandb
        except ImportError:
            raise RuntimeError("--wandb-project needs the package: pip install 'megalite[log]'") from None
        settings = wandb.Settings(init_timeout=WANDB_INIT_S, finish_timeout=FINISH_S - 5, silent=True, console="off")

        def start(mode: str) -> Any:
            return wandb.init(
                project=project,
                name=run_dir.resolve().name,
                dir=str(run_dir),
                config=config,
                mode=mode,  # type: ignore[arg-type]
                settings=settings,
            )

        # The mode is chosen before anything can ask for a key at the terminal. WANDB_MODE is read by the library.
        mode = wandb.setup(settings=wandb.Settings(silent=True)).settings.mode
        if mode == "online" and not wandb.login(prompt=False, verify=False):
            mode = "offline"
            _say_offline("no API key", run_dir)
        try:
            self._run = start(mode)
        except Exception as e:  # wandb documents no closed set of errors
            _say_offline(" ".join(str(e).split()), run_dir)
            self._run = start("offline")

    def log(self, values: dict[str, float], step: int) -> None:
        self._run.log(values, step=step)

    def close(self) -> None:
        self._run.finish()


def _say_offline(why: str, run_dir: Path) -> None:
    logger.info("wandb: %s; recording offline in %s (upload later: wandb sync)", why, run_dir / "wandb")
