"""Rows of a table as records of conversations."""

from __future__ import annotations

import json
from collections.abc import Iterable
from typing import Any

from megalite.runtime.data.chats.messages import KEYS

_OF_PAIRS = ("chosen", "rejected", "margin")


def chat_columns(names: Iterable[str], key: str) -> list[str]:
    """Return the columns of a table that conversations, or pairs of answers, are made of."""
    return [name for name in dict.fromkeys(names) if name in (*KEYS, *_OF_PAIRS, key)]


def as_lines(rows: Any) -> list[bytes | None]:
    """Return the rows of a table as JSON. One that has text that is not UTF-8 is a line that is not, either."""
    try:
        records = rows.to_pylist()
    except UnicodeDecodeError:
        if len(rows) == 1:
            return [b"\xff"]
        return [line for number in range(len(rows)) for line in as_lines(rows.slice(number, 1))]
    return [json.dumps(record, ensure_ascii=False, default=str).encode() for record in records]
