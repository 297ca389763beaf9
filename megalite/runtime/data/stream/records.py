"""The first record of a file: whether it is a conversation."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, Literal

from megalite.core.base.errors import UserError
from megalite.runtime.data.chats.messages import is_conversation
from megalite.runtime.data.documents import read_lines
from megalite.runtime.data.tokenizer import optional_import

Kind = Literal["lines", "packed", "rows", "texts"]
"""Of a file: JSON lines, these compressed, a parquet table, or one text."""

TEXT_KEY = "text"
"""`--key` where nobody gave it: conversations are then looked for under all their names."""

_MAX_LINE = 128 << 20


def first_record(path: Path, kind: Kind) -> Mapping[str, Any] | None:
    """Return the first record of a file: {} if that is no object, None if there is none.

    A table has one with an empty list in place of each nested value, and an empty text in place of others.
    """
    if kind == "texts":
        return {}
    if kind == "rows":
        return _types(path)
    if kind == "packed":
        lines: Iterable[bytes] = read_lines(path)
        line = next((line for line in lines if line.strip()), None)
    else:
        try:
            with path.open("rb") as f:
                line = next((line for line in iter(lambda: f.readline(_MAX_LINE), b"") if line.strip()), None)
        except OSError as e:
            raise UserError(str(path), f"cannot be read ({e.strerror})", "check it and its permissions") from None
    if line is None:
        return None
    try:
        record = json.loads(line.decode("utf-8-sig"))
    except (ValueError, RecursionError):
        return {}
    return record if isinstance(record, dict) else {}


def _types(path: Path) -> Mapping[str, Any]:
    parquet: Any = optional_import("pyarrow.parquet", "pyarrow", "data")
    pyarrow: Any = optional_import("pyarrow", "pyarrow", "data")
    try:
        schema = parquet.read_schema(path)
    except (pyarrow.ArrowException, OSError) as e:
        raise UserError(str(path), f"cannot be read as parquet ({e})", "download or write it again") from None
    return {field.name: [] if pyarrow.types.is_nested(field.type) else "" for field in schema}


def holds_conversation(record: Mapping[str, Any], key: str) -> bool:
    """Whether a record is a conversation. With a text under the key it is that text."""
    value = record.get(key)
    if isinstance(value, str):
        return False
    return is_conversation(record) if key == TEXT_KEY else isinstance(value, list)
