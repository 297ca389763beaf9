"""One attempt: an ssh process per host, output line by line, heartbeats, forwarded signals, and a common end."""

from __future__ import annotations

import contextlib
import os
import re
import selectors
import signal
import subprocess
import sys
import threading
import time
from collections import defaultdict
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import IO

from megalite.core.base.log import logger, unfinished_code
from megalite.extras.launch.failure import FailedRank, RankTail, first_failure, is_explained, parse_report
from megalite.extras.launch.hosts import SSH_FAILED
from megalite.runtime.base.child import allow_many_files
from megalite.runtime.recover.hub import MET

HEARTBEAT_S = 3.0
# The agents have 8 s of grace and 5 s of killing; then the connection itself is cut.
CLOSE_TO_KILL_S = 15.0
# Seconds that other hosts have to report a cause after ranks of one host failed only because they lost a peer.
REPORT_S = 15.0
# Between attempts to start a lost host again. One that is cut off has stopped by then.
AGAIN_S = 60.0
_POLL_S = 0.3
_MAX_LINE = 1 << 16
# Exit codes above it are those of processes that a signal has ended, and ssh's of a lost connection.
_SIGNALED = 128
# After our prefix, megalite's logger ("[rank 3] ") and torch's traceback printer ("[rank3]: ") repeat the rank.
_RANK_LINE = re.compile(r"\[\[rank (\d+)\]\] ?(?:\[rank \1\] |\[rank\1\]: )?(.*)", re.DOTALL)


@dataclass
class Remote:
    """One host's ssh process and its state.

    Attributes:
        again: whether the host was lost before, and started again while the run went on.
        again_at: when it is to be, on the launcher's clock.
    """

    name: str
    command: Sequence[str]
    process: subprocess.Popen[bytes]
    open_streams: int = 2
    buffers: dict[str, bytes] = field(default_factory=lambda: {"out": b"", "err": b""})
    torchrun_report: list[str] = field(default_factory=list)
    code: int | None = None
    again: bool = False
    again_at: float = float("inf")


@dataclass(frozen=True)
class Outcome:
    """How an attempt ended.

    Attributes:
        code: first non-zero exit code, or 0.
        culprit: rank that failed first, if known.
        unseen: hosts whose end was not observed.
        asked_to_stop: whether the user stopped it.
    """

    code: int
    culprit: FailedRank | None
    unseen: tuple[str, ...]
    asked_to_stop: bool


