"""Runs measuring functions, "rows", in warm processes: each result is kept as it comes, and an accident costs its row.

A start costs seconds (torch, driver, libraries), so that a process runs row after row, and another one takes its place
only after a row that crashed, hung or broke CUDA. Everything that a row started ends with it, also what lives in a
session of its own, as the ranks of torchrun do.

`python -m benchmarks.rows MODULE DEVICE` is such a process; MODULE has `ROWS`.
"""

from __future__ import annotations

import gc
import importlib
import json
import os
import signal
import subprocess
import sys
import threading
import time
import traceback
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from itertools import count, groupby
from pathlib import Path
from typing import IO, Any

ROOT = Path(__file__).resolve().parents[1]
# What is told of every row as it ends: its name and its figures.
Report = Callable[[str, dict[str, Any]], None]


@dataclass(frozen=True)
class Row:
    """One measurement.

    Attributes:
        name: its name in the results.
        seconds: its limit.
        run: called with the torch.device, returns the figures.
        together: whether it may run beside others, as it measures no time.
    """

    name: str
    seconds: float
    run: Callable[[Any], dict[str, Any]]
    together: bool = False


def end_marked(mark: str) -> None:
    """End all processes that have MEGALITE_ROWS_MARK=mark from their parents, also orphans and other sessions.

    Returns when they are gone, and their memory with them, or after ten seconds.
    """
    sought, until = f"MEGALITE_ROWS_MARK={mark}\0".encode(), time.monotonic() + 10
    without: set[str] = set()
    while time.monotonic() < until:
        left, before = 0, without
        without = set()
        for process in Path("/proc").glob("[0-9]*"):
            try:
                environment = (process / "environ").read_bytes()
                if sought in environment:
                    left += 1
                    os.kill(int(process.name), signal.SIGKILL)
                # In exec a process has a program, and no arguments and no environment yet: it is looked at once more.
                elif not environment and os.readlink(process / "exe"):
                    is_seen = process.name in before and (process / "cmdline").read_bytes()
                    left += not is_seen
                    without.add(process.name)
            except OSError:  # it ended meanwhile, or is another user's
                continue
        if not left:
            return
        time.sleep(0.01)


_numbers = count()
_START_S = 120.0


class _Process:
    """A warm process, which runs one row at a time."""

    def __init__(self, module: str, device: str, log: IO[bytes]) -> None:
        answers, told = os.pipe()
        self._mark = f"{os.getpid()}.{next(_numbers)}"
        paths = os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])
        env = {**os.environ, "PYTHONPATH": paths, "MEGALITE_ROWS_MARK": self._mark}
        self._process = subprocess.Popen(
            [sys.executable, "-u", "-m", "benchmarks.rows", module, device, str(told)],
            cwd=ROOT,
            env=env,
            stdin=subprocess.PIPE,
            stdout=log,
            stderr=log,
            pass_fds=[told],
        )
        os.close(told)
        self._answers = os.fdopen(answers)
        assert self._process.stdin is not None
        self._orders = self._process.stdin
        late = threading.Timer(_START_S, self.kill)
        late.start()
        self._answers.readline()  # it has imported everything
        late.cancel()

    def run(self, row: Row, seconds: float) -> tuple[dict[str, Any], bool]:
        """Return what a row measured, or how it ended, and whether the process goes on."""
        began = time.monotonic()
        late = threading.Timer(seconds, self.kill)
        late.start()
        try:
            self._orders.write(f"{row.name}\n".encode())
            self._orders.flush()
            answer = self._answers.readline()
        except BrokenPipeError:
            answer = ""
        took = time.monotonic() - began
        late.cancel()
        if answer.endswith("\n"):
            found = json.loads(answer)
            return {**found, "seconds": round(took, 2)}, not found.get("broken")
        code = self._process.wait()
        error = f"cut off after {seconds:.0f} s" if took >= seconds else f"its process ended with {code}"
        return {"error": error, "seconds": round(took, 2)}, False

    def kill(self) -> None:
        """Kill the process and all that it started."""
        end_marked(self._mark)

    def end(self) -> None:
        """Kill it all, and wait for the process."""
        self.kill()
        self._process.wait()
        self._orders.close()
        self._answers.close()


