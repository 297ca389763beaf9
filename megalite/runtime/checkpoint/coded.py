"""Coded shards (`--save-code`): the bytes of a safetensors file, smaller, which any range of them is read from.

Layout: the header of the safetensors file as it is; its body in pieces of `PIECE` bytes, each coded by itself; then a
table with the length and the CRC32 of the plain bytes of each piece. The first byte of a piece is the item size of its
elements, whose first bytes come first, then their second ones, and so on, as one zstd frame; or 0, where that would be
longer, before plain bytes. Where `DIFFERENCE` is set in it, what decodes is the XOR with the same bytes of a base
(`base`). Bits come back as they were. Needs the package zstandard; does not import torch.
"""

from __future__ import annotations

import importlib
import struct
import zlib
from array import array
from bisect import bisect_right
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from types import ModuleType

from megalite.core.base.errors import UserError
from megalite.runtime.checkpoint.manifest import FileEntry
from megalite.runtime.checkpoint.safetensors_io import BadCheckpoint, read_exactly

# Small enough that a slice of a box decodes little besides, large enough that zstd loses nothing by it.
PIECE = 1 << 20
# Higher levels are slower and no smaller: most bits of a state are noise.
_LEVEL = 1
_ROW = struct.Struct("<II")
# Flag in the first byte of a piece.
DIFFERENCE = 0x80
# Returns the bytes of a base for bytes `begin` to `end` of a shard's body.
BaseBytes = Callable[[int, int], bytes]


def zstd(given: str) -> ModuleType:
    """Import the package zstandard.

    Raises:
        UserError: it is not installed; names what needs it.
    """
    try:
        return importlib.import_module("zstandard")
    except ImportError as e:
        raise UserError(given, f"needs the Python package zstandard ({e})", "pip install zstandard") from None


def encode(body: memoryview, items: Sequence[tuple[int, int]], base: BaseBytes | None = None) -> Iterator[bytes]:
    """Yield the pieces of a shard's body, then the table.

    Args:
        body: plain bytes.
        items: (first byte, item size) of each tensor in it, in order.
        base: what pieces may be coded as differences of; each takes the shortest form.
    """
    compressor = zstd("--save-code planes-zstd").ZstdCompressor(level=_LEVEL)
    begins, table = [begin for begin, _ in items], bytearray()
    for at in range(0, len(body), PIECE):
        plain = bytes(body[at : at + PIECE])
        width = items[bisect_right(begins, at) - 1][1]
        piece = _encode(plain, width, compressor.compress)
        if base is not None:
            difference = _encode(xor(plain, base(at, at + len(plain))), width, compressor.compress)
            if difference[0] and len(difference) < len(piece):
                piece = bytes([difference[0] | DIFFERENCE]) + difference[1:]
        table += _ROW.pack(len(piece), zlib.crc32(plain))
        yield piece
    yield bytes(table)


def xor(a: bytes | bytearray, b: bytes) -> bytes:
    """Return the bitwise difference of as many bytes."""
    return (int.from_bytes(a, "little") ^ int.from_bytes(b, "little")).to_bytes(len(a), "little")


def _encode(plain: bytes, width: int, compress: Callable[[bytes], bytes]) -> bytes:
    whole = len(plain) - len(plain) % width
    coded = compress(b"".join([*(plain[i:whole:width] for i in range(width)), plain[whole:]]))
    return bytes([width]) + coded if len(coded) < len(plain) else b"\0" + plain


def _decode(piece: bytearray, size: int) -> bytearray:
    """Return the `size` plain bytes of a piece; whatever it holds, no more memory than that is taken."""
    width, coded = piece[0] & ~DIFFERENCE, memoryview(piece)[1:]
    if width == 0:
        return piece[1:]
    library = zstd("a coded checkpoint")
    try:
        # A frame names its size, and is believed when memory is taken for it.
        planes = library.ZstdDecompressor().decompress(coded) if library.frame_content_size(coded) == size else b""
    except library.ZstdError:
        planes = b""
    if len(planes) != size or width > size:
        return bytearray()
    rows, out = size // width, bytearray(planes)
    for i in range(width):
        out[i : rows * width : width] = planes[i * rows : (i + 1) * rows]
    return out


class CodedShard:
    """Read plain bytes of a coded shard, as if it were the safetensors file; the piece read last stays in memory.

    Args:
        path: the file, for messages.
        entry: what the manifest says of it.
        fd: its descriptor, open as long as this is used.
        base: the bytes that its differences refer to.

    Raises:
        BadCheckpoint: its table does not fit its size.
    """

    def __init__(self, path: Path, entry: FileEntry, fd: int, base: BaseBytes | None = None) -> None:
        self._path, self._entry, self._fd, self._base = path, entry, fd, base
        count = -(-(entry.plain_size - entry.header) // PIECE)
        self.table = entry.size - count * _ROW.size
        if self.table < entry.header:
            raise BadCheckpoint(str(path), f"has {entry.size} bytes, too few for {count} pieces")
        data = bytearray(count * _ROW.size)
        read_exactly(fd, memoryview(data), self.table, path)
        self._begins, self._sums = array("Q", [entry.header]), array("L")
        for length, crc in _ROW.iter_unpack(data):
            self._begins.append(self._begins[-1] + length)
            self._sums.append(crc)
            if not 1 < length <= PIECE + 1:
                break
        if self._begins[-1] != self.table or len(self._sums) != count:
            raise BadCheckpoint(str(path), "its table of pieces does not fill it")
        self._last, self._plain = -1, bytearray()

    def stored(self, begin: int, end: int) -> range:
        """Return the bytes of the file that hold the pieces with plain bytes `begin` to `end` of the shard."""
        first, last = self._number(begin), self._number(end - 1)
        return range(self._begins[first], self._begins[last + 1])

    def _number(self, at: int) -> int:
        return (at - self._entry.header) // PIECE

    def read(self, buffer: memoryview, at: int) -> None:
        """Fill `buffer` with the plain bytes of the body from byte `at` of the shard on.

        Raises:
            BadCheckpoint: a piece does not decode to the bytes that were saved.
        """
        done = 0
        while done < len(buffer):
            number = self._number(at + done)
            start = at + done - self._entry.header - number * PIECE
            part = memoryview(self._piece(number))[start : start + len(buffer) - done]
            buffer[done : done + len(part)] = part
            done += len(part)

    def plain(self) -> Iterator[bytes]:
        """Yield the plain bytes of the body, in order; raises as `read`."""
        for number in range(len(self._sums)):
            yield bytes(self._piece(number))

    def check(self) -> None:
        """Decode all pieces; raises as `read`."""
        for number in range(len(self._sums)):
            self._piece(number)

    def _piece(self, number: int) -> bytearray:
        if number != self._last:
            begin, end = self._begins[number], self._begins[number + 1]
            piece = bytearray(end - begin)
            read_exactly(self._fd, memoryview(piece), begin, self._path)
            size = min(PIECE, self._entry.plain_size - self._entry.header - number * PIECE)
            plain = _decode(piece, size)
            if piece[0] & DIFFERENCE and len(plain) == size:
                start = number * PIECE
                plain = bytearray(xor(plain, self._base(start, start + size)) if self._base is not None else b"")
            if len(plain) != size or zlib.crc32(plain) != self._sums[number]:
                rule = f"bytes {begin} to {end} do not decode to the {size} bytes that were saved"
                raise BadCheckpoint(str(self._path), rule)
            self._last, self._plain = number, plain
        return self._plain
