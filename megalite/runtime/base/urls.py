"""What is a URL of a store, which URLs are accepted, and the local path that stands for one."""

from __future__ import annotations

import re
from pathlib import Path

from megalite.core.base.errors import require
from megalite.core.base.redact import user_of

# Chained and capital schemes are URLs too, which check_url refuses.
_URL = re.compile(r"([a-z][a-z0-9+.:-]*)://(.*)", re.DOTALL | re.IGNORECASE)
_SCHEME = re.compile(r"[a-z][a-z0-9+.-]*")
# Of SCHEME://CONTAINER: what has a colon is a name with a port, or one of Amazon's (arn:...).
_CONTAINER = re.compile(r"[^:]*(:\d{1,5})?|arn:.*")


def is_url(path: object) -> bool:
    """Whether a path is a URL of a store."""
    return bool(_URL.match(str(path)))


def join(url: str, *names: str) -> str:
    """Append names to a URL."""
    return "/".join([url.rstrip("/"), *names])


def check_url(flag: str, url: str) -> None:
    """Refuse a URL that holds a credential, without quoting it, or names no bucket."""
    match = _URL.match(url)
    if match is None:
        return
    scheme = bool(_SCHEME.fullmatch(match[1]))
    require(scheme, f"{flag} {match[1]}://...", "must have one scheme, in small letters", "use s3://, gs:// or another")
    secret = user_of(url) or "?" in match[2] or not _CONTAINER.fullmatch(match[2].partition("/")[0])
    rule = "holds a credential, an @ or a query"
    require(not secret, f"{flag} {match[1]}://...", rule, "give credentials by environment")
    rule = "must be SCHEME://BUCKET/NAME"
    require(bool(match[2].strip("/")) and ".." not in match[2].split("/"), f"{flag} {url}", rule, "give a bucket")


def check_user(flag: str, text: str) -> None:
    """Refuse a URL with a user or a password, without quoting it, where any text will do otherwise."""
    rule = "has a user or a password in a URL"
    require(not (is_url(text) and user_of(text)), flag, rule, "give credentials by environment")


def check_local(flag: str, path: str | None) -> None:
    """Refuse a URL, without quoting it, where only a path will do."""
    require(not is_url(path), flag, "must be a path on this machine, not a URL", "give a path")


def cached_at(url: str, cache_dir: str) -> Path:
    """Return the local folder or file that stands for a URL; a path that is none stands for itself."""
    match = _URL.match(url)
    return Path(cache_dir).expanduser() / match[1] / match[2].strip("/") if match else Path(url)
