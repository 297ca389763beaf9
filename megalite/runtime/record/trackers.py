"""TensorBoard and Weights & Biases: if they fail or hang, the run continues.

`metrics.jsonl` is the record; a tracker is a copy to look at. Each runs in its own thread and takes values from a
queue, so neither its errors nor its delays (an unreachable server, a full disk) reach the training loop.
"""

from __future__ import annotations

import importlib
import queue
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

from megalite.core.base.log import logger

WANDB_INIT_S = 15.0
"""Longest wait for the wandb server before the run is recorded offline, seconds."""
# Then for its own process alone, which a busy machine may start late.
_WANDB_OFFLINE_INIT_S = 60.0
FINISH_S = 20.0
"""Longest wait for a tracker at the end of a run, seconds."""
_QUEUE_LENGTH = 100_000


class Tracker(NamedTuple):
    """Functions that record the values of a step, and finish, and one that names a checkpoint the best: its folder and
    its validation loss.
    """

    log: Callable[[dict[str, float], int], object]
    close: Callable[[], object]
    best: Callable[[Path, float], object] = lambda path, loss: None


class BackgroundTracker:
    """A tracker in a daemon thread. No method raises or waits, except `close`, which waits at most `FINISH_S`.

    Args:
        name: for messages.
        start: creates the tracker; runs in the thread.
    """

    def __init__(self, name: str, start: Callable[[], Tracker]) -> None:
        self.name, self._start = name, start
        self._items: queue.Queue[Callable[[Tracker], object] | None] = queue.Queue(_QUEUE_LENGTH)
        self._stopped = threading.Event()
        self._giving_up = threading.Lock()
        self._thread = threading.Thread(target=self._work, name=f"megalite-{name}", daemon=True)
        self._thread.start()

    def _work(self) -> None:
        try:
            tracker = self._start()
            while (item := self._items.get()) is not None:
                item(tracker)
            tracker.close()
        except Exception as e:  # whatever a tracker does, the run continues
            self._give_up(f"{type(e).__name__}: {' '.join(str(e).split())}")

    def _give_up(self, why: str) -> None:
        with self._giving_up:
            if not self._stopped.is_set():
                logger.warning(f"{self.name} stopped ({why}); the run and its metrics.jsonl continue")
                # Only now: `close` of a stopped tracker does not wait, and the end of the process ends this thread.
                self._stopped.set()

    def log(self, values: dict[str, float], step: int) -> None:
        """Queue the values of a step."""
        self._put(lambda tracker: tracker.log(values, step))

    def best(self, path: Path, loss: float) -> None:
        """Queue the best checkpoint."""
        self._put(lambda tracker: tracker.best(path, loss))

    def _put(self, item: Callable[[Tracker], object]) -> None:
        if self._stopped.is_set():
            return
        try:
            self._items.put_nowait(item)
        except queue.Full:
            self._give_up(f"the last {_QUEUE_LENGTH} lines are still waiting")

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


def tensorboard_tracker(run_dir: Path) -> Tracker:
    """Write events to RUN_DIR/tensorboard."""
    writer = _import("torch.utils.tensorboard", "--tensorboard").SummaryWriter(str(run_dir / "tensorboard"))

    def log(values: dict[str, float], step: int) -> None:
        for name, value in values.items():
            writer.add_scalar(name, value, step)

    return Tracker(log, writer.close)


def wandb_tracker(run_dir: Path, project: str, config: dict[str, Any]) -> Tracker:
    """Start a Weights & Biases run: online where a key is found and the server answers, else in RUN_DIR/wandb."""
    wandb = _import("wandb", "--wandb-project")

    def start(mode: str) -> Any:
        limit = WANDB_INIT_S if mode == "online" else _WANDB_OFFLINE_INIT_S
        settings = wandb.Settings(init_timeout=limit, finish_timeout=FINISH_S - 5, silent=True, console="off")
        name = run_dir.resolve().name
        return wandb.init(project=project, name=name, dir=str(run_dir), config=config, settings=settings, mode=mode)

    # The mode is chosen before anything can ask for a key at the terminal. The library reads WANDB_MODE.
    mode = wandb.setup(settings=wandb.Settings(silent=True)).settings.mode
    why = ""
    if mode == "online" and not wandb.login(prompt=False, verify=False):
        mode, why = "offline", "no API key"
    try:
        run = start(mode)
    except Exception as e:  # wandb documents no closed set of errors
        why = " ".join(str(e).split())
        run = start("offline")
    if why:
        logger.info(f"wandb: {why}; recording offline in {run_dir / 'wandb'} (upload later: wandb sync)")

    def best(path: Path, loss: float) -> None:
        # A reference: the files stay where they are.
        artifact = wandb.Artifact(
            f"checkpoint-{run.id}", "model", metadata={"checkpoint": path.name, "valid_loss": loss}
        )
        artifact.add_reference(path.resolve().as_uri(), checksum=False)
        run.log_artifact(artifact, aliases=["best"])

    return Tracker(run.log, run.finish, best)


def _import(module: str, flag: str) -> Any:
    try:
        return importlib.import_module(module)
    except ImportError:
        raise RuntimeError(f"{flag} requires the package: pip install 'megalite[log]'") from None
