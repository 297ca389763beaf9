"""Scales for blocks as in DeepSeek-V3 (arXiv:2412.19437, section 3.3), for rows, for tensors, and for MX blocks."""

from __future__ import annotations

from megalite.core.options.recipe import Recipe

_ADA = (8, 9)
_HOPPER = (9, 0)
_BLACKWELL = ((10, 0), (10, 3), (12, 0))

RECIPE = {
    "blockwise": Recipe((1, 128), (128, 128), "e4m3", True, 128, (_HOPPER, *_BLACKWELL[:2]), "blocks of 128: Hopper"),
    "rowwise": Recipe((1, 0), (1, 0), "e4m3", True, 16, (_HOPPER, *_BLACKWELL), "rows"),
    "tensorwise": Recipe(
        (0, 0), (0, 0), "e5m2", False, 16, (_ADA, _HOPPER, *_BLACKWELL), "whole tensors: fastest, least precise"
    ),
    "mxfp8": Recipe((1, 32), (1, 32), "e4m3", True, 32, _BLACKWELL, "blocks of 32: Blackwell"),
}
