"""Where the weights of a bucket are between uses: this rank's share, and how it becomes the full weights."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from megalite.core.mesh import collectives
from megalite.core.mesh.context import Axis
from megalite.core.optim.shares import ParamShare


class WeightStore:
    """Full weights on every rank, each of which updates all of them.

    Args:
        full: full weights of a bucket, flat.
        owned: range of this rank's elements.
        axis: axis of the ranks that each own a share.
        shares: what this rank's share holds of each parameter.

    Attributes:
        share: this rank's share, flat; valid also while the full weights have no memory.
    """

    def __init__(self, full: torch.Tensor, owned: slice, axis: Axis, shares: Sequence[ParamShare]) -> None:
        self.full, self.owned, self.axis, self.shares = full, owned, axis, shares
        self.share = full[owned]
        self._gathering: collectives.Work = collectives.FinishedWork()

    @property
    def gathered(self) -> bool:
        """Whether the full weights, or what is used in their place, have memory."""
        return self.full.untyped_storage().nbytes() > 0

    def gather(self) -> None:
        """Start gathering the shares of all ranks; the weights are complete after `wait`."""
        self.drop_codes()

    def wait(self) -> None:
        """Wait until the full weights are gathered."""
        self._gathering.wait()

    def release(self) -> None:
        """Free the full weights, if they are sharded."""

    def forget_codes(self) -> None:
        """Free the codes of this rank's share, if it has any: weights change."""

    def drop_codes(self) -> None:
        """Free the codes of parameters, made of weights that change or leave."""
        for own in self.shares:
            own.param.codes = None


class GatheredWeights(WeightStore):
    """Full weights on every rank; those of other ranks' shares are gathered after an update. Arguments as above."""

    def gather(self) -> None:
        super().gather()
        self._gathering = collectives.all_gather(self.full, self.share, self.axis)


class ShardedWeights(GatheredWeights):
    """Full weights only between `gather` and `release`, this rank's share always (ZeRO-3); arguments as above."""

    def __init__(self, full: torch.Tensor, owned: slice, axis: Axis, shares: Sequence[ParamShare]) -> None:
        super().__init__(full, owned, axis, shares)
        self.share = self._keep(self.share)

    def _keep(self, share: torch.Tensor) -> torch.Tensor:
        """Copy the share to memory of its own."""
        return share.clone()

    def gather(self) -> None:
        resize(self.full, len(self.full))
        super().gather()

    def release(self) -> None:
        self.wait()
        self.drop_codes()
        resize(self.full, 0)


def resize(flat: torch.Tensor, numel: int) -> None:
    """Free or reallocate the memory of a flat tensor; its views stay valid."""
    storage = flat.untyped_storage()
    if storage.nbytes() != numel * flat.element_size():
        storage.resize_(numel * flat.element_size())
