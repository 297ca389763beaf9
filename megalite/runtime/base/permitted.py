"""What a user names but may not read or write."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from megalite.core.base.errors import UserError


@contextmanager
def permitted() -> Iterator[None]:
    """Make a path without permission, often another user's, a mistake in one line. Also a decorator.

    Raises:
        UserError: in place of a `PermissionError` that names a path.
    """
    try:
        yield
    except PermissionError as e:
        if not e.filename:
            raise
        remedy = "have its owner permit it, or name another path"
        raise UserError(f"{e.filename}", f"{e.strerror}", remedy) from None
