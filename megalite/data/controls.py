"""Texts in which the names of control tokens stand for these tokens, and which characters each id covers."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Sequence
from itertools import accumulate

Span = tuple[int, int]
"""The first character of a text and the one after the last."""


def char_spans(text: str, spans: Iterable[Span]) -> list[Span]:
    """Convert spans of a text's bytes in UTF-8 to spans of its characters; parts of a character become all of it."""
    char_of = [i for i, char in enumerate(text) for _ in char.encode()] + [len(text)]
    return [(char_of[first], char_of[end - 1] + 1 if end > first else char_of[first]) for first, end in spans]


def consecutive(sizes: Sequence[int]) -> list[Span]:
    """Return the spans of pieces that lie end to end."""
    return [(end - size, end) for size, end in zip(sizes, accumulate(sizes))]


def around_controls(
    text: str, controls: dict[str, int], encode: Callable[[str], tuple[list[int], list[Span]]]
) -> tuple[list[int], list[Span]]:
    """Encode a text whose names of control tokens become these tokens, and `encode` does the rest."""
    ids: list[int] = []
    spans: list[Span] = []
    at = 0
    for piece in re.split(f"({any_of(controls)})", text):
        if piece in controls:
            ids.append(controls[piece])
            spans.append((at, at + len(piece)))
        elif piece:
            own, inside = encode(piece)
            ids += own
            spans += [(at + first, at + end) for first, end in inside]
        at += len(piece)
    return ids, spans


def any_of(words: Iterable[str]) -> str:
    """Return a pattern that matches any of the words, the longest first; nothing if there are none."""
    return "|".join(re.escape(word) for word in sorted(words, key=len, reverse=True)) or "(?!)"
