"""Token files, verified as they are read: damage, and changes while a run reads them, are errors.

Files are read, not mapped: with a map, a truncated file or a failing sector kills the process without a message.
"""

from __future__ import annotations

import hashlib
import itertools
import os
import random
import struct
import threading
import weakref
from collections import OrderedDict
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from megalite.core.base.errors import UserError
from megalite.runtime.data.sidecar import DIGEST, Checksums
from megalite.runtime.data.stand_in import Units

# At each start a rank checks at most this much of its share of all files, in a fraction of a second.
AT_START = 512 << 20
_SAMPLES, _SAMPLE_BYTES = 64, 4096
# A blend may have more files than a process may open.
_MAX_OPEN = 64
_RESTORE = "restore the file, or preprocess the text again"


class _OpenFiles:
    """Descriptors of token files, of which the last `_MAX_OPEN` that were read stay open."""

    def __init__(self) -> None:
        # Training and evaluation read in threads of their own: nothing is closed under a read.
        self._lock = threading.RLock()
        self._open: OrderedDict[int, int] = OrderedDict()

    @contextmanager
    def descriptor(self, number: int, path: Path) -> Iterator[int]:
        """Lend the descriptor of a file, opened if it is not open."""
        with self._lock:
            if number not in self._open:
                while len(self._open) >= _MAX_OPEN:
                    os.close(self._open.popitem(last=False)[1])
                self._open[number] = os.open(path, os.O_RDONLY)
            self._open.move_to_end(number)
            yield self._open[number]

    def close(self, number: int) -> None:
        """Close a file that is read no more."""
        with self._lock:
            if number in self._open:
                os.close(self._open.pop(number))


_FILES = _OpenFiles()
_NUMBERS = itertools.count()


class TokenFile:
    """Read a `.bin`, or another large file beside it.

    With checksums every block is checked when it is first read, and again after the file was changed; data without
    them may not change at all while they are read.

    Args:
        path: the file.
        size: its size in bytes.
        sums: its checksums, None for data made by other tools.

    Attributes:
        path, size, sums: the arguments.

    Raises:
        UserError: the file cannot be read, or the checksums belong to a file of another size.
    """

    def __init__(self, path: Path, size: int, sums: Checksums | None) -> None:
        self.path = path
        self.size = size
        self.sums = sums
        self._block = sums.block if sums is not None else max(size, 1)
        # Copies of this object share the number, as they share the path.
        self._number = next(_NUMBERS)
        weakref.finalize(self, _FILES.close, self._number)
        self._stamp = self._current_stamp()
        self._verified = bytearray(-(-size // self._block))
        self._units = Units.of(path)
        if sums is not None and len(sums.blocks) != len(self._verified) * DIGEST:
            rule = "is not the file that PREFIX.json beside it describes"
            raise UserError(f"{path} has {size} bytes", rule, _RESTORE)

    def read(self, begin: int, size: int) -> bytes:
        """Return bytes [begin, begin + size).

        Raises:
            UserError: they cannot be read, differ from the checksums, or the file was truncated or changed.
        """
        if size == 0:
            return b""
        if self.sums is None:
            data = self.peek(begin, size)
            if self._current_stamp() != self._stamp:
                rule = "was changed while training was reading it"
                remedy = "leave the files of a running job alone; start again with the data you want"
                raise UserError(str(self.path), rule, remedy)
            return data
        blocks = range(begin // self._block, (begin + size - 1) // self._block + 1)
        stamp = self._current_stamp()
        if stamp != self._stamp:
            self._stamp, self._verified = stamp, bytearray(len(self._verified))
        # A unit of a stand-in may have been deleted and downloaded again since it was checked.
        if self._units is None and all(self._verified[block] for block in blocks):
            data = self.peek(begin, size)
            if self._current_stamp() == stamp:
                return data
        data = b"".join(self._read_block(block, self.sums) for block in blocks)
        return data[begin - blocks[0] * self._block :][:size]

    def check(self, rank: int = 0, world: int = 1, at_most: int | None = AT_START) -> None:
        """Check this rank's share of all blocks, or a random `at_most` bytes of a larger share."""
        # Of a file in a store nothing is downloaded that is not needed: blocks are checked when they are read.
        if self.sums is None or self._units is not None:
            return
        share = range(rank, len(self._verified), world)
        if at_most is not None and len(share) * self._block > at_most:
            share = sorted(random.SystemRandom().sample(share, at_most // self._block))  # type: ignore[assignment]
        for block in share:
            self._read_block(block, self.sums)

    def hash_into(self, digest: hashlib._Hash) -> None:
        """Add the file to a hash: its checksums, which cover every byte.

        Without them, its size and 64 blocks of 4 KiB spread evenly over it, first and last included: a change between
        these blocks is not noticed.
        """
        if self.sums is not None:
            digest.update(self.sums.root.encode() + self.sums.blocks)
            return
        digest.update(struct.pack("<Q", self.size))
        last = max(self.size - _SAMPLE_BYTES, 0)
        for sample in range(_SAMPLES):
            digest.update(self.read(last * sample // (_SAMPLES - 1), min(_SAMPLE_BYTES, self.size)))

    def _read_block(self, block: int, sums: Checksums) -> bytes:
        begin = block * self._block
        data = self.peek(begin, min(self._block, self.size - begin))
        if self._units is not None and not sums.matches(block, data):
            # It may have been damaged on its way, or on this disk.
            self._units.forget(begin, len(data))
            data = self.peek(begin, len(data))
        if not sums.matches(block, data):
            given = f"{self.path}, bytes {begin} to {begin + len(data)}"
            raise UserError(given, "differ from what preprocessing wrote, by the checksums in PREFIX.json", _RESTORE)
        self._verified[block] = 1
        return data

    def peek(self, begin: int, size: int) -> bytes:
        """Return bytes [begin, begin + size) without a check; raises as `read`."""
        if self._units is not None and size:
            return self._units.read(begin, size)
        chunks, at = [], begin
        try:
            with _FILES.descriptor(self._number, self.path) as fd:
                while at < begin + size and (chunk := os.pread(fd, begin + size - at, at)):
                    chunks.append(chunk)
                    at += len(chunk)
        except OSError as e:
            raise read_error(self.path, e) from None
        if at < begin + size:
            rule = f"ends at byte {at} instead of {self.size}: it was truncated while it was open"
            raise UserError(str(self.path), rule, _RESTORE)
        return b"".join(chunks)

    def _current_stamp(self) -> tuple[int, int, int]:
        try:
            with _FILES.descriptor(self._number, self.path) as fd:
                stat = os.fstat(fd)
        except OSError as e:
            raise read_error(self.path, e) from None
        return stat.st_mtime_ns, stat.st_size, stat.st_ino


def read_error(path: Path, e: OSError) -> UserError:
    """Make the error for a file that cannot be read."""
    remedy = "check the file, its permissions and the disk"
    return UserError(str(path), f"cannot be read ({e.strerror or e})", remedy)
