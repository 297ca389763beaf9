"""Compressed sums of gradients over the batch axes (`--compress`): fewer bytes, for an approximation of the sum.

A codec replaces a bucket's reduction, once per step, not per micro-batch. What it drops may be kept as a residual and
added to the next step's gradient (error feedback: Seide et al. 2014, section 3; Karimireddy et al. 2019). The result
depends on dp, tp and the bucket boundaries, but is the same on every run.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from megalite.core.mesh import collectives
from megalite.core.mesh.context import Axis
from megalite.core.sharding.parameter import ShardedParameter


@dataclass(frozen=True)
class BucketParam:
    """A parameter of a bucket: its name, local shape, first element in the bucket, and whether it has matrices."""

    name: str
    shape: torch.Size
    start: int
    matrix: bool

    @classmethod
    def of(cls, param: ShardedParameter, start: int) -> BucketParam:
        """Describe a parameter whose first element in the bucket is `start`."""
        spec = param.shard.spec
        return cls(spec.name, param.shape, start, spec.ndim > 1)

    @property
    def span(self) -> slice:
        """Range of its elements in the bucket."""
        return slice(self.start, self.start + self.shape.numel())


class Codec(ABC):
    """Sums the gradients of a bucket over an axis: `start`, `wait` and, if the step is not skipped, `commit`.

    Without `commit`, residuals stay as they were before the step.

    Args:
        params: parameters of the bucket.
        numel: elements of the bucket, a multiple of the axis size.
        axis: axis of the ranks whose gradients are summed.
        device: device of the bucket.

    Attributes:
        sent: bytes sent by this rank in this step.
        residual: gradient that this rank has not sent yet, flat fp32 [numel], without loss scale; None for codecs
            that drop nothing.
    """

    residual: Tensor | None = None

    def __init__(self, params: Sequence[BucketParam], numel: int, axis: Axis, device: torch.device) -> None:
        self.params, self.axis = params, axis
        self.sent = 0
        self._share = numel // axis.size
        self._works: list[collectives.Work] = []
        # (state carried over to the next step, its value once this step is committed)
        self._next: list[tuple[Tensor, Tensor]] = []

    def start(self, grad: Tensor, owned: slice, scale: float) -> None:
        """Start summing `grad`, flat fp32 [numel], multiplied by the loss scale `scale`.

        `wait` writes the elements `owned` of the sum to `grad`, multiplied by `scale` as well.
        """
        self._grad = grad
        self._owned = owned
        self._scale = scale
        self.sent = 0
        x = grad / scale
        if self.residual is not None:
            x += self.residual
        # Codes cannot express NaN, and a residual would never lose it: other ranks receive zeros, and the NaN norm of
        # this rank makes all ranks skip the step.
        finite = x.isfinite().all()
        self._poison = torch.where(finite, 0.0, torch.nan)
        self._send(x.masked_fill_(~finite, 0.0))

    def wait(self) -> None:
        """Wait for the sum."""
        out = self._grad[self._owned]
        self._receive(out)
        out.mul_(self._scale).add_(self._poison)
        self._works.clear()

    def drop(self) -> None:
        """Wait for transfers in flight and discard them, after an interrupted step."""
        for work in self._works:
            work.wait()
        self._works.clear()
        self._next = []

    def commit(self) -> None:
        """Keep the residuals of this step, whose update is applied."""
        for old, new in self._next:
            old.copy_(new)
        self._next = []

    def shared_states(self, name: str) -> dict[str, Tensor]:
        """Return what a parameter carries over besides the residual, equal on all ranks: kind of state -> tensor."""
        return {}

    def finish_load(self) -> None:  # noqa: B027 (most have nothing to do)
        """Complete the state after a checkpoint has filled it, or the part of it that was saved."""

    @abstractmethod
    def _send(self, x: Tensor) -> None:
        """Start summing `x`, which may be overwritten."""

    @abstractmethod
    def _receive(self, out: Tensor) -> None:
        """Write the sum to `out`: the full bucket, or this rank's share."""

    def _begin(self, work: collectives.Work) -> collectives.Work:
        self._works.append(work)
        self.sent += work.sent
        return work