def run_rows(
    module: str,
    device: str,
    names: Sequence[str],
    until: float,
    log: IO[bytes],
    report: Report,
    lanes: int = 1,
    patience: float = 1.0,
) -> None:
    """Run the named rows of a module, in their order; what may run together takes up to `lanes` processes.

    Args:
        module: name of a module with `ROWS`.
        device: "cuda" or "cpu".
        names: rows to run.
        until: time.monotonic() at which the last one ends.
        log: file that all output goes to.
        report: called with name and figures as a row ends, from several threads but one at a time.
        lanes: number of processes.
        patience: how many times its limit a row may take.
    """
    chosen = [row for row in importlib.import_module(module).ROWS if row.name in names]
    rows = [replace(row, seconds=row.seconds * patience) for row in chosen]
    told = threading.Lock()
    kept: list[_Process] = []
    started: list[_Process] = []

    def start() -> _Process:
        started.append(process := _Process(module, device, log))
        return process

    def lane(waiting: deque[Row]) -> None:
        process: _Process | None = None
        while True:
            try:
                row = waiting.popleft()
            except IndexError:
                break
            left = until - time.monotonic()
            if left < row.seconds / 3:
                found: dict[str, Any] = {"skipped": f"{max(left, 0):.0f} s are left of the time for all rows"}
            else:
                process = process or (kept.pop() if kept else start())
                found, fit = process.run(row, min(row.seconds, left))
                if not fit:
                    process.end()
                    process = None
            with told:
                report(row.name, found)
        if process is not None:
            kept.append(process)

    for together, group in groupby(rows, lambda row: row.together):
        waiting = deque(group)
        while len(kept) > 1:
            kept.pop().end()
        threads = [
            threading.Thread(target=lane, args=[waiting]) for _ in range(min(lanes, len(waiting)) if together else 1)
        ]
        for thread in threads:
            thread.start()
        try:
            for thread in threads:
                thread.join()
        except KeyboardInterrupt:
            waiting.clear()
            for process in started:
                process.kill()
            raise
    for process in kept:
        process.end()


def _found(row: Row, device: Any) -> dict[str, Any]:
    """Run a row in this process."""
    import torch

    cuda = device.type == "cuda"
    try:
        found = row.run(device)
        if cuda:
            torch.cuda.synchronize()
    except Exception as e:
        place = traceback.extract_tb(e.__traceback__)[-1]
        error = f"{type(e).__name__}: {e}".strip().split("\n")[0]
        traceback.print_exc()
        found = {"error": error[:400], "at": f"{Path(place.filename).name}:{place.lineno}"}
        del e
    gc.collect()  # an engine has cycles, through its hooks: the last row's would still hold its memory
    if cuda:
        try:
            torch.cuda.synchronize()
            torch.cuda.empty_cache()
            torch.cuda.reset_peak_memory_stats()
        except RuntimeError:  # every later call of this process fails too
            found["broken"] = True
    return found


def main() -> None:
    """Run the rows that are asked for on stdin, one a line; write a line of JSON for each."""
    module, name, told = sys.argv[1:]
    rows = {row.name: row for row in importlib.import_module(module).ROWS}
    import torch

    # Rows that run together compute their references on the same cores.
    torch.set_num_threads(1)
    if name == "cpu":
        device: Any = torch.device("cpu")
    else:
        from megalite.core.mesh.device import pick_device

        device = pick_device(name)  # as a run does: it also sets what the allocator reads at its start
    with os.fdopen(int(told), "w") as answers:
        print(file=answers, flush=True)
        for order in map(str.strip, sys.stdin):
            print(f"== {order}", flush=True)
            found = _found(rows[order], device)
            print(json.dumps(found), flush=True)
            print(json.dumps(found), file=answers, flush=True)
            if found.get("broken"):
                os._exit(3)


if __name__ == "__main__":
    main()
