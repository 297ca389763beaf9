"""The agent on each host: runs torchrun and stops all of it when the launcher goes away.

Started by the launcher over ssh as `PYTHON agent.py [--kill] COMMAND...`; this file needs the Python standard library
only. With `--kill`, for runs that go on without a lost host, a host that loses the launcher kills its ranks: told to
stop, they would have the whole run save and end.

Standard input is the control channel, one message per line:

    PING        the launcher is alive (every 3 s); after 15 s of silence this host assumes that it is cut off and stops
                itself, since the other side has stopped too and may be restarting the run
    SIG TERM    goes to the ranks, not to torchrun: ranks that finish the step, save and exit with 0 make torchrun exit
                with 0, while a torchrun that gets the signal exits with 1 whatever its ranks do; a second one goes to
                torchrun
    SIG USR1    (any other name) goes to every process below torchrun that has a handler for it; torchrun starts each
                rank in its own session, so a signal to the process group would reach none
    STOP        what follows is no loss: the launcher stops all hosts
    end of file the launcher is gone: stop

Exit code: the command's, 128 + n when signal n ended it, 129 when the agent stopped it.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import resource
import select
import signal
import subprocess
import sys
import time

HEARTBEAT_TIMEOUT_S = 15.0
TERM_GRACE_S = 8.0
KILL_GRACE_S = 5.0
STOPPED_EXIT_CODE = 129
_PR_SET_PDEATHSIG = 1
_PR_SET_CHILD_SUBREAPER = 36
_DEAD = (b"Z", b"X")


def _prctl(option: int, value: int) -> None:
    if ctypes.CDLL(None, use_errno=True).prctl(option, value, 0, 0, 0) != 0:
        raise OSError(ctypes.get_errno(), "prctl")


def processes() -> dict[int, tuple[int, bytes]]:
    """Map every process on this host to its parent and its state letter (proc_pid_stat(5))."""
    table = {}
    for entry in os.listdir("/proc"):
        if entry.isdigit():
            with contextlib.suppress(FileNotFoundError, ProcessLookupError), open(f"/proc/{entry}/stat", "rb") as f:
                # The command name, in parentheses, may itself contain spaces and parentheses.
                state, parent = f.read().rpartition(b")")[2].split()[:2]
                table[int(entry)] = (int(parent), state)
    return table


def children(parent: int) -> list[int]:
    """List the live direct children of a process."""
    return [pid for pid, (ppid, state) in processes().items() if ppid == parent and state not in _DEAD]


def descendants(root: int) -> list[int]:
    """List the live processes below `root`."""
    table = processes()
    below: dict[int, list[int]] = {}
    for pid, (parent, _) in table.items():
        below.setdefault(parent, []).append(pid)
    live = []
    queue = [root]
    while queue:
        pids = below.get(queue.pop(), [])
        queue += pids
        live += [pid for pid in pids if table[pid][1] not in _DEAD]
    return live


def handles(pid: int, signum: int) -> bool:
    """Check whether the process has installed a handler: without one, SIGUSR1 would kill it."""
    with contextlib.suppress(FileNotFoundError, ProcessLookupError), open(f"/proc/{pid}/status") as f:
        for line in f:
            if line.startswith("SigCgt:"):
                return bool(int(line.split()[1], 16) >> (signum - 1) & 1)
    return False


def _kill(pid: int, signum: int) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.kill(pid, signum)


def report(text: str) -> None:
    """Send a line to the launcher, if it still reads."""
    with contextlib.suppress(OSError):
        os.write(2, f"agent: {text}\n".encode())


class Agent:
    """Runs one command, and owns every process that ever descends from it.

    Args:
        command: program and arguments.
        kill: whether a host that loses the launcher, or this process, kills its ranks.
    """

    def __init__(self, command: list[str], kill: bool = False) -> None:
        self.at_loss = signal.SIGKILL if kill else signal.SIGTERM
        # Orphans of a killed rank (data workers, a watchdog) are adopted by this process instead of by init, so
        # that all descendants stay known to the end.
        _prctl(_PR_SET_CHILD_SUBREAPER, 1)
        self.terminated = False
        self.child = subprocess.Popen(
            command, stdin=subprocess.DEVNULL, start_new_session=True, preexec_fn=self._before_exec
        )

    def _before_exec(self) -> None:
        """Restore in the child the signal that `main` ignores; if the agent itself is killed, torchrun is told."""
        signal.signal(signal.SIGHUP, signal.SIG_DFL)
        _prctl(_PR_SET_PDEATHSIG, self.at_loss)

    def relay(self, name: str) -> None:
        """Forward the signal `name` ("TERM", "USR1")."""
        signum = getattr(signal, "SIG" + name, None)
        if not isinstance(signum, signal.Signals):
            report(f"unknown signal {name!r} ignored")
            return
        if signum in (signal.SIGTERM, signal.SIGINT):
            ranks = [] if self.terminated else children(self.child.pid)
            self.terminated = True
            for pid in ranks or [self.child.pid]:
                _kill(pid, signum)
            return
        skipped = 0
        for pid in descendants(self.child.pid):
            if handles(pid, signum):
                _kill(pid, signum)
            else:
                skipped += 1
        if skipped:
            report(f"{skipped} processes without a handler for SIG{name} were skipped")

    def stop(self) -> None:
        """End torchrun and, after 8 s, KILL the rest. Silent: the pipe to the launcher may be full."""
        _kill(self.child.pid, self.at_loss)
        self.clear()

    def clear(self) -> None:
        """Give remaining descendants 8 s to end, then KILL; one that is stuck in the kernel is abandoned after 5 s."""
        start = time.monotonic()
        while remaining := descendants(os.getpid()):
            self.child.poll()
            elapsed = time.monotonic() - start
            if elapsed > TERM_GRACE_S + KILL_GRACE_S:
                report(f"processes {remaining} cannot be killed")
                return
            if elapsed > TERM_GRACE_S:
                for pid in remaining:
                    _kill(pid, signal.SIGKILL)
            time.sleep(0.05)

    def run(self) -> int:
        """Serve the control channel until the command ends or must be ended."""
        last = time.monotonic()
        rest = b""
        while self.child.poll() is None:
            # Polled, not awaited in a thread: a starved agent that wakes late still finds the PING in the pipe first.
            if select.select([0], [], [], 0.2)[0]:
                data = os.read(0, 4096)
                if not data:
                    reason = "the launcher closed the connection"
                    break
                last = time.monotonic()
                *lines, rest = (rest + data).split(b"\n")
                for line in lines:
                    if line.startswith(b"SIG "):
                        self.relay(line[4:].decode("ascii", "replace"))
                    elif line == b"STOP":
                        self.at_loss = signal.SIGTERM
            elif time.monotonic() - last > HEARTBEAT_TIMEOUT_S:
                reason = f"no heartbeat from the launcher for {HEARTBEAT_TIMEOUT_S:g} s"
                break
        else:
            self.clear()
            code = self.child.returncode
            return code if code >= 0 else 128 - code
        self.stop()
        report(reason + ": stopped everything on this host")
        return STOPPED_EXIT_CODE


def main() -> int:
    """Run `agent.py [--kill] COMMAND...`."""
    # sshd's own hang-up and a stray signal to the agent must not end it before its children.
    for signum in (signal.SIGHUP, signal.SIGPIPE):
        signal.signal(signum, signal.SIG_IGN)
    # Its processes may open as many files as this host allows.
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))
    kill = sys.argv[1] == "--kill"
    command = sys.argv[1 + kill :]
    try:
        agent = Agent(command, kill)
    except (OSError, AttributeError) as e:  # AttributeError: no prctl, so not Linux
        report(f"cannot start {command[0]}: {e}")
        return 127
    return agent.run()


if __name__ == "__main__":
    sys.exit(main())
