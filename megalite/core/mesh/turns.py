"""Two passes that take turns: while what one of them exchanges is under way, the other computes.

Each runs on a thread of its own, and exactly one of them at any time: it hands over where it would wait. So kernels and
collectives have one order, the same on all ranks that run the same two passes, and each pass is what it is alone.
"""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Executor, wait
from threading import Semaphore
from typing import Literal

Side = Literal["F", "B"]
"""A forward pass, or a backward pass."""


class OtherPassFailedError(RuntimeError):
    """Ends a pass beside one that has failed."""


class Turns:
    """Whose turn it is, among passes that wait for the exchanges of one axis."""

    def __init__(self) -> None:
        self._running: Side | None = None
        self._gates = {"F": Semaphore(0), "B": Semaphore(0)}
        self._failed = False

    def hand_over(self, side: Side) -> None:
        """Let the other pass run until it hands over, or ends; at once where none runs beside this one.

        Args:
            side: the kind of pass that has come to a place to wait. A backward pass that computes a forward pass again
                comes to those of both, and hands over at its own only: both passes have as many.

        Raises:
            OtherPassFailedError: the other pass has failed.
        """
        self._check()
        if self._running != side:
            return
        other: Side = "B" if side == "F" else "F"
        self._running = other
        self._gates[other].release()
        self._gates[side].acquire()
        self._check()

    def run(self, forward: Callable[[], None], backward: Callable[[], None], worker: Executor) -> None:
        """Run two passes to their ends, the backward pass first and on a thread of `worker`.

        Raises:
            BaseException: what the pass has raised that failed first.
        """
        self._gates, self._failed, self._running = {"F": Semaphore(0), "B": Semaphore(1)}, False, "B"
        beside = worker.submit(self._take, "B", backward)
        try:
            self._take("F", forward)
        except OtherPassFailedError:
            pass
        finally:
            wait([beside])
            self._failed = False
        beside.result()

    def _take(self, side: Side, run_pass: Callable[[], None]) -> None:
        """Run a pass from its first turn on; at its end the other goes on alone."""
        try:
            self._gates[side].acquire()
            self._check()
            run_pass()
        except BaseException:
            self._failed = True
            raise
        finally:
            self._running = None
            self._gates["B" if side == "F" else "F"].release()

    def _check(self) -> None:
        if self._failed:
            raise OtherPassFailedError("the pass beside this one has failed")
