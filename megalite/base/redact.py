"""Errors of a store's library, without the credentials that they quote."""

from __future__ import annotations

import re

from megalite.base.errors import printable

_SECRET = re.compile(
    r"(?i)((?:credential|signature|\bsig|(?:access|account|api)_?key(?:_?id)?|secret|token|passwo?r?d|authorization)"
    r"\W{1,5}(?:(?:bearer|basic)\s+)?)[^\s&,;<]+"
)
_USER = re.compile(r"://[^/\s@]+@")
_KEY_ID = re.compile(r"\b(?:AKIA|ASIA)[0-9A-Z]{12,}")


def describe(e: BaseException) -> str:
    """Describe an error of a store's library in a short line without credentials."""
    text = _KEY_ID.sub("...", _SECRET.sub(r"\1...", _USER.sub("://...@", f"{type(e).__name__}: {e}")))
    return printable(" ".join(text.split()))[:300]
