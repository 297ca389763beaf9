"""Sums of the bits of tensors, by which a copy of a state is known to be sound."""

from __future__ import annotations

from collections.abc import Sequence

import torch

_BITS = {4: torch.int32, 2: torch.int16}


def sums_of_bits(flats: Sequence[torch.Tensor]) -> torch.Tensor:
    """Sum the bits of each tensor as integers, int32: any one flipped bit changes the sum."""
    return gather_sums([sum_of_bits(flat) for flat in flats])


def sum_of_bits(flat: torch.Tensor) -> torch.Tensor:
    """As `sums_of_bits`, of one tensor."""
    # Modulo 2^32: a sum in 64 bits takes eighteen times as long as one in 32.
    return flat.view(_BITS[flat.element_size()]).sum(dtype=torch.int32)


def gather_sums(sums: Sequence[torch.Tensor]) -> torch.Tensor:
    """Return the sums of tensors as one tensor, on the device of some of them: if possible, not on the host."""
    if not sums:
        return torch.empty(0, dtype=torch.int32)
    # A sum that is on a GPU would be waited for.
    device = next((total.device for total in sums if not total.is_cpu), sums[0].device)
    return torch.stack([total.to(device, non_blocking=True) for total in sums])
