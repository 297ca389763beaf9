"""Masters and moments in bf16 (`--master-dtype`, `--moments-dtype`): fp32 within an update, and then rounded by chance.

Rounded to the nearest, a change below 2^-9 of a value would always be lost: a weight would stop moving, and an average
with a decay rate of 0.999 would never fall. Rounded stochastically, none is lost on average (Gupta et al. 2015, section
3). The random bits of an element are a function of its parameter, the state, the step and its place in the whole
parameter, so that every layout rounds alike.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import cached_property
from hashlib import blake2b
from itertools import product

import torch

from megalite.core.base.dtypes import DTYPES
from megalite.core.base.slices import Slice, flat_index
from megalite.core.ops import Ops
from megalite.core.ops.stochastic_round import Place
from megalite.core.optim.bucket import Bucket
from megalite.core.options.optim import OptimConfig

Flats = tuple[torch.Tensor, ...]


def state_dtypes(bucket: Bucket, cfg: OptimConfig) -> tuple[torch.dtype, ...]:
    """Return the types of a bucket's masters and of each state of its update rule."""
    return DTYPES[cfg.master_dtype], *(DTYPES[cfg.moments_dtype] for _ in bucket.rule.states)


class StateRounding:
    """Masters and states of a bucket's share in fp32, and back.

    Args:
        bucket: the bucket.
        ops: kernels for the device of its states.
    """

    def __init__(self, bucket: Bucket, ops: Ops) -> None:
        self._bucket, self._ops = bucket, ops

    @contextmanager
    def in_fp32(
        self, flats: Flats, weights: torch.Tensor | None, step: int
    ) -> Iterator[tuple[Flats, torch.Tensor | None]]:
        """Yield (masters and states in fp32, weights for an update rule to round masters to); then round all.

        Args:
            flats: masters and states; fp32 ones are yielded themselves.
            weights: weights to be overwritten with the masters, after the update; None if these are the same.
            step: number of updates, including this one.
        """
        wide = tuple(flat.float() for flat in flats)
        same = wide[0] is flats[0]
        yield wide, weights if same else None
        for role, flat, values in zip(("master", *self._bucket.rule.states), flats, wide):
            if flat is not values:
                for name, run, place in self._runs:
                    self._ops.stochastic_round(values[run], flat[run], _key(f"{name} {role} {step}"), place)
        if weights is not None and not same:
            weights.copy_(flats[0])

    @cached_property
    def _runs(self) -> list[tuple[str, slice, Place]]:
        """List (parameter, range of the share, its place in the whole parameter); padding, which stays 0, is in none.

        Leading dimensions count as rows.
        """
        out = []
        for own in self._bucket.param_shares:
            spec = own.param.shard.spec
            for box in own.param.shard.flat_slices(own.start, own.stop):
                at = own.at + box.at - own.start
                for place, numel in _places(box, spec.shape):
                    out.append((spec.tied_to or spec.name, slice(at, at + numel), place))
                    at += numel
        return out


def _places(box: Slice, shape: Sequence[int]) -> Iterator[tuple[Place, int]]:
    """Yield (place, number of elements) of the parts of a box that have at most three dimensions."""
    outer = max(0, len(shape) - 3)
    inner, jump = (box.shape[-2], shape[-2]) if len(shape) > 1 else (1, 1)
    for index in product(*map(range, box.shape[:outer])):
        first = (*(o + i for o, i in zip(box.offset, index)), *box.offset[outer:-1])
        place = Place(flat_index(shape[:-1], first), inner, jump, box.offset[-1], box.shape[-1])
        yield place, math.prod(box.shape[outer:])


def _key(text: str) -> tuple[int, int]:
    """Return two signed integers of 32 bits."""
    digest = blake2b(text.encode(), digest_size=8).digest()
    return int.from_bytes(digest[:4], "big", signed=True), int.from_bytes(digest[4:], "big", signed=True)
