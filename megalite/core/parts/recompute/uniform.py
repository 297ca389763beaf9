"""The same for every block: nothing, the core of its mixer (arXiv:2205.05198, section 5), or all of it."""

from __future__ import annotations

from megalite.core.options.recompute import Extent, Recomputation

MODE = {
    "none": Recomputation(lambda block: Extent.NOTHING, Extent.NOTHING),
    "selective": Recomputation(lambda block: Extent.CORE, Extent.CORE),
    "full": Recomputation(lambda block: Extent.BLOCK, Extent.BLOCK),
}
