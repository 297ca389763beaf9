"""Where masters and states of the update rules are, and where an update finds them."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Protocol

import torch

from megalite.core.optim.bucket import Bucket
from megalite.core.optim.low_precision import Flats, state_dtypes
from megalite.core.options.optim import OptimConfig

Update = tuple[Flats, torch.Tensor, torch.Tensor | None]
"""A bucket's masters and states, its gradient, and the weights to be written; None if the masters are these."""


class StateStore(Protocol):
    """Masters and states of all buckets.

    Attributes:
        flats: flat tensors of each bucket, for reads and writes between updates; masters begin as the weights.
    """

    flats: list[Flats]

    def updates(self, returns_grads: bool = False) -> Iterator[Update]:
        """Yield what an update reads and writes, bucket by bucket, all on the device of the states.

        Args:
            returns_grads: the gradients, not the weights, are written for the buckets' device.
        """
        ...


class DeviceStates:
    """States beside the weights. Weights of the masters' type are the masters themselves.

    Args:
        buckets: buckets in the order in which their gradients become complete.
        cfg: optimizer options.
    """

    def __init__(self, buckets: Sequence[Bucket], cfg: OptimConfig) -> None:
        self._buckets = buckets
        self.flats = [_make_flats(bucket, cfg) for bucket in buckets]

    def updates(self, returns_grads: bool = False) -> Iterator[Update]:
        """Yield the tensors of each bucket in order."""
        for bucket, flats in zip(self._buckets, self.flats):
            share = bucket.store.share
            yield flats, bucket.grad_share, None if share.data_ptr() == flats[0].data_ptr() else share


def _make_flats(bucket: Bucket, cfg: OptimConfig) -> Flats:
    share, (master, *states) = bucket.store.share, state_dtypes(bucket, cfg)
    return share.to(master), *(torch.zeros_like(share, dtype=dtype) for dtype in states)
