"""What all commands that draw share: how matplotlib's failures are reported."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from megalite.core.base.errors import UserError


@contextmanager
def picture_errors(given: str) -> Iterator[None]:
    """Turn the failures of drawing and saving a matplotlib figure into errors about what was `given`.

    Raises:
        UserError: matplotlib is missing, or it cannot write this file.
    """
    try:
        yield
    except ImportError:
        raise UserError(given, "needs matplotlib", "pip install 'megalite[log]'") from None
    except ValueError as e:
        raise UserError(given, str(e), "use a name that ends in .png, .svg or .pdf") from None
    except OSError as e:
        raise UserError(given, f"cannot be written ({e.strerror})", "choose a path you can write to") from None
