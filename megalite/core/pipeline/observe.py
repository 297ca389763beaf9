"""The interface of what observes a pipeline program: heartbeat, recorder, profiler."""

from __future__ import annotations

from megalite.core.pipeline.schedule import Op

RANGE = "step: "
"""Prefix of the ranges that megalite adds to a profiler's trace."""
OPTIMIZER_RANGE = f"{RANGE}optimizer"


class Observer:
    """Observes the executor, on its thread and at every operation: methods must be fast.

    Subclasses override the methods that they need; the defaults do nothing.
    """

    def begin(self, op: Op) -> None:
        """Handle the start of an operation."""

    def waits(self) -> None:
        """Handle that the current operation comes to wait for a message; of a pair each of the two does."""

    def arrived(self) -> None:
        """Handle the arrival of the message that the current operation was waiting for."""

    def end(self, op: Op) -> None:
        """Handle the end of the operation (on a GPU: all of its work is enqueued)."""

    def finished(self) -> None:
        """Handle the end of the last operation of the program; sends may still be in flight."""
