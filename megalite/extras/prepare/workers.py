"""Encoding in many processes: chunks of records go out, their ids come back in order."""

from __future__ import annotations

import contextlib
import multiprocessing
import signal
from collections.abc import Callable, Generator, Iterable, Iterator
from contextlib import contextmanager
from multiprocessing import connection
from multiprocessing.connection import Connection

from megalite.extras.tool import ToolError
from megalite.runtime.data.documents import Chunk
from megalite.runtime.data.encode import EncodedChunk
from megalite.runtime.data.tokenizer import Tokenizer, load_tokenizer

Encoder = Callable[[Chunk], EncodedChunk]
EncoderFactory = Callable[[Tokenizer], Encoder]
"""Makes the encoder of a process; must be picklable."""


def _work(ours: Connection, tokenizer_path: str, make_encoder: EncoderFactory) -> None:
    """Encode chunks from a pipe until its other end is closed."""
    # The parent handles Ctrl-C.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    encoder = make_encoder(load_tokenizer(tokenizer_path))
    with contextlib.suppress(EOFError, OSError):
        while True:
            ours.send(encoder(ours.recv()))


class Workers:
    """Run encoding processes with one pipe each: killing one, at any moment, breaks no other pipe.

    (A `ProcessPoolExecutor` has one pipe for all results, and hangs if a worker dies while it writes.)
    """

    def __init__(self, number: int, tokenizer_path: str, make_encoder: EncoderFactory) -> None:
        context = multiprocessing.get_context("spawn")
        self.processes = []
        self.idle: list[Connection] = []
        for _ in range(number):
            ours, theirs = context.Pipe()
            process = context.Process(target=_work, args=(theirs, tokenizer_path, make_encoder), daemon=True)
            # The worker inherits the mask, so that Ctrl-C does not end it, with a traceback, while it starts.
            previous = signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGINT])
            try:
                process.start()
            finally:
                signal.pthread_sigmask(signal.SIG_SETMASK, previous)
            theirs.close()
            self.processes.append(process)
            self.idle.append(ours)
        self._busy: dict[Connection, int] = {}

    @property
    def busy(self) -> bool:
        return bool(self._busy)

    def submit(self, number: int, chunk: Chunk) -> None:
        """Send a chunk to an idle worker."""
        worker = self.idle.pop()
        with _ended_unexpectedly():
            worker.send(chunk)
        self._busy[worker] = number

    def collect(self) -> Iterator[tuple[int, EncodedChunk]]:
        """Wait until at least one chunk is done; yield (number, ids) of those that are."""
        for worker in connection.wait(list(self._busy)):
            assert isinstance(worker, Connection)
            with _ended_unexpectedly():
                encoded = worker.recv()
            self.idle.append(worker)
            yield self._busy.pop(worker), encoded

    def close(self) -> None:
        for process in self.processes:
            process.kill()
            process.join()


@contextmanager
def _ended_unexpectedly() -> Iterator[None]:
    try:
        yield
    except (EOFError, OSError) as e:
        text = "a preprocessing worker ended unexpectedly, perhaps killed because memory ran out; give fewer --workers"
        raise ToolError(text) from e


def encode_all(
    chunks: Iterable[Chunk], tokenizer: Tokenizer, make_encoder: EncoderFactory, workers: int
) -> Generator[tuple[Chunk, EncodedChunk], None, None]:
    """Yield chunks with their ids, in order; at most a few chunks per worker are in memory."""
    if workers == 1:
        encoder = make_encoder(tokenizer)
        for chunk in chunks:
            yield chunk, encoder(chunk)
        return
    pool = Workers(workers, tokenizer.path, make_encoder)
    waiting: dict[int, Chunk] = {}
    done: dict[int, EncodedChunk] = {}
    submitted = yielded = 0
    source = iter(chunks)
    try:
        while True:
            while pool.idle and len(waiting) < 4 * workers and (unread := next(source, None)) is not None:
                waiting[submitted] = unread
                pool.submit(submitted, unread)
                submitted += 1
            if not pool.busy:
                return
            done.update(pool.collect())
            while yielded in done:
                yield waiting.pop(yielded), done.pop(yielded)
                yielded += 1
    finally:
        pool.close()
