"""Token files, verified as they are read: damage, and changes while a run reads them, are errors.

Files are read, not mapped: with a map, a truncated file or a failing sector kills the process without a message.
"""

from __future__ import annotations

import hashlib
import os
import random
import struct
import weakref
from pathlib import Path

from megalite.base.errors import UserError
from megalite.data.index import read_error
from megalite.data.sidecar import BLOCK, DIGEST, Checksums

# At each start a rank checks at most this much of its share of a file, in a fraction of a second.
_AT_START = 512 << 20
_SAMPLES, _SAMPLE_BYTES = 64, 4096
_RESTORE = "restore the file, or preprocess the text again"


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
        self.path, self.size, self.sums = path, size, sums
        try:
            self._fd = os.open(path, os.O_RDONLY)
        except OSError as e:
            raise read_error(path, e) from None
        weakref.finalize(self, os.close, self._fd)
        self._stamp = self._current_stamp()
        self._verified = bytearray(-(-size // BLOCK))
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
            data = self._pread(begin, size)
            if self._current_stamp() != self._stamp:
                rule = "was changed while training was reading it"
                remedy = "leave the files of a running job alone; start again with the data you want"
                raise UserError(str(self.path), rule, remedy)
            return data
        blocks = range(begin // BLOCK, (begin + size - 1) // BLOCK + 1)
        stamp = self._current_stamp()
        if stamp != self._stamp:
            self._stamp, self._verified = stamp, bytearray(len(self._verified))
        if all(self._verified[block] for block in blocks):
            data = self._pread(begin, size)
            if self._current_stamp() == stamp:
                return data
        data = b"".join(self._read_block(block, self.sums) for block in blocks)
        return data[begin - blocks[0] * BLOCK :][:size]

    def check(self, rank: int = 0, world: int = 1, at_most: int = _AT_START) -> None:
        """Check this rank's share of all blocks, or a random `at_most` bytes of a larger share."""
        if self.sums is None:
            return
        share = range(rank, len(self._verified), world)
        if len(share) * BLOCK > at_most:
            share = sorted(random.SystemRandom().sample(share, at_most // BLOCK))  # type: ignore[assignment]
        for block in share:
            self._read_block(block, self.sums)

    def hash_into(self, digest: hashlib._Hash) -> None:
        """Add the file to a hash: its checksums, which cover every byte.

        Without them, its size and 64 blocks of 4 KiB spread evenly over it, first and last included: a change between
        these blocks is not noticed.
        """
        if self.sums is not None:
            digest.update(self.sums.sha256.encode() + self.sums.blocks)
            return
        digest.update(struct.pack("<Q", self.size))
        last = max(self.size - _SAMPLE_BYTES, 0)
        for sample in range(_SAMPLES):
            digest.update(self.read(last * sample // (_SAMPLES - 1), min(_SAMPLE_BYTES, self.size)))

    def _read_block(self, block: int, sums: Checksums) -> bytes:
        begin = block * BLOCK
        data = self._pread(begin, min(BLOCK, self.size - begin))
        if not sums.matches(block, data):
            given = f"{self.path}, bytes {begin} to {begin + len(data)}"
            raise UserError(given, "differ from what preprocessing wrote, by the checksums in PREFIX.json", _RESTORE)
        self._verified[block] = 1
        return data

    def _pread(self, begin: int, size: int) -> bytes:
        chunks, at = [], begin
        while at < begin + size:
            try:
                chunk = os.pread(self._fd, begin + size - at, at)
            except OSError as e:
                raise read_error(self.path, e) from None
            if not chunk:
                rule = f"ends at byte {at} instead of {self.size}: it was truncated while it was open"
                raise UserError(str(self.path), rule, _RESTORE)
            chunks.append(chunk)
            at += len(chunk)
        return b"".join(chunks)

    def _current_stamp(self) -> tuple[int, int]:
        stat = os.fstat(self._fd)
        return stat.st_mtime_ns, stat.st_size
