"""Fuzzing: each case damages the valid files of a reader and reads them in a forked process with limits.

The reader must read them or raise `UserError` (one printable line), within 10 s of processor time and 700 MB, without
starting, connecting or writing anything. A case is a function of its seed, the reader's name and its number.
"""

from __future__ import annotations

import contextlib
import faulthandler
import json
import os
import resource
import shutil
import signal
import sys
import time
import traceback
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from random import Random
from typing import Any

from megalite.core.base.errors import UserError, printable
from megalite.runtime.base.child import readable
from tests.soak import mutate
from tests.soak.readers import READERS, Reader, sign

CPU_S, MEMORY = 10.0, 700 << 20
# A machine with other work: processor time is what counts, this only finds a reader that waits for something.
WALL_S = 300.0
_LONGEST_ERROR = 4000
_WRITES = os.O_WRONLY | os.O_RDWR | os.O_CREAT | os.O_TRUNC
# Audit events of starting, reaching or changing something; their paths, if any, come first.
_FORBIDDEN = (
    *("os.exec", "os.posix_spawn", "os.spawn", "os.system", "subprocess.Popen", "socket.connect", "socket.getaddrinfo"),
    *("pickle.find_class", "os.fork", "os.forkpty"),
)
_CHANGES = ("os.rename", "os.remove", "os.mkdir", "os.rmdir", "os.link", "os.symlink", "os.truncate", "os.chmod")


# Those whose last argument may be the open folder that the path is relative to.
_IN_FOLDERS = ("os.remove", "os.mkdir", "os.rmdir")


class Failed(Exception):
    """A case that a reader did not survive."""


def draw(rng: Random, reader: str, files: dict[str, bytes]) -> dict[str, bytes]:
    """Damage one or two files of a valid set."""
    out = dict(files)
    for _ in range(rng.choice((1, 1, 1, 2))):
        name = rng.choice(sorted(out))
        form = next((f for ending, f in READERS[reader].forms.items() if name.endswith(ending)), mutate.bytes_of)
        change = form if rng.random() < 0.7 else mutate.bytes_of
        for _ in range(rng.choice((1, 1, 2, 3))):
            with contextlib.suppress(Exception):  # a second change of what is no longer of this format
                out[name] = change(rng, out[name])
    sign(reader, out)
    return out


class Watch:
    """Notes what a reader does besides reading. An audit hook cannot be removed: only for processes that end soon."""

    def __init__(self, allowed: str) -> None:
        self.allowed, self.seen = allowed, list[str]()
        self.on = False
        sys.addaudithook(self._hook)

    def _hook(self, event: str, args: tuple[Any, ...]) -> None:
        if not self.on:
            return
        if event in _FORBIDDEN:
            self.seen.append(f"{event} {args!r:.200}")
        elif event in _CHANGES or (event == "open" and not isinstance(args[0], int) and args[2] & _WRITES):
            at = args[-1] if event in _IN_FOLDERS else -1
            self._write(args[0] if at == -1 else f"{os.readlink(f'/proc/self/fd/{at}')}/{os.fsdecode(args[0])}")
        elif event in ("compile", "exec") and "canary" in repr(args):
            self.seen.append(f"{event} {args!r:.200}")

    def _write(self, path: Any) -> None:
        path = os.fsdecode(path) if isinstance(path, str | bytes | os.PathLike) else str(path)
        # The second is the name that a process shows while it flushes.
        if not path.startswith(self.allowed) and path not in (os.devnull, "/proc/self/comm"):
            self.seen.append(f"wrote {path}")


def read_once(reader: Reader, folder: Path, expected: Any, watch: Watch) -> str:
    """Read damaged files; return "read" or "refused".

    Raises:
        Failed: anything else happened.
    """
    watch.seen.clear()
    watch.on = True
    try:
        found = reader.read(folder)
        outcome = "read"
    except UserError as e:
        text, outcome = str(e), "refused"
        # Some errors list several mistakes, a line each.
        if printable(text, keep="\n") != text or len(text) > _LONGEST_ERROR or not text:
            raise Failed(f"an error that is not one printable line: {text[:2000]!r}") from None
    except BaseException as e:
        raise Failed(f"{type(e).__name__} instead of UserError:\n{_traceback()}") from None
    finally:
        watch.on = False
    if watch.seen:
        raise Failed(f"reading did more than read: {watch.seen}")
    if outcome == "read" and reader.exact and found != expected:
        raise Failed("damaged files were read as something else than was written")
    return outcome


def _traceback() -> str:
    """The traceback, its long lines cut."""
    return "\n".join(line[:300] for line in traceback.format_exc().splitlines()[-25:])


