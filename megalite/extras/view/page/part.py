"""One part of a page, made by itself: what goes wrong in it is said in its place."""

from __future__ import annotations

import resource
from collections.abc import Callable
from typing import Any

from megalite.core.base.errors import UserError
from megalite.runtime.base.untrusted import BadFile


def part(make: Callable[[], dict[str, Any]]) -> dict[str, Any]:
    """Return a part, or {"problem": why}."""
    try:
        return make()
    except Exception as e:
        text = str(e) if isinstance(e, UserError | BadFile) else f"{type(e).__name__}: {e}"
        return {"problem": text[:1000]}


def limit_processor_time(seconds: int) -> None:
    """End this process with SIGXCPU where it has used so much."""
    resource.setrlimit(resource.RLIMIT_CPU, (seconds, seconds + 5))
