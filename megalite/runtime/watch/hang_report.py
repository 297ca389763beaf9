"""What a watchdog reports of a rank that hangs, and which rank of all reports is to blame. Standard library only."""

from __future__ import annotations

from dataclasses import dataclass

STOPPED, WAITING = "stopped", "waiting for other ranks"
STARVED = "unable to print its stacks (process state R)"  # like the others, perhaps, but without processor time


@dataclass(frozen=True)
class HangReport:
    """What a watchdog found out about its hanging rank.

    Attributes:
        progress: number of the heartbeat, where ranks that run ahead of their GPUs differ in nothing else; otherwise 0.
        waits_in: on what communication the rank waits, if its flight recorder says so.
        gpu_waits: whether its GPU waits for other ranks, as far as is known.
        silent: seconds since its last heartbeat.
        state: `STOPPED`, `WAITING`, `STARVED`, or where it is.
        stacks: its Python stacks, as far as it could print them.
    """

    rank: int
    host: str
    pid: int
    step: int
    place: str
    silent: float
    state: str
    stacks: str
    progress: int = 0
    waits_in: str = ""
    gpu_waits: bool = True

    @property
    def suspicion(self) -> tuple[int, int, bool, int, float]:
        """Order reports by suspicion, most suspicious first: by state, then by how far behind the rank is."""
        kind = {STOPPED: 0, STARVED: 2, WAITING: 3}.get(self.state, 1)
        return kind, self.step, self.gpu_waits, self.progress, -self.silent

    def __str__(self) -> str:
        state = f"{self.state} ({self.waits_in})" if self.waits_in else self.state
        return f"rank {self.rank} ({self.host}, pid {self.pid}), {state}, in {self.place} for {self.silent:.0f} s"


def culprit_of(reports: dict[int, HangReport]) -> HangReport:
    """Return the most suspicious report."""
    return min(reports.values(), key=lambda report: report.suspicion)
