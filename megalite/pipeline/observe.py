"""Who watches the operations of a pipeline program: heartbeat, recorder, profiler."""

from __future__ import annotations

from megalite.pipeline.schedule import Op


class Observer:
    """Watches the executor, on the thread that runs it and once per operation: whatever it does must be quick.

    A subclass overrides what it needs; the methods here do nothing.
    """

    def begin(self, op: Op) -> None:
        """Note that an operation begins."""

    def arrived(self) -> None:
        """Note that the message which the present operation waited for is there."""

    def end(self, op: Op) -> None:
        """Note that the operation has ended (on a GPU: that all of it is enqueued)."""

    def finished(self) -> None:
        """Note that every operation of the program has ended; sends may still be under way."""
