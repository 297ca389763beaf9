"""Find the rank that failed first and its last output: one dead rank ends all others, each with errors of its own."""

from __future__ import annotations

import re
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field

# Errors of a rank that failed only because it lost another one (gloo, NCCL, TCPStore).
_CONSEQUENCE = re.compile(
    r"Connection closed by peer|Connection reset by peer|Connection refused|Broken pipe|recvValue failed|"
    r"failed to recv|ncclRemoteError|NCCL communicator was aborted|remote process exited|Socket Timeout|"
    r"lost a peer|another rank failed first|killing this rank, which did not end by itself|"
    r"DistNetworkError|DistStoreError|"
    r"Watchdog caught collective operation timeout"
)
_FAILED_RANK = re.compile(r"rank\s*: (\d+) \(local_rank: (\d+)\)\n\s*exitcode\s*: (-?\d+) \(pid")
_TRACEBACK = "Traceback (most recent call last)"
_SIGTERM = 15
_KEPT_LINES = 200
_SHOWN_WITHOUT_TRACEBACK = 20


@dataclass
class RankTail:
    """Last lines of one rank's standard error; `failed_at` is when a traceback or `error:` line arrived."""

    lines: deque[str] = field(default_factory=lambda: deque(maxlen=_KEPT_LINES))
    failed_at: float = float("inf")
    _is_consequence: bool | None = None

    def add(self, line: str, now: float) -> None:
        """Append a line; `now` is the launcher's monotonic clock in seconds, since the hosts' clocks differ."""
        self.lines.append(line)
        self._is_consequence = None
        if line.startswith((_TRACEBACK, "error: ")):
            self.failed_at = min(self.failed_at, now)

    def last_words(self) -> list[str]:
        """Return the lines from the first traceback kept to the end; without one, the last 20."""
        lines = list(self.lines)
        start = next((i for i, line in enumerate(lines) if line.startswith((_TRACEBACK, "error: "))), None)
        return lines[-_SHOWN_WITHOUT_TRACEBACK:] if start is None else lines[start:]

    def is_consequence(self) -> bool:
        """Check whether its last lines report a lost peer."""
        # Called for all ranks whenever one fails.
        if self._is_consequence is None:
            self._is_consequence = bool(_CONSEQUENCE.search("\n".join(self.last_words())))
        return self._is_consequence


@dataclass(frozen=True)
class FailedRank:
    """A failed rank in torchrun's report. `code` < 0: killed by that signal; `reported_at`: launcher's clock (s)."""

    host: str
    rank: int
    local_rank: int
    code: int
    reported_at: float

    def cause(self) -> str:
        """Describe how the rank ended: "exit code 1" or "killed by signal 9"."""
        return f"exit code {self.code}" if self.code >= 0 else f"killed by signal {-self.code}"


def parse_report(host: str, text: str, now: float) -> list[FailedRank]:
    """List the failed ranks of torchrun's closing report (none if torchrun itself failed)."""
    return [FailedRank(host, int(rank), int(local), int(code), now) for rank, local, code in _FAILED_RANK.findall(text)]


def is_explained(failed: Sequence[FailedRank], tails: dict[int, RankTail]) -> bool:
    """Check whether a rank failed on its own, and not because it lost a peer or was terminated."""
    return any(_distance(f, tails) == 0 for f in failed)


def first_failure(failed: Sequence[FailedRank], tails: dict[int, RankTail]) -> FailedRank | None:
    """Return the rank to blame.

    Order: ranks that failed on their own, then those that lost a peer, then those that torchrun terminated (SIGTERM);
    within each, the one whose failure reached the launcher first.
    """

    def key(f: FailedRank) -> tuple[int, float, int]:
        tail = tails.get(f.rank, RankTail())
        return _distance(f, tails), min(tail.failed_at, f.reported_at), f.rank

    return min(failed, key=key, default=None)


def _distance(f: FailedRank, tails: dict[int, RankTail]) -> int:
    """Return the distance from the cause: 0 failed on its own, 1 lost a peer, 2 terminated by torchrun."""
    return 2 if f.code == -_SIGTERM else int(tails.get(f.rank, RankTail()).is_consequence())
