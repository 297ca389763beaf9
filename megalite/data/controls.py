"""Encode texts in which names of control tokens stand for these tokens, and find the characters that each id covers."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Sequence
from itertools import accumulate

Span = tuple[int, int]
"""(first character, character after the last) of a text."""


def char_spans(text: str, spans: Iterable[Span]) -> list[Span]:
    """Convert spans of a text's bytes in UTF-8 to spans of its characters, with every character that they touch."""
    char_of = [i for i, char in enumerate(text) for _ in char.encode()] + [len(text)]
    return [(char_of[first], char_of[end - 1] + 1 if end > first else char_of[first]) for first, end in spans]


def consecutive_spans(sizes: Sequence[int]) -> list[Span]:
    """Return the spans of tokens of these sizes, end to end."""
    return [(end - size, end) for size, end in zip(sizes, accumulate(sizes))]


def encode_with_controls(
    text: str, controls: dict[str, int], encode: Callable[[str], tuple[list[int], list[Span]]]
) -> tuple[list[int], list[Span]]:
    """Encode a text: names of control tokens become these tokens, and `encode` encodes the text between them."""
    ids: list[int] = []
    spans: list[Span] = []
    at = 0
    for piece in re.split(f"({any_of(controls)})", text):
        if piece in controls:
            ids.append(controls[piece])
            spans.append((at, at + len(piece)))
        elif piece:
            piece_ids, piece_spans = encode(piece)
            ids += piece_ids
            spans += [(at + first, at + end) for first, end in piece_spans]
        at += len(piece)
    return ids, spans


def any_of(words: Iterable[str]) -> str:
    """Return a pattern that matches any of the words, the longest first; nothing if there are none."""
    return "|".join(re.escape(word) for word in sorted(words, key=len, reverse=True)) or "(?!)"
