"""The text of new tokens up to a stop, read token by token."""

from __future__ import annotations

from dataclasses import dataclass, field

from megalite.runtime.data.tokenizer import Tokenizer

_UNFINISHED = "\ufffd"
_LONGEST = 4
"""Bytes of a character, and so the most tokens of one."""


@dataclass
class NewText:
    """New tokens of a text, and whether a stop has come. Of each token only what it can have changed is looked at.

    Attributes:
        tokenizer: reads the tokens.
        until: texts that end this one.
    """

    tokenizer: Tokenizer
    until: tuple[str, ...]
    _ids: list[int] = field(default_factory=list)
    # Tokens are decoded from `_first` on, as the first of a sequence may lose its space; those up to `_settled` are
    # whole characters, and `_tail` is the end of their text.
    _first: int = 0
    _settled: int = 0
    _tail: str = ""

    def add(self, token: int) -> bool:
        """Add a token; returns whether the text ends with it."""
        if token == self.tokenizer.eos_id:
            return True
        # The model may have more ids than the tokenizer.
        if token < self.tokenizer.vocab_size:
            self._ids.append(token)
        before = self.tokenizer.decode(self._ids[self._first : self._settled]).rstrip(_UNFINISHED)
        now = self.tokenizer.decode(self._ids[self._first :])
        seen = self._tail + now[len(before) :]
        if any(stop in seen for stop in self.until):
            return True
        if not now.endswith(_UNFINISHED) or len(self._ids) - self._settled >= _LONGEST:
            longest = max(map(len, self.until), default=0)
            self._tail = seen[max(len(seen) - longest, 0) :]
            self._first, self._settled = self._settled, len(self._ids)
        return False

    def text(self) -> str:
        """Return the text before its first stop."""
        text = self.tokenizer.decode(self._ids)
        for stop in self.until:
            text = text.split(stop)[0]
        return text
