"""Records of a `.json` file: the entries of a list, or values one after the other."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path

from megalite.core.base.errors import UserError

_SPACE = re.compile(r"\s*")
_DECODER = json.JSONDecoder()


def json_values(data: bytes, path: Path) -> Iterator[bytes]:
    """Yield each value as it is written.

    Raises:
        UserError: the file is not JSON from here on; names the line.
    """
    try:
        text = data.decode("utf-8-sig")
    except UnicodeDecodeError as e:
        raise UserError(str(path), f"is not UTF-8 text ({e})", "convert it to UTF-8") from None
    at = _after_space(text, 0)
    in_list = text.startswith("[", at)
    at = _after_space(text, at + in_list)
    try:
        while at < len(text) and not (in_list and text[at] == "]"):
            end = _DECODER.raw_decode(text, at)[1]
            yield text[at:end].encode()
            at = _after_space(text, end)
            if in_list and not text.startswith((",", "]"), at):
                raise json.JSONDecodeError("Expecting ',' or ']'", text, at)
            at = _after_space(text, at + text.startswith(",", at)) if in_list else at
    except (ValueError, RecursionError) as e:
        where = f"{path} line {e.lineno}" if isinstance(e, json.JSONDecodeError) else str(path)
        rule = f"does not parse as JSON ({e.msg if isinstance(e, json.JSONDecodeError) else e})"
        raise UserError(where, rule, "correct it: a list of records, or a record per line") from None


def _after_space(text: str, at: int) -> int:
    match = _SPACE.match(text, at)
    assert match is not None
    return match.end()
