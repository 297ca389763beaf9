"""What the optimizer hands to checkpoints."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from megalite.core.base.slices import Slice

if TYPE_CHECKING:
    import torch


@dataclass(frozen=True)
class StateTensor:
    """What this rank holds of one logical tensor of the optimizer state: the interface to checkpoints.

    Attributes:
        name: global parameter name (for a tied copy: the name it is tied to).
        role: "master", or a state of the update rule ("exp_avg"); for compressed gradients "residual" and "powersgd".
        shape: global shape, without vocabulary padding.
        flat: flat view, fp32 or bf16, as it is saved; loading writes to it.
        slices: boxes of the logical tensor in `flat`; empty if this rank holds nothing of it.
        is_owner: whether this rank writes it to checkpoints; true on exactly one rank per element.
        summand: (i, n): `flat` holds summand i of n, each saved as a tensor of its own; loaded into another number of
            summands, each gets an equal fraction of their sum. None: `flat` holds the tensor itself.
        exact: whether checkpoints of weights alone keep its type.
    """

    name: str
    role: str
    shape: tuple[int, ...]
    flat: torch.Tensor
    slices: list[Slice]
    is_owner: bool
    summand: tuple[int, int] | None = None
    exact: bool = False

    @property
    def kind(self) -> str:
        """Name of the tensor in checkpoints, besides `name`: the role, with the number of the summand."""
        return self.role if self.summand is None else f"{self.role}_{self.summand[0]}"
