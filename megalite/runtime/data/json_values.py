"""Records of a `.json` file: the entries of a list, or values one after the other, read as they are needed."""

from __future__ import annotations

import codecs
import json
import re
from collections.abc import Iterable, Iterator
from pathlib import Path

from megalite.core.base.errors import UserError

_SPACE = re.compile(r"\s*")
_DECODER = json.JSONDecoder()
_CUT_CHARS = 16
"""Where a value is cut, an error is this close to the end, but that of an open string."""


def json_values(blocks: Iterable[bytes], path: Path, limit: int) -> Iterator[bytes]:
    """Yield each value as it is written; none may have more than `limit` characters.

    Raises:
        UserError: the file is not JSON from here on; names the line.
    """
    text = _Text(blocks, path, limit)
    try:
        in_list = text.next_char() == "["
        text.at += in_list
        while text.next_char() not in ("", "]" if in_list else ""):
            yield text.value().encode()
            if in_list and text.next_char() not in (",", "]"):
                raise json.JSONDecodeError("Expecting ',' or ']'", text.held, text.at)
            text.at += in_list and text.next_char() == ","
        if in_list and text.next_char() != "]":
            raise json.JSONDecodeError("Expecting value or ']'", text.held, text.at)
    except (ValueError, RecursionError) as e:
        where = f"{path} line {text.line + e.lineno}" if isinstance(e, json.JSONDecodeError) else str(path)
        rule = f"does not parse as JSON ({e.msg if isinstance(e, json.JSONDecodeError) else e})"
        raise UserError(where, rule, "correct it: a list of records, or a record per line") from None


class _Text:
    """The text of blocks, of which no more than the current value is held.

    Attributes:
        held: what is held.
        at: position in it.
        line: lines before it.
    """

    def __init__(self, blocks: Iterable[bytes], path: Path, limit: int) -> None:
        self.held, self.at, self.line = "", 0, 0
        self._pieces, self._path, self._limit = self._decoded(blocks), path, limit

    def next_char(self) -> str:
        """Return the next character that is not a space; "" at the end."""
        while True:
            match = _SPACE.match(self.held, self.at)
            assert match is not None
            self.at = match.end()
            if self.at < len(self.held) or not self._read_on(1):
                return self.held[self.at : self.at + 1]

    def value(self) -> str:
        """Return the next value."""
        whole = False
        while True:
            try:
                end = _DECODER.raw_decode(self.held, self.at)[1]
            except json.JSONDecodeError as e:
                cut = e.msg.startswith("Unterminated string") or e.pos > len(self.held) - _CUT_CHARS
                if whole or not cut:
                    raise
                # It may go on; a long one is read in steps that grow with it.
                whole = not self._read_on(max(len(self.held) - self.at, 1))
                continue
            # A number may go on, too, as 1 in "1e+".
            if end > len(self.held) - 3 and not whole:
                whole = not self._read_on(1)
                continue
            value, self.at = self.held[self.at : end], end
            return value

    def _read_on(self, chars: int) -> bool:
        """Read that many characters or more, and forget what lies before the current one; False at the end."""
        self.line += self.held.count("\n", 0, self.at)
        pieces, self.at = [self.held[self.at :]], 0
        size = len(pieces[0])
        while chars > 0 and (piece := next(self._pieces, "")):
            pieces.append(piece)
            size, chars = size + len(piece), chars - len(piece)
            if size > self._limit:
                rule = f"has more than {self._limit >> 20} MiB in one record"
                raise UserError(f"{self._path} line {self.line + 1}", rule, "split it into documents, one per record")
        self.held = "".join(pieces)
        return len(pieces) > 1

    def _decoded(self, blocks: Iterable[bytes]) -> Iterator[str]:
        decoder = codecs.getincrementaldecoder("utf-8-sig")()
        try:
            for block in blocks:
                if text := decoder.decode(block):
                    yield text
            decoder.decode(b"", final=True)
        except UnicodeDecodeError as e:
            raise UserError(str(self._path), f"is not UTF-8 text ({e})", "convert it to UTF-8") from None
