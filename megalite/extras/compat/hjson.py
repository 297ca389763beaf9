"""Hjson, as which DeepSpeed reads files: JSON with comments and last commas, or without quotes, commas, outer braces.

Syntax: https://hjson.github.io/syntax.html. Infinity and NaN, texts there, are numbers as in Python's JSON.
"""

from __future__ import annotations

import json
import re
from typing import Any, NoReturn

from megalite.runtime.base.untrusted import MAX_DEPTH

_GAP = re.compile(r"(?:\s+|#[^\n]*|//[^\n]*|/\*.*?\*/)*", re.DOTALL)
_QUOTED = re.compile(r""""((?:[^"\\\n]|\\.)*)"|'((?:[^'\\\n]|\\.)*)'""")
_ESCAPED = re.compile(r"""\\'|\\.|"|\t""")
_KEY = re.compile(r"[^\s{}\[\],:]+")
_LITERAL = re.compile(
    r"(true|false|null|NaN|-?Infinity|-?(?:0|[1-9]\d*)(?:\.\d+)?(?:[eE][-+]?\d+)?)[ \t]*(?=[,}\]#\r\n]|//|/\*|\Z)"
)
_LINE = re.compile(r"[^\r\n]*")


def read_hjson(text: str) -> Any:
    """Return the value of a text.

    Raises:
        ValueError: it is no Hjson, has a key twice in an object, or is nested too deeply; names the line.
    """
    try:
        # The usual case, and much faster.
        return json.loads(text, object_pairs_hook=_unique)
    except json.JSONDecodeError:
        return _Reader(text).read()


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    keys = [key for key, _ in pairs]
    twice = next((key for i, key in enumerate(keys) if key in keys[:i]), None)
    if twice is not None:
        raise ValueError(f"{twice} is given twice")
    return dict(pairs)


class _Reader:
    """A text, and the position of what comes next in it."""

    def __init__(self, text: str) -> None:
        self.text, self.at = text, 0

    def read(self) -> Any:
        value = self.value(0) if self.next_char() in ("{", "[") else self.members("", 1)
        if self.next_char():
            self.fail("the end of the text is missing")
        return value

    def fail(self, rule: str) -> NoReturn:
        raise ValueError(f"line {self.text.count(chr(10), 0, self.at) + 1}: {rule}")

    def take(self, pattern: re.Pattern[str]) -> re.Match[str] | None:
        if match := pattern.match(self.text, self.at):
            self.at = match.end()
        return match

    def next_char(self) -> str:
        """Return the first character that is no space and in no comment; "" at the end."""
        self.take(_GAP)
        return self.text[self.at : self.at + 1]

    def value(self, depth: int) -> Any:
        if depth > MAX_DEPTH:
            self.fail(f"is nested in more than {MAX_DEPTH} levels")
        char = self.next_char()
        if char in ("{", "["):
            self.at += 1
            return self.members("}", depth + 1) if char == "{" else self.entries(depth + 1)
        if self.text.startswith("'''", self.at):
            return self.lines()
        if char in ('"', "'"):
            return self.quoted()
        if not char or char in "}],:":
            self.fail("a value is missing")
        if literal := self.take(_LITERAL):
            return json.loads(literal[1])
        line = self.take(_LINE)
        return line[0].strip() if line else ""

    def members(self, end: str, depth: int) -> dict[str, Any]:
        pairs = []
        while self.next_char() != end:
            pairs.append((self.key(), self.value(depth)))
            if self.next_char() == ",":
                self.at += 1
        self.at += len(end)
        return _unique(pairs)

    def entries(self, depth: int) -> list[Any]:
        values = []
        while self.next_char() != "]":
            values.append(self.value(depth))
            if self.next_char() == ",":
                self.at += 1
        self.at += 1
        return values

    def key(self) -> str:
        if self.next_char() in ('"', "'"):
            key = self.quoted()
        elif bare := self.take(_KEY):
            key = bare[0]
        else:
            self.fail("a key is missing")
        if self.next_char() != ":":
            self.fail(f"a colon is missing after the key {key:.40}")
        self.at += 1
        return key

    def quoted(self) -> str:
        found = self.take(_QUOTED)
        if found is None:
            self.fail("a quote is not closed")
        body = found[1] if found[1] is not None else found[2]
        as_json = _ESCAPED.sub(lambda m: {"\\'": "'", '"': '\\"', "\t": "\\t"}.get(m[0], m[0]), body)
        text: str = json.loads(f'"{as_json}"')
        return text

    def lines(self) -> str:
        """Read a text in ''' quotes: lines without the indentation of the first quote."""
        indent = self.at - self.text.rfind("\n", 0, self.at) - 1
        end = self.text.find("'''", self.at + 3)
        if end < 0:
            self.fail("''' is not closed")
        first, *others = self.text[self.at + 3 : end].replace("\r", "").split("\n")
        self.at = end + 3
        others = [re.sub(rf"^[ \t]{{0,{indent}}}", "", line) for line in others]
        lines = [*([first.lstrip(" \t")] if first.strip(" \t") or not others else []), *others]
        return "\n".join(lines).removesuffix("\n")
