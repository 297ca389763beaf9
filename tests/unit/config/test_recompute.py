"""What every activation checkpointing mode keeps; a new entry of the table is held to it by itself."""

from __future__ import annotations

import pytest

from megalite.core.options.recompute import MODES, Extent, Recomputation

ARGUMENTS = ("1", "2", "3", "8", "0.25", "0.5")
"""Some of them every mode that takes one reads; several show whether it tells them apart."""
ODD = (
    "",
    " ",
    "x",
    "0",
    "0.0",
    "-1",
    "-1/2",
    "1/0",
    "nan",
    "inf",
    "1e999",
    "9" * 400,
    "0." + "5" * 400,
    "\u00b2",
    "1:1",
    "a,b",
)
BLOCKS = range(200)
"""More than models have: modules that predict further tokens come after the last block."""


def extents(mode: Recomputation) -> list[Extent]:
    return [mode.extent(i) for i in BLOCKS]


@pytest.mark.parametrize("name", MODES)
def test_every_mode_says_how_far_each_block_goes(name: str) -> None:
    """By the number of the block alone, whoever asks first; the plan and the schedule go by the largest extent."""
    of = MODES[name].of or (lambda argument: None)
    read = [mode for argument in ARGUMENTS if (mode := of(argument)) is not None]
    assert bool(MODES[name].of) == bool(MODES[name].form) == bool(read)
    assert len({tuple(extents(mode)) for mode in read}) == len(read), "arguments make no difference"
    for mode in (MODES[name], *read):
        seen = extents(mode)
        assert all(type(extent) is Extent for extent in seen)
        assert [mode.extent(i) for i in reversed(BLOCKS)][::-1] == seen
        assert max(seen) is mode.most


@pytest.mark.parametrize("name", MODES)
def test_what_no_mode_can_read_is_refused(name: str) -> None:
    for argument in ODD:
        with pytest.raises(KeyError):
            MODES[f"{name}:{argument}"]
