"""The same for every block: nothing, the core of its mixer (arXiv:2205.05198, section 5), or all of it; or so for a
share of the blocks.
"""

from __future__ import annotations

from collections.abc import Callable
from fractions import Fraction

from megalite.core.options.recompute import Extent, Recomputation

_LONGEST = 20
"""Characters of a share: an exponent could make a number of any size."""


def _uniform(extent: Extent, about: str) -> Recomputation:
    of, form = (_share(extent), "NAME:SHARE above 0 and below 1") if extent else (None, "")
    return Recomputation(lambda block: extent, extent, of, form, about)


def _share(extent: Extent) -> Callable[[str], Recomputation | None]:
    def of(argument: str) -> Recomputation | None:
        """Read the share of the blocks; they are spread over the model, and so over the stages of a pipeline."""
        try:
            share = Fraction(argument) if len(argument) <= _LONGEST else Fraction(0)
        except (ValueError, ZeroDivisionError):
            return None
        if not 0 < share < 1:
            return None
        return Recomputation(lambda i: extent if (i + 1) * share // 1 > i * share // 1 else Extent.NOTHING, extent)

    return of


MODE = {
    "none": _uniform(Extent.NOTHING, "nothing"),
    "selective": _uniform(Extent.CORE, "the attention core"),
    "full": _uniform(Extent.BLOCK, "whole blocks"),
}
