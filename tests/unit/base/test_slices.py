"""Boxes of tensors as numpy sees them."""

from __future__ import annotations

from typing import Any

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from megalite.core.base.slices import box_index, contiguous_boxes, contiguous_runs


@st.composite
def boxes(draw: Any) -> tuple[tuple[int, ...], tuple[int, ...], tuple[int, ...]]:
    """Shape, offset and extent of a box of one to four dimensions."""
    shape = draw(st.lists(st.integers(1, 5), min_size=1, max_size=4))
    offset = [draw(st.integers(0, n - 1)) for n in shape]
    return tuple(shape), tuple(offset), tuple(draw(st.integers(1, n - o)) for n, o in zip(shape, offset))


@given(boxes())
def test_contiguous_boxes_make_up_the_box(box: tuple[tuple[int, ...], tuple[int, ...], tuple[int, ...]]) -> None:
    shape, offset, extent = box
    flat = np.arange(np.prod(shape))
    expected = flat.reshape(shape)[box_index(offset, extent)].ravel()
    parts = list(contiguous_boxes(shape, offset, extent))
    np.testing.assert_array_equal(np.concatenate([flat[p.at : p.at + p.numel] for p in parts]), expected)
    starts, run = contiguous_runs(shape, offset, extent)
    assert [(start, run) for start in starts] == [(p.at, p.numel) for p in parts]
