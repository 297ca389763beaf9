"""Worker processes that tokenize pieces just ahead of the reader."""

from __future__ import annotations

import contextlib
import heapq
import itertools
import multiprocessing
import subprocess
import threading
import time
from concurrent.futures import Future, wait
from multiprocessing.connection import Connection

from megalite.core.base.errors import UserError
from megalite.core.base.log import logger
from megalite.runtime.base.child import start_child
from megalite.runtime.base.waits import tell
from megalite.runtime.data.stream.catalogue import Piece
from megalite.runtime.data.stream.pieces import Recipe, make
from megalite.runtime.data.tokenizer import Tokenizer

# A piece that so many workers died of ends the run.
_ATTEMPTS = 3
_LOG_AFTER_S, _LOOK_EVERY_S = 20.0, 1.0
_LOOK_AGAIN_S = 0.02


class Workers:
    """Tokenize pieces in processes that start when the first piece is missing; what is needed now goes first.

    A worker that is killed is replaced, and its piece made again: no sample depends on it.

    Args:
        number: processes at most; 0: tokenize in this one.
        tokenizer: the tokenizer, which processes load from its path.

    Attributes:
        number: as above.
        started: processes started so far.
    """

    def __init__(self, number: int, tokenizer: Tokenizer) -> None:
        self.number, self._tokenizer = number, tokenizer
        self.started = 0
        self._changed = threading.Condition()
        self._queue: list[tuple[bool, int, str, tuple[Recipe, Piece, int]]] = []
        self._pending: dict[str, Future[None]] = {}
        self._count = itertools.count()
        self._threads: list[threading.Thread] = []
        self._processes: set[subprocess.Popen[bytes]] = set()
        self._idle, self._closed = 0, False
        self._tokens, self._seconds = 0, 0.0

    def order(self, recipe: Recipe, piece: Piece, part: int, urgent: bool = False) -> Future[None]:
        """Have a part of a piece made; return what is done when it is there."""
        name = str(recipe.path(piece, part))
        with self._changed:
            if self._closed:
                raise RuntimeError("the data are closed")
            future = self._pending.get(name)
            if future is None:
                future = self._pending[name] = Future()
            elif not urgent:
                return future
            # One that was ordered before is in the queue twice then; whoever comes second finds it done.
            heapq.heappush(self._queue, (not urgent, next(self._count), name, (recipe, piece, part)))
            if not self._idle and len(self._threads) < self.number:
                thread = threading.Thread(target=self._serve, name="tokenizing", daemon=True)
                self._threads.append(thread)
                thread.start()
            self._changed.notify()
        return future

    def bring(self, recipe: Recipe, piece: Piece, part: int) -> None:
        """Make a part of a piece, and wait until it is there.

        Raises:
            UserError: it cannot be made.
        """
        if not self.number:
            make(recipe, self._tokenizer, piece, part)
            return
        future, since, told = self.order(recipe, piece, part, urgent=True), time.monotonic(), False
        while not wait([future], _LOOK_EVERY_S).done:
            tell()  # a wait that ends: workers tokenize, or end with an error
            if not told and time.monotonic() - since > _LOG_AFTER_S:
                told = True
                rate = f"some {self.number * self._tokens / self._seconds:,.0f} a second" if self._seconds else "them"
                logger.info(f"waiting for tokens of {piece.files[0].name}: {self.number} workers make {rate}")
        future.result()

    def close(self) -> None:
        """End all processes; whoever waits for a piece gets an error."""
        with self._changed:
            self._closed = True
            self._queue.clear()
            pending, self._pending = list(self._pending.values()), {}
            self._changed.notify_all()
        for process in list(self._processes):
            process.kill()
        for future in pending:
            with contextlib.suppress(Exception):
                future.set_exception(RuntimeError("the data are closed"))
        for thread in self._threads:
            thread.join()

    def _serve(self) -> None:
        """Give pieces to one process, one after the other."""
        process, pipe = None, None
        while (job := self._next()) is not None:
            name, order, urgent = job
            error: Exception | None = None
            tokens: int | None = 0
            for attempt in range(_ATTEMPTS):
                try:
                    if pipe is None:
                        process, pipe = self._start()
                    pipe.send((*order, urgent))
                    wrong, tokens, seconds = pipe.recv()
                    error = UserError.from_message(wrong) if wrong else None
                    self._tokens, self._seconds = self._tokens + (tokens or 0), self._seconds + seconds
                    break
                except (EOFError, OSError) as e:
                    if self._closed:
                        return
                    if pipe is None:
                        rule = f"no process can be started that tokenizes it ({e})"
                        remedy = "look at the processes, open files and memory of the host, or give --data-workers 0"
                        time.sleep(2**attempt)
                    else:
                        pipe.close()
                        code, pipe = process.wait() if process else 0, None
                        self._processes.discard(process)  # type: ignore[arg-type]
                        if self._closed:
                            return
                        logger.warning(f"a tokenizing worker ended with {code}: its piece is made again")
                        rule = f"{attempt + 1} workers ended with {code} while they tokenized it"
                        remedy = "check the memory of the host, give fewer --data-workers, or look at the file"
                    error = UserError(order[1].files[0].path, rule, remedy)
                except Exception as e:  # whoever waits must hear of it
                    error = e
                    break
            if tokens is None and not error:
                # Another rank's worker makes it: the next ones meanwhile.
                self._put_back(name, order)
                continue
            with self._changed:
                future = self._pending.pop(name, None)
            if future is not None and not future.done():
                future.set_exception(error) if error else future.set_result(None)
        if pipe is not None and process is not None:
            pipe.close()
            process.wait()

    def _put_back(self, name: str, order: tuple[Recipe, Piece, int]) -> None:
        with self._changed:
            heapq.heappush(self._queue, (True, next(self._count), name, order))
        time.sleep(_LOOK_AGAIN_S)

    def _next(self) -> tuple[str, tuple[Recipe, Piece, int], bool] | None:
        with self._changed:
            while True:
                while self._queue:
                    later, _, name, order = heapq.heappop(self._queue)
                    if name in self._pending:
                        return name, order, not later
                if self._closed:
                    return None
                self._idle += 1
                self._changed.wait()
                self._idle -= 1

    def _start(self) -> tuple[subprocess.Popen[bytes], Connection]:
        ours, theirs = multiprocessing.Pipe()
        settings = {"descriptor": theirs.fileno(), "tokenizer": self._tokenizer.path}
        process = start_child("megalite.runtime.data.stream.worker", settings, [theirs.fileno()])
        theirs.close()
        with self._changed:
            self.started += 1
            self._processes.add(process)
        return process, ours  # type: ignore[return-value]