class Fuzzer:
    """Runs cases of one reader.

    Args:
        name: of the reader.
        folder: to work in.
        seed: of all cases.
    """

    def __init__(self, name: str, folder: Path, seed: str, reader: Reader | None = None) -> None:
        self.name, self.reader, self.folder, self.seed = name, reader or READERS[name], folder, seed
        valid = folder / "valid"
        valid.mkdir(parents=True)
        self.reader.make(valid)
        self.files = {str(p.relative_to(valid)): p.read_bytes() for p in sorted(valid.rglob("*")) if p.is_file()}
        # Also warms up what is imported at first use: in a case, starting anything is a failure.
        self.expected = self.reader.read(valid)
        shutil.rmtree(valid)

    def write(self, number: int, place: Path) -> None:
        """Write the files of a case."""
        rng = Random(f"{self.seed}:{self.name}:{number}")
        for name, data in draw(rng, self.name, self.files).items():
            path = place / name
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(data)

    def run(self, numbers: Iterable[int], tally: Counter[str], until: float = float("inf")) -> None:
        """Run cases, each batch in one forked process, until `time.monotonic` reaches a time.

        Raises:
            Failed: the first case that fails, with its number; its files are in `folder`.
        """
        left = iter(numbers)
        while batch := [n for _, n in zip(range(200), left)]:
            for number, outcome in self._batch(batch):
                if outcome not in ("read", "refused"):
                    raise Failed(f"case {number}: {outcome}")
                tally[f"{self.name}: {outcome}"] += 1
            if time.monotonic() >= until:
                return

    def _batch(self, numbers: list[int]) -> Iterator[tuple[int, str]]:
        """Yield (case, outcome) of cases in a forked process; a process that dies is the outcome of its last case."""
        theirs, ours = os.pipe()[::-1]
        pid = os.fork()
        if pid == 0:
            os.close(ours)
            self._child(numbers, theirs)
        os.close(theirs)
        waiting = list(numbers)
        with os.fdopen(ours, "rb") as pipe:
            try:
                while waiting:
                    ready = readable(pipe.fileno(), WALL_S)
                    line = pipe.readline() if ready else b""
                    if line:
                        yield waiting.pop(0), json.loads(line)
                        continue
                    ended = "" if ready else f"not done after {WALL_S:.0f} s"
                    if not ready:
                        os.kill(pid, signal.SIGKILL)
                    status = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
                    pid = 0
                    yield waiting.pop(0), ended or self._death(status)
                    return
            finally:
                if pid:
                    os.kill(pid, signal.SIGKILL)
                    os.waitpid(pid, 0)

    def _death(self, status: int) -> str:
        if status == -signal.SIGPROF:
            return f"more than {CPU_S:.0f} s of processor time"
        return f"the process died with {status}: {(self.folder / 'stderr').read_text(errors='replace')[-2000:]}"

    def _child(self, numbers: list[int], pipe: int) -> None:
        """Run cases and report each outcome; never returns."""
        try:
            _limit()
            null, err = (
                os.open(os.devnull, os.O_RDWR),
                os.open(self.folder / "stderr", os.O_RDWR | os.O_CREAT | os.O_TRUNC),
            )
            for target, source in ((0, null), (1, err), (2, err)):
                os.dup2(source, target)
            place = self.folder / "case"
            watch = Watch(str(place / "out"))
            for number in numbers:
                shutil.rmtree(place, ignore_errors=True)
                place.mkdir()
                os.chdir(place)
                self.write(number, place)
                before = _contents(place)
                signal.setitimer(signal.ITIMER_PROF, CPU_S)
                try:
                    outcome = read_once(self.reader, place, self.expected, watch)
                except Failed as e:
                    outcome = str(e)
                signal.setitimer(signal.ITIMER_PROF, 0)
                if outcome in ("read", "refused") and _contents(place) != before:
                    outcome = f"files changed: {sorted(_contents(place).items() ^ before.items())!r:.500}"
                os.write(pipe, json.dumps(outcome).encode() + b"\n")
                if outcome not in ("read", "refused"):
                    break
                os.ftruncate(err, 0)
        except BaseException:
            traceback.print_exc()
            os._exit(3)
        os._exit(0)


def _limit() -> None:
    """Limit this process; a core would only fill the disk."""
    faulthandler.disable()
    signal.signal(signal.SIGALRM, signal.SIG_DFL)
    signal.setitimer(signal.ITIMER_REAL, 0)
    size = int(Path("/proc/self/statm").read_text().split()[0]) * os.sysconf("SC_PAGE_SIZE")
    resource.setrlimit(resource.RLIMIT_AS, (size + MEMORY, size + MEMORY))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))


def _contents(folder: Path) -> dict[str, bytes]:
    return {
        str(p): p.read_bytes()
        for p in folder.rglob("*")
        if p.is_file() and "out" not in p.relative_to(folder).parts[:1]
    }


def fuzz(
    names: Iterable[str], folder: Path, seed: str, cases: Callable[[], Iterable[int]], tally: Counter[str]
) -> None:
    """Run cases of each reader; raises `Failed` with the reader's name in it."""
    for name in names:
        try:
            Fuzzer(name, folder / name, seed).run(cases(), tally)
        except Failed as e:
            raise Failed(f"{name}, {e}") from None
