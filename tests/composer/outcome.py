"""What a rank is asked to run, and what it finds."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

Boxes = dict[str, tuple[tuple[int, ...], list[tuple[tuple[slice, ...], np.ndarray]]]]


class Task(NamedTuple):
    """A run of a draw.

    Attributes:
        words: its command line.
        world: number of ranks.
        data: samples of its own: words for `OwnSamples`, or "".
        move: 1 or -1 moves all initial weights by one rounding, up or down.
        fault: name of what is planted, one of `faults.FAULTS`.
        weights_of: folder of Hugging Face files: only load them and return them.
    """

    words: Sequence[str]
    world: int = 1
    data: str = ""
    move: int = 0
    fault: str = ""
    weights_of: str = ""


class Outcome(NamedTuple):
    """What a rank found.

    Attributes:
        refused: the line of a `UserError`, or "".
        figures: by step, figures of the step by name.
        grads: gradients of the first step that this rank writes.
        start, weights: masters before the first and after the last step that it writes.
        copies: (axis, its ranks, name -> digests of the weights of that name) of what must be equal over an axis.
    """

    refused: str = ""
    figures: dict[int, dict[str, float]] = {}
    grads: Boxes = {}
    start: Boxes = {}
    weights: Boxes = {}
    copies: Sequence[tuple[str, tuple[int, ...], dict[str, list[str]]]] = ()
