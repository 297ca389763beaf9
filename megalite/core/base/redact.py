"""Text without credentials: those of the environment and of stores' sessions by their values, others by their form.

What a library or a server says may quote any of them, in any place. Values of less than `_SHORTEST` characters cannot
be told from words, and stay.
"""

from __future__ import annotations

import base64
import contextlib
import functools
import os
import re
import sys
import threading
import urllib.parse
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

_SHORTEST = 8
# In base64, what is next to a value changes its ends: too little would be left of a short one.
_SHORTEST_ENCODED = 12
# Names of variables, attributes and fields that hold a credential.
_NAME = re.compile(r"(?i)key|secret|token|passw|credential|connection_?string|\bsig\b|\bsas\b|authorization")
_FIELD = re.compile(
    r"(?i)((?:credential|signature|\bsig|(?:access|account|api)_?key(?:_?id)?|secret|token|passwo?r?d|authorization)"
    r"\W{1,5}(?:(?:bearer|basic)\s+)?)[^\s&,;<]+"
)
_KEY_ID = re.compile(r"\b(?:AKIA|ASIA)[0-9A-Z]{12,}")
# A secret may hold slashes.
_USER = re.compile(r"(?i)\b([a-z][a-z0-9+.-]*)://\S+@")
# Of these SCHEME://CONTAINER@ACCOUNT/NAME is a name without a credential.
_AT_ACCOUNT = ("abfs", "abfss", "wasb", "wasbs")
# Values that sessions of this process hold or have held.
_held = set[str]()


def user_of(url: str) -> str:
    """Return what a URL gives as user, password or both, wherever the @ stands; "" if it gives nothing."""
    scheme, is_url, rest = url.partition("://")
    user, at, _ = rest.rpartition("@")
    is_name = scheme.lower() in _AT_ACCOUNT and not set(user) & set(":/@")
    return (user or at) if is_url and not is_name else ""


def mask(text: str) -> str:
    """Return a text with "..." for every credential that this process knows, and for the users of URLs."""
    # Name by name: another thread may remove one meanwhile.
    variables = {name: os.environ.get(name, "") for name in os.environ}
    known = _pattern_of(frozenset(_environment(variables)) | _held)
    text = known.sub("...", text) if known else text
    return _USER.sub(lambda m: f"{m[1]}://...@" if user_of(m[0]) else m[0], text)


def mask_fields(text: str) -> str:
    """As `mask`, and for what looks like a credential, in the words of libraries and servers."""
    return _KEY_ID.sub("...", _FIELD.sub(r"\1...", mask(text)))


def mask_tracebacks() -> None:
    """Let Python print errors that nobody catches, in threads too, without credentials."""

    def print_error(*error: Any) -> None:
        import traceback  # here: commands that end well start without it

        sys.stderr.write(mask("".join(traceback.format_exception(*error))))

    def print_error_of_thread(args: threading.ExceptHookArgs) -> None:
        if not issubclass(args.exc_type, SystemExit):
            sys.stderr.write(f"in thread {args.thread.name if args.thread else 'unknown'}:\n")
            print_error(args.exc_type, args.exc_value, args.exc_traceback)

    sys.excepthook, threading.excepthook = print_error, print_error_of_thread


def learn(fs: Any) -> None:
    """Note the credentials of a file system of fsspec: its options, those of its session, those in AWS's files."""
    session = getattr(fs, "session", None)
    holders = [fs, _reach(fs, "_s3", "_request_signer", "_credentials"), _reach(fs, "credentials")]
    mappings = [vars(holder) for holder in [*holders, _reach(fs, "credentials", "credentials")] if holder is not None]
    mappings.append(getattr(fs, "storage_options", {}))
    if "s3" in getattr(fs, "protocol", ""):
        with contextlib.suppress(Exception):  # files that cannot be read: the first request says so
            import botocore.session

            mappings += (session or botocore.session.Session()).full_config["profiles"].values()
    for mapping in mappings:
        _held.update(_values(mapping))


def _reach(holder: Any, *names: str) -> Any:
    """Return an attribute of an attribute; None if there is none, or nothing that has attributes of its own."""
    for name in names:
        holder = getattr(holder, name, None)
    return holder if hasattr(holder, "__dict__") else None


def _environment(variables: Mapping[str, str]) -> Iterator[str]:
    yield from _values(variables)
    for value in variables.values():
        # As of a proxy or an endpoint.
        if "@" in value and (user := user_of(value)):
            yield from user.split(":", 1)


def _values(mapping: Mapping[str, Any]) -> Iterator[str]:
    """Return the credentials among named values, and those that are fields of them, as in a connection string."""
    for name, value in mapping.items():
        if isinstance(value, str) and _NAME.search(name) and not os.path.exists(value):
            yield value
            fields = (field.partition("=") for field in re.split("[;&?]", value))
            yield from (inner for field, equals, inner in fields if equals and _NAME.search(field))


@functools.lru_cache(maxsize=8)
def _pattern_of(values: frozenset[str]) -> re.Pattern[str] | None:
    """Match values as they are, quoted for a URL, or in base64."""
    forms = {form for value in values if len(value.strip()) >= _SHORTEST for form in _forms(value.strip())}
    return re.compile("|".join(map(re.escape, sorted(forms, key=len, reverse=True)))) if forms else None


def _forms(value: str) -> Iterable[str]:
    quoted = [urllib.parse.quote(value, safe) for safe in ("", "/", "/+=")]
    plain = [value, *quoted, urllib.parse.unquote(value), *(q.replace("%", "%25") for q in quoted)]
    if len(value) < _SHORTEST_ENCODED:
        return plain
    # Three texts, as the value may begin at any of three places of a group.
    data = [base64.b64encode(b"." * i + value.encode())[4:-4].decode() for i in range(3)]
    return [*plain, *data, *(text.replace("+", "-").replace("/", "_") for text in data)]