class Runner:
    """Runs one command per host until all have ended.

    Args:
        hosts: their names.
        commands: one for each.
        log_dir: where torchrun's files are on the hosts.
        reserves: whether the run has ranks in reserve: once all ranks have met, it goes on without a host that is lost,
            unless that is the first.
        returns: whether such a host may join again: it is started anew until the run ends, or until the first host is
            lost, without whose store none can be; another host's ranks then say how the run ends.
    """

    def __init__(
        self,
        hosts: Sequence[str],
        commands: Sequence[Sequence[str]],
        log_dir: str,
        reserves: bool = False,
        returns: bool = False,
    ) -> None:
        self._log_dir = log_dir
        self._reserves, self._returns = reserves, returns
        self._replaces = False
        self._tails: dict[int, RankTail] = defaultdict(RankTail)
        self._failed: list[FailedRank] = []
        self._first_code = 0
        self._unseen: set[str] = set()
        # Lost hosts, of which each is told of once until it says something again.
        self._told: set[str] = set()
        self._stop_requests = 0
        self._close_at = self._kill_at = float("inf")
        # Guards the hosts' standard inputs, which the heartbeat thread and signal handlers (main thread) write to.
        self._input_lock = threading.RLock()
        self._selector = selectors.DefaultSelector()
        self._remotes: list[Remote] = []
        allow_many_files()  # three pipes per host
        for name, command in zip(hosts, commands):
            self._remotes.append(self._start(name, command))
        self._leader = self._remotes[0]

    def _start(self, name: str, command: Sequence[str]) -> Remote:
        pipe = subprocess.PIPE
        # A new session: Ctrl-C at the terminal must reach only us, or every ssh would die before its ranks have saved.
        process = subprocess.Popen(command, stdin=pipe, stdout=pipe, stderr=pipe, bufsize=0, start_new_session=True)
        assert process.stdin is not None
        assert process.stdout is not None
        assert process.stderr is not None
        os.set_blocking(process.stdin.fileno(), False)
        remote = Remote(name, command, process)
        self._selector.register(process.stdout, selectors.EVENT_READ, (remote, "out"))
        self._selector.register(process.stderr, selectors.EVENT_READ, (remote, "err"))
        return remote

    def run(self) -> Outcome:
        """Forward output until every host has ended; whatever happens here, the hosts are asked to stop."""
        done = threading.Event()
        # A thread: the main loop may block for long if our output is not read (Ctrl-S, a pager).
        heartbeat = threading.Thread(target=self._heartbeat, args=(done,), daemon=True)
        heartbeat.start()
        try:
            with self._signals():
                while any(r.code is None for r in self._remotes):
                    for key, _ in self._selector.select(_POLL_S):
                        self._read(key.fileobj, *key.data)  # type: ignore[arg-type]
                    self._reap()
        finally:
            done.set()
            self.close_inputs()
            heartbeat.join()
            self._selector.close()
            self._end_leftovers()
        culprit = first_failure(self._failed, self._tails)
        if self._first_code:
            self._explain(culprit)
        return Outcome(self._first_code, culprit, tuple(sorted(self._unseen)), self._stop_requests > 0)

    def send(self, line: str, to: Remote | None = None) -> None:
        """Write one line to the agents' standard inputs; a host that does not read it is detected by other means."""
        with self._input_lock:
            for remote in self._remotes if to is None else [to]:
                stdin = remote.process.stdin
                if stdin is not None and not stdin.closed:
                    try:
                        stdin.write(line.encode())
                    except BrokenPipeError:
                        stdin.close()

    def close_inputs(self) -> None:
        """Ask every agent to stop; 15 s later their connections are closed."""
        self._close_at = float("inf")
        self._kill_at = min(self._kill_at, time.monotonic() + CLOSE_TO_KILL_S)
        for remote in self._remotes:
            self._close_input(remote)

    def _close_input(self, remote: Remote) -> None:
        self.send("STOP\n", remote)
        with self._input_lock:
            if remote.process.stdin is not None:
                remote.process.stdin.close()

    def _heartbeat(self, done: threading.Event) -> None:
        while not done.wait(HEARTBEAT_S):
            self.send("PING\n")

    @contextmanager
    def _signals(self) -> Iterator[None]:
        def stop(signum: int, _frame: object) -> None:
            self._stop_requests += 1
            if self._stop_requests == 1:
                self.send("SIG TERM\n")
                name = signal.Signals(signum).name
                logger.warning(f"launch: {name}: ranks save and stop; repeat it to stop now")
            else:
                self.close_inputs()

        def stacks(_signum: int, _frame: object) -> None:
            self.send("SIG USR1\n")

        handlers = {signal.SIGTERM: stop, signal.SIGINT: stop, signal.SIGUSR1: stacks}
        before = {number: signal.signal(number, handler) for number, handler in handlers.items()}
        # Ctrl-Z would silence the heartbeat, and 15 s later the hosts would stop.
        before[signal.SIGTSTP] = signal.signal(signal.SIGTSTP, signal.SIG_IGN)
        try:
            yield
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)

    def _read(self, stream: IO[bytes], remote: Remote, which: str) -> None:
        data = os.read(stream.fileno(), 1 << 16)
        *lines, rest = (remote.buffers[which] + data).split(b"\n")
        if rest and (not data or len(rest) > _MAX_LINE):
            lines.append(rest)
            rest = b""
        remote.buffers[which] = rest
        for line in lines:
            self._show(remote, which, line.decode("utf-8", "replace").rstrip("\r"))
        if not data:
            self._selector.unregister(stream)
            stream.close()
            remote.open_streams -= 1

    def _show(self, remote: Remote, which: str, line: str) -> None:
        match = _RANK_LINE.fullmatch(line)
        if match is not None:
            rank, line = int(match[1]), match[2]
            label = f"[{remote.name} rank {rank}]"
            self._told.discard(remote.name)
            if which == "err":
                self._tails[rank].add(line, time.monotonic())
                self._replaces |= self._reserves and MET in line
        else:
            label = f"[{remote.name}]"
            in_report = bool(remote.torchrun_report) or line.startswith("Traceback (most recent call last)")
            if which == "err" and in_report and not line.startswith("agent: "):
                # torchrun's own report of forty lines: kept for the summary, and printed if it names no rank.
                remote.torchrun_report.append(line)
                return
        target = sys.stdout if which == "out" else sys.stderr
        target.write(f"{label} {line}\n")
        target.flush()

    def _reap(self) -> None:
        for remote in self._remotes:
            if remote.code is None and remote.open_streams == 0 and remote.process.poll() is not None:
                remote.code = _shell_code(remote.process.returncode)
                if remote.code:
                    self._host_failed(remote)
                elif self._starts_again() and self._goes_on():
                    remote.again_at = time.monotonic() + AGAIN_S  # it left, as it was told to stop
        for at, remote in enumerate(self._remotes):
            if time.monotonic() > remote.again_at and self._goes_on():
                self._unseen.discard(remote.name)
                self._remotes[at] = self._start(remote.name, remote.command)
                self._remotes[at].again = True
            if remote.again and remote.code is None and self._leader.code == 0:
                self._close_input(remote)  # it may still be looking for a run that is done
        if time.monotonic() > self._close_at:
            self.close_inputs()
        if time.monotonic() > self._kill_at:
            for remote in self._remotes:
                if remote.process.poll() is None:
                    logger.warning(f"launch: {remote.name} does not end: closing its connection")
                    self._unseen.add(remote.name)
                    _kill_session(remote.process)
            self._kill_at = time.monotonic() + CLOSE_TO_KILL_S

    def _goes_on(self) -> bool:
        """Whether the run goes on as long as the leader's ranks do, and nobody has asked for its end."""
        asked = self._stop_requests > 0 or self._kill_at < float("inf")
        return self._replaces and self._leader.code is None and not asked

    def _starts_again(self) -> bool:
        return self._returns and self._leader is self._remotes[0]

    def _lose_leader(self) -> None:
        """Have another host's ranks say how the run ends, if it goes on without those that did."""
        left = [remote for remote in self._remotes if remote.code is None]
        if self._returns and left:
            self._leader = left[0]
            for remote in self._remotes:
                remote.again_at = float("inf")

    def _host_failed(self, remote: Remote) -> None:
        assert remote.code is not None
        lost = remote.code == SSH_FAILED
        if lost:
            self._unseen.add(remote.name)
        failed = parse_report(remote.name, "\n".join(remote.torchrun_report), time.monotonic())
        ended = ": connection lost" if lost else f" ended with exit code {remote.code}"
        left = self._returns and self._goes_on() and {rank.code for rank in failed} == {unfinished_code()}
        if remote.again and not self._goes_on():
            return  # it may never have been part of the run, of which the first host's code tells
        if self._replaces and self._kill_at == float("inf") and (remote.again or left or _is_lost(remote.code, failed)):
            if remote is self._leader:
                self._lose_leader()
            if remote is not self._leader:
                then = "the run goes on if ranks are left in reserve"
                if self._returns:
                    then = "the run goes on with the hosts that are left: megalite join brings it back"
                if self._starts_again():
                    then = f"the run goes on with the hosts that are left: starting it again every {AGAIN_S:g} s"
                    remote.again_at = time.monotonic() + AGAIN_S
                if remote.name not in self._told:
                    logger.error(f"launch: {remote.name}{ended}; {then}")
                self._told.add(remote.name)
                return
            remote.code = 1  # the run's: it cannot go on without its store
        self._failed += failed
        unexplained = bool(self._failed) and not is_explained(self._failed, self._tails)
        # Then the cause is on another host, which is about to end on its own; stopped now, it would not report it.
        wait = unexplained and not lost and any(r.code is None for r in self._remotes)
        if not self._first_code:
            if not failed:
                for line in remote.torchrun_report:
                    sys.stderr.write(f"[{remote.name}] {line}\n")
            self._first_code = remote.code
            then = "its ranks lost a peer: waiting for the other hosts to report why" if wait else "stopping all hosts"
            logger.error(f"launch: {remote.name}{ended}; {then}")
        if wait:
            self._close_at = min(self._close_at, time.monotonic() + REPORT_S)
        else:
            self.close_inputs()

    def _explain(self, culprit: FailedRank | None) -> None:
        """End the log with the rank that failed first and its last output."""
        if culprit is None:
            return
        tail = self._tails[culprit.rank].last_words() or ["(nothing on its standard error)"]
        others = sorted({f.rank for f in self._failed} - {culprit.rank})
        if others:
            logger.error(f"launch: ranks {', '.join(map(str, others))} ended because of it")
        log = f"{culprit.host}:{self._log_dir}/{culprit.host}/*/attempt_0/{culprit.local_rank}/stderr.log"
        logger.error(
            f"launch: first failure: rank {culprit.rank} on {culprit.host}, {culprit.cause()} (full output: {log}):"
        )
        for line in tail:
            logger.error(f"    {line}")

    def _end_leftovers(self) -> None:
        for remote in self._remotes:
            try:
                remote.process.wait(max(0.0, self._kill_at - time.monotonic()))
            except subprocess.TimeoutExpired:
                _kill_session(remote.process)
                remote.process.wait()


def _kill_session(process: subprocess.Popen[bytes]) -> None:
    """Kill ssh and a ProxyCommand below it, which would hold our pipes open."""
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)


def _is_lost(code: int, failed: Sequence[FailedRank]) -> bool:
    """Check whether a host's ranks, or what had started them, were killed: others know nothing of it from them."""
    return code > _SIGNALED or (bool(failed) and all(rank.code < 0 for rank in failed))


def _shell_code(returncode: int) -> int:
    return returncode if returncode >= 0 else 128 - returncode
